"""Decodes text files and HTML pages."""

from __future__ import annotations

import re

import webencodings

_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_DECLARED = re.compile(
    rb"""\A\s*<\?xml[^>]*?encoding\s*=\s*["']([^"'>]+)|<meta[^>]*?charset\s*=\s*["']?\s*([^\s"'/>;]+)""", re.IGNORECASE
)
_DECLARED_WITHIN = 1024
_NO_CODEC = re.compile(r"[^\w:.-]|idna|punycode|escape|undefined", re.ASCII | re.IGNORECASE)
"""Names of what is none of text, among Python's."""
_GUESSES = re.findall(
    r"\w+",
    "utf_16_le utf_16_be cp1252 cp1251 cp1250 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 gb18030 big5 shift_jis "
    "euc_jp euc_kr iso2022_jp koi8_r cp866",
)
"""Those of the web (WHATWG): among Python's 97, many fit any short text."""
_LEAST_ZEROS = 4
"""Zero bytes of a text in UTF-16, nearly all of them at even or at odd places."""
_MOST_BROKEN = 0.05
"""Share of the letters beyond ASCII that may be broken in a text that is UTF-8, or what the page declares."""


def decode(data: bytes, *, is_html: bool = False, declared: str = "") -> tuple[str, str | None]:
    """Decodes a file by its byte order mark, what it is declared to be or the page declares (by WHATWG's names, or else
    Python's), UTF-8, or else by what the text looks like.

    Returns:
      (text, note): `note` says what had to be guessed, None if nothing.

    Raises:
      ValueError: it is not text.
    """
    if data.startswith(_MARKS):
        return webencodings.decode(data, "utf-8", "strict")[0], None
    if not declared and is_html and (found := _DECLARED.search(data, 0, _DECLARED_WITHIN)):
        declared = (found[1] or found[2]).decode("latin-1")
        declared = "" if declared.lower().startswith("utf-16") else declared  # nobody could read it in UTF-16
    known = webencodings.lookup(declared)
    if known is not None and known.name not in ("replacement", "x-user-defined"):
        declared = known.codec_info.name
    names = ["utf-8"] if not declared or _NO_CODEC.search(declared) else [declared, "utf-8"]
    for errors in ("strict", "replace"):
        for name in names:
            try:
                text = data.decode(name, errors)
            except (UnicodeDecodeError, LookupError):
                continue
            broken = 0 if errors == "strict" else text.count("\ufffd")
            if "\x00" in text or broken and broken > _MOST_BROKEN * len(re.findall(r"[^\x00-\x7f]", text)):
                continue
            return text, f"{broken} characters are not {name}" if broken else None
    from charset_normalizer import from_bytes

    zeros = sorted([data[::2].count(0), data[1::2].count(0)])
    if b"\x00" in data and not (zeros[1] >= _LEAST_ZEROS and zeros[1] > 9 * zeros[0] and len(data) % 2 == 0):
        raise ValueError("contains NUL bytes, so it is not text")
    guess = from_bytes(data, cp_isolation=_GUESSES).best()
    if guess is None or (b"\x00" in data and "16" not in guess.encoding):
        raise ValueError("contains NUL bytes, so it is not text" if b"\x00" in data else "is not text in any encoding")
    return str(guess), f"read as {guess.encoding}, which is a guess: it is not UTF-8"

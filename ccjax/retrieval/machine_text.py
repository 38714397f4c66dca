"""Finds machine-generated text: base64, hex and minified code, which no question can match.

Similar looking text is kept: identifiers, paths and URLs (which are short and have runs of one kind of letter),
sequences of one kind of letter, digits, numbers in tables, hashes and keys, text in scripts without blanks.
"""

from __future__ import annotations

import operator
import re

_LEAST_CHARS = 256
_LEAST_LINE_CHARS = 40
_MOST_URL_CHARS = 4096
_ALPHABET = "[A-Za-z0-9+/_-]"
_RUN = re.compile(rf"(?<!{_ALPHABET}){_ALPHABET}{{{_LEAST_CHARS},}}+={{0,2}}")
_LINE = rf"[ \t>\"']*+{_ALPHABET}{{{_LEAST_LINE_CHARS},}}+={{0,2}}(?:[\"',;\\]+[ \t]*\+?)?+[ \t]*+"
_WRAPPED = re.compile(rf"^{_LINE}(?:\n{_LINE})+(?:\n[ \t>\"']*+{_ALPHABET}++={{1,2}}[\"',;]*[ \t]*$)?", re.MULTILINE)
_CLASSES = str.maketrans(
    {chr(code): "u" for code in range(65, 91)}
    | {chr(code): "l" for code in range(97, 123)}
    | {chr(code): "d" for code in range(48, 58)}
)
_LEAST_CHANGES = 0.4
"""Share of adjacent characters of different kinds (capitals, small letters, digits, others): 0.65 in base64 of random
bytes, 0.55 in that of text, 0.47 in hex, about 0.2 in identifiers, paths and URLs."""
_MOST_OTHERS = 0.1
"""Share of signs besides letters and digits: 0.03 in base64 of random bytes, far more in paths."""
_URL = re.compile(r"://[^\s\"'<>()]*\Z")

_LONG_LINE = re.compile(r"^.{500,}$", re.MULTILINE)


def without_machine_text(text: str) -> tuple[str, int]:
    """The text without base64, hex and minified code, and the number of characters left out."""
    shorter = _RUN.sub(_unless_readable, _WRAPPED.sub(_unless_readable, text))
    shorter = _LONG_LINE.sub(lambda line: "" if _is_minified(line[0]) else line[0], shorter)
    return shorter, len(text) - len(shorter)


def _unless_readable(match: re.Match[str]) -> str:
    signs = "".join(re.findall(_ALPHABET, match[0]))
    kinds = re.sub(r"[^uld]", "s", signs.translate(_CLASSES))
    changes = sum(map(operator.ne, kinds, kinds[1:]))
    is_mixed = "d" in kinds and changes >= _LEAST_CHANGES * len(kinds) and kinds.count("s") <= _MOST_OTHERS * len(kinds)
    if len(signs) < _LEAST_CHARS or not is_mixed:
        return match[0]
    before = match.string[max(0, match.start() - _MOST_URL_CHARS) : match.start()]
    return match[0] if len(signs) <= _MOST_URL_CHARS and _URL.search(before) else ""


def _is_minified(line: str) -> bool:
    """Whether a long line is code without blanks: calls, blocks and statements, unlike in JSON and in tables."""
    return (
        _share(" \t", line) <= 0.06
        and _share("(){};=", line) >= 0.06
        and _share("({", line) >= 0.02
        and _share(";=", line) >= 0.02
        and _share("0123456789", line) <= 0.4
        and len(line.encode("ascii", "ignore")) >= 0.9 * len(line)
    )


def _share(signs: str, text: str) -> float:
    return sum(map(text.count, signs)) / len(text)

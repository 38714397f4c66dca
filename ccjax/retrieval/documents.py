"""Turns one file into a title, clean text and metadata."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import re
import sys
import tomllib
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import regex
import yaml

from ccjax.retrieval.encoding import decode
from ccjax.retrieval.markdown import blocks, without_comments

MAX_FILE_BYTES = 20_000_000
_MOST = sys.float_info.max
_MOST_FRONT_MATTER_CHARS = 65_536
"""YAML is parsed at 0.1 MB/s."""
_MOST_REASON_CHARS = 400
Value = str | float | bool
_Read = Callable[[bytes], "LoadedDocument"]


class DocumentError(ValueError):
    """A file that cannot be used; the message names the file and the reason."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class LoadedDocument:
    """A parsed file.

    The title is that of the front matter, the only Markdown heading of level 1, an HTML <title> or only <h1>, a PDF's
    metadata title, else the file name in words. A heading that became the title is not repeated in `text`.

    Attributes:
      markdown: whether `text` has Markdown markup (all but plain text is turned into it).
      metadata: from a Markdown file's front matter (see `plain_metadata`).
      notes: what a reader should know about how the text was made out, such as a guessed encoding.
    """

    title: str
    text: str
    markdown: bool = False
    metadata: Mapping[str, Value | list[Value]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def plain_metadata(value: Any) -> dict[str, Value | list[Value]]:
    """The text, numbers and booleans of a mapping by name, and lists of them, for filters; dates as ISO text. The rest
    (mappings, numbers beyond a float) is left out. Empty if `value` is no mapping."""
    if not isinstance(value, Mapping):
        return {}
    plain: dict[str, Value | list[Value]] = {}
    for name, item in value.items():
        if isinstance(item, list):
            item = [part for part in map(_plain, item) if part is not None]
        elif (item := _plain(item)) is None:
            continue
        plain[cleaned(str(name))] = item
    return plain


def _plain(item: Any) -> Value | None:
    if isinstance(item, datetime.date):
        item = item.isoformat()
    if isinstance(item, str):
        return cleaned(item)
    return item if isinstance(item, int | float) and -_MOST <= item <= _MOST else None


def load_document(path: str | Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> LoadedDocument:
    """The title and text of the file at `path`; the same bytes under the same name always give the same result.

    Raises:
      DocumentError: unsupported suffix, unreadable or too large, undecodable, broken, encrypted, or without text.
    """
    path = Path(path)
    return parse_document(path, read_document(path, max_file_bytes=max_file_bytes))


def is_supported(path: Path) -> bool:
    """Whether files with this name are read."""
    return _kind(path) in _READERS


def read_document(path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of the file at `path`.

    Raises:
      DocumentError: unsupported suffix, not a regular file, unreadable, or over the limit.
    """
    if not is_supported(path):
        wanted = ", ".join(sorted(_READERS))
        raise DocumentError(path, f"unsupported suffix {path.suffix!r}, wanted one of {wanted}")
    try:
        check_regular(path)
        with path.open("rb") as file:
            data = file.read(max_file_bytes + 1)
        if len(data) > max_file_bytes:
            size = path.stat().st_size
            raise DocumentError(path, f"too large: {size} bytes, over the limit max_file_bytes={max_file_bytes}")
        return data
    except OSError as error:
        raise DocumentError(path, reason_of(error)) from None


def check_regular(path: Path) -> None:
    """Checks that reading the file ends: a pipe would block.

    Raises:
      DocumentError: not a regular file.
      OSError: it is not there, or cannot be looked at.
    """
    if not path.is_file():
        path.stat()  # says why, if it is not there
        raise DocumentError(path, "not a regular file")


def parse_document(path: Path, data: bytes) -> LoadedDocument:
    """The title and text of `data`, the content of `path`, whose suffix names the format.

    Raises:
      DocumentError: undecodable, broken, encrypted, or without text.
    """
    if not data.strip():
        raise DocumentError(path, "the file is empty")
    try:
        loaded = _parsed(path, data)
    except Exception as error:
        raise DocumentError(path, reason_of(error)) from None
    text = cleaned(loaded.text).strip("\n").rstrip()
    if not text.strip():
        raise DocumentError(path, "no text besides a title" if loaded.title else "no text")
    title = " ".join(cleaned(loaded.title).split())
    return dataclasses.replace(loaded, title=title or _title_from_name(path), text=text)


def _parsed(path: Path, data: bytes) -> LoadedDocument:
    try:
        return _READERS[_kind(path)](data)
    except ChildProcessError:  # which may go well next time
        raise
    except OSError as error:  # of a library: the content is in memory
        raise ValueError(f"cannot be parsed: {type(error).__name__}: {error}") from None


def reason_of(error: Exception) -> str:
    """Why content could not be read or parsed; libraries raise more than they document, on broken files."""
    if isinstance(error, DocumentError):
        return error.reason
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding}: byte {error.start}, {error.reason}"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    kind = "" if isinstance(error, ValueError) else f"cannot be parsed: {type(error).__name__}: "
    told = re.sub(r" (?:object )?at 0x[0-9a-fA-F]+", "", f"{kind}{error}")  # which changes from run to run
    return " ".join(told.split())[:_MOST_REASON_CHARS]


def _title_from_name(path: Path) -> str:
    words = regex.sub(r"[^\p{L}\p{M}\p{N}]+", " ", cleaned(path.stem)).strip() or path.stem
    return words[:1].upper() + words[1:]


def cleaned(text: str) -> str:
    """Unix line ends, composed characters (NFC); no control characters, colours of terminals, soft hyphens, or lone
    surrogates (PDF fonts yield them; UTF-8 cannot hold them)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize(
        "NFC", re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f\xad\ufeff\ud800-\udfff]", "", text)
    )


def _decoded(data: bytes, *, is_html: bool = False) -> tuple[str, tuple[str, ...]]:
    text, note = decode(data, is_html=is_html)
    if "\x00" in text:
        raise ValueError("contains NUL bytes, so it is not text")
    return text, () if note is None else (note,)


def _read_text(data: bytes) -> LoadedDocument:
    text, notes = _decoded(data)
    return LoadedDocument("", text, notes=notes)


def _read_markdown(data: bytes) -> LoadedDocument:
    text, notes = _decoded(data)
    text, front, problem = _without_front_matter(text.replace("\r\n", "\n").replace("\r", "\n"))
    title, text = _without_title(_without_html(without_comments(text)), front.get("title"))
    return LoadedDocument(title, text, True, plain_metadata(front), (*notes, *filter(None, [problem])))


def _without_html(text: str) -> str:
    """Markdown with blocks of HTML as Markdown, as far as a reader sees them; a table may have blank lines."""
    if "<" not in text:
        return text
    html: Any = importlib.import_module("ccjax.retrieval.html")
    lines, parts, end = text.split("\n"), list[str](), 0
    for block in blocks(text):
        if block.kind != "html_block" or block.start < end or not lines[block.start].lstrip().startswith("<"):
            continue
        parts += lines[end : block.start]
        end, source = block.end, "\n".join(lines[block.start : block.end])
        while "<table" in source and "</table" not in source and end < len(lines):
            source, end = f"{source}\n{lines[end]}", end + 1
        title, inner = html.read_html(source)
        indent = " " * (len(lines[block.start]) - len(lines[block.start].lstrip()))
        shown = [f"# {title}"] * bool(title) + inner.split("\n")
        parts += ["", *(f"{indent}{line}" for line in shown), ""]
    return "\n".join([*parts, *lines[end:]])


def _without_title(text: str, title: Any) -> tuple[str, str]:
    """The title, by default the only heading of level 1 (one of several is the subject of its section alone), and the
    text without that heading."""
    lines = text.split("\n")
    if isinstance(title, bool) or not isinstance(title, (str, int, float, datetime.date)) or not str(title).strip():
        title = None  # nor what is no text: that of nested aliases of YAML would fill the memory
    named = [block for block in blocks(text) if block.level == 1 and block.text and "\n" not in block.text]
    if named and (title == named[0].text or title is None and len(named) == 1):
        title, lines = named[0].text, lines[: named[0].start] + lines[named[0].end :]
    return str(title or ""), "\n".join(lines)


def _without_front_matter(text: str) -> tuple[str, Mapping[str, Any], str]:
    """The text behind the YAML (or TOML between `+++`) at its beginning, what that says, and what is wrong with it.
    What is no mapping is text between two lines; what is broken but begins with a key is left out."""
    found = re.match(r"(---|\+\+\+)[ \t]*\n(.*?)(?:^|\n)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", text, re.DOTALL)
    if found is None or len(found[2]) > _MOST_FRONT_MATTER_CHARS:
        return text, {}, ""
    behind = text[found.end() :]
    try:
        front = tomllib.loads(found[2]) if found[1] == "+++" else yaml.safe_load(found[2])
    except Exception as error:  # besides YAMLError the exceptions of its constructors: ValueError, RecursionError ...
        if not re.match(r"\w[^\n:=]*[:=]", found[2]):
            return text, {}, ""
        return behind, {}, f"front matter that is left out: {' '.join(str(error).split())}"[:300]
    return (behind, front, "") if isinstance(front, Mapping) else (text, {}, "")


def _reader(name: str, *, of_text: bool = False, **options: Any) -> _Read:
    """A function of this package, of text or of bytes, which returns title, text and maybe a note, or only a text. Its
    module, and the library that it needs, are loaded when the first file is read."""

    def read(data: bytes) -> LoadedDocument:
        module, _, function = name.partition(".")
        call = getattr(importlib.import_module(f"ccjax.retrieval.{module}"), function)
        content, notes = _decoded(data, is_html=module == "html") if of_text else (data, ())
        found = call(content, **options)
        title, text, *more = _without_title(found, None) if isinstance(found, str) else found
        return LoadedDocument(title, text, True, notes=(*notes, *filter(None, more)))

    return read


_READERS: dict[str, _Read] = {
    **dict.fromkeys((".md", ".markdown"), _read_markdown),
    **dict.fromkeys((".txt", ".text", ".log", "README", "LICENSE"), _read_text),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _reader("html.read_html", of_text=True)),
    ".pdf": _reader("pdf.read_pdf"),
    ".rst": _reader("formats.read_rst", of_text=True),
    ".csv": _reader("formats.read_csv", of_text=True),
    ".tsv": _reader("formats.read_csv", of_text=True, delimiter="\t"),
    ".ipynb": _reader("formats.read_notebook"),
    ".eml": _reader("formats.read_mail"),
    ".docx": _reader("formats.read_docx"),
    ".pptx": _reader("formats.read_pptx"),
    ".xlsx": _reader("formats.read_xlsx"),
    ".epub": _reader("formats.read_epub"),
}


def _kind(path: Path) -> str:
    """The suffix in small letters, or the name of a file that needs none."""
    return path.suffix.lower() or path.name.upper()

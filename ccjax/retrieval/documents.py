"""Turns one file (.md .txt .html .htm .pdf) into a title, clean text and metadata."""

from __future__ import annotations

import dataclasses
import datetime
import io
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ccjax.retrieval.markdown import Fences

MAX_FILE_BYTES = 20_000_000
_MOST = sys.float_info.max
_MOST_FRONT_MATTER_CHARS = 65_536
"""YAML is parsed at 0.1 MB/s."""


class DocumentError(ValueError):
    """A file that cannot be used; the message names the file and the reason."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class LoadedDocument:
    """A parsed file. `markdown` says whether `text` still has Markdown markup; `metadata` is from a Markdown file's
    front matter (see `plain_metadata`).

    The title is a Markdown level-1 heading or front-matter title, an HTML <title> or first <h1>, a PDF's metadata
    title, else the file name in words. A heading that became the title is not repeated in `text`.
    """

    title: str
    text: str
    markdown: bool = False
    metadata: Mapping[str, str | float | bool] = dataclasses.field(default_factory=dict)


def plain_metadata(value: Any) -> dict[str, str | float | bool]:
    """The text, numbers and booleans of a mapping by name, for filters; dates as ISO text. The rest (lists, mappings,
    numbers beyond a float) is left out. Empty if `value` is no mapping."""
    if not isinstance(value, Mapping):
        return {}
    plain: dict[str, str | float | bool] = {}
    for name, item in value.items():
        if isinstance(item, datetime.date):
            item = item.isoformat()
        if isinstance(item, str):
            plain[without_controls(str(name))] = without_controls(item)
        elif isinstance(item, int | float) and -_MOST <= item <= _MOST:
            plain[without_controls(str(name))] = item
    return plain


def load_document(path: str | Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> LoadedDocument:
    """The title and text of the file at `path`; the same bytes under the same name always give the same result.

    Raises:
      DocumentError: unsupported suffix, unreadable or too large, undecodable, broken, encrypted, or without text.
    """
    path = Path(path)
    return parse_document(path, read_document(path, max_file_bytes=max_file_bytes))


def read_document(path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of the file at `path`.

    Raises:
      DocumentError: unsupported suffix, not a regular file (a pipe would block), unreadable, or over the limit.
    """
    if path.suffix.lower() not in _PARSERS:
        wanted = ", ".join(sorted(_PARSERS))
        raise DocumentError(path, f"unsupported suffix {path.suffix!r}, wanted one of {wanted}")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError(path, "not a regular file")
        if status.st_size > max_file_bytes:
            raise DocumentError(path, f"{status.st_size} bytes, over the limit max_file_bytes={max_file_bytes}")
        with path.open("rb") as file:
            data = file.read(max_file_bytes + 1)
        if len(data) > max_file_bytes:
            raise DocumentError(path, f"grows while it is read, over the limit max_file_bytes={max_file_bytes}")
        return data
    except OSError as error:
        raise DocumentError(path, f"cannot be read: {error.strerror or error}") from None


def parse_document(path: Path, data: bytes) -> LoadedDocument:
    """The title and text of `data`, the content of `path`, whose suffix names the format.

    Raises:
      DocumentError: undecodable, broken, encrypted, or without text.
    """
    if not data.strip():
        raise DocumentError(path, "the file is empty")
    suffix = path.suffix.lower()
    title, text = _PARSERS[suffix](path, data)
    text = without_controls(text).strip("\n").rstrip()
    if not text.strip():
        raise DocumentError(path, "no text besides a title" if title else "no text")
    title = " ".join(without_controls(title or "").split())
    metadata = _front_matter(_decode(path, data)) if suffix == ".md" else {}
    return LoadedDocument(title or _title_from_name(path), text, markdown=suffix == ".md", metadata=metadata)


def _title_from_name(path: Path) -> str:
    words = re.sub(r"[\W_]+", " ", path.stem).strip() or path.stem
    return words[:1].upper() + words[1:]


def without_controls(text: str) -> str:
    """Unix line ends, no control characters, no lone surrogates (PDF fonts yield them; UTF-8 cannot hold them)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "", text)


def _decode(path: Path, data: bytes, declared: str | None = None) -> str:
    encoding = declared or "utf-8"
    for mark, named in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if data.startswith(mark):
            encoding = named
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(path, f"byte {error.start} is not {encoding}: {error.reason}") from None
    except (LookupError, ValueError):  # ValueError: a name with NUL
        raise DocumentError(path, f"unknown character encoding {encoding!r}") from None
    if "\x00" in text:
        raise DocumentError(path, "contains NUL bytes, so it is not text")
    return text


def _parse_text(path: Path, data: bytes) -> tuple[None, str]:
    return None, _decode(path, data)


# Front matter must begin with a key, or a thematic break at the top would swallow what follows it.
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?=\w)((?:\w[\w-]*[ \t]*:.*\n|[ \t#-].*\n|\n)*?)---[ \t]*(?:\n|\Z)")
_HEADING = re.compile(r" {0,3}#[ \t]+(\S.*)$")
_UNDERLINE = re.compile(r" {0,3}=+[ \t]*$")


def _parse_markdown(path: Path, data: bytes) -> tuple[str | None, str]:
    text = _decode(path, data).replace("\r\n", "\n").replace("\r", "\n")
    title = None
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        if named := re.search(r"^title[ \t]*:[ \t]*(.+)$", front[1], re.MULTILINE):
            title = named[1].strip().strip("\"'")
    lines = text.split("\n")
    found = _find_heading(lines)
    if found is not None:
        first, last, heading = found
        if title is None or title == heading:
            title, lines = heading, lines[:first] + lines[last:]
    return title, "\n".join(lines)


def _front_matter(text: str) -> dict[str, str | float | bool]:
    """The front matter as metadata; empty if there is none or it is not YAML."""
    front = _FRONT_MATTER.match(text.replace("\r\n", "\n").replace("\r", "\n"))
    if front is None or len(front[1]) > _MOST_FRONT_MATTER_CHARS:
        return {}
    try:
        return plain_metadata(yaml.safe_load(front[1]))
    except Exception:  # besides YAMLError the exceptions of its constructors: ValueError, RecursionError ...
        return {}


def _find_heading(lines: list[str]) -> tuple[int, int, str] | None:
    """First level-1 heading outside code fences as (first line, line after it, text), or None."""
    fences = Fences()
    for index, line in enumerate(lines):
        if fences.takes(line):
            continue
        if (heading := _HEADING.match(line)) and (words := _without_closing_marks(heading[1].rstrip())):
            return index, index + 1, words
        if index and _UNDERLINE.match(line) and (above := lines[index - 1].strip()):
            # An underline makes a heading of the whole paragraph above; only a one-line paragraph is a title.
            if index == 1 or not lines[index - 2].strip():
                return index - 1, index + 1, above
    return None


def _without_closing_marks(heading: str) -> str:
    """`Title ##` is `Title`, but `C#` stays."""
    words = heading.rstrip("#")
    return words.rstrip() if not words or words[-1].isspace() else heading


_BLOCKS = (
    "address article aside blockquote caption center dd details dialog div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header hr legend li main menu nav ol option p pre section summary table tbody tfoot thead "
    "tr ul"
).split()
_LINES = "li tr dt dd option".split()
_SPACES = (
    dict.fromkeys(_BLOCKS, ("\n\n", "\n\n"))
    | dict.fromkeys(_LINES, ("\n", "\n"))
    | {"br": ("\n", ""), "td": ("", " "), "th": ("", " ")}
)
_UNSEEN = "head title script style noscript template svg iframe object audio video canvas".split()


def _parse_html(path: Path, data: bytes) -> tuple[str | None, str]:
    import bs4
    import bs4.exceptions
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    if declared in ("iso-8859-1", "latin-1", "us-ascii", "ascii"):
        declared = "windows-1252"  # what browsers do (WHATWG), since most such pages hold windows-1252 quotes
    markup = _decode(path, data, declared)
    with warnings.catch_warnings():  # about XHTML and about bodies that look like a file name; both are fine here
        warnings.simplefilter("ignore", bs4.UnusualUsageWarning)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            soup = bs4.BeautifulSoup(markup, "html.parser")
        except bs4.exceptions.ParserRejectedMarkup as error:
            raise DocumentError(path, f"broken HTML: {str(error).splitlines()[-1].strip()}") from None
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    if (heading := soup.h1) is not None:
        heading_text = " ".join(heading.get_text(" ").split())
        if title in ("", heading_text):
            title = heading_text
        else:
            heading = None
    text = "\n".join(line.rstrip() for line in "".join(_seen(soup, heading)).replace("\xa0", " ").split("\n"))
    text = re.sub(r"(?<=\n) (?=\S)", "", text)
    return title or None, re.sub(r"\n{3,}", "\n\n", text).strip()


def _seen(soup: Any, left_out: Any) -> Iterator[str]:
    """The text of a page in order, with the space around its parts, without `left_out` (a tag or None) and what
    browsers hide. The tree is not modified, because each change of a tag takes time proportional to the number
    of its neighbours."""
    from bs4.element import CData, NavigableString, Tag

    within = [(iter(soup.contents), "", False)]
    while within:
        nodes, space_after, is_pre = within[-1]
        node = next(nodes, None)
        if node is None:
            within.pop()
            yield space_after
        elif isinstance(node, Tag):
            if node is left_out or node.name in _UNSEEN:
                continue
            space_before, space_after = _SPACES.get(node.name, ("", ""))
            yield space_before
            if node.name != "br":
                within.append((iter(node.contents), space_after, is_pre or node.name == "pre"))
        elif type(node) is NavigableString:
            yield node if is_pre else re.sub(r"\s+", " ", node)
        elif type(node) is CData:
            yield node


def _parse_pdf(path: Path, data: bytes) -> tuple[str | None, str]:
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(path, "encrypted, and the empty password does not open it")
        pages = [page.extract_text() for page in reader.pages]
        title = (reader.metadata.title if reader.metadata else None) or None
    except DocumentError:
        raise
    except Exception as error:  # on damaged files pypdf raises many types: PdfReadError, KeyError, RecursionError ...
        raise DocumentError(path, f"broken PDF: {type(error).__name__}: {error}") from None
    if not any(page.strip() for page in pages):
        raise DocumentError(path, "no text on any page (scanned pages need text recognition first)")
    return title, "\n\n".join(_unwrap(page) for page in pages)


def _unwrap(page: str) -> str:
    """Joins the lines of a page's paragraphs: a PDF's line ends say nothing about sentences."""
    paragraphs = re.split(r"\n[ \t]*\n", page.replace("\r\n", "\n"))
    joined = (re.sub(r"(?<=[a-z])-\n(?=[a-z])", "", paragraph.strip()) for paragraph in paragraphs)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in joined if paragraph)


_PARSERS: dict[str, Callable[[Path, bytes], tuple[str | None, str]]] = {
    ".md": _parse_markdown,
    ".txt": _parse_text,
    ".html": _parse_html,
    ".htm": _parse_html,
    ".pdf": _parse_pdf,
}

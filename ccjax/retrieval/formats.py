"""Tables, notebooks, mail, books and office files as Markdown.

Archives are read in memory and only as far as they say they are large; nothing in them is run, fetched or written.
"""

from __future__ import annotations

import collections
import csv
import email
import email.policy
import importlib
import io
import itertools
import json
import posixpath
import re
import statistics
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import docutils.core
import docutils.nodes

from ccjax.retrieval.encoding import decode
from ccjax.retrieval.html import read_html
from ccjax.retrieval.markdown import fenced, table

_MOST_UNPACKED_BYTES, _MOST_PARTS, _MOST_CELLS = 200_000_000, 20_000, 2_000_000
_LONGEST_OUTPUT = 2000
_SAMPLED_ROWS = 50
_MOST_FORWARDED = 4
"""Mails in mails."""
csv.field_size_limit(2**31 - 1)  # of the process; what is read is small enough
_ENTITY = re.compile(rb"<!ENTITY", re.IGNORECASE)
_RST = {
    "report_level": 3,
    "halt_level": 5,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "embed_stylesheet": False,
    "syntax_highlight": "none",
    "math_output": "LaTeX",
    "output_encoding": "unicode",
    "warning_stream": False,
    "_disable_config": True,
}


def read_rst(text: str) -> tuple[str, str]:
    """Title and text of reStructuredText. What docutils cannot make out, such as the directives of Sphinx, is text."""
    tree = docutils.core.publish_doctree(text, settings_overrides=_RST)
    for message in [*tree.findall(docutils.nodes.system_message)]:
        if isinstance(message.parent, docutils.nodes.section) and message["level"] < _RST["report_level"]:
            message.parent.remove(message)  # a heading with too short a line, which is one all the same
            continue
        cited = "\n\n".join(node.astext() for node in message.findall(docutils.nodes.literal_block))
        paragraphs = re.split(r"\n(?:[ \t]*\n)+", cited) if cited else []
        message.parent.replace(message, [docutils.nodes.paragraph("", part) for part in paragraphs])
    title, text = read_html(docutils.core.publish_from_doctree(tree, writer="html5", settings_overrides=_RST))
    return title if tree.get("title") else "", text  # the page of a document without one is called <string>


def read_csv(text: str, delimiter: str | None = None) -> str:
    """A table.

    Args:
      delimiter: None to find out.
    """
    lines = list(io.StringIO(text, newline=""))
    if delimiter is None:
        delimiter = max(",;\t|", key=lambda sign: _num_alike(itertools.islice(_rows(lines, sign), _SAMPLED_ROWS)))
    rows = list(_rows(lines, delimiter))
    above = [row for row in rows[:1] if row[0].startswith("sep=")]  # a note for Excel
    return _table_of(rows[len(above) :])


def _rows(lines: list[str], delimiter: str) -> Iterator[list[str]]:
    """The rows that are not empty. One with a stray quotation mark, which would take in others, is its first line."""
    start = num_vain = 0
    while start < len(lines):
        stop = len(lines) if num_vain <= 9 * len(lines) else start + 1
        reader = csv.reader(map(lines.__getitem__, range(start, stop)), delimiter=delimiter, strict=True)
        try:
            row, num_lines = next(reader), reader.line_num
        except csv.Error:
            line, num_lines, num_vain = lines[start].rstrip("\r\n"), 1, num_vain + reader.line_num
            row = line.split(delimiter) if line.count('"') % 2 else next(csv.reader([line], delimiter=delimiter))
        start += num_lines
        if any(map(str.strip, row)):
            yield row


def _num_alike(rows: Iterator[list[str]]) -> tuple[int, int]:
    """How many rows have as many cells as most of those with several have, and how many cells."""
    widths = collections.Counter(len(row) for row in rows if len(row) > 1)
    return max(((count, width) for width, count in widths.items()), default=(0, 0))


def _table_of(rows: list[list[str]]) -> str:
    """A table as Markdown. Its header is the first row with more than half as many filled cells as most have; what is
    above is text."""
    filled = [sum(map(bool, map(str.strip, row))) for row in rows[:_SAMPLED_ROWS]]
    usual = statistics.median_high(filled or [0])
    start = next((at for at, count in enumerate(filled) if 2 * count > usual), 0)
    above, rows = [" ".join(filter(None, row)) for row in rows[:start]], rows[start:]
    width = max(map(len, rows), default=0)
    if width < 2 or len(rows) < 2:
        return "\n".join([*above, *(" ".join(row) for row in rows)])
    if len(rows) * width > _MOST_CELLS:
        raise ValueError(f"too large: wanted a table of at most {_MOST_CELLS} cells, got {len(rows)} rows of {width}")
    return "\n\n".join([*above, table([row + [""] * (width - len(row)) for row in rows])])


def read_notebook(data: bytes) -> str:
    """The cells of a Jupyter notebook, with what they printed."""
    book = json.loads(data)
    cells = book.get("cells") or [c for sheet in book.get("worksheets") or [] for c in sheet.get("cells") or []]
    language = _mapping(_mapping(book.get("metadata")).get("kernelspec")).get("language") or ""
    parts = []
    for cell in map(_mapping, cells):
        source = _text_of(cell.get("source") or cell.get("input") or "")
        if cell.get("cell_type") != "code":
            parts.append(source)
            continue
        parts.append(fenced(source, language))
        for output in map(_mapping, cell.get("outputs") or []):
            shown = _text_of(output.get("text") or _mapping(output.get("data")).get("text/plain") or "")
            parts.append(fenced(shown[:_LONGEST_OUTPUT]) if shown.strip() else "")
    return "\n\n".join(filter(None, parts))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text_of(source: Any) -> str:
    return "".join(map(str, source)) if isinstance(source, list) else str(source)


def read_mail(data: bytes) -> tuple[str, str]:
    """Subject and text of a message, with its sender, recipients, date and the names of what is attached; mails in it
    are sections."""
    message: Any = email.message_from_bytes(data, policy=email.policy.default)
    text = _mail_text(message, 0)
    if not text.strip():
        raise ValueError("no message")
    return _header(message, "Subject"), text


def _mail_text(message: Any, depth: int) -> str:
    names = ("From", "To", "Cc", "Date")
    lines = [f"{name}: {value}" for name in names if (value := _header(message, name))]
    attached: list[str] = []
    texts = "\n\n".join(filter(str.strip, _mail_parts(message, attached, depth)))
    lines += [f"Attached: {', '.join(attached)}"] if attached else []
    return "\n".join(lines) + f"\n\n{texts}"


def _header(message: Any, name: str) -> str:
    raw = next((str(value) for key, value in message.raw_items() if key.lower() == name.lower()), "")
    value = " ".join(decode(raw.encode("utf-8", "surrogateescape"))[0].split())
    try:
        return " ".join(email.policy.default.header_factory(name, value).split())
    except Exception:  # of many kinds, on broken addresses
        return value


def _mail_parts(part: Any, attached: list[str], depth: int) -> Iterator[str]:
    """The texts of a message in order, of alternatives the first that is not empty; adds names of files to
    `attached`."""
    kind, name = part.get_content_type(), part.get_filename()
    if kind == "message/rfc822":
        inner = part.get_payload()[0]
        if not inner.keys():  # encoded as a whole
            inner["Content-Transfer-Encoding"] = part.get("Content-Transfer-Encoding", "8bit")
            inner = email.message_from_bytes(inner.get_payload(decode=True), policy=email.policy.default)
        subject = _header(inner, "Subject") or "Attached message"
        if depth < _MOST_FORWARDED:
            yield f"## {subject}\n\n{_mail_text(inner, depth + 1)}"
        else:
            attached.append(subject)
    elif kind == "multipart/alternative":
        by_kind = sorted(part.iter_parts(), key=lambda one: one.get_content_type() != "text/plain")
        yield next(filter(str.strip, ["\n\n".join(_mail_parts(one, attached, depth)) for one in by_kind]), "")
    elif part.is_multipart():
        for one in part.iter_parts():
            is_shown = kind == "multipart/related" and one.get_content_maintype() == "image" and not one.is_attachment()
            yield from _mail_parts(one, [] if is_shown else attached, depth)
    elif part.is_attachment() or not kind.startswith(("text/plain", "text/html", "multipart/")):
        attached += [name] if name else []
    else:
        is_html = kind == "text/html"
        data = part.get_payload(decode=True) or b""
        try:
            charset = part.get_content_charset("").removeprefix("us-").replace("ascii", "utf-8")
            text = decode(data, is_html=is_html, declared=charset)[0]
        except ValueError:  # the other parts may be text
            text = data.decode("utf-8", "replace")
        yield read_html(text)[1] if is_html else text


# -- archives ----------------------------------------------------------------------------------------------------------


def _opened(data: bytes) -> zipfile.ZipFile:
    """An archive that is safe to parse.

    Raises:
      ValueError: it is none, encrypted, too large when unpacked, or its XML defines entities.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        infos = archive.infolist()
        num_bytes = sum(info.file_size for info in infos)
        if len(infos) > _MOST_PARTS or num_bytes > _MOST_UNPACKED_BYTES:
            wanted = f"{_MOST_UNPACKED_BYTES} bytes in {_MOST_PARTS} parts"
            raise ValueError(f"too large: wanted at most {wanted} when unpacked, got {num_bytes} in {len(infos)}")
        for info in infos:
            if info.flag_bits & 1:
                raise ValueError("protected by a password")
            if info.filename.endswith((".xml", ".rels", ".opf", ".ncx", ".xhtml")):
                if _ENTITY.search(archive.read(info).replace(b"\x00", b"")):
                    raise ValueError(f"refused: {info.filename} defines XML entities")
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError) as error:
        if data.startswith(b"\xd0\xcf\x11\xe0"):
            raise ValueError("protected by a password, or a file of an older format") from None
        raise ValueError(f"broken archive: {error}") from None
    return archive


def _library(name: str, suffix: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"reading {suffix} needs {name}: pip install 'ccjax[office]'") from None


def read_docx(data: bytes) -> tuple[str, str]:
    """Title and text of a Word document."""
    mammoth = _library("mammoth", ".docx")
    _opened(data).close()
    html = mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: [], include_default_style_map=True)
    return read_html(html.value)


def read_pptx(data: bytes) -> tuple[str, str]:
    """Title and text of slides, each below its title, with notes."""
    presentation = _library("pptx", ".pptx")
    _opened(data).close()
    parts = []
    slides = presentation.Presentation(io.BytesIO(data)).slides
    for number, slide in enumerate(slides, 1):
        if slide.element.get("show") in ("0", "false"):
            continue
        heading = slide.shapes.title
        named = " ".join(heading.text_frame.text.split()) if heading is not None else ""
        parts.append(f"## {named or f'Slide {number}'}")
        parts += _texts_of(slide.shapes, None if heading is None else heading.shape_id)
        if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None:
            parts.append(notes.text)
    return "", "\n\n".join(part for part in parts if part.strip())


def _texts_of(shapes: Any, heading_id: int | None) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _texts_of(shape.shapes, heading_id)
        elif getattr(shape, "has_table", False):
            yield _table_of([[cell.text for cell in row.cells] for row in shape.table.rows])
        elif shape.has_text_frame and shape.shape_id != heading_id:
            yield "\n".join(
                f"{'  ' * paragraph.level}- {paragraph.text}"
                if len(shape.text_frame.paragraphs) > 1
                else paragraph.text
                for paragraph in shape.text_frame.paragraphs
                if paragraph.text.strip()
            )


def read_xlsx(data: bytes) -> tuple[str, str]:
    """The sheets of a workbook, each a table below its name, with the values that its program saved."""
    openpyxl = _library("openpyxl", ".xlsx")
    _opened(data).close()
    parts, num_cells = [], 0
    for sheet in openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False).worksheets:
        if sheet.sheet_state != "visible":
            continue
        sheet.reset_dimensions()  # which may claim billions of cells
        rows: list[list[str]] = []
        for values in sheet.iter_rows(values_only=True):
            num_cells += 1 + len(values)
            if num_cells > _MOST_CELLS:
                raise ValueError(f"too large: wanted at most {_MOST_CELLS} cells")
            cells = ["" if value is None else str(value).removesuffix(" 00:00:00") for value in values]
            if any(cells):
                rows.append(cells)
        if rows:
            parts.append(f"## {sheet.title}\n\n{_table_of(rows)}")
    return "", "\n\n".join(parts)


def read_epub(data: bytes) -> tuple[str, str]:
    """Title and chapters of a book, in reading order."""
    with _opened(data) as archive:
        try:
            container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
            place = next(element.attrib["full-path"] for element in container.iter() if "full-path" in element.attrib)
            package = ElementTree.fromstring(archive.read(place))
        except (KeyError, StopIteration, ElementTree.ParseError) as error:
            raise ValueError(f"broken book: {type(error).__name__}: {error}") from None
        elements = {
            kind: [e for e in package.iter() if e.tag.endswith("}" + kind)] for kind in ("title", "item", "itemref")
        }
        places = {item.get("id"): item.get("href", "") for item in elements["item"]}
        parts = []
        for reference in elements["itemref"]:
            href = unquote(places.get(reference.get("idref"), ""))
            try:
                page = archive.read(posixpath.normpath(posixpath.join(posixpath.dirname(place), href)))
            except KeyError:
                continue
            title, text = read_html(decode(page, is_html=True)[0])
            parts.append(f"# {title}\n\n{text}" if title and text else text)
    return " ".join(next((e.text or "" for e in elements["title"]), "").split()), "\n\n".join(filter(None, parts))

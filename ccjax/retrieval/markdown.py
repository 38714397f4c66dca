"""Markdown: its blocks as ranges of lines (headings, paragraphs, list items, tables, code); tables and code as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable("table")
_PARSER.core.ruler.enableOnly(["normalize", "block"])
_LEAVES = {"heading_open", "paragraph_open", "table_open", "fence", "code_block", "html_block", "hr"}
_CODE_OR_COMMENT = re.compile(
    r"(?<!`)(`+)(?!`)[^\n]*?(?<!`)\1(?!`)"
    r"|<!--(?s:.*?)-->|(?m:^%%[ \t]*$)(?s:.*?)(?m:^%%[ \t]*$)|(?<!\S)%%[^\n]*?%%(?!\S)"
)
_BOLD = re.compile(r"\*\*(?=\S)([^\n*]{0,79}[^\s.!?;:*]):?\*\*:?")
"""A paragraph that stands for a heading."""
_NOTE = re.compile(r"(?m)^\[(?://|comment|_)\]:[ ]?#.*$")
BAR = re.compile(r"(?<!\\)\|")
"""Separates the cells of a table."""
_LONGEST_HEADER = 240
_LINK = re.compile(r"!?\[([^\]\[]*)\]\([^()\s]*\)")


@dataclasses.dataclass(slots=True)
class Block:
    """A block that contains no other one, from line `start` to before line `end`.

    Attributes:
      kind: paragraph, heading, table, fence, code_block, html_block or hr.
      level: of a heading outside lists and quotes, 1 to 6, which a paragraph in bold has, too; else 0.
      text: of a heading, without its marks and the targets of links.
      rows: first lines of a table's rows, the header's first.
      items: first line and line behind the last of the list items that begin with this block, the outermost first.
    """

    kind: str
    start: int
    end: int
    level: int = 0
    text: str = ""
    rows: list[int] = dataclasses.field(default_factory=list)
    items: tuple[tuple[int, int], ...] = ()


def blocks(text: str) -> Iterator[Block]:
    """The blocks of Markdown in reading order; between them are blank lines and definitions of links only."""
    items: list[tuple[int, int]] = []
    block: Block | None = None
    for token in _PARSER.parse(text):
        if token.type == "list_item_open":
            items.append(_lines(token))
        elif token.type in _LEAVES:
            if block is not None:
                yield block
            block = Block(token.type.removesuffix("_open"), *_lines(token), items=tuple(items))
            block.level = int(token.tag[1:]) if block.kind == "heading" and not token.level else 0
            items = []
        elif block is not None and token.type == "tr_open":
            block.rows.append(_lines(token)[0])
        elif block is not None and token.type == "inline":
            if block.kind == "paragraph" and token.level == 1 and (bold := _BOLD.fullmatch(token.content)):
                block.level, token.content = 6, bold[1]
            if not block.level:
                continue
            block.text = "\n".join(" ".join(line.split()) for line in _LINK.sub(r"\1", token.content).split("\n"))
    if block is not None:
        yield block


def without_comments(text: str) -> str:
    """Markdown without comments outside code: those of HTML, of Obsidian (`%%`), and definitions of links."""
    if not any(mark in text for mark in ("-->", "%%")) and not _NOTE.search(text):
        return text
    lines, parts, end = text.split("\n"), list[str](), 0
    for block in [*(block for block in blocks(text) if block.kind in ("fence", "code_block")), None]:
        start, behind = (len(lines), len(lines)) if block is None else (block.start, block.end)
        plain = "\n".join(lines[end:start])
        last = max(plain.rfind("-->"), plain.rfind("%%"))
        last = plain.find("\n", last) if last >= 0 else 0
        last = len(plain) if last < 0 else last
        plain = _CODE_OR_COMMENT.sub(lambda match: match[0] if match[1] else "", plain[:last]) + plain[last:]
        parts.append(_NOTE.sub("", plain))
        parts.append("\n".join(lines[start:behind]))
        end = behind
    return "\n".join(parts[:-1])


def fenced(text: str, language: str = "") -> str:
    """A block of code."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table, its header first; if the header is too long to be repeated often, rows as `name: value`."""
    rows = [[" ".join(BAR.sub(r"\\|", cell).split()) for cell in row] for row in rows]
    if sum(map(len, rows[0])) > _LONGEST_HEADER:
        pairs = (zip(rows[0], row, strict=False) for row in rows[1:])
        return "\n".join(
            "- " + "; ".join(f"{name}: {cell}" if name else cell for name, cell in row if cell) for row in pairs
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _lines(token: Token) -> tuple[int, int]:
    assert token.map is not None
    return token.map[0], token.map[1]

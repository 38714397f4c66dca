"""The visible main text of an HTML page as Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from selectolax.lexbor import LexborHTMLParser

from ccjax.retrieval.markdown import fenced, table

_UNSEEN = (
    "head, script, style, noscript, template, svg, iframe, object, audio, video, canvas, select, button, datalist, "
    "rt, rp, nav, body > footer, body > header:not(:has(h1)), [hidden], [aria-hidden=true], dialog:not([open]), "
    "[role=navigation], [role=search], [role=menu], [role=contentinfo]"
)
_INVISIBLE = re.compile(
    r"(?:^|[;\s])(?:display\s*:\s*none|visibility\s*:\s*hidden|(?:opacity|font-size)\s*:\s*0+(?:\.0*)?(?![.\d]))",
    re.IGNORECASE,
)
_MENU = re.compile(r"(?:^|[-_\s])(?:nav(?:bar|igation)?|menu|breadcrumbs?|sidebar|toc|cookies?)(?:$|[-_\s])", re.I)
_LINKED = 0.7
"""Share of the text of a menu that is in links."""
_BLOCK, _LINE, _MARKED, _ESCAPED = "\x02", "\x03", "\x04", "\x05"
"""Ends of blocks and lines; before the mark of an item or a quote; before text that would be one of Markdown's marks at
the beginning of a line."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f]")
_BLOCK_TAGS = (
    "address article aside blockquote body caption center details dialog div dl fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr legend main menu ol p pre section summary table td th ul"
).split()
_SEPARATORS: dict[str, str] = {str(tag): _BLOCK for tag in _BLOCK_TAGS} | dict.fromkeys(
    ["br", "dd", "dt", "li", "tr"], _LINE
)
_HELD = frozenset("a blockquote caption h1 h2 h3 h4 h5 h6 li pre table td th".split())
_MOST_MENUS = 1000
"""Elements that are looked at, as that takes time proportional to their text."""
_IS_XML = re.compile(
    r"\s*<\?xml|[^<]*(?:<!--.*?-->\s*)?(?:<!doctype[^>]*xhtml|(?:<!doctype[^>]*>\s*)?<html[^>]*\sxmlns=)", re.I | re.S
)
_ONLY_XML = re.compile(
    r"<!--.*?(?:-->|\Z)|<!\[CDATA\[(?P<text>.*?)(?:\]\]>|\Z)"
    r"|<(?P<tag>(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)[a-z][\w:.-]*)"
    r"""(?P<rest>(?:\s+[\w:.-]+\s*=\s*(?:"[^"]*"|'[^']*'))*)\s*/>""",
    re.IGNORECASE | re.DOTALL,
)
_NESTED = re.compile(
    r"<(/?)(?:address|article|aside|blockquote|center|details|dialog|dir|div|dl|fieldset|figcaption|figure|footer|header"
    r"|hgroup|listing|main|menu|nav|ol|optgroup|pre|search|section|summary|ul)\b[^<>]*>",
    re.IGNORECASE,
)
_NO_TAGS = re.compile(r"<!--(?:-?>|.*?(?:-->|\Z))|<(script|style)(?=[\s/>]).*?(?:</\1|\Z)", re.IGNORECASE | re.DOTALL)
_HEAD = 2000
"""Characters that say whether a page is XHTML."""
_DEEPEST_TAG = 512
"""As in browsers; the parser takes time proportional to the square of the depth."""
_SYNTAX = re.compile(r"(\s*)(?=#{1,6}\s|```|~~~)")
_DEEPEST = 24
"""Elements of the page that are written as a whole; deeper ones become plain text."""
_MOST_COLUMNS, _LONGEST_REPEATED, _LONGEST_TARGET = 50, 200, 200
_LONGEST_CELL = 1000
"""Of several blocks, in a table without header cells that is one; with longer ones it arranges the page."""
_NO_CELL = re.compile(r"(?:^|\n)\s*(?:#{1,6} |```|\|.*\n\s*\|-)")
"""A heading, code or a table."""


class _Cell(NamedTuple):
    text: str
    is_header: bool
    down: int
    across: int


def read_html(markup: str) -> tuple[str, str]:
    """The title and the text of a page: its <title> or only <h1>, and what a reader sees besides menus, in <main> if
    there is one. The text is Markdown: headings, lists, links, code, and tables in which cells that span others are
    repeated."""
    if _IS_XML.match(markup[:_HEAD]):
        markup = _ONLY_XML.sub(_as_html, markup)
    tree = LexborHTMLParser(_flat(markup))
    title = " ".join(node.text().split()) if (node := tree.css_first("head > title, body > title")) else ""
    unseen = {node.mem_id for node in tree.css(_UNSEEN)}
    headings = tree.css("h1")
    if headings and title in ("" if len(headings) == 1 else None, words := " ".join(headings[0].text().split())):
        title = words
        unseen.add(headings[0].mem_id)
    candidates = tree.css("ul[class], ol[class], div[class], ul[id], ol[id], div[id]")[:_MOST_MENUS]
    unseen |= {node.mem_id for node in candidates if _is_menu(node)}
    styled = (node for node in tree.css("[style]") if _INVISIBLE.search(node.attributes.get("style") or ""))
    unseen |= {node.mem_id for node in styled}
    root = next((node for node in tree.css("main, [role=main]") if node.text().strip()), tree.body)
    return title, "" if root is None else _Writer(unseen).text_of(root)


def _as_html(match: re.Match[str]) -> str:
    """What HTML has for a comment, a CDATA section or an empty element of XML."""
    if match["tag"]:
        return f"<{match['tag']}{match['rest']}></{match['tag']}>"
    return match[0] if match["text"] is None else html.escape(match["text"])


def _flat(markup: str) -> str:
    """The page with paragraphs in place of elements that are nested too deeply, and of tags that are no elements."""
    depth = 0

    def shown(match: re.Match[str]) -> str:
        nonlocal depth
        depth = max(0, depth + (-1 if match[1] else 1))
        return match[0] if depth + len(match[1]) <= _DEEPEST_TAG else "<p>"

    return _NESTED.sub(shown, _NO_TAGS.sub(lambda match: _NESTED.sub("<p>", match[0]), markup))


def _is_menu(node: Any) -> bool:
    if not _MENU.search(f"{node.attributes.get('class')} {node.attributes.get('id')}"):
        return False
    linked = sum(len("".join(link.text().split())) for link in node.css("a"))
    return linked > _LINKED * len("".join(node.text().split()))


class _Writer:
    """Writes elements as Markdown. Until all have ended, the text has control characters as marks."""

    def __init__(self, unseen: set[Any]) -> None:
        self._unseen = unseen
        self._parts: list[list[str]] = [[]]  # of the elements that are written as a whole
        self._tables: list[list[list[_Cell]]] = []
        self._numbers: list[int] = []  # of the next items of lists, 0 without numbers

    def text_of(self, root: Any) -> str:
        """The text of an element."""
        waiting = [(root, "begin", False)]  # a stack of nodes, as pages may be nested deeply
        while waiting:
            node, state, is_pre = waiting.pop()
            tag = node.tag
            if tag == "-text":
                text = _CONTROLS.sub("", node.text_content or "")
                text = text if is_pre else _SYNTAX.sub(rf"\1{_ESCAPED}", re.sub(r"\s+", " ", text), count=1)
                self._parts[-1].append(text)
            elif state != "begin":
                self._end(node, tag, state == "held")
            elif not tag.startswith(("-", "_")) and node.mem_id not in self._unseen:
                waiting.append((node, self._begin(tag), is_pre))
                children, child = [], node.child
                while child is not None:
                    children.append((child, "begin", is_pre or tag == "pre"))
                    child = child.next
                waiting += reversed(children)
        text = _lines(_cleaned("".join(self._parts[0])))
        text = re.sub(rf"(?m)^((?:[ {_MARKED}]|[->] |\d+\. )*){_ESCAPED}", r"\1\\", text)
        return re.sub(f"[{_MARKED}{_ESCAPED}]", "", text)

    def _begin(self, tag: str) -> str:
        self._parts[-1].append(self._separator(tag))
        if tag in ("ul", "ol"):
            self._numbers.append(int(tag == "ol"))
        if tag == "tr" and self._tables:
            self._tables[-1].append([])
        if tag not in _HELD or len(self._parts) > _DEEPEST:
            return "open"
        if tag == "table":
            self._tables.append([[]])
        self._parts.append([])
        return "held"

    def _end(self, node: Any, tag: str, is_held: bool) -> None:
        if is_held:
            raw = "".join(self._parts.pop())
            self._parts[-1].append(self._written(node, tag, raw.rstrip() if tag == "pre" else _cleaned(raw)))
        if tag in ("ul", "ol"):
            self._numbers.pop()
        self._parts[-1].append("" if tag == "br" else self._separator(tag))

    def _separator(self, tag: str) -> str:
        return _LINE if tag in ("ul", "ol") and self._numbers else _SEPARATORS.get(tag, "")

    def _written(self, node: Any, tag: str, text: str) -> str:
        if tag == "table":
            is_layout = node.attributes.get("role") in ("presentation", "none")
            return f"{text}{_BLOCK}{_table(self._tables.pop(), is_layout)}"
        if tag in ("td", "th") and self._tables:
            spans = _number(node.attributes.get("rowspan")), _number(node.attributes.get("colspan"))
            self._tables[-1][-1].append(_Cell(text, tag == "th", *spans))
            return ""
        if not text.strip():
            return ""
        if tag == "pre":
            return fenced(text.replace(_BLOCK, "").replace(_LINE, "\n"))
        if tag == "a":
            target = (node.attributes.get("href") or "").strip().replace(" ", "%20")
            is_told = target and len(target) <= _LONGEST_TARGET and not re.match(r"#|javascript:|data:", target, re.I)
            return f"[{text}]({target})" if is_told and _BLOCK not in text and "]" not in text else text
        if tag[0] == "h" and tag[1:].isdigit():
            return f"{'#' * int(tag[1])} {' '.join(_lines(text).split())}"
        if tag == "li":
            number = self._numbers[-1] if self._numbers else 0
            if number:
                self._numbers[-1] += 1
            mark = f"{number}. " if number else "- "
            return _MARKED + mark + re.sub(r"\n(?=[^\n])", "\n" + " " * len(mark), _lines(text))
        if tag == "blockquote":
            return f"{_MARKED}> " + _lines(text).replace("\n", f"\n{_MARKED}> ")
        return text


def _cleaned(text: str) -> str:
    marks = re.compile(r"(?<! ) *[\x02\x03][ \x02\x03]*")
    text = marks.sub(lambda match: _BLOCK if _BLOCK in match[0] else _LINE, text.replace("\xa0", " "))
    return (text if "```" in text else re.sub(r"(?<=\S) +", " ", text)).strip(" \x02\x03")


def _lines(text: str) -> str:
    return re.sub(r"\x03+", "\n", text.replace(_BLOCK, "\n\n"))


def _number(value: str | None) -> int:
    """Of rows or columns that a cell spans."""
    return max(1, int(value)) if value and value.isascii() and value.isdigit() and len(value) < 6 else 1


def _in_cell(text: str) -> str:
    """Blocks as one line."""
    text = text.replace(f"{_MARKED}> ", "")
    text = re.sub(rf"([:;,])?\n\s*(?={_MARKED})", lambda match: f"{match[1] or ';'} ", text)
    return re.sub(f"{_MARKED}(?:- )?", "", text)


def _table(rows: Sequence[Sequence[_Cell]], is_layout: bool) -> str:
    """A table as Markdown; one that only arranges blocks, or has one row or column, as blocks."""
    rows = [row for row in rows if row]
    texts = [_lines(cell.text) for row in rows for cell in row]
    is_long = any("\n\n" in text and len(text) > _LONGEST_CELL for text in texts)
    is_layout |= is_long and not any(cell.is_header for row in rows for cell in row) or any(map(_NO_CELL.search, texts))
    if is_layout or len(rows) < 2 or max(map(len, rows)) < 2:
        return _BLOCK.join(cell.text for row in rows for cell in row)
    cells = sum(map(len, rows))
    is_plain = sum(min(cell.down, len(rows)) * cell.across for row in rows for cell in row) > 1000 + 20 * cells
    grid: list[dict[int, str]] = [{} for _ in rows]
    for number, row in enumerate(rows):
        column = 0
        for text, _, down, across in row:
            while column in grid[number]:
                column += 1
            text = _in_cell(_lines(text))
            below = 1 if is_plain else min(down, len(rows) - number)
            for other in range(number, number + below):
                for beside in range(column, column + (1 if is_plain else min(across, _MOST_COLUMNS))):
                    is_first = (other, beside) == (number, column)
                    grid[other][beside] = text if is_first or len(text) <= _LONGEST_REPEATED else ""
    num_header = max(1, next((at for at, row in enumerate(rows) if not all(c.is_header for c in row)), 1))
    num_columns = max(max(row) + 1 for row in grid)
    columns = range(num_columns)
    header = [" ".join(dict.fromkeys(row.get(column, "") for row in grid[:num_header])) for column in columns]
    return table([header, *([row.get(at, "") for at in range(max(row) + 1)] for row in grid[num_header:])])

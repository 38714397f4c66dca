"""Splits a document's text into passages of bounded token count, each with its title and headings in front.

The text becomes units: sentences, rows of tables, lines of code. The borders between passages are those of least total
cost: between sections rather than within one, between paragraphs rather than sentences, not within a list item.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import regex

from ccjax.retrieval.markdown import Block, blocks

LEAST_TOKENS = 40
"""No passage is shorter unless its document is, or a fifth of the limit is."""
_MOST_CHARS_PER_TOKEN = 32
_ENDS = r"""[.!?…‽؟۔।॥။።]["'”’»)\]*_`]{0,6}"""
_SENTENCE = regex.compile(
    rf"(?=\s)(?<={_ENDS})\s+(?=[^\s\p{{Ll}}])|(?<=[。！？｡][」』）”’]{{0,6}})(?![」』）”’。！？｡])"
)
_ABBREVIATION = regex.compile(
    r"(?:^|[\s(\[])(?:\p{L}|\d{1,2}|(?:\p{L}\.)+\p{L}|[DMS]rs?|Ms|Prof|St|[Nn][or]s?|vs|[Ff]igs?|[Ee]qs?|[Cc]f|approx"
    r"|[Cc]a|[Aa]bs|[Aa]rt|[Vv]gl|[Bb]zw|[Ss]ec|[Cc]h|[Pp]p?|[Vv]ols?|Jr|Sr)\.$"
)
_PARTS = (  # where a text is cut, what a border there costs
    (_SENTENCE, 10.0),
    (regex.compile(r"(?<=\S)[^\S\n]*(?=\n)"), 14.0),
    (regex.compile(r"(?<=[,;:—])(?=\s)|(?<=[、，；：])"), 30.0),
    (regex.compile(r"(?<=\S)(?=\s)"), 40.0),
)
_WITHIN_A_WORD = 60.0
_GLUED, _WHOLE = 1000.0, 100.0
"""Costs behind a heading, and additional ones within what fits into a passage: list items, tables, blocks of code."""
_PARAGRAPH, _ITEM, _ROW, _CODE_LINE, _INTRODUCED = 4.0, 5.0, 6.0, 12.0, 15.0
_SUBSECTION, _SECTION, _OUTER_SECTION = 1.0, 4.0, 25.0
"""Costs of headings within a passage: below the section that it begins in, beside that, above it."""
_PASSAGE, _UNFILLED, _TOO_SHORT = 3.0, 8.0, 500.0
_NO_LEVEL = 7


@dataclasses.dataclass(slots=True)
class _Unit:
    """A piece of text with the white space before it.

    Attributes:
      cost: of a border before it.
      line: where its block begins.
      level: of its section, 0 for none; `heading` is the words of a heading.
      context: first line of a passage that begins here: title and headings.
      head: what such a passage repeats (a table's header); `tail` is what one that ends here needs.
    """

    text: str
    cost: float
    line: int = 0
    level: int = 0
    heading: str = ""
    context: str = ""
    head: str = ""
    tail: str = ""
    tokens: int = 0


def split(
    text: str,
    *,
    count_tokens: Callable[[str], int],
    chunk_tokens: int,
    title: str = "",
    markdown: bool = False,
) -> list[str]:
    """Splits a text into passages of at most `chunk_tokens` tokens, in reading order.

    The first line of a passage is `title > heading > heading` (of at most a third of the tokens), unless there is
    neither; a heading that is in it is not repeated below it. Headings stay with what follows; passages end with
    sentences; list items, tables and blocks of code are whole where they fit, else a table's header and the line above
    it are repeated, and the marks of a block of code. The same text, counts and settings always give the same passages.
    Takes time proportional to the text.

    Args:
      markdown: whether the text is Markdown; else it consists of paragraphs.

    Raises:
      ValueError: `chunk_tokens` is less than 1 or than what one character takes.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: wanted at least 1, got {chunk_tokens}")
    splitter = _Splitter(title, count_tokens, chunk_tokens)
    units = list(splitter.markdown_units(text) if markdown else splitter.text_units(text))
    return [passage for some in splitter.parts(units) for passage in splitter.rendered(some)]


class _Splitter:
    def __init__(self, title: str, count_tokens: Callable[[str], int], limit: int) -> None:
        self._title, self._count_tokens, self._limit = title, count_tokens, limit
        self._count = functools.cache(lambda text: count_tokens(text) if text else 0)  # of texts that occur often

    # -- units ---------------------------------------------------------------------------------------------------

    def text_units(self, text: str) -> Iterator[_Unit]:
        context = self._context([])
        for paragraph in regex.split(r"\n(?:[^\S\n]*\n)+", text):
            yield from self._cut(f"\n\n{paragraph}", _Unit("", _PARAGRAPH, context=context))

    def markdown_units(self, text: str) -> list[_Unit]:
        lines, units, wholes = text.split("\n"), list[_Unit](), list[tuple[int, int]]()
        path: list[tuple[int, str]] = []
        found = list(blocks(text)) or [Block("paragraph", 0, len(lines))]
        found[0].start = 0
        for block, after in itertools.zip_longest(found, found[1:]):
            block.end = len(lines) if after is None else after.start
            if block.level:
                path = [*((level, words) for level, words in path if level < block.level), (block.level, block.text)]
            like = _Unit("", _PARAGRAPH, block.start, path[-1][0] if path else 0, block.text)
            like.context = self._context([words for _, words in path])
            if block.items:
                like.cost = _ITEM
            if units and units[-1].heading:
                like.cost = _GLUED
            elif units and block.kind != "paragraph" and units[-1].text.rstrip().endswith(":"):
                like.cost = _INTRODUCED
            wholes += block.items
            if block.kind in ("fence", "code_block", "table"):
                wholes.append((block.start, block.end))
                units += self._row_units(block, lines, like, units)
            else:
                units += self._cut(_separated(lines, block.start, block.end), like)
        starts = [unit.line for unit in units]
        for start, end in wholes:
            first, last = bisect.bisect_left(starts, start), bisect.bisect_left(starts, end)
            if sum(unit.tokens for unit in units[first:last]) + self._limit // 6 <= self._limit:
                for unit in units[first + 1 : last]:
                    unit.cost += _WHOLE
        return units

    def _row_units(self, block: Block, lines: list[str], like: _Unit, units: Sequence[_Unit]) -> Iterator[_Unit]:
        """The rows of a table or the lines of code; all but the first have what has to be repeated as `head`."""
        starts = block.rows or [row for row in range(block.start, block.end) if lines[row].strip()]
        starts[0], head, tail, num_first = block.start, "", "", 1
        if block.kind == "table":
            above = units[-1].text.strip() if units and not units[-1].heading else ""
            head, num_first = "\n".join(lines[block.start : block.start + 2]), 2
            if above and "\n" not in above and self._count(f"{above}\n\n{head}") <= self._limit // 2:
                head = f"{above}\n\n{head}"
                like = dataclasses.replace(like, cost=max(like.cost, _INTRODUCED))
        elif block.kind == "fence":
            head, num_first = lines[block.start], 2
            tail = "\n" + "".join(regex.findall(r"^[ >]*|[`~]{3,}", head)[:2])
        if block.kind == "table" and self._count(head) > self._limit // 2:
            lines[block.start + 1] = regex.sub(r"\s|(?<=-)-", "", lines[block.start + 1])
            head = "\n".join(lines[block.start : block.start + 2])
        if self._count(head + tail) > self._limit * (3 if block.kind == "table" else 2) // 4:
            head = tail = ""
        for number, (start, end) in enumerate(itertools.pairwise([*starts, block.end])):
            row = dataclasses.replace(like, head=head if number else "", tail=tail if end < block.end else "")
            if number:
                row.cost = _ROW if block.kind == "table" else _CODE_LINE
            if 0 < number < num_first or block.kind == "fence" and end == block.end:
                row.cost = _GLUED
            yield from self._cut(_separated(lines, start, end), row, -1)

    def _context(self, headings: Sequence[str]) -> str:
        """Title and headings in a line; outer headings are left out if it becomes too long, then words."""
        parts = [part for part in dict.fromkeys([self._title, *headings]) if part]
        while len(parts) > 2 and self._count(" > ".join(parts)) > self._limit // 3:
            del parts[1]
        words = " > ".join(parts)[: self._limit * _MOST_CHARS_PER_TOKEN].split()
        while words and self._count(" ".join(words)) > self._limit // 3:
            words.pop()
        return " ".join(words)

    def _cut(self, text: str, like: _Unit, level: int = 0) -> Iterator[_Unit]:
        """Units of a text, which are like `like` but for the costs of borders between them.

        Args:
          level: 0 for sentences, -1 for the whole text if it fits.
        """
        most = max(1, self._limit - self._count(like.context) - self._count(like.head + like.tail) - 1)
        for piece, cost, tokens in self._pieces(text, most, level, like.cost):
            yield dataclasses.replace(like, text=piece, cost=cost, tokens=tokens)

    def _pieces(self, text: str, most: int, level: int, cost: float) -> Iterator[tuple[str, float, int]]:
        """Pieces with the costs of borders before them, `cost` for the first, and their tokens, `most` at most; small
        ones are joined."""
        if level == len(_PARTS):
            found, cost_between = regex.findall(rf"\X{{1,{max(1, most // 2)}}}+", text), _WITHIN_A_WORD
        else:
            found, cost_between = (_parts(text, level), _PARTS[level][1]) if level >= 0 else ([text], 0.0)
        least = self._limit // (25 if level < 1 else 8)
        held, held_tokens = "", 0
        for piece in found:
            fits = len(piece) <= most * _MOST_CHARS_PER_TOKEN or level == len(_PARTS)
            tokens = self._count_tokens(piece) if fits else most + 1
            if held and (held_tokens >= least or held_tokens + tokens > most):
                yield held, cost, held_tokens
                held, held_tokens, cost = "", 0, cost_between
            if tokens > most and level < len(_PARTS):
                yield from self._pieces(held + piece, most, level + 1, cost)
                held, held_tokens, cost = "", 0, cost_between
            elif held or piece.strip():
                held, held_tokens = held + piece, held_tokens + tokens
        if held:
            yield held, cost, held_tokens

    # -- passages ------------------------------------------------------------------------------------------------

    def parts(self, units: Sequence[_Unit]) -> Iterator[Sequence[_Unit]]:
        """The units of each passage: the partition of least cost, found from the front (dynamic programming)."""
        sums = [0, *itertools.accumulate(unit.tokens for unit in units)]
        least = min(LEAST_TOKENS, self._limit // 5, sums[-1])
        lead = list(range(len(units)))  # the first unit that is no heading
        for at in reversed(range(len(units) - 1)):
            lead[at] = lead[at + 1] if units[at].heading else at
        costs, begins = [0.0], [0]
        for end in range(1, len(units) + 1):
            costs.append(float("inf"))
            begins.append(end - 1)
            highest, highest_behind = _NO_LEVEL, {}
            for begin in reversed(range(end)):
                highest_behind[begin] = highest
                start = lead[begin] if lead[begin] < end else begin
                first, body = units[start], sums[end] - sums[begin]
                size = body + self._count(first.context) + self._count(first.head + units[end - 1].tail)
                if size > self._limit and start < end - 1:
                    break
                cost = costs[begin] + _PASSAGE + _UNFILLED * max(0.0, 1 - size / self._limit) ** 2
                cost += (units[begin].cost if begin else 0.0) + (_TOO_SHORT if body < least else 0.0)
                if (level := highest_behind[start]) < _NO_LEVEL:
                    section = first.level
                    cost += _SUBSECTION if level > section else _SECTION if level == section else _OUTER_SECTION
                if cost < costs[end]:
                    costs[end], begins[end] = cost, begin
                if units[begin].heading:
                    highest = min(highest, units[begin].level)
        borders = [len(units)]
        while borders[-1] > 0:
            borders.append(begins[borders[-1]])
        for begin, end in itertools.pairwise(reversed(borders)):
            yield units[begin:end]

    def rendered(self, units: Sequence[_Unit]) -> Iterator[str]:
        """The text of a passage; more than one if it exceeds the limit, as counts of parts do not always add up."""
        start, context = 0, _parent(units[0])
        for at, unit in enumerate(units[:-1], 1):
            if not unit.heading or any(later.heading and later.level <= unit.level for later in units[at:]):
                break
            start, context = at, unit.context
        shown = [unit for unit in units[:start] if unit.heading not in context] + list(units[start:])
        first, body = units[start], "".join(unit.text for unit in shown).rstrip()
        body = body.lstrip("\n") if body.startswith("\n") else body.lstrip()
        text = "\n".join(filter(None, (context, first.head, f"{body}{units[-1].tail}")))
        if not body or self._count_tokens(text) <= self._limit:
            yield from [text] if body else []
        elif len(units) > 1:
            number = len(units)
            middle = min(range(1, number), key=lambda at: units[at].cost + _WITHIN_A_WORD * abs(2 * at / number - 1))
            yield from self.rendered(units[:middle])
            yield from self.rendered(units[middle:])
        elif context or first.head or first.tail:
            yield from self.rendered([dataclasses.replace(first, context="", head="", tail="")])
        elif len(body) > 1:
            characters = regex.findall(r"\X", body)
            if len(characters) == 1:
                characters = list(body)
            for part in (characters[: len(characters) // 2], characters[len(characters) // 2 :]):
                yield from self.rendered([dataclasses.replace(first, text="".join(part))])
        else:
            size = self._count_tokens(body)
            raise ValueError(
                f"chunk_tokens: wanted at least {size}, the size of the indivisible {body!r}, got {self._limit}"
            )


def _separated(lines: Sequence[str], start: int, end: int) -> str:
    """Some lines without blank ones behind them, and the line ends before them."""
    before = "\n\n" if start and not lines[start - 1].strip() else "\n"
    return before + "\n".join(lines[start:end]).rstrip()


def _parent(unit: _Unit) -> str:
    """The context without the unit's own heading."""
    own = f" > {unit.heading}" if unit.heading else ""
    return f" > {unit.context}".removesuffix(own).removeprefix(" > ")


def _parts(text: str, level: int) -> Iterator[str]:
    begin = 0
    for match in _PARTS[level][0].finditer(text):
        end = match.start()
        if end > begin and not (level == 0 and _ABBREVIATION.search(text, max(0, end - 12), end)):
            yield text[begin:end]
            begin = end
    yield text[begin:]

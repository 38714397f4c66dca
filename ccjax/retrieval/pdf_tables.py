"""Tables of a PDF, which only says where each piece of text is: short ones beside each other, in columns."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence

from ccjax.retrieval.markdown import table

_LEAST_ROWS = 3
_MOST_WORDS = 3
"""Words of most cells of at least half the columns, as columns of prose have more."""
_SAME_ROW, _NEXT_LINE, _NEXT_ROW = 0.4, 1.6, 3.5
"""Distances of base lines, in sizes of the text."""
_SAME_COLUMN = 6.0
GAP = 0.8


@dataclasses.dataclass(eq=False, slots=True)
class Line:
    """A line of text, its place on the page in points, and the size and font of most of its characters; or a table.

    Attributes:
      cells: (x0, x1, text) of its parts with gaps of `GAP` sizes between them.
    """

    text: str
    size: float
    font: str
    x0: float
    x1: float
    y0: float
    cells: list[tuple[float, float, str]]
    table: Table | None = None


@dataclasses.dataclass(eq=False)
class Table:
    """Cells row by row. The first row is a header if it has another font than the next one, or if it alone has no
    number in one of the columns.

    Attributes:
      places: where the columns begin and end.
      y0: of the last row.
    """

    rows: list[list[str]]
    places: list[tuple[float, float]]
    y0: float
    has_header: bool

    def continues(self, other: Table) -> bool:
        """Whether it is the rest of another table, from the page before."""
        near = (
            abs(own - their) < _SAME_COLUMN for (own, _), (their, _) in zip(self.places, other.places, strict=False)
        )
        is_like = len(self.places) == len(other.places) and all(near)
        return is_like and (not self.has_header or self.rows[0] == other.rows[0])

    def is_above(self, box: Sequence[Line]) -> bool:
        """Whether lines of text are below the table."""
        (begin, _), (_, end) = self.places[0], self.places[-1]
        return all(line.table is None and line.y0 < self.y0 and line.x0 < end and line.x1 > begin for line in box)

    def markdown(self) -> str:
        """The table with its header, or an empty one."""
        return table(self.rows if self.has_header else [[""] * len(self.places), *self.rows])


def with_tables(boxes: Sequence[list[Line]]) -> list[list[Line]]:
    """The boxes of a page with its tables in place of their lines."""
    found = {}
    for rows in _runs(sorted((line for box in boxes for line in box if line.text.strip()), key=lambda o: -o.y0)):
        if (one := _table(rows)) is not None:
            found |= dict.fromkeys((id(line) for row in rows for line in row), one)
    shown: list[list[Line]] = []
    for box in boxes:
        for one, lines in itertools.groupby(box, lambda line: found.get(id(line))):
            if one is None:
                shown.append(list(lines))
            elif all(line.table is not one for other in shown for line in other):
                place = next((at for at, other in enumerate(shown) if one.is_above(other)), len(shown))
                shown.insert(place, [Line("", 0.0, "", 0.0, 0.0, 0.0, [], one)])
    return shown


def _runs(lines: Sequence[Line]) -> Iterator[list[list[Line]]]:
    """Rows of several lines each that follow each other; a line below a cell is in its row."""
    rows: list[list[Line]] = []
    for line in lines:
        if rows and rows[-1][0].y0 - line.y0 <= _SAME_ROW * line.size:
            rows[-1].append(line)
        else:
            rows.append([line])
    run: list[list[Line]] = []
    for row in rows:
        num_cells = sum(len(line.cells) for line in row)
        distance = (run[-1][-1].y0 - row[0].y0) / max(1.0, row[0].size) if run else 0.0
        if run and num_cells == 1 and row[0].x0 > min(line.cells[0][1] for line in run[-1]) and distance <= _NEXT_LINE:
            run[-1] += row
            continue
        if run and (num_cells < 2 or distance > _NEXT_ROW):
            yield run
            run = []
        if num_cells > 1:
            run.append(row)
    yield run


def _table(rows: Sequence[Sequence[Line]]) -> Table | None:
    """The table that rows of lines are, or None: two columns without a header may be text."""
    places: list[tuple[float, float]] = []
    for begin, end, _ in sorted(cell for row in rows for line in row for cell in line.cells):
        if places and begin < places[-1][1]:
            places[-1] = (places[-1][0], max(places[-1][1], end))
        else:
            places.append((begin, end))
    if len(rows) < _LEAST_ROWS or len(places) < 2:
        return None
    cells = []
    for row in rows:
        own = [cell for line in row for cell in line.cells]
        cells.append([" ".join(text for x0, _, text in own if begin <= x0 <= end) for begin, end in places])
    words = [statistics.median(len(cell.split()) for cell in column if cell) for column in zip(*cells, strict=True)]
    if 2 * sum(count <= _MOST_WORDS for count in words) < len(words):
        return None
    first, second = (collections.Counter(line.font for line in row).most_common(1)[0][0] for row in rows[:2])
    numbered = ([any(map(str.isdigit, cell)) for cell in column] for column in zip(*cells, strict=True))
    has_header = first != second or any(not column[0] and all(column[1:]) for column in numbered)
    return Table(cells, places, rows[-1][-1].y0, has_header) if has_header or len(places) > 2 else None

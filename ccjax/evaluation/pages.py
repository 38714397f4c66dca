"""Output of figures: tables in a terminal or in a Markdown page, and plots in files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Rows = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, head, cells."""


def rich_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """A table for a terminal; the head is optional."""
    from rich.table import Table

    table = Table(*head, title=title, show_header=any(head))
    for row in rows:
        table.add_row(*row)
    return table


def show(
    head: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, says: Iterable[str] = ()
) -> None:
    """Prints a table and lines below it; at most 160 columns if the output is not a terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(rich_table(head, rows, title))
    for line in says:
        console.print(line, highlight=False, markup=False)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same for a page."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


@contextlib.contextmanager
def plot_file(path: Path, num_rows: int, num_columns: int, size: tuple[float, float], **how: Any) -> Iterator[Any]:
    """`[num_rows, num_columns]` panels to draw in, written to the file at the end; the format follows its ending.

    Args:
      size: of the whole in inches.
      how: further arguments of `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ccjax"  # the same bytes for the same figures
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(num_rows, num_columns, figsize=size, layout="constrained", squeeze=False, **how)
    yield panels
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def text(value: float | None, form: str = ".0f") -> str:
    """A number as a cell, empty for None."""
    return "" if value is None else format(value, form)


def interval(found: Mapping[str, float] | None, form: str, scale: float = 1.0) -> str:
    """A mean with its interval as a cell, empty for None."""
    if found is None:
        return ""
    mean, low, high = (format(scale * found[name], form) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"

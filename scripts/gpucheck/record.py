"""Results of a run, written as they come: rows, verdicts, time left, tables."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ccjax.evaluation.pages import markdown_table


class CheckRecord:
    """The rows of every suite, kept in `path` even if the run is killed.

    Attributes:
      rows: suite -> its rows, in order.
      failures: in words, one per failed check; a run with any exits with status 1.
      limit_s: seconds after which no further measurement begins.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, is_quick: bool, limit_s: float) -> None:
        """`header`: machine and versions."""
        self.path = path
        self.is_quick = is_quick
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.failures: list[str] = []
        self._header = header
        self._start = time.monotonic()
        self.limit_s = limit_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(is_complete=False)

    def seconds_left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._start + self.limit_s - time.monotonic()

    def say(self, line: str) -> None:
        """Prints a line of progress."""
        print(f"{time.monotonic() - self._start:6.1f} s  {line}", flush=True)

    def add(self, suite: str, **row: Any) -> dict[str, Any]:
        """Adds a row and writes it to disk."""
        self.rows.setdefault(suite, []).append(row)
        self.write(is_complete=False)
        return row

    def fail(self, failure: str) -> None:
        """Records and prints a failure."""
        self.failures.append(failure)
        self.write(is_complete=False)
        self.say(f"FAILED {failure}")

    def compare(self, suite: str, error: float, tolerance: float, *, mutant: str | None = None, **row: Any) -> bool:
        """Adds a row; True if the error is within the tolerance, or beyond it for a `mutant`."""
        is_within = bool(error <= tolerance)
        passed = is_within if mutant is None else not is_within
        self.add(suite, **row, mutant=mutant, error=_finite(error), tolerance=tolerance, passed=passed)
        if not passed:
            what = ", ".join(str(value) for value in row.values())
            wanted = f"an error of at most {tolerance:g}" if mutant is None else f"{mutant!r} beyond {tolerance:g}"
            self.fail(f"{suite}: {what}: wanted {wanted}, got {error:.3g}")
        return passed

    def results(self, *, is_complete: bool = True) -> dict[str, Any]:
        """All results as JSON values."""
        return {
            **self._header,
            "is_quick": self.is_quick,
            "is_complete": is_complete,
            "elapsed_s": round(time.monotonic() - self._start, 1),
            "failures": self.failures,
            "suites": self.rows,
        }

    def write(self, *, is_complete: bool) -> None:
        """Writes all results to `path`, which is never incomplete."""
        results = self.results(is_complete=is_complete)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, self.path)


def _finite(error: float) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return error if math.isfinite(error) else None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table under its title; None is an empty cell."""
    return f"**{title}**\n\n{markdown_table(columns, [[_text(value) for value in row] for row in rows])}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else str(round(value) if isinstance(value, float) else value)
    )


def numerics_table(record: CheckRecord, suite: str, title: str, *names: str) -> str:
    """A row for each value of these columns: how many cases are right, the worst error, how many mutants are caught."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows.get(suite, []):
        groups.setdefault(" ".join(row[name] for name in names), []).append(row)
    rows = []
    for name, own in groups.items():
        right = [row for row in own if "error" in row and row["mutant"] is None]
        mutants = [row for row in own if row.get("mutant")]
        shares = [row["error"] / row["tolerance"] for row in right if row["error"] is not None]
        counts = (f"{sum(row['passed'] for row in some)} of {len(some)}" for some in (right, mutants))
        rows.append((name, *counts, max(shares, default=None), sum("cannot" in row for row in own)))
    return table(title, (" and ".join(names), "right", "mutants caught", "worst error / tolerance", "cannot"), rows)

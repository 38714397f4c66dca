"""What every benchmark shares: machine and versions of a run, medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ccjax.evaluation.environment import environment as environment


class BenchmarkError(Exception):
    """A benchmark cannot be carried out; the message is one line for the user."""


def median(seconds: Sequence[float]) -> float:
    """Median of repeated timings."""
    return statistics.median(seconds)

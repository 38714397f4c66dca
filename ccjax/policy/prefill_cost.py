"""Cost of a prefill behind a cached prefix: T(cached, new) between measured points (RAGCache sec. 5.1)."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ccjax.policy._checks import check_count, check_mass


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillGrid:
    """Seconds of prefills by their cached and new tokens; checked on construction (ValueError naming the field).

    Attributes:
      cached: numbers of cached tokens, ascending, at least two.
      new: numbers of tokens computed behind them, ascending, at least two.
      seconds: one row for each of `cached`, one value for each of `new`.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, values, least in (("cached", self.cached, 0), ("new", self.new, 1)):
            for value in values:
                check_count(name, value, least=least)
            if len(values) < 2 or any(earlier >= later for earlier, later in itertools.pairwise(values)):
                raise ValueError(f"{name}: wanted at least two ascending numbers, got {values}")
        if len(self.seconds) != len(self.cached) or any(len(row) != len(self.new) for row in self.seconds):
            raise ValueError(f"seconds: wanted {len(self.cached)} rows of {len(self.new)} values")
        for row in self.seconds:
            for value in row:
                check_mass("seconds", value)

    def prefill_s(self, cached: int, new: int) -> float:
        """T(cached, new) in seconds, by bilinear interpolation; 0 for no new tokens.

        The paper does not say how to extrapolate. Our reading: constant below the smallest numbers, since a short
        prefill takes a fixed time; linear beyond the largest, from the outermost cells.
        """
        check_count("cached", cached, least=0)
        check_count("new", new, least=0)
        if new == 0:
            return 0.0
        row, down = _place(self.cached, cached)
        column, right = _place(self.new, new)
        upper, lower = self.seconds[row : row + 2]
        above = _between(upper[column], upper[column + 1], right)
        below = _between(lower[column], lower[column + 1], right)
        return max(0.0, _between(above, below, down))

    def to_json(self) -> dict[str, Any]:
        """The grid as JSON values."""
        return {"cached": list(self.cached), "new": list(self.new), "seconds": [list(row) for row in self.seconds]}

    @classmethod
    def from_json(cls, value: Any) -> PrefillGrid:
        """Inverse of `to_json`.

        Raises:
          ValueError: it is malformed; the message says how.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"grid: wanted an object, got {type(value).__name__}")
        try:
            return cls(tuple(value["cached"]), tuple(value["new"]), tuple(map(tuple, value["seconds"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"grid: a field is missing or not what it should be: {error}") from error


def coarse_grid(times: Sequence[tuple[int, float]]) -> PrefillGrid:
    """T(cached, new) from the seconds of full prefills of three lengths, as (tokens, seconds), ascending.

    A token attends to all before it, so `T(0, n) = f + u n + a n^2 / 2`; behind c cached tokens each attends to c more:
    `T(c, n) = f + u n + a n (c + n / 2)`. Measured curves may bend the wrong way; then a, u or f is 0.

    Raises:
      ValueError: there are not three ascending lengths.
    """
    if len(times) != 3 or not 0 < times[0][0] < times[1][0] < times[2][0]:
        raise ValueError(f"times: wanted three ascending lengths, got {times}")
    (n1, s1), (n2, s2), (n3, s3) = times
    a = max(0.0, 2.0 * ((s3 - s2) / (n3 - n2) - (s2 - s1) / (n2 - n1)) / (n3 - n1))
    u = max(0.0, (s3 - s1) / (n3 - n1) - a * (n1 + n3) / 2)
    f = max(0.0, s1 - u * n1 - a * n1 * n1 / 2)
    cached, new = (0, n3), (n1, n2, n3)
    return PrefillGrid(cached, new, tuple(tuple(f + u * n + a * n * (c + n / 2) for n in new) for c in cached))


def _place(points: Sequence[int], value: int) -> tuple[int, float]:
    """The cell of a value and its relative position there: 0 to 1, greater beyond the last cell."""
    cell = min(max(0, bisect.bisect_right(points, value) - 1), len(points) - 2)
    return cell, max(0.0, (value - points[cell]) / (points[cell + 1] - points[cell]))


def _between(first: float, second: float, part: float) -> float:
    return first + (second - first) * part

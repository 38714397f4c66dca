"""Sizing for a service level: a goal such as "p99 TTFT < 1 s at 20 req/s", and the cheapest deployment that meets
it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBER = r"(\d+(?:\.\d+)?)"
_GOAL = re.compile(
    rf"(mean|p50|p90|p99)\s+(ttft|latency)\s*<=?\s*{_NUMBER}\s*(ms|s)\s+at\s+{_NUMBER}\s*(?:req/s|requests/s|qps|/s)"
)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A statistic of a time, its limit in seconds, and the request rate per second."""

    statistic: str
    figure: str
    most_s: float
    rate: float

    def value(self, figures: Mapping[str, Any]) -> float:
        """The statistic in a run's figures (`SimulationResults.figures`); infinite if requests were refused or not
        answered."""
        times = figures[f"{self.figure}_s"]
        if times is None or figures["answered"] < figures["requests"]:
            return math.inf
        return times[self.statistic]

    def is_met(self, figures: Mapping[str, Any]) -> bool:
        """Whether the statistic is within the limit."""
        return self.value(figures) <= self.most_s


def parse_goal(text: str) -> Goal:
    """Parses a goal such as "p99 TTFT < 1 s at 20 req/s": mean, p50, p90 or p99; TTFT or latency; s or ms.

    Raises:
      ValueError: it is malformed, or a number is 0.
    """
    found = _GOAL.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(
            "size-for: wanted a goal such as 'p99 TTFT < 1 s at 20 req/s' (mean, p50, p90, p99; TTFT, latency; s, ms)"
            f", got {text!r}"
        )
    statistic, figure, most, unit, rate = found.groups()
    goal = Goal(statistic, figure, float(most) / (1000 if unit == "ms" else 1), float(rate))
    if not goal.most_s or not goal.rate:
        raise ValueError(f"size-for: wanted a time and a rate of more than 0, got {text!r}")
    return goal


@dataclasses.dataclass(frozen=True)
class DeploymentSize:
    """A deployment: host memory for chunk-caches on each replica, and the number of replicas."""

    host_cache_bytes: int
    replicas: int


@dataclasses.dataclass(frozen=True)
class Tried:
    """A size that was tried: its figures, and the value of the goal's statistic."""

    size: DeploymentSize
    figures: Mapping[str, Any]
    value: float
    is_met: bool


def search(
    goal: Goal, budgets: Sequence[int], most_replicas: int, simulate: Callable[[DeploymentSize], Mapping[str, Any]]
) -> tuple[dict[int, DeploymentSize], list[Tried]]:
    """(Fewest replicas that meet the goal by budget, without budgets for which none do; all sizes that were tried).

    More replicas are assumed to be no worse, so the number is doubled until one meets the goal, then bisected. A larger
    budget is assumed to need no more replicas than a smaller one, which bounds its search.

    Args:
      simulate: figures of a run at `goal.rate`; called once per size.
    """
    tried: dict[DeploymentSize, Tried] = {}

    def is_met(size: DeploymentSize) -> bool:
        if size not in tried:
            figures = simulate(size)
            tried[size] = Tried(size, figures, goal.value(figures), goal.is_met(figures))
        return tried[size].is_met

    needed: dict[int, DeploymentSize] = {}
    most = most_replicas
    for budget in sorted(set(budgets)):
        count = _least(lambda count, budget=budget: is_met(DeploymentSize(budget, count)), most)
        if count is not None:
            needed[budget], most = DeploymentSize(budget, count), count
    return needed, list(tried.values())


def _least(is_met: Callable[[int], bool], most: int) -> int | None:
    """The least count from 1 to `most` that satisfies a monotone condition; None if `most` does not."""
    low, high = 0, 1
    while not is_met(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high

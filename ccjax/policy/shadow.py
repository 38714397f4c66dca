"""Recomputes more if answers were measured to differ from full prefill's, less once they agree again.

A heuristic of ours, not from a paper. A calibration remains the minimum: the factor never falls below 1.
"""

from __future__ import annotations

import dataclasses

from ccjax.policy._checks import check_count, check_ratio
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import expected_share, get_strategy

WINDOW = 20
"""Number of checks per decision."""
GROWTH = 1.5
SHRINKING = 0.9
MOST = 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class ShareControl:
    """State after some checks; `after` returns the next one.

    Attributes:
      target: share of answers that should equal full prefill's, token by token.
      factor: factor on the share to recompute from settings or calibration; in [1, `MOST`].
      num_checks, num_same: checks in the current window, and how many of them found the same answer.
    """

    target: float
    factor: float = 1.0
    num_checks: int = 0
    num_same: int = 0

    def __post_init__(self) -> None:
        check_ratio("target", self.target)
        check_count("num_checks", self.num_checks, least=0)
        check_count("num_same", self.num_same, least=0)

    def after(self, is_same: bool) -> ShareControl:
        """The state after one more check: a window below the target raises the factor by half, one at least half way
        from the target to 1 lowers it by a tenth."""
        num_checks, num_same = self.num_checks + 1, self.num_same + is_same
        if num_checks < WINDOW:
            return dataclasses.replace(self, num_checks=num_checks, num_same=num_same)
        share, factor = num_same / num_checks, self.factor
        if share < self.target:
            factor = min(MOST, factor * GROWTH)
        elif share >= (1.0 + self.target) / 2.0:
            factor = max(1.0, factor * SHRINKING)
        return ShareControl(self.target, factor)

    def applied(self, settings: PlannerSettings) -> PlannerSettings:
        """`settings` with the share to recompute multiplied by `factor`."""
        if self.factor == 1.0:
            return settings
        ratio = settings.recompute_ratio
        if ratio is None and "alpha" not in get_strategy(settings.strategy).options:
            ratio = expected_share(settings, 0.0)
        if ratio is None:
            limit = None if settings.max_deviation is None else settings.max_deviation / self.factor
            return dataclasses.replace(
                settings,
                alpha=settings.alpha * self.factor,
                recompute_cap=min(1.0, settings.recompute_cap * self.factor),
                max_deviation=limit,
            )
        return dataclasses.replace(settings, recompute_ratio=min(1.0, ratio * self.factor))

"""The factor on recomputed tokens, by hand and in a simulation where more recompute keeps more answers."""

from __future__ import annotations

import random

import pytest

from ccjax.policy.hkvd import DEFAULT_RATIO
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.shadow import MOST, WINDOW, ShareControl


def after(control: ShareControl, *same: bool) -> ShareControl:
    for is_same in same:
        control = control.after(is_same)
    return control


def window(num_same: int) -> list[bool]:
    return [True] * num_same + [False] * (WINDOW - num_same)


def test_factor_does_not_change_within_a_window():
    control = after(ShareControl(0.9), *[False] * (WINDOW - 1))
    assert (control.factor, control.num_checks, control.num_same) == (1.0, WINDOW - 1, 0)
    assert after(control, True) == ShareControl(0.9, 1.5)


@pytest.mark.parametrize(
    ("start", "num_same", "factor"),
    [(1.0, 17, 1.5), (1.5, 0, 2.25), (6.0, 10, MOST), (2.0, 18, 2.0), (2.0, 19, 1.8), (1.05, 20, 1.0), (1.0, 20, 1.0)],
)
def test_factor_rises_below_the_target_and_falls_well_above_it(start, num_same, factor):
    control = after(ShareControl(0.9, start), *window(num_same))
    assert control.factor == pytest.approx(factor) and (control.num_checks, control.num_same) == (0, 0)


def test_factor_only_ever_increases_recomputation():
    by_share, by_alpha = PlannerSettings(recompute_ratio=0.2), PlannerSettings(alpha=0.5)
    assert ShareControl(0.9).applied(by_share) is by_share
    assert ShareControl(0.9, 1.5).applied(by_share).recompute_ratio == pytest.approx(0.3)
    assert ShareControl(0.9, MOST).applied(by_share).recompute_ratio == 1.0
    raised = ShareControl(0.9, 2.0).applied(by_alpha)
    assert (raised.alpha, raised.recompute_ratio, raised.max_deviation) == (1.0, None, None)
    assert ShareControl(0.9, 2.0).applied(PlannerSettings(max_deviation=0.3)).max_deviation == 0.15
    blend = PlannerSettings(strategy="cacheblend")
    assert ShareControl(0.9, 2.0).applied(blend).recompute_ratio == pytest.approx(2.0 * DEFAULT_RATIO)


def test_control_settles_where_the_target_is_met():
    """Answers are equal with a probability of 0.6 at factor 1, growing to 1 at factor 3."""
    rng = random.Random(0)
    control, shares, factors = ShareControl(0.9), [], []
    for number in range(4000):
        likely = min(1.0, 0.6 + 0.2 * (control.factor - 1.0))
        is_same = rng.random() < likely
        control = control.after(is_same)
        if number > 400:
            shares.append(is_same)
            factors.append(control.factor)
    assert sum(shares) / len(shares) > 0.9 and sum(factors) / len(factors) < 4.0


def test_target_out_of_range_is_rejected_by_name():
    with pytest.raises(ValueError, match="target"):
        ShareControl(1.5)

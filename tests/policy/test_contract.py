"""Settings for a request's mode and target, with and without a calibration."""

from __future__ import annotations

import dataclasses

import pytest

from ccjax.policy.contract import ReuseContract, reuse_contract
from ccjax.policy.settings import PlannerSettings
from tests.policy.test_calibration import CALIBRATION, trial

SETTINGS = PlannerSettings(strategy="auto")
BY_SHARE = dataclasses.replace(
    CALIBRATION,
    trials={
        "auto": (
            trial(0.11, 93, recompute_ratio=0.1),
            trial(0.31, 99, recompute_ratio=0.3),
            trial(0.4, 100, alpha=2.0),
        ),
        "random": (trial(0.5, 60, recompute_ratio=0.5),),
    },
)
# Bounds at 95 %: 87.3, 95.3 and 97.0 %


def contract(mode="bounded", target=None, settings=SETTINGS, calibration=BY_SHARE) -> ReuseContract:
    return reuse_contract(mode, target, settings, calibration)


@pytest.mark.parametrize("target", [None, 0.5])
@pytest.mark.parametrize("calibration", [None, BY_SHARE])
@pytest.mark.parametrize("mode", ["off", "exact"])
def test_exact_and_off_modes_guarantee_full_quality(mode, target, calibration):
    found = contract(mode, target, calibration=calibration)
    assert found == ReuseContract(mode, SETTINGS, False, target, 1.0)


@pytest.mark.parametrize("strategy", ["full", "prefix"])
def test_strategies_that_never_approximate_need_no_calibration(strategy):
    settings = PlannerSettings(strategy=strategy)
    assert contract("bounded", 0.9, settings, None) == ReuseContract("bounded", settings, False, 0.9, 1.0)


def test_without_calibration_only_a_requested_target_forces_exact_reuse():
    for calibration in (None, dataclasses.replace(BY_SHARE, trials={"random": BY_SHARE.trials["random"]})):
        assert contract("bounded", calibration=calibration) == ReuseContract("bounded", SETTINGS)
        assert contract("fast", calibration=calibration) == ReuseContract("fast", SETTINGS)
        assert contract("bounded", 0.1, calibration=calibration) == ReuseContract("exact", SETTINGS, False, 0.1, 1.0)


@pytest.mark.parametrize(
    ("target", "alpha", "ratio", "bound"),
    [(0.5, 1.0, 0.1, 0.8725), (None, 1.0, 0.3, 0.9534), (0.95, 1.0, 0.3, 0.9534), (0.96, 2.0, None, 0.9705)],
)
def test_plan_uses_the_cheapest_setting_that_meets_the_target(target, alpha, ratio, bound):
    for mode in ("bounded",) if target is None else ("bounded", "fast"):
        found = contract(mode, target)
        assert (found.mode, found.settings.alpha, found.settings.recompute_ratio) == ("bounded", alpha, ratio)
        # Trials ran without the focus cut, which would leave a part of that share partly_recomputed.
        assert found.settings == dataclasses.replace(SETTINGS, alpha=alpha, recompute_ratio=ratio, focus_window=None)
        assert found.is_calibrated and found.quality_target == (0.9 if target is None else target)
        assert found.quality_bound == pytest.approx(bound, abs=1e-4)


def test_requested_target_that_no_setting_meets_forces_exact_reuse():
    assert contract("bounded", 0.99) == ReuseContract("exact", SETTINGS, True, 0.99, 1.0)
    failed = PlannerSettings(strategy="random")
    for mode in ("bounded", "fast"):
        assert contract(mode, 0.9, failed) == ReuseContract("exact", failed, True, 0.9, 1.0)


def test_calibration_without_affordable_setting_keeps_the_server_settings():
    failed = PlannerSettings(strategy="random")
    assert contract(settings=failed) == ReuseContract("bounded", failed, False, 0.9, None), "0.5 is more than 0.15"
    assert contract("fast", settings=failed) == ReuseContract("fast", failed)
    # 0.95 is kept only at 0.4, which is too expensive unless a request asks for it; 0.1 has a bound of 87.3 %.
    dear = dataclasses.replace(BY_SHARE, target=0.96)
    found = contract(calibration=dear)
    assert (found.mode, found.settings, found.quality_target) == ("bounded", SETTINGS, 0.96)
    assert found.quality_bound == pytest.approx(0.8725, abs=1e-4)
    assert contract("bounded", 0.96, calibration=dear).settings.alpha == 2.0
    more = dataclasses.replace(SETTINGS, recompute_cap=0.35)
    assert contract(settings=more, calibration=dear).quality_bound == pytest.approx(0.9534, abs=1e-4)


@pytest.mark.parametrize(
    ("forced", "target", "ratio"),
    [(0.05, None, 0.3), (0.3, None, 0.3), (0.6, None, 0.6), (0.2, 0.5, 0.2), (0.6, 0.96, 0.6)],
)
def test_forced_recompute_share_applies_if_above_the_calibrated_one(forced, target, ratio):
    found = contract("bounded", target, dataclasses.replace(SETTINGS, recompute_ratio=forced))
    assert (found.settings.recompute_ratio, found.settings.focus_window) == (ratio, None)


def test_calibrated_alpha_overrides_a_smaller_forced_share():
    found = contract("bounded", 0.96, dataclasses.replace(SETTINGS, recompute_ratio=0.35))
    assert (found.settings.alpha, found.settings.recompute_ratio) == (2.0, None)


def test_calibrated_deviation_limit_is_used_even_with_a_forced_share():
    by_deviation = dataclasses.replace(BY_SHARE, trials={"auto": (trial(0.1, 100, max_deviation=0.2),)})
    found = contract(calibration=by_deviation)
    assert (found.settings.max_deviation, found.settings.recompute_ratio) == (0.2, None)
    forced = dataclasses.replace(SETTINGS, recompute_ratio=0.05)
    assert contract("bounded", None, forced, by_deviation).settings.max_deviation == 0.2


def test_calibrated_focus_cut_is_used_only_if_the_server_enables_focus():
    cut = trial(0.1, 100, recompute_ratio=0.1, focus_window=2, focus_rule="largest_gap")
    calibration = dataclasses.replace(BY_SHARE, trials={"auto": (cut, trial(0.5, 100, recompute_ratio=0.5))})
    cutting = dataclasses.replace(SETTINGS, focus_window=3)
    found = contract(settings=cutting, calibration=calibration)
    assert (found.settings.focus_window, found.settings.focus_rule) == (2, "largest_gap")
    assert found.quality_bound == pytest.approx(0.025 ** (1 / 100))
    assert contract(calibration=calibration).settings.focus_window is None
    forced = dataclasses.replace(cutting, recompute_ratio=0.2)
    assert contract(settings=forced, calibration=calibration).settings.focus_window is None


def test_fast_mode_guarantees_no_quality():
    assert contract("fast") == ReuseContract("fast", SETTINGS)


def test_invalid_quality_target_is_rejected_by_name():
    with pytest.raises(ValueError, match="quality_target"):
        contract("exact", 1.5)

"""Limits a request's reuse so that its answer keeps the requested quality.

How reuse changes answers cannot be known in advance, so a model is calibrated (`ccjax.policy.calibration`); the result
is the minimum that reuse recomputes.
"""

from __future__ import annotations

import dataclasses

from ccjax.policy._checks import check_ratio
from ccjax.policy.calibration import Calibration, Trial
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import get_strategy
from ccjax.types import ReuseMode

_PREPARED = ("prepared", "idle")
"""States of the cache (`ccjax calibrate --cached`) in which passages were computed behind the frame."""

MOST_RECOMPUTED = 0.3
"""The largest share that a calibration may recompute by default: beyond it reuse saves little."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseContract:
    """How one request may be served.

    Attributes:
      mode: the request's, or "exact" if approximate reuse cannot keep the quality that the request asks for.
      settings: the settings to plan it with.
      is_calibrated: whether a calibration of this model and strategy decided.
      quality_target: share of full prefill's answers to keep; None if none was requested.
      quality_bound: share that the calibration showed to be kept, with its confidence; 1 for exact reuse, None if
        unknown.
      is_for_prepared: the bound was measured over prepared passages and says nothing of KV computed elsewhere.
    """

    mode: ReuseMode
    settings: PlannerSettings
    is_calibrated: bool = False
    quality_target: float | None = None
    quality_bound: float | None = None
    is_for_prepared: bool = False


def reuse_contract(
    mode: ReuseMode, quality_target: float | None, settings: PlannerSettings, calibration: Calibration | None
) -> ReuseContract:
    """The contract of a request in a mode, with or without a target of its own.

    `off` and `exact` are fixed. `bounded` recomputes as much as the cheapest setting that keeps the target, or
    `settings.recompute_ratio` if that is more. Without a calibration of the strategy, or if no setting keeps a target
    named in the request, reuse is exact for that request; other requests are served according to `settings`. So a
    calibration in which no setting up to `MOST_RECOMPUTED` keeps its own target changes nothing, and the bound is what
    it measured for a share like that of `settings`. `fast` guarantees nothing.

    Raises:
      ValueError: a target outside 0 to 1.
    """
    if quality_target is not None:
        check_ratio("quality_target", quality_target)
    if mode in ("off", "exact") or get_strategy(settings.strategy).exact_only:
        return ReuseContract(mode, settings, quality_target=quality_target, quality_bound=1.0)
    if calibration is None or settings.strategy not in calibration.trials:
        if quality_target is None:
            return ReuseContract(mode, settings)
        return ReuseContract("exact", settings, quality_target=quality_target, quality_bound=1.0)
    wanted = calibration.target if quality_target is None else quality_target
    trial = calibration.choose(settings.strategy, wanted)
    if mode == "fast" and quality_target is None:
        return ReuseContract(mode, settings)
    is_for_prepared = calibration.settings.get("cached") in _PREPARED
    if quality_target is None and (trial is None or _share(trial) > MOST_RECOMPUTED):
        return ReuseContract(mode, settings, False, wanted, _bound_as_set(settings, calibration), is_for_prepared)
    if trial is None:
        return ReuseContract("exact", settings, True, wanted, 1.0)
    bound = calibration.bound(settings.strategy, trial)
    return ReuseContract("bounded", _at_least(settings, trial), True, wanted, bound, is_for_prepared)


def _share(trial: Trial) -> float:
    """The share of reused tokens that a trial recomputes: its `recompute_ratio`, else the measured share."""
    return trial.computed_share if trial.recompute_ratio is None else trial.recompute_ratio


def _bound_as_set(settings: PlannerSettings, calibration: Calibration) -> float | None:
    """The share of answers kept by the trial that recomputes most among those that recompute no more than `settings`;
    None if there is none."""
    share = settings.recompute_cap if settings.recompute_ratio is None else settings.recompute_ratio
    below = [
        trial
        for trial in calibration.trials[settings.strategy]
        if trial.focus_window is None and _share(trial) <= share
    ]
    return calibration.bound(settings.strategy, max(below, key=_share)) if below else None


def _at_least(settings: PlannerSettings, trial: Trial) -> PlannerSettings:
    """The trial's share to recompute, or the forced one of `settings` if that is more, and its focus cut; no focus cut
    if `settings` or the trial have none, or if the share was forced, since that combination was not tried."""
    forced = settings.recompute_ratio
    if forced is not None and forced >= _share(trial):
        return dataclasses.replace(settings, focus_window=None)
    return dataclasses.replace(
        settings,
        alpha=trial.alpha,
        recompute_ratio=trial.recompute_ratio,
        max_deviation=trial.max_deviation,
        focus_window=None if settings.focus_window is None else trial.focus_window,
        focus_rule=trial.focus_rule,
    )

"""How far one request's reuse may go so that its answer keeps the quality it asks for.

No server says what reuse costs in answers; so a model is calibrated (`ccjax.policy.calibration`), and what that showed
is the least that reuse recomputes.
"""

from __future__ import annotations

import dataclasses

from ccjax.policy._checks import check_ratio
from ccjax.policy.calibration import Calibration, Trial
from ccjax.policy.planner import PlannerSettings
from ccjax.types import ReuseMode

_NEVER_APPROXIMATE = ("full", "prefix")

MOST_REPAIRED = 0.3
"""The largest share that a calibration has recomputed where no request asks for more: beyond it reuse saves little."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseContract:
    """How one request may be served.

    Attributes:
      mode: that of the request, or "exact" where reuse cannot keep the quality that the request names.
      settings: to plan it by.
      is_calibrated: a calibration of this model and strategy decided.
      quality_target: share of full prefill's answers to keep; None if none was requested.
      quality_bound: share that calibration showed to be kept, with its confidence; 1 for exact reuse, None where that
        is not known.
    """

    mode: ReuseMode
    settings: PlannerSettings
    is_calibrated: bool = False
    quality_target: float | None = None
    quality_bound: float | None = None


def reuse_contract(
    mode: ReuseMode, quality_target: float | None, settings: PlannerSettings, calibration: Calibration | None
) -> ReuseContract:
    """The contract of a request in a mode, with or without a target of its own.

    `off` and `exact` are what they say. `bounded` recomputes what the cheapest setting does that keeps the target, or
    `settings.recompute_ratio` where that is more. Without a calibration of the strategy, or where no setting keeps a
    target that the request names, reuse is exact for that request: others get what `settings` say. So a calibration
    that shows no setting up to `MOST_REPAIRED` to keep its own target takes nothing away; what it showed of a share
    like that of `settings` is the bound then. `fast` promises nothing.

    Raises:
      ValueError: a target outside 0 to 1.
    """
    if quality_target is not None:
        check_ratio("quality_target", quality_target)
    if mode in ("off", "exact") or settings.strategy in _NEVER_APPROXIMATE:
        return ReuseContract(mode, settings, quality_target=quality_target, quality_bound=1.0)
    if calibration is None or settings.strategy not in calibration.trials:
        if quality_target is None:
            return ReuseContract(mode, settings)
        return ReuseContract("exact", settings, quality_target=quality_target, quality_bound=1.0)
    wanted = calibration.target if quality_target is None else quality_target
    trial = calibration.choose(settings.strategy, wanted)
    if mode == "fast" and quality_target is None:
        return ReuseContract(mode, settings)
    if quality_target is None and (trial is None or _share(trial) > MOST_REPAIRED):
        return ReuseContract(mode, settings, False, wanted, _bound_as_set(settings, calibration))
    if trial is None:
        return ReuseContract("exact", settings, True, wanted, 1.0)
    bound = calibration.bound(settings.strategy, trial)
    return ReuseContract("bounded", _at_least(settings, trial), True, wanted, bound)


def _share(trial: Trial) -> float:
    """What a trial recomputes of what it reuses, by name or as it came out."""
    return trial.computed_share if trial.recompute_ratio is None else trial.recompute_ratio


def _bound_as_set(settings: PlannerSettings, calibration: Calibration) -> float | None:
    """The share of answers kept by the trial that recomputes most of those no more than `settings` do; None where none
    does."""
    share = settings.repair_cap if settings.recompute_ratio is None else settings.recompute_ratio
    below = [one for one in calibration.trials[settings.strategy] if one.focus_window is None and _share(one) <= share]
    return calibration.bound(settings.strategy, max(below, key=_share)) if below else None


def _at_least(settings: PlannerSettings, trial: Trial) -> PlannerSettings:
    """The trial's share to recompute, or the one that `settings` force where that is more, and its focus cut; without
    any where `settings` or the trial have none, and with a share that was forced: it would not be through."""
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

"""How far one request's reuse may go so that its answer keeps the quality it asks for. Knows no KV and no prompt.

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


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseContract:
    """What one request gets.

    Attributes:
      mode: that of the request, or "exact" where reuse cannot keep the quality.
      settings: to plan it by.
      is_calibrated: a calibration of this model and strategy decided.
      quality_target: share of full prefill's answers to keep; None where nobody named any.
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
    `settings.recompute_ratio` where that is more; where no setting keeps it, reuse is exact. Without a calibration of
    the strategy nothing can be promised: a request that names a target gets exact reuse, others what `settings` say.
    `fast` promises nothing either way, but where no setting keeps the calibration's own target it is exact as well.

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
    if trial is None:
        return ReuseContract("exact", settings, True, wanted, 1.0)
    if mode == "fast" and quality_target is None:
        return ReuseContract(mode, settings)
    bound = calibration.bound(settings.strategy, trial)
    return ReuseContract("bounded", _at_least(settings, trial), True, wanted, bound)


def _at_least(settings: PlannerSettings, trial: Trial) -> PlannerSettings:
    """The trial's share to recompute, or the one that `settings` force where that is more, and its focus cut; without
    any where `settings` or the trial have none, and with a share that was forced: it would not be through."""
    forced = settings.recompute_ratio
    shown = trial.computed_share if trial.recompute_ratio is None else trial.recompute_ratio
    if forced is not None and forced >= shown:
        return dataclasses.replace(settings, focus_window=None)
    return dataclasses.replace(
        settings,
        alpha=trial.alpha,
        recompute_ratio=trial.recompute_ratio,
        max_deviation=trial.max_deviation,
        focus_window=None if settings.focus_window is None else trial.focus_window,
        focus_rule=trial.focus_rule,
    )

"""Which alpha to deploy, from what each one cost and kept on a validation set (CacheCraft eq. 13). Measures nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ccjax.policy._checks import check_mass, check_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class AlphaTrial:
    """One alpha run over the whole validation set; checked on construction (ValueError naming the field).

    Attributes:
      alpha: of CacheCraft eq. 12, at least 0.
      mean_cfo: E[CFO_alpha], in [0, 1]: the mean of eq. 12 over the chunks that had a usable variant. An exact reuse
        counts as 0, a chunk computed whole for its CFO as 1: with those left out, the mean could fall as alpha grows.
      quality: F1_alpha or any score for which more is better, at least 0, on the scale of the target.
    """

    alpha: float
    mean_cfo: float
    quality: float

    def __post_init__(self) -> None:
        check_mass("alpha", self.alpha)
        check_ratio("mean_cfo", self.mean_cfo)
        check_mass("quality", self.quality)


def choose_alpha(trials: Sequence[AlphaTrial], *, target_quality: float) -> AlphaTrial | None:
    """The trial of alpha*, or None where no trial reaches the target.

    CacheCraft eq. 13: `alpha* = argmin_alpha E[CFO_alpha] subject to F1_alpha >= F1_desired`. A quality within one part
    in 1e9 of the target reaches it: 0.9 of 0.8 is 0.7200000000000001 in binary, and 18 right answers of 25 are 0.72.

    The paper is silent on ties. Reading: the least alpha. Over the same stored variants no chunk's CFO falls as alpha
    grows, so alphas of equal mean CFO give every chunk the same CFO and recompute the same tokens. It is silent on a
    target that no alpha reaches (reading: none is chosen) and on F1_desired, which is the deployment's to set; its own
    runs keep 0.9 of full prefill's score.

    Args:
      trials: in any order, each alpha once.
      target_quality: F1_desired, at least 0, on the scale of `AlphaTrial.quality`.

    Raises:
      ValueError: no trials, an alpha twice, or a target that is negative or not finite.
    """
    check_mass("target_quality", target_quality)
    alphas = sorted(trial.alpha for trial in trials)
    if not alphas:
        raise ValueError("trials: wanted at least one, got none")
    twice = [alpha for alpha, following in zip(alphas, alphas[1:], strict=False) if alpha == following]
    if twice:
        raise ValueError(f"trials: wanted each alpha once, got {twice[0]!r} twice")
    good = (t for t in trials if t.quality >= target_quality or math.isclose(t.quality, target_quality))
    return min(good, key=lambda trial: (trial.mean_cfo, trial.alpha), default=None)

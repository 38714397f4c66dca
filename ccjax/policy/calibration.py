"""Chooses how much to recompute so that answers are kept, from trials on a validation set.

CacheCraft eq. 13 takes the alpha of least expected cost whose quality on a validation set reaches the target. A score
that reaches it on a hundred questions may miss it on the next hundred, so here the score's lower confidence bound must
reach the target. A setting may be a share to recompute instead of an alpha.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ccjax.policy._checks import check_count, check_mass, check_ratio
from ccjax.policy.focus import check_focus_rule

VERSION = 1
_LARGEST_BET = 0.99
"""Share of the stake that can be lost at once; any below 1 gives a bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One setting, run over all questions of a validation set; checked on construction (ValueError naming the field).

    Attributes:
      alpha: CacheCraft eq. 12, if `recompute_ratio` is None.
      recompute_ratio: the share of reused tokens to recompute, instead of eq. 12.
      max_deviation: as in `PlannerSettings`, if `recompute_ratio` is None.
      focus_window, focus_rule: CacheCraft alg. 1, as in `PlannerSettings`.
      computed_share: average share of the passages' token-layers that was computed; in [0, 1].
      num_answers: questions that full prefill answered.
      num_kept: how many of these this setting answered at least as well; with `shares`, their sum, rounded down.
      shares: of each answer, the share that was kept; empty if answers count as kept or not.
    """

    computed_share: float
    num_answers: int
    num_kept: int
    alpha: float = 1.0
    recompute_ratio: float | None = None
    max_deviation: float | None = None
    focus_window: int | None = None
    focus_rule: str = "entropy"
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_mass("alpha", self.alpha)
        if self.recompute_ratio is not None:
            check_ratio("recompute_ratio", self.recompute_ratio)
        if self.max_deviation is not None:
            check_mass("max_deviation", self.max_deviation)
        if self.focus_window is not None:
            check_count("focus_window", self.focus_window)
        check_focus_rule("focus_rule", self.focus_rule)
        check_ratio("computed_share", self.computed_share)
        check_count("num_answers", self.num_answers)
        check_count("num_kept", self.num_kept, least=0)
        for share in self.shares:
            check_ratio("shares", share)
        if self.shares and len(self.shares) != self.num_answers:
            raise ValueError(f"shares: wanted {self.num_answers}, one for each answer, got {len(self.shares)}")
        if self.num_kept > self.num_answers:
            raise ValueError(f"num_kept: wanted at most {self.num_answers}, all answers, got {self.num_kept}")

    def kept_at_least(self, confidence: float) -> float:
        """The share of answers that this setting keeps, with that confidence: `mean_lower_bound` of its `shares`, or
        `kept_lower_bound`."""
        if self.shares:
            return mean_lower_bound(self.shares, confidence)
        return kept_lower_bound(self.num_kept, self.num_answers, confidence)


def kept_lower_bound(num_kept: int, num_answers: int, confidence: float) -> float:
    """Clopper and Pearson's one-sided lower bound, for any number of answers: the least share of kept answers under
    which `num_kept` of `num_answers` or more would still occur with a probability of `1 - confidence`.

    Raises:
      ValueError: a confidence below 0.5 or not below 1, or invalid counts.
    """
    _check_confidence(confidence)
    check_count("num_answers", num_answers)
    check_count("num_kept", num_kept, least=0)
    if num_kept > num_answers:
        raise ValueError(f"num_kept: wanted at most {num_answers}, all answers, got {num_kept}")
    if num_kept == 0:
        return 0.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:  # the probability grows with the share
        middle = (low + high) / 2.0
        if _probability_of_at_least(num_kept, num_answers, middle) < 1.0 - confidence:
            low = middle
        else:
            high = middle
    return low


def mean_lower_bound(shares: Sequence[float], confidence: float) -> float:
    """Waudby-Smith and Ramdas' one-sided lower bound of a mean by betting (JRSS B 2024, sec. 4), for any number of
    shares in [0, 1] of any distribution: the least mean against which no gambler, who knows the shares before each,
    would have won `1 / (1 - confidence)` times the stake by betting that the next one is above it.

    Raises:
      ValueError: a confidence below 0.5 or not below 1, or no shares.
    """
    _check_confidence(confidence)
    if not shares:
        raise ValueError("shares: wanted at least one, got none")
    goal = -math.log(1.0 - confidence)
    bets, total, squares = [], 0.5, 0.25
    for count, share in enumerate(shares, 1):
        bets.append(math.sqrt(2.0 * goal * count / (len(shares) * squares)))  # `squares / count` estimates the variance
        total += share
        squares += (share - total / (count + 1)) ** 2

    def is_refuted(mean: float) -> bool:
        won = 0.0
        for bet, share in zip(bets, shares, strict=True):
            won += math.log1p(min(bet, _LARGEST_BET / mean) * (share - mean))
            if won >= goal:
                return True
        return False

    low, high = 0.0, 1.0
    while high - low > 1e-9:  # the higher the mean, the less is won
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def fewest_answers(target: float, confidence: float) -> int:
    """How many answers it takes at least to show, by `kept_lower_bound`, that the target share is kept.

    Raises:
      ValueError: a target outside 0 to below 1, or a confidence below 0.5 or not below 1.
    """
    _check_confidence(confidence)
    if not 0.0 <= target < 1.0:
        raise ValueError(f"target: wanted a share from 0 to below 1, got {target!r}")
    return max(1, math.ceil(math.log(1.0 - confidence) / math.log(target))) if target else 1


def _check_confidence(confidence: float) -> None:
    is_number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
    if not is_number or not 0.5 <= confidence < 1.0:
        raise ValueError(f"confidence: wanted a number from 0.5 to below 1, got {confidence!r}")


def _probability_of_at_least(least: int, count: int, share: float) -> float:
    """P(X >= least) of a binomial X over `count` draws, 0 < share < 1."""
    log_share, log_rest = math.log(share), math.log1p(-share)
    logs = (
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * log_share
        + (count - k) * log_rest
        for k in range(least, count + 1)
    )
    return math.fsum(map(math.exp, logs))


def confidence_of_each(trials: Sequence[Trial], confidence: float) -> float:
    """Confidence that one trial must reach in `cheapest_safe`: it grows with the number of kinds of focus cut."""
    _check_confidence(confidence)
    return 1.0 - (1.0 - confidence) / max(1, len(set(map(_focus, trials))))


def cheapest_safe(trials: Iterable[Trial], *, target: float, confidence: float) -> Trial | None:
    """The trial of least computed share that keeps the target share of answers with that confidence; None if none does.

    Tests the trials from the greatest computed share down, and stops at the first that fails. So the chance that the
    chosen one keeps less than the target is at most `1 - confidence`, however many were tried (a fixed-sequence test);
    the cheapest of all passing trials would have no such bound. Trials with another focus cut are tested separately,
    and the chances of all these sequences add up to no more (Bonferroni).

    Raises:
      ValueError: no trials, a target outside 0 to 1, a confidence below 0.5 or not below 1.
    """
    check_ratio("target", target)
    ordered = sorted(trials, key=_cost)
    each = confidence_of_each(ordered, confidence)
    if not ordered:
        raise ValueError("trials: wanted at least one, got none")
    chosen: dict[tuple[int | None, str], Trial] = {}
    missed = set()
    for trial in reversed(ordered):
        if trial.kept_at_least(each) < target:
            missed.add(_focus(trial))
        elif _focus(trial) not in missed:
            chosen[_focus(trial)] = trial
    return min(chosen.values(), key=_cost, default=None)


def _cost(trial: Trial) -> tuple[float, float, float]:
    return trial.computed_share, trial.recompute_ratio or 0.0, trial.alpha


def _focus(trial: Trial) -> tuple[int | None, str]:
    return trial.focus_window, "" if trial.focus_window is None else trial.focus_rule


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibration of one model on the questions of one corpus; a field out of range is a ValueError that names it.

    Attributes:
      model: fingerprint of weights, tokenizer and dtype.
      questions: sha256 (hex) of the questions with their passages and right answers.
      score: the score that decides whether an answer is kept.
      target: share of full prefill's answers to keep, unless a request has its own target.
      confidence: required confidence.
      trials: by strategy.
      settings: engine settings that affect the outcome: two calibrations are comparable if they are equal.
    """

    model: str
    questions: str
    score: str
    target: float
    confidence: float
    trials: Mapping[str, Sequence[Trial]]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ratio("target", self.target)
        _check_confidence(self.confidence)

    def choose(self, strategy: str, target: float | None = None) -> Trial | None:
        """The cheapest setting of a strategy that keeps a target; None if none does, or the strategy was not tried."""
        trials = self.trials.get(strategy, ())
        wanted = self.target if target is None else target
        return cheapest_safe(trials, target=wanted, confidence=self.confidence) if trials else None

    def bound(self, strategy: str, trial: Trial) -> float:
        """The share of answers that a setting of a strategy keeps, as used by `choose`."""
        return trial.kept_at_least(confidence_of_each(self.trials[strategy], self.confidence))

    def to_json(self) -> dict[str, Any]:
        """The calibration as JSON values."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Calibration:
        """Inverse of `to_json`.

        Raises:
          ValueError: it is malformed; the message says how.
        """
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            raise ValueError(f"calibration: wanted an object of version {VERSION}, got {value!r:.80}")
        try:
            texts = {name: value[name] for name in ("model", "questions", "score")}
            trials = {
                str(strategy): tuple(_trial(trial) for trial in found) for strategy, found in value["trials"].items()
            }
            settings = dict(value["settings"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"calibration: a field is missing or not what it should be: {error}") from error
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"calibration: wanted a string under {name!r}, got {text!r:.80}")
        target, confidence = value.get("target", math.nan), value.get("confidence", math.nan)
        return cls(**texts, target=target, confidence=confidence, trials=trials, settings=settings)


def _trial(value: Mapping[str, Any]) -> Trial:
    return Trial(**{**value, "shares": tuple(value.get("shares", ()))})

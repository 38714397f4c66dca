"""Scores of one answer and their means over many."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles, as SQuAD compares answers (Rajpurkar et al. 2016)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, reference: str) -> float:
    """1 if both have the same words in the same order, else 0."""
    return float(words(answer) == words(reference))


def contains(answer: str, reference: str) -> float:
    """1 if the answer has the reference's words in a row, else 0; for models that answer in sentences."""
    own, wanted = words(answer), words(reference)
    if not wanted:
        return float(not own)
    return float(any(own[start : start + len(wanted)] == wanted for start in range(len(own) - len(wanted) + 1)))


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, each counted as often as it occurs; 1 if both are empty."""
    own, wanted = collections.Counter(words(answer)), collections.Counter(words(reference))
    common = (own & wanted).total()
    if not own or not wanted:
        return float(own == wanted)
    return 2.0 * common / (own.total() + wanted.total())


def jaccard(answer: str, reference: str) -> float:
    """Words in common over words in either, each counted once (CacheCraft sec. 5.1.2); 1 if both are empty."""
    own, wanted = set(words(answer)), set(words(reference))
    return len(own & wanted) / len(own | wanted) if own or wanted else 1.0


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, stemmed (Lin 2004), by the `rouge-score` package."""
    return _rouge_scorer()(reference, answer)


@functools.cache
def _rouge_scorer() -> Callable[[str, str], float]:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE-L needs the package rouge-score: pip install 'ccjax[evaluate]'") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return lambda reference, answer: scorer.score(reference, answer)["rougeL"].fmeasure


TEXT_SCORES: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {"exact_match": exact_match, "contains": contains, "f1": token_f1, "jaccard": jaccard, "rouge_l": rouge_l}
)


def best(score: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """The score against the reference that fits best."""
    return max(score(answer, reference) for reference in references)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def mean_interval(
    values: Sequence[float], *, may_be_share: bool = True, num_resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean over questions. The interval of a share, whose values are 0 or 1, is Wilson's, which has a width even if all
    are equal; that of other means is the percentile bootstrap's.

    Args:
      may_be_share: False for values that are no shares even if all are 0, such as differences.

    Raises:
      ValueError: fewer than two values.
    """
    _check_several(values)
    if may_be_share and _is_binary(values):
        return _wilson(int(sum(values)), len(values))
    return _bootstrap((values,), np.mean, num_resamples, seed)


def ratio_interval(
    values: Sequence[float], full: Sequence[float], *, num_resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """Mean of a way over mean of full prefill on the same questions, which are drawn in pairs; None if full's is 0.

    If answers are right or wrong, and the way is right only where full prefill is, this is the share of right answers
    that it keeps, with an interval as in `mean_interval`.
    """
    _check_several(values)
    if not np.mean(full) > 0.0:
        return None
    if _is_binary((*values, *full)) and all(own <= whole for own, whole in zip(values, full, strict=True)):
        return _wilson(int(sum(values)), int(sum(full)))
    all_questions = float(np.mean(values) / np.mean(full))

    def ratio(own: np.ndarray, whole: np.ndarray, axis: int = -1) -> np.ndarray:
        # A draw without a question that full prefill answers right has no ratio: it gets that of all questions.
        own, whole = np.mean(own, axis=axis), np.mean(whole, axis=axis)
        return np.divide(own, whole, out=np.full_like(own, all_questions), where=whole > 0.0)

    return _bootstrap((values, full), ratio, num_resamples, seed)


def _check_several(values: Sequence[float]) -> None:
    if len(values) < 2:
        raise ValueError(f"values: wanted at least two questions for an interval, got {len(values)}")


def _is_binary(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def _wilson(count: int, total: int) -> Interval:
    from scipy import stats

    interval = stats.binomtest(count, total).proportion_ci(0.95, "wilson")
    return Interval(count / total, float(interval.low), float(interval.high))


def _bootstrap(
    data: tuple[Sequence[float], ...], statistic: Callable[..., np.ndarray], num_resamples: int, seed: int
) -> Interval:
    from scipy import stats

    samples = tuple(np.asarray(values, np.float64) for values in data)
    interval = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=num_resamples,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(statistic(*samples, axis=-1)), float(interval.low), float(interval.high))

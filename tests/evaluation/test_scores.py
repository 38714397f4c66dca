"""Scores by hand, ROUGE-L against the package that defines it, intervals by what they cover."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.evaluation.scores import (
    TEXT_SCORES,
    best,
    contains,
    exact_match,
    jaccard,
    mean_interval,
    ratio_interval,
    rouge_l,
    token_f1,
    words,
)


def test_words_are_normalized_as_in_squad():
    assert words("The  Eiffel-Tower, in A park.") == ["eiffeltower", "in", "park"]
    assert exact_match("The blue boat.", "blue  Boat") == 1.0
    assert exact_match("boat blue", "blue boat") == 0.0
    assert exact_match("another", "other") == 0.0, "an article is a whole word"


def test_contains_requires_consecutive_whole_words():
    assert contains("It was the Blue boat, I think.", "blue boat") == 1.0
    assert contains("The boat was blue.", "blue boat") == 0.0, "in another order"
    assert contains("blue old boat", "blue boat") == 0.0, "not in a row"
    assert contains("1308 points", "308") == contains("", "308") == 0.0, "whole words"
    assert (contains("", "the"), contains("boat", "the")) == (1.0, 0.0), "of a reference without words"


@pytest.mark.parametrize(
    ("answer", "reference", "f1", "common"),
    [
        ("red boat", "red boat", 1.0, 1.0),
        ("a red red boat", "red boat", 0.8, 1.0),  # 2 of 3 and 2 of 2
        ("red", "blue", 0.0, 0.0),
        ("red boat on sea", "red boat", 2 / 3, 0.5),
        ("", "", 1.0, 1.0),
        ("", "red", 0.0, 0.0),
        ("the", "red", 0.0, 0.0),
    ],
)
def test_f1_counts_repeated_words_and_jaccard_does_not(answer, reference, f1, common):
    assert token_f1(answer, reference) == token_f1(reference, answer) == pytest.approx(f1)
    assert jaccard(answer, reference) == jaccard(reference, answer) == pytest.approx(common)


def test_rouge_l_matches_the_rouge_score_package_with_stemming():
    from rouge_score.rouge_scorer import RougeScorer

    pairs = [("the boats were painted", "a boat was painted red"), ("x", "x"), ("", "x")]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for answer, reference in pairs:
        assert rouge_l(answer, reference) == scorer.score(reference, answer)["rougeL"].fmeasure
    assert rouge_l("boats", "boat") == 1.0


def test_best_score_over_several_references_counts():
    assert best(token_f1, "red boat", ["blue", "red", "red boat"]) == 1.0
    assert set(TEXT_SCORES) == {"exact_match", "contains", "f1", "jaccard", "rouge_l"}


@pytest.mark.parametrize("is_share", [True, False], ids=["Wilson", "bootstrap"])
def test_confidence_interval_has_its_nominal_coverage(is_share):
    from scipy import stats

    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        right = (rng.random(60) < 0.7).astype(float)
        values = right if is_share else right * 0.5  # shares of words, as F1 has them
        interval = mean_interval(values.tolist(), num_resamples=300, seed=seed)
        assert interval.low <= interval.mean <= interval.high
        covered += interval.low <= (0.7 if is_share else 0.35) <= interval.high
    least, most = stats.binom.ppf([1e-4, 1 - 1e-4], 200, 0.95)
    assert least - 6 <= covered <= most, "the percentile bootstrap covers a little less than it says"


def test_proportions_use_the_wilson_interval_even_at_0_and_1():
    from scipy import stats

    whole = mean_interval([1.0] * 24)
    assert (whole.mean, whole.high) == (1.0, pytest.approx(1.0))
    z = stats.norm.ppf(0.975)
    assert whole.low == pytest.approx(24 / (24 + z * z))  # Wilson's bound, worked out for 24 of 24
    some = mean_interval([1.0] * 6 + [0.0] * 2)
    wanted = stats.binomtest(6, 8).proportion_ci(0.95, "wilson")
    assert (some.low, some.high) == (wanted.low, wanted.high)
    nothing = mean_interval([0.0] * 8, may_be_share=False)
    assert (nothing.low, nothing.high) == (0.0, 0.0), "differences that are all 0 are no share"
    kept = ratio_interval([1.0] * 6 + [0.0] * 4, [1.0] * 8 + [0.0] * 2)
    assert kept is not None and (kept.mean, kept.low, kept.high) == (0.75, wanted.low, wanted.high)


def test_ratio_interval_resamples_questions_in_pairs():
    rng = np.random.default_rng(1)
    full = rng.random(50)
    interval = ratio_interval((0.9 * full).tolist(), full.tolist())
    assert interval is not None
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.9, 0.9, 0.9))  # unpaired it would vary
    assert ratio_interval([0.0, 1.0], [0.0, 0.0]) is None
    wins_some = ratio_interval([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert wins_some is not None and wins_some.low < wins_some.mean == 1.0 < wins_some.high, "it is no share of full's"
    rare = ratio_interval([0.5, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert rare is not None and (rare.low, rare.high) == (0.5, 0.5), "a draw without the one right answer says nothing"


def test_interval_of_one_question_is_rejected():
    with pytest.raises(ValueError, match="at least two"):
        mean_interval([1.0])

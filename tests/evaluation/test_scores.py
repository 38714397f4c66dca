"""Scores by hand, ROUGE-L and intervals against the packages that define them, KL against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from scipy import special, stats

from ccjax.evaluation.scores import (
    TEXT_SCORES,
    best,
    exact_match,
    first_token_kl,
    jaccard,
    mean_interval,
    ratio_interval,
    rouge_l,
    token_f1,
    words,
)


def test_words_are_compared_as_squad_does():
    assert words("The  Eiffel-Tower, in A park.") == ["eiffeltower", "in", "park"]
    assert exact_match("The blue boat.", "blue  Boat") == 1.0
    assert exact_match("boat blue", "blue boat") == 0.0
    assert exact_match("another", "other") == 0.0, "an article is a whole word"


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
def test_f1_counts_every_occurrence_and_jaccard_none_twice(answer, reference, f1, common):
    assert token_f1(answer, reference) == token_f1(reference, answer) == pytest.approx(f1)
    assert jaccard(answer, reference) == jaccard(reference, answer) == pytest.approx(common)


def test_rouge_l_is_the_packages_with_stemming():
    pairs = [("the boats were painted", "a boat was painted red"), ("x", "x"), ("", "x")]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for answer, reference in pairs:
        assert rouge_l(answer, reference) == scorer.score(reference, answer)["rougeL"].fmeasure
    assert rouge_l("boats", "boat") == 1.0


def test_of_several_references_the_best_counts():
    assert best(token_f1, "red boat", ["blue", "red", "red boat"]) == 1.0
    assert set(TEXT_SCORES) == {"exact_match", "f1", "jaccard", "rouge_l"}


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=20))
def test_kl_is_scipys(pairs):
    own, other = (np.asarray(row, np.float32) for row in zip(*pairs, strict=True))
    wanted = special.rel_entr(special.softmax(own.astype(float)), special.softmax(other.astype(float))).sum()
    assert first_token_kl(own, other) == pytest.approx(wanted, abs=1e-9)
    assert first_token_kl(own, own + 3.0) == pytest.approx(0.0, abs=1e-5), "logits count up to a constant"


def test_kl_is_of_full_prefill_from_the_other_and_in_nats():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p || q) = ln(2)/2 + ln(2/3)/2, KL(q || p) differs
    p, q = np.log(np.asarray([0.5, 0.5])), np.log(np.asarray([0.25, 0.75]))
    assert first_token_kl(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert abs(first_token_kl(q, p) - first_token_kl(p, q)) > 0.01
    with pytest.raises(ValueError, match=r"one length, got \(2,\) and \(3,\)"):
        first_token_kl(p, np.zeros(3))


def test_an_interval_covers_the_mean_of_what_was_drawn_from_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        interval = mean_interval((rng.random(60) < 0.7).astype(float).tolist(), num_resamples=300, seed=seed)
        assert interval.low <= interval.mean <= interval.high
        covered += interval.low <= 0.7 <= interval.high
    least, most = stats.binom.ppf([1e-4, 1 - 1e-4], 200, 0.95)
    assert least - 6 <= covered <= most, "the percentile bootstrap covers a little less than it says"


def test_a_ratio_draws_questions_in_pairs():
    rng = np.random.default_rng(1)
    full = rng.random(50)
    interval = ratio_interval((0.9 * full).tolist(), full.tolist())
    assert interval is not None
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.9, 0.9, 0.9))  # unpaired it would vary
    assert ratio_interval([0.0, 1.0], [0.0, 0.0]) is None
    rare = ratio_interval([0.5, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert rare is not None and (rare.low, rare.high) == (0.5, 0.5), "a draw without the one right answer says nothing"


def test_one_question_has_no_interval():
    with pytest.raises(ValueError, match="at least two"):
        mean_interval([1.0])

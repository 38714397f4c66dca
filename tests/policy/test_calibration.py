"""The confidence bound against scipy, the choice by hand and by simulation, the file format."""

from __future__ import annotations

import dataclasses
import functools
import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy import calibration
from ccjax.policy.calibration import (
    Calibration,
    Trial,
    cheapest_safe,
    confidence_of_each,
    kept_lower_bound,
    mean_lower_bound,
)


@given(st.integers(1, 400), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_kept_lower_bound_is_the_clopper_pearson_bound(num_answers, data, confidence):
    from scipy import stats

    num_kept = data.draw(st.integers(0, num_answers))
    test = stats.binomtest(num_kept, num_answers, alternative="greater")
    wanted = test.proportion_ci(confidence_level=confidence, method="exact").low
    assert kept_lower_bound(num_kept, num_answers, confidence) == pytest.approx(wanted, abs=1e-9)


def test_more_answers_give_a_higher_lower_bound():
    # all kept: the bound is (1 - confidence) ** (1 / n)
    assert kept_lower_bound(20, 20, 0.95) == pytest.approx(0.05 ** (1 / 20))
    assert kept_lower_bound(20, 20, 0.95) < 0.9 < kept_lower_bound(59, 59, 0.95) - 0.05


def gamblers_stake(mean, shares, confidence):
    """What betting against `mean` made of a stake of 1, as published, in the notation of the paper's sec. 4."""
    alpha, n, most = 1.0 - confidence, len(shares), 1.0
    stake, var_hat = 1.0, 0.25
    for t, x in enumerate(shares, 1):
        bet = (2.0 * np.log(1.0 / alpha) / (n * var_hat)) ** 0.5
        stake *= 1.0 + min(bet, 0.99 / mean) * (x - mean)
        most = max(most, stake)
        mus = [(0.5 + sum(shares[:i])) / (i + 1) for i in range(1, t + 1)]
        var_hat = (0.25 + sum((shares[i] - mus[i]) ** 2 for i in range(t))) / (t + 1)
    return most


def test_mean_lower_bound_matches_the_published_betting_procedure():
    shares = [1.0, 0.75, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.875, 1.0] * 4
    for confidence in (0.9, 0.95):
        bound = mean_lower_bound(shares, confidence)
        assert 0.7 < bound < np.mean(shares)
        assert gamblers_stake(bound, shares, confidence) == pytest.approx(1.0 / (1.0 - confidence), rel=1e-5)
    one = Trial(0.1, 40, 36, recompute_ratio=0.1, shares=tuple(shares))
    assert one.kept_at_least(0.95) == bound
    assert mean_lower_bound([0.0] * 50, 0.95) == 0.0 < mean_lower_bound([1.0] * 50, 0.95) < 0.95


@pytest.mark.parametrize(("target", "confidence"), [(0.95, 0.95), (0.95, 0.975), (0.5, 0.9), (0.99, 0.99)])
def test_fewest_answers_is_the_smallest_sample_that_can_prove_a_target(target, confidence):
    fewest = calibration.fewest_answers(target, confidence)
    assert kept_lower_bound(fewest, fewest, confidence) >= target
    assert fewest == 1 or kept_lower_bound(fewest - 1, fewest - 1, confidence) < target


def test_mean_lower_bound_holds_at_its_stated_confidence():
    """On shares like measured ones: most answers keep all of 16 tokens, others lose some."""
    rng = np.random.default_rng(0)
    shares = np.where(rng.random((400, 60)) < 0.7, 1.0, rng.integers(8, 16, (400, 60)) / 16)
    truth = 0.7 + 0.3 * 11.5 / 16
    assert sum(mean_lower_bound(row.tolist(), 0.95) > truth for row in shares) <= 0.05 * 400
    normal = shares.mean(1) - 1.645 * shares.std(1) / 60**0.5
    assert sum(normal > truth) > 0.05 * 400, "what assumes a normal distribution misses more often here"


def trial(share: float, kept: int, **settings) -> Trial:
    return Trial(computed_share=share, num_answers=100, num_kept=kept, **settings)


CURVE = [trial(0.05, 80), trial(0.1, 94), trial(0.2, 99), trial(0.4, 100), trial(0.8, 100)]
# Bounds at 95 %: 72.3, 88.5, 95.3, 97.0, 97.0 %


@pytest.mark.parametrize(
    ("target", "share"), [(0.0, 0.05), (0.72, 0.05), (0.73, 0.1), (0.9, 0.2), (0.953, 0.2), (0.96, 0.4), (0.98, None)]
)
def test_cheapest_safe_trial_is_chosen_regardless_of_input_order(target, share):
    for trials in permutations(CURVE):
        chosen = cheapest_safe(trials, target=target, confidence=0.95)
        assert (chosen.computed_share if chosen else None) == share


def test_trials_cheaper_than_a_failing_trial_are_never_chosen():
    lucky = [trial(0.05, 100), trial(0.1, 70), trial(0.2, 100)]
    assert cheapest_safe(lucky, target=0.9, confidence=0.95) == lucky[2]
    assert cheapest_safe([*lucky, trial(0.9, 80)], target=0.9, confidence=0.95) is None


def test_failing_trial_rules_out_only_trials_with_the_same_focus_cut():
    plain = [trial(0.1, 100), trial(0.3, 100)]
    cut = [trial(share, kept, focus_window=3) for share, kept in ((0.04, 100), (0.2, 80), (0.25, 100))]
    other = [trial(0.08, 100, focus_window=3, focus_rule="largest_gap")]
    assert cheapest_safe([*plain, *cut], target=0.9, confidence=0.95) == plain[0]
    assert cheapest_safe([*cut, *plain, *other], target=0.9, confidence=0.95) == other[0]
    assert cheapest_safe(cut, target=0.9, confidence=0.95) == cut[2]


def test_trial_sequences_share_the_error_probability():
    assert confidence_of_each([trial(0.1, 90), trial(0.2, 90)], 0.95) == pytest.approx(0.95)
    both = [trial(0.2, 99), trial(0.1, 99, focus_window=3)]
    assert confidence_of_each(both, 0.95) == pytest.approx(0.975)
    # 99 of 100 kept: at least 95.3 % at a confidence of 95 %, 94.6 % at 97.5 %
    assert cheapest_safe(both[:1], target=0.95, confidence=0.95) == both[0]
    assert cheapest_safe(both, target=0.95, confidence=0.95) is None
    assert cheapest_safe(both, target=0.945, confidence=0.95) == both[1]
    changed = dataclasses.replace(CALIBRATION, trials={"auto": tuple(both)})
    assert changed.bound("auto", both[0]) == pytest.approx(0.9455, abs=1e-4)


def test_chosen_setting_misses_the_target_no_more_often_than_stated(monkeypatch):
    """4,000 validation sets of 150 questions for a strategy whose true kept share grows with the computed tokens, first
    just below the target; choosing the cheapest setting that passes would miss more often."""
    monkeypatch.setattr(calibration, "kept_lower_bound", functools.cache(kept_lower_bound))  # of 151 counts
    rng = np.random.default_rng(0)
    truth = {0.1: 0.88, 0.2: 0.89, 0.3: 0.895, 0.4: 0.899, 0.5: 0.93, 0.6: 0.97}
    misses = naive = 0
    for kept in rng.binomial(150, list(truth.values()), size=(4000, 6)).tolist():
        trials = [Trial(share, 150, num) for share, num in zip(truth, kept, strict=True)]
        chosen = cheapest_safe(trials, target=0.9, confidence=0.95)
        misses += chosen is not None and truth[chosen.computed_share] < 0.9
        naive += any(one.kept_at_least(0.95) >= 0.9 and truth[one.computed_share] < 0.9 for one in trials)
    assert misses <= 0.05 * 4000 + 3 * (0.05 * 0.95 * 4000) ** 0.5
    assert naive > 0.05 * 4000 + 3 * (0.05 * 0.95 * 4000) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"computed_share": 1.5}, "computed_share"),
        ({"num_kept": 101}, "num_kept"),
        ({"num_kept": -1}, "num_kept"),
        ({"num_kept": 90.5}, "num_kept"),
        ({"shares": (1.0,)}, "shares: wanted 100"),
        ({"shares": (1.5,) * 100}, "shares"),
        ({"num_answers": 0}, "num_answers"),
        ({"alpha": -1.0}, "alpha"),
        ({"recompute_ratio": 2.0}, "recompute_ratio"),
        ({"focus_window": 0}, "focus_window"),
        ({"focus_rule": "best"}, "focus_rule"),
    ],
)
def test_invalid_trial_fields_are_rejected_by_name(arguments, name):
    with pytest.raises(ValueError, match=name):
        Trial(**{"computed_share": 0.1, "num_answers": 100, "num_kept": 90, **arguments})


@pytest.mark.parametrize(
    ("trials", "target", "confidence", "name"),
    [([], 0.9, 0.95, "trials"), (CURVE, 1.1, 0.95, "target"), (CURVE, 0.9, 1.0, "confidence"), (CURVE, 0.9, 0, "conf")],
)
def test_invalid_cheapest_safe_arguments_are_rejected_by_name(trials, target, confidence, name):
    with pytest.raises(ValueError, match=name):
        cheapest_safe(trials, target=target, confidence=confidence)


CALIBRATION = Calibration(
    model="m",
    questions="q",
    score="exact_match",
    target=0.9,
    confidence=0.95,
    trials={
        "auto": tuple(CURVE),
        "legolink": (trial(0.3, 60, focus_window=2, focus_rule="largest_gap"),),
        "random": (trial(0.5, 60, recompute_ratio=0.5),),
    },
    settings={"cached": "both"},
)


def test_calibration_round_trips_through_json():
    text = json.dumps(CALIBRATION.to_json())
    assert Calibration.from_json(json.loads(text)) == CALIBRATION


def test_a_calibration_chooses_by_strategy_and_target():
    assert CALIBRATION.choose("auto") == CURVE[2]
    assert CALIBRATION.choose("auto", 0.96) == CURVE[3]
    assert CALIBRATION.choose("random") is None
    assert CALIBRATION.choose("legolink") is None and CALIBRATION.choose("cachecraft") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1"),
        ({"model": 3}, "'model'"),
        ({"target": "high"}, "target"),
        ({"confidence": 1.0}, "confidence"),
        ({"trials": {"auto": [{"computed_share": 0.1}]}}, "missing"),
        ({"trials": {"auto": [{**CALIBRATION.to_json()["trials"]["auto"][0], "num_kept": 500}]}}, "num_kept"),
        ({"trials": []}, "not what it should be"),
        ({"settings": 3}, "not what it should be"),
    ],
)
def test_damaged_calibration_file_is_rejected_with_the_reason(change, message):
    value = {**CALIBRATION.to_json(), **change}
    with pytest.raises(ValueError, match=message):
        Calibration.from_json(value)
    with pytest.raises(ValueError):
        Calibration.from_json([])

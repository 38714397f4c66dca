"""The choice of alpha by hand-worked trials, against exhaustive search, and its errors."""

from __future__ import annotations

import dataclasses
import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.calibration import AlphaTrial, choose_alpha

# CacheCraft sec. 6 gives ROUGE 0.825, 0.896, 0.94 and 0.953 for these alphas; the mean CFOs are ours.
PAPER = [
    AlphaTrial(alpha=0.5, mean_cfo=0.15, quality=0.825),
    AlphaTrial(alpha=1.0, mean_cfo=0.30, quality=0.896),
    AlphaTrial(alpha=2.0, mean_cfo=0.55, quality=0.94),
    AlphaTrial(alpha=3.0, mean_cfo=0.70, quality=0.953),
]


@pytest.mark.parametrize(
    ("target_quality", "alpha"),
    [(0.0, 0.5), (0.825, 0.5), (0.826, 1.0), (0.9, 2.0), (0.94, 2.0), (0.95, 3.0), (0.953, 3.0), (0.954, None)],
)
def test_the_cheapest_alpha_that_reaches_the_target_in_whatever_order(target_quality, alpha):
    for trials in permutations(PAPER):
        chosen = choose_alpha(trials, target_quality=target_quality)
        assert (chosen.alpha if chosen else None) == alpha


def test_cost_decides_and_neither_alpha_nor_surplus_quality():
    # not monotone, as measured on a small set: the least alpha costs more, the best score costs most
    trials = [AlphaTrial(0.2, 0.25, 0.9), AlphaTrial(0.4, 0.2, 0.91), AlphaTrial(0.8, 0.5, 0.99)]
    assert choose_alpha(trials, target_quality=0.9) == trials[1]


def test_of_equal_costs_the_least_alpha():
    trials = [AlphaTrial(9.0, 1.0, 0.9), AlphaTrial(5.0, 1.0, 0.8), AlphaTrial(7.0, 1.0, 0.95)]
    assert choose_alpha(trials, target_quality=0.5) == trials[1]
    assert choose_alpha(trials, target_quality=0.85) == trials[2]


def test_a_share_of_full_prefills_quality_is_reached_despite_rounding():
    target = 0.9 * 0.8
    assert target > 18 / 25
    assert choose_alpha([AlphaTrial(1.0, 0.3, 18 / 25)], target_quality=target) is not None
    assert choose_alpha([AlphaTrial(1.0, 0.3, 18 / 25 - 1e-8)], target_quality=target) is None


def test_qualities_may_be_in_percent():
    assert choose_alpha([AlphaTrial(0, 0, 60.0), AlphaTrial(1, 0.4, 91)], target_quality=90) == AlphaTrial(1, 0.4, 91)


@given(
    st.lists(
        st.builds(
            AlphaTrial,
            alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0]),
            mean_cfo=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
            quality=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        ),
        min_size=1,
        unique_by=lambda trial: trial.alpha,
    ),
    st.sampled_from([0.0, 0.4, 0.9, 0.95, 1.0]),
)
def test_no_trial_beats_the_chosen_one(trials, target):
    chosen = choose_alpha(trials, target_quality=target)
    good = [trial for trial in trials if trial.quality >= target]
    if chosen is None:
        assert not good
        return
    assert chosen in good
    for trial in good:
        assert trial.mean_cfo >= chosen.mean_cfo
        assert trial.mean_cfo > chosen.mean_cfo or trial.alpha >= chosen.alpha


class TestErrors:
    def test_no_trials(self):
        with pytest.raises(ValueError, match="^trials: wanted at least one, got none"):
            choose_alpha([], target_quality=0.9)

    def test_an_alpha_tried_twice(self):
        trials = [AlphaTrial(1.0, 0.3, 0.9), AlphaTrial(0.5, 0.2, 0.8), AlphaTrial(1, 0.3, 0.8)]
        with pytest.raises(ValueError, match=r"^trials: wanted each alpha once, got 1(\.0)? twice"):
            choose_alpha(trials, target_quality=0.0)

    @pytest.mark.parametrize("target", [-0.1, math.nan, math.inf, "0.9", None, True])
    def test_a_bad_target(self, target):
        with pytest.raises(ValueError, match="^target_quality: wanted .*, got "):
            choose_alpha(PAPER, target_quality=target)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("alpha", -0.5),
            ("alpha", math.inf),
            ("mean_cfo", -0.01),
            ("mean_cfo", 1.01),
            ("mean_cfo", math.nan),
            ("quality", -1),
            ("quality", math.nan),
            ("quality", "good"),
        ],
    )
    def test_a_bad_trial(self, field, value):
        with pytest.raises(ValueError, match=f"^{field}: wanted .*, got "):
            AlphaTrial(**{"alpha": 1.0, "mean_cfo": 0.3, "quality": 0.9, field: value})


def test_trials_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAPER[0].alpha = 1.0  # type: ignore[misc]

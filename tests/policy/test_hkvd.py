"""CacheBlend's schedule and choice: counts per layer, the most deviating tokens, the share hidden by loading."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.hkvd import counts_by_layer, hidden_ratio, most_deviating


def test_counts_by_layer_match_hand_computed_examples():
    assert counts_by_layer(1000, 0.2, 9) == (1000, 238, 238, 213, 213, 188, 188, 163, 163)
    assert counts_by_layer(10, 0.5, 1) == (10,)
    assert counts_by_layer(10, 0.5, 2) == (10, 5)
    assert counts_by_layer(10, 0.0, 3) == (10, 0, 0)
    assert counts_by_layer(10, 1.0, 4) == (10, 10, 10, 10)


@given(st.integers(1, 5000), st.floats(0.0, 1.0), st.integers(2, 80))
def test_layer_counts_never_increase_and_average_to_the_ratio(num_candidates, ratio, num_layers):
    counts = counts_by_layer(num_candidates, ratio, num_layers)
    assert len(counts) == num_layers and counts[0] == num_candidates
    assert all(0 <= after <= before for before, after in zip(counts, counts[1:], strict=False))
    mean = sum(counts[1:]) / (num_layers - 1)
    # Counts are rounded up; stages of unequal length give the first ones slightly more weight.
    assert ratio * num_candidates * 0.9 <= mean <= ratio * num_candidates * 1.1 + 1
    assert len(set(counts[1:])) <= 4


@given(st.lists(st.floats(0.0, 1e6), max_size=40), st.data())
def test_most_deviating_tokens_are_chosen(deviations, data):
    count = data.draw(st.integers(0, len(deviations)))
    chosen = most_deviating(deviations, count)
    assert len(chosen) == len(set(chosen)) == count and list(chosen) == sorted(chosen)
    others = [value for index, value in enumerate(deviations) if index not in chosen]
    assert not chosen or not others or min(deviations[index] for index in chosen) >= max(others)


def test_ties_are_broken_by_position():
    assert most_deviating([1.0, 3.0, 3.0, 3.0], 2) == (1, 2)


@pytest.mark.parametrize(
    ("load_s", "prefill_s", "ratio"),
    [(0.0, 2.0, 0.15), (0.2, 2.0, 0.15), (0.6, 2.0, 0.3), (9.0, 2.0, 1.0), (1.0, 0.0, 0.15)],
)
def test_hidden_ratio_matches_hand_computed_values(load_s, prefill_s, ratio):
    assert hidden_ratio(load_s, prefill_s) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: counts_by_layer(0, 0.1, 2), "num_candidates: wanted an integer of at least 1, got 0"),
        (lambda: counts_by_layer(5, 0.1, 0), "num_layers: wanted"),
        (lambda: counts_by_layer(5, 1.5, 3), "ratio: wanted a number in"),
        (lambda: most_deviating([1.0], 2), "count: wanted at most 1, as many as deviations, got 2"),
        (lambda: most_deviating([1.0], -1), "count: wanted an integer of at least 0"),
        (lambda: most_deviating([math.nan], 1), "deviations: wanted numbers, got NaN"),
        (lambda: hidden_ratio(-1.0, 1.0), "load_s: wanted"),
        (lambda: hidden_ratio(1.0, math.inf), "prefill_s: wanted"),
        (lambda: hidden_ratio(1.0, 1.0, least=2.0), "least: wanted"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()

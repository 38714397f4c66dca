"""Timeout of a load (CacheCraft sec. 3.5): values by hand and monotonicity."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.loading import (
    LEAST_WAIT_S,
    STORE_S,
    UNMEASURED_WAIT_S,
    claim_s,
    longest_load_wait_s,
    longest_shared_wait_s,
)


@pytest.mark.parametrize(
    ("num_tokens", "seconds_per_token", "expected"),
    [
        (200, 0.01, 2.0),  # 200 tokens of 10 ms: computing them takes 2 s
        (1, 3.0, 3.0),
        (100, 0.005, 0.5),  # exactly the floor
        (100, 0.004, 0.5),  # 0.4 s, below the floor
        (2000, 0.0001, 0.5),  # an accelerator: 0.2 s
        (2000, 0.0, 0.5),
        (200, None, 5.0),
        (1, None, 5.0),
    ],
)
def test_longest_load_wait_is_compute_time_with_a_minimum(num_tokens, seconds_per_token, expected):
    assert longest_load_wait_s(num_tokens, seconds_per_token) == pytest.approx(expected)


def test_wait_constants_match_the_examples():
    assert (LEAST_WAIT_S, UNMEASURED_WAIT_S) == (0.5, 5.0)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_more_tokens_or_a_slower_device_never_shorten_the_wait(tokens, more_tokens, rate, more_rate):
    bound = longest_load_wait_s(tokens, rate)
    assert LEAST_WAIT_S <= bound <= longest_load_wait_s(tokens + more_tokens, rate + more_rate)


@pytest.mark.parametrize(
    ("num_tokens", "seconds_per_token", "name"),
    [
        (0, 0.1, "num_tokens"),
        (0, None, "num_tokens"),
        (2.0, 0.1, "num_tokens"),
        (5, -0.1, "seconds_per_token"),
        (5, math.inf, "seconds_per_token"),
        (5, math.nan, "seconds_per_token"),
    ],
)
def test_bad_arguments_are_named(num_tokens, seconds_per_token, name):
    with pytest.raises(ValueError, match=name):
        longest_load_wait_s(num_tokens, seconds_per_token)


@pytest.mark.parametrize(
    ("num_tokens", "seconds_per_token", "expected"),
    [
        (200, 0.01, 3.0),  # 2 s to compute and 1 s to store
        (10, 0.01, 1.5),  # 0.1 s to compute, but the floor is half a second
        (200, None, 6.0),
    ],
)
def test_longest_shared_wait_is_load_wait_plus_one_second(num_tokens, seconds_per_token, expected):
    assert longest_shared_wait_s(num_tokens, seconds_per_token) == pytest.approx(expected)
    assert claim_s(num_tokens, seconds_per_token) == pytest.approx(2 * expected)
    assert STORE_S == 1.0


@pytest.mark.parametrize("function", [longest_shared_wait_s, claim_s])
def test_shared_waits_reject_the_same_arguments_as_loads(function):
    with pytest.raises(ValueError, match="num_tokens"):
        function(0, 0.1)
    with pytest.raises(ValueError, match="seconds_per_token"):
        function(1, math.nan)

"""Loads that are not worth starting: plans by hand, hysteresis, exploration. The timeout of a load (CacheCraft sec.
3.5)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.loading import (
    EXPLORE_EVERY,
    LEAST_WAIT_S,
    SHORT_WAIT_S,
    LoadHabit,
    PlannedLoad,
    claim_s,
    load_to_explore,
    loads_to_give_up,
    longest_load_wait_s,
    longest_shared_wait_s,
)
from ccjax.types import VariantId

STEADY, AVOIDING = LoadHabit(), LoadHabit(1)


def loads(*times: tuple[float, float]) -> list[PlannedLoad]:
    """Loads named a, b, c ... of (load_s, compute_s)."""
    return [PlannedLoad(VariantId("abcdefgh"[n]), *pair) for n, pair in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "hidden_s", "expected"),
    [
        ([(1.0, 2.0)], 0.0, ""),  # faster to load
        ([(3.0, 2.0)], 0.0, "a"),
        ([(3.0, 2.0)], 1.0, ""),  # 1 s of the 3 s is hidden
        ([(2.5, 2.0)], 0.0, ""),  # exactly 1.25 times
        ([(2.6, 2.0)], 0.0, "a"),
        ([(3.0, 2.0), (3.0, 2.0)], 1.0, "b"),  # the first load uses the hidden time
        ([(4.0, 1.0)] * 5, 0.0, "abce"),  # computing a, b and c hides 3 s of d, which uses all of it
        ([(4.0, 1.0)] * 8, 0.0, "abcefg"),
        ([(0.0, 0.0)], 0.0, ""),
        ([(0.1, 0.0)], 0.0, "a"),
        ([(0.004, 0.0)] * 2, 0.0, ""),  # 8 ms in all are not worth it
        ([(0.004, 0.0)] * 3, 0.0, "abc"),
        ([(0.02, 0.0)], 0.011, ""),
        ([], 5.0, ""),
    ],
)
def test_loads_to_give_up_match_hand_computed_plans(times, hidden_s, expected):
    assert loads_to_give_up(loads(*times), hidden_s, STEADY) == frozenset(expected)


@pytest.mark.parametrize(
    ("load_s", "steady", "avoiding"), [(0.7, "", ""), (0.81, "", "a"), (1.0, "", "a"), (1.24, "", "a"), (1.3, "a", "a")]
)
def test_hysteresis_keeps_the_current_habit_between_the_two_factors(load_s, steady, avoiding):
    assert loads_to_give_up(loads((load_s, 1.0)), 0.0, STEADY) == frozenset(steady)
    assert loads_to_give_up(loads((load_s, 1.0)), 0.0, AVOIDING) == frozenset(avoiding)


def test_one_rejected_load_is_explored_every_sixteen_plans():
    planned = loads((9.0, 1.0), (8.0, 1.0), (8.0, 1.0))[::-1]  # not ordered by id
    habit, explored = LoadHabit(), []
    for number in range(3 * EXPLORE_EVERY):
        given_up = loads_to_give_up(planned, 0.0, habit)
        assert given_up == {"a", "b", "c"}
        if load_to_explore(planned, given_up, habit) is not None:
            explored.append((number, load_to_explore(planned, given_up, habit)))
        habit = habit.after(True)
    assert explored == [(EXPLORE_EVERY, "b"), (2 * EXPLORE_EVERY, "b")]  # the fastest; of equal ones the first by id
    assert habit.after(False) == LoadHabit() and not LoadHabit().explores


def test_nothing_is_explored_when_a_load_was_chosen():
    habit = LoadHabit(EXPLORE_EVERY)
    planned = loads((9.0, 1.0), (0.1, 1.0))
    assert load_to_explore(planned, loads_to_give_up(planned, 0.0, habit), habit) is None
    assert load_to_explore([], frozenset(), habit) is None


@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), max_size=8),
    st.integers(0, 20),
    st.sampled_from([STEADY, AVOIDING]),
)
def test_only_slower_loads_are_given_up_and_kept_loads_have_bounded_waits(times, hidden_s, habit):
    planned = loads(*times)
    given_up = loads_to_give_up(planned, hidden_s, habit)
    assert all(load.load_s > 0.8 * load.compute_s for load in planned if load.variant_id in given_up)
    assert not loads_to_give_up(planned, hidden_s + sum(load.load_s for load in planned), habit)
    kept = [load for load in planned if load.variant_id not in given_up]
    computed_s = sum(load.compute_s for load in planned if load.variant_id in given_up)
    waited_s = sum(load.load_s for load in kept) - hidden_s - computed_s
    assert waited_s <= 1.25 * sum(load.compute_s for load in kept) + SHORT_WAIT_S


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_arguments_are_named(value):
    with pytest.raises(ValueError, match="^load_s: wanted"):
        PlannedLoad(VariantId("a"), value, 1.0)
    with pytest.raises(ValueError, match="^compute_s: wanted"):
        PlannedLoad(VariantId("a"), 1.0, value)
    with pytest.raises(ValueError, match="^hidden_s: wanted"):
        loads_to_give_up([], value, STEADY)


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


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_more_tokens_or_a_slower_device_never_shorten_the_wait(tokens, more_tokens, rate, more_rate):
    bound = longest_load_wait_s(tokens, rate)
    assert LEAST_WAIT_S <= bound <= longest_load_wait_s(tokens + more_tokens, rate + more_rate)


@pytest.mark.parametrize("function", [longest_load_wait_s, longest_shared_wait_s, claim_s])
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
def test_bad_waits_are_named(function, num_tokens, seconds_per_token, name):
    with pytest.raises(ValueError, match=name):
        function(num_tokens, seconds_per_token)


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

"""CacheCraft alg. 1: cuts by hand for both rules, cases that the paper leaves open, and the fold over layers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ccjax.policy.focus import FOCUS_RULES, FocusState, focused_chunks, observe
from ccjax.types import LayerStats
from tests.policy import oracles_policy as oracle

rules = st.sampled_from(FOCUS_RULES)
mass_lists = st.lists(st.floats(0.0, 1e3, allow_subnormal=False), max_size=8)


class TestCut:
    @pytest.mark.parametrize(
        ("mass", "entropy", "largest_gap"),
        [
            # gaps 1, 6, 1 of 8: -p ln p = 0.260, 0.216, 0.260. The dominant gap loses; of equal ones the first wins.
            ([9.0, 8.0, 2.0, 1.0], {0}, {0, 1}),
            # gaps 2, 4, 4 of 10: terms 0.322, 0.367, 0.367; the earlier of the equal cuts keeps two
            ([10.0, 8.0, 4.0, 0.0], {0, 1}, {0, 1}),
            # gaps 10, 3, 1 of 14: p = 0.71, 0.21, 0.07; terms 0.240, 0.330, 0.189: rank 2 against rank 1
            ([14.0, 4.0, 1.0, 0.0], {0, 1}, {0}),
            # the same chunks in another prompt order
            ([1.0, 14.0, 0.0, 4.0], {1, 3}, {1}),
            # p = 0.9 at the first gap: 0.095 against 0.230 for p = 0.1
            ([10.0, 1.0, 0.0], {0, 1}, {0}),
        ],
    )
    def test_cuts_match_hand_computed_examples(self, mass, entropy, largest_gap):
        assert focused_chunks(mass, "entropy") == entropy
        assert focused_chunks(mass, "largest_gap") == largest_gap

    @pytest.mark.parametrize("rule", FOCUS_RULES)
    @pytest.mark.parametrize(
        ("mass", "expected"),
        [
            ([], set()),
            ([0.0], {0}),
            ([0.3], {0}),
            ([0.3, 0.5], {1}),  # the single gap decides, although -1 ln 1 = 0
            ([0.5, 0.5], {0, 1}),
            ([2.0, 2.0, 2.0], {0, 1, 2}),
            ([1.0, 5.0, 1.0, 5.0], {1, 3}),  # one positive gap among zeros
            ([5.0, 1.0, 1.0], {0}),
        ],
    )
    def test_cases_the_paper_leaves_open(self, rule, mass, expected):
        assert focused_chunks(mass, rule) == expected

    @given(mass_lists, rules)
    def test_agrees_with_numpy_and_scipy(self, mass, rule):
        gaps = [a - b for a, b in zip(sorted(mass, reverse=True), sorted(mass, reverse=True)[1:], strict=False)]
        assume(len(gaps) > 1 and min(gaps) > 1e-6)
        terms = sorted(-g / sum(gaps) * math.log(g / sum(gaps)) if rule == "entropy" else g for g in gaps)
        assume(terms[-1] - terms[-2] > 1e-9)  # with rounding a tie may be resolved either way
        assert focused_chunks(mass, rule) == oracle.focused(mass, rule)

    @given(mass_lists, rules, st.randoms())
    def test_focused_chunks_have_more_mass_and_ignore_input_order(self, mass, rule, rng: random.Random):
        focused = focused_chunks(mass, rule)
        assert bool(focused) == bool(mass)
        outside = set(range(len(mass))) - focused
        assert all(mass[i] > mass[j] for i in focused for j in outside)
        assert outside or len(set(mass)) <= 1
        order = list(range(len(mass)))
        rng.shuffle(order)
        assert {order[i] for i in focused_chunks([mass[i] for i in order], rule)} == focused


def fold(layers: list[tuple[float, ...]], window: int, rule: str = "largest_gap", first: int = 0) -> list[FocusState]:
    states = [FocusState()]
    for layer, mass in enumerate(layers, first):
        states.append(observe(states[-1], LayerStats(layer, mass), window=window, rule=rule))
    return states[1:]


class TestFold:
    def test_decides_after_window_equal_layers_of_cumulated_mass(self):
        # cumulated: (1 0 0) -> {0}; (1 3 0) gaps 2, 1 -> {1}; (2 3 0) gaps 1, 2 -> {0, 1}; (3 5 0) gaps 2, 3;
        # (4 6 0) gaps 2, 4: three layers {0, 1} in a row, at layer 4. Layer 1's mass alone would give {1}.
        layers = [(1.0, 0.0, 0.0), (0.0, 3.0, 0.0), (1.0, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 1.0, 0.0)]
        states = fold(layers, window=3)
        assert [state.focused for state in states] == [{0}, {1}, {0, 1}, {0, 1}, {0, 1}]
        assert [state.num_unchanged for state in states] == [1, 1, 1, 2, 3]
        assert [state.decided for state in states] == [None, None, None, None, {0, 1}]
        assert states[-1].layer == 4
        assert states[-1].cumulated_mass == (4.0, 6.0, 0.0)

    def test_decided_set_never_changes(self):
        first, second = fold([(1.0, 0.0), (0.0, 9.0)], window=1, first=5)  # the first layer may have any number
        assert first.decided == {0} and first.layer == 5
        assert second is first
        assert fold([()], window=1)[-1].decided == frozenset()

    @given(st.lists(st.tuples(*[st.integers(0, 4).map(float)] * 4), min_size=1, max_size=12), st.integers(1, 5), rules)
    def test_agrees_with_alg_1_run_over_all_layers(self, layers, window, rule):
        # alg. 1 l. 10-13 as printed, with a list of all sets
        sets, expected = [], None
        for layer in range(len(layers)):
            sets.append(focused_chunks([math.fsum(column) for column in zip(*layers[: layer + 1], strict=True)], rule))
            if layer + 1 >= window and len(set(sets[-window:])) == 1:
                expected = (sets[-1], layer)
                break
        last = fold(layers, window, rule)[-1]
        assert (last.decided, last.layer) == (expected or (None, len(layers) - 1))

    @pytest.mark.parametrize(
        ("stats", "window", "rule", "name"),
        [
            (LayerStats(2, (1.0, 2.0)), 3, "entropy", "stats.layer: wanted 1"),
            (LayerStats(0, (1.0, 2.0)), 3, "entropy", "stats.layer: wanted 1"),
            (LayerStats(1, (1.0,)), 3, "entropy", "question_mass_by_chunk: wanted 2 documents"),
            (LayerStats(1, (1.0, math.nan)), 3, "entropy", r"question_mass_by_chunk\[1\]"),
            (LayerStats(1, (1.0, 2.0)), 0, "entropy", "window"),
            (LayerStats(1, (1.0, 2.0)), 3, "steepest", "rule: wanted one of entropy, largest_gap, got 'steepest'"),
            *((LayerStats(1, (1.0, bad)), 3, "entropy", r"question_mass_by_chunk\[1\]") for bad in (-0.1, math.inf)),
        ],
    )
    def test_bad_input_is_named(self, stats, window, rule, name):
        state = observe(FocusState(), LayerStats(0, (1.0, 0.0)), window=3, rule="entropy")
        with pytest.raises(ValueError, match=name):
            observe(state, stats, window=window, rule=rule)

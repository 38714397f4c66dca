"""CacheCraft sec. 3.3: choice by least CFO, f_r, eviction. Cases by hand, and invariants over random variants."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.reuse import adjusted_overlap, cache_fix_overhead
from ccjax.policy.variants import (
    choose_other_context,
    choose_repair,
    choose_variant,
    choose_victims,
    hottest_first,
    reuse_credit,
)
from tests.policy.builders import ids, variant


@st.composite
def variants_of_one_chunk(draw):
    built = {}
    for _ in range(draw(st.integers(0, 6))):
        prefix = draw(st.text("ABC", max_size=3))
        inter = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(prefix), max_size=len(prefix)))
        cci = draw(st.sampled_from([0.5, 0.6, 0.9, 1.0]))
        meta = variant("X", prefix, inter, cci=cci, fidelity=draw(st.sampled_from(["exact", "approx"])))
        built[meta.variant_id] = meta
    return list(built.values())


@st.composite
def stored(draw):
    return [
        variant("X", variant_id=f"v{i}", num_bytes=draw(st.integers(0, 9)), f_r=float(draw(st.integers(0, 3))))
        for i in range(draw(st.integers(0, 8)))
    ]


class TestChoice:
    def test_least_cfo_wins(self):
        # after A: overlap of X|AB = 3/4 -> CFO 0.8 * 1/4 = 0.2; of X|A C = 1/2 -> 0.6 * 1/2 = 0.3; X alone: 0.5
        ab, ac = variant("X", "AB", (3.0, 1.0), cci=0.8), variant("X", "AC", (1.0, 1.0), cci=0.6)
        choice = choose_variant([variant("X"), ac, ab], ids("AD"), alpha=1.0)
        assert choice is not None and choice.meta is ab
        assert choice.cfo == pytest.approx(0.2) and not choice.exact

    def test_equal_prefix_of_an_approximate_variant_is_not_exact_reuse(self):
        approx = variant("X", "AB", fidelity="approx")
        choice = choose_variant([approx], ids("AB"), alpha=1.0)
        assert choice is not None and choice.cfo == 0.0 and not choice.exact
        assert choose_variant([approx], ids("AB"), alpha=1.0, exact_only=True) is None

    def test_cfo_0_behind_another_prefix_is_not_exact(self):
        # eq. 6 as printed: old A within new AB costs nothing, although B is new to the chunk
        choice = choose_variant([variant("X", "A")], ids("AB"), alpha=1.0)
        assert choice is not None and choice.cfo == 0.0 and not choice.exact

    @pytest.mark.parametrize("alpha", [0.0, 4.0])
    def test_unscaled_score_decides_when_alpha_makes_cfos_equal(self, alpha):
        # CCI (1 - beta') = 1.0 and 0.5; times 4, clipped, both 1; times 0 both 0
        worse, better = variant("X", variant_id="0", cci=1.0), variant("X", "B", variant_id="9", cci=0.5)
        choice = choose_variant([worse, better], ids("A"), alpha=alpha)
        assert choice is not None and choice.meta is better

    def test_last_ties_break_by_id(self):
        twins = [variant("X", "B", variant_id="2"), variant("X", "C", variant_id="1")]
        choice = choose_variant(twins, ids("A"), alpha=1.0)
        assert choice is not None and choice.meta.variant_id == "1"

    @given(variants_of_one_chunk(), st.text("ABCD", max_size=3), st.sampled_from([0.0, 0.3, 1.0, 3.0]), st.randoms())
    def test_chosen_variant_has_least_cfo_in_any_order(self, variants, prefix, alpha, rng: random.Random):
        choice = choose_variant(variants, ids(prefix), alpha=alpha)
        shuffled = list(variants)
        rng.shuffle(shuffled)
        assert choose_variant(shuffled, ids(prefix), alpha=alpha) == choice
        assert (choice is None) == (not variants)
        exact = [m for m in variants if m.fidelity == "exact" and m.prefix_ids == ids(prefix)]
        only = choose_variant(variants, ids(prefix), alpha=alpha, exact_only=True)
        assert [only.meta] == exact if only else not exact
        if choice is None:
            return
        cfos = {
            m.variant_id: cache_fix_overhead(
                m.cci, adjusted_overlap(m.prefix_ids, m.inter_by_prefix, ids(prefix)), alpha
            )
            for m in variants
        }
        assert choice.cfo == cfos[choice.meta.variant_id] == min(cfos.values())
        assert choice.exact == bool(exact) and (not exact or choice.meta in exact)
        if choice.meta.fidelity == "approx":
            assert all(cfos[m.variant_id] > choice.cfo for m in variants if m.fidelity == "exact")


class TestCredit:
    @pytest.mark.parametrize(
        ("cfo", "num_tokens", "expected"),
        [(0.25, 100, 4.0), (1.0, 100, 1.0), (0.0, 100, 100.0), (0.001, 100, 100.0), (5e-324, 100, 100.0)],
    )
    def test_reuse_credit_is_inverse_cfo_capped_at_the_token_count(self, cfo, num_tokens, expected):
        assert reuse_credit(cfo, num_tokens) == pytest.approx(expected)

    @pytest.mark.parametrize(("cfo", "num_tokens", "name"), [(1.2, 5, "share"), (0.5, 0, "num_tokens")])
    def test_bad_arguments_are_named(self, cfo, num_tokens, name):
        with pytest.raises(ValueError, match=name):
            reuse_credit(cfo, num_tokens)


class TestVictims:
    # ordered by f_r, then id: c (1), a (2), d (2), b (9)
    STORED = tuple(
        variant("X", variant_id=name, f_r=f_r) for name, f_r in {"a": 2.0, "b": 9.0, "c": 1.0, "d": 2.0}.items()
    )

    @pytest.mark.parametrize(
        ("count", "pinned", "expected"),
        [
            (0, (), ()),
            (1, (), ("c",)),
            (2, (), ("c", "a")),
            (3, (), ("c", "a", "d")),
            (4, (), ("c", "a", "d", "b")),
            (5, (), None),
            (1, ("c",), ("a",)),
            (3, ("a",), ("c", "d", "b")),
            (4, ("a",), None),
            (0, ("a", "b", "c", "d"), ()),
        ],
    )
    def test_victims_have_the_least_f_r(self, count, pinned, expected):
        assert choose_victims(self.STORED, count, pinned=pinned) == expected
        assert choose_victims(reversed(self.STORED), count, pinned=pinned) == expected

    def test_negative_victim_count_is_rejected_by_name(self):
        with pytest.raises(ValueError, match="count"):
            choose_victims(self.STORED, -1)


class TestSystemPrompt:
    """The system prompt is not a prefix chunk, whatever mass it receives."""

    def test_variant_with_only_system_prefix_has_no_overlap_after_passages(self):
        choice = choose_variant([variant("X", "S", (2.0,), cci=0.6)], ids("SAB"), alpha=1.0, num_instructions=1)
        assert choice is not None and choice.cfo == 0.6 and not choice.exact

    def test_variant_with_only_system_prefix_is_exact_after_the_system_prompt(self):
        choice = choose_variant([variant("X", "S", (2.0,), cci=0.6)], ids("S"), alpha=1.0, num_instructions=1)
        assert choice is not None and choice.cfo == 0.0 and choice.exact

    @pytest.mark.parametrize(
        ("old", "masses", "new", "cfo"),
        [
            ("SAB", (90.0, 4.0, 4.0), "SDE", 0.6),  # no common passage: beta' = 0
            ("SAB", (90.0, 6.0, 2.0), "SAC", 0.6 * 0.25),
            ("SAB", (90.0, 6.0, 2.0), "SBA", 0.6),  # the reverse order of both: gamma = 1
            ("SAB", (90.0, 6.0, 2.0), "TAB", 0.6),  # another system prompt: no overlap
        ],
    )
    def test_system_prompt_counts_neither_in_overlap_nor_in_order(self, old, masses, new, cfo):
        stored = variant("X", old, masses, cci=0.6)
        choice = choose_variant([stored], ids(new), alpha=1.0, num_instructions=1)
        assert choice is not None and abs(choice.cfo - cfo) < 1e-12


class TestRepair:
    # approximate variants; S, A and B are known, C is not: d (7.0), then a and b (5.0), then e (0.0)
    STORED = (
        variant("B", "SA", variant_id="b", f_r=5.0, fidelity="approx"),
        variant("A", "SB", variant_id="a", f_r=5.0, fidelity="approx"),
        variant("A", "SBC", variant_id="c", f_r=9.0, fidelity="approx"),
        variant("C", "S", variant_id="f", f_r=8.0, fidelity="approx"),
        variant("A", "S", variant_id="x", f_r=99.0, fidelity="exact"),
        variant("B", "", variant_id="d", f_r=7.0, fidelity="approx"),
        variant("B", "S", variant_id="e", fidelity="approx"),
    )

    def test_repair_chooses_greatest_f_r_first_with_ties_by_id(self):
        left, chosen = list(self.STORED), []
        while (meta := choose_repair(left, ids("SAB"))) is not None:
            chosen.append(meta.variant_id)
            left.remove(meta)
        assert chosen == ["d", "a", "b", "e"]

    def test_repair_requires_known_prefix_and_chunk(self):
        known = {"c": ids("SABC"), "d": ids("B"), None: ids("SA")}
        for wanted, chunk_ids in known.items():
            meta = choose_repair(self.STORED, chunk_ids)
            assert (meta.variant_id if meta else None) == wanted

    def test_repair_chooses_nothing_without_approximate_variants(self):
        assert choose_repair([], ids("SAB")) is None
        assert choose_repair([variant("A", "S")], ids("SA")) is None

    @given(variants_of_one_chunk(), st.randoms())
    def test_repair_and_hottest_first_do_not_depend_on_input_order(self, variants, rng: random.Random):
        shuffled = list(variants)
        rng.shuffle(shuffled)
        assert hottest_first(shuffled) == hottest_first(variants)
        assert choose_repair(shuffled, ids("XABC")) == choose_repair(variants, ids("XABC"))


def test_hottest_first_reverses_eviction_order_and_prefers_exact_variants():
    held = [
        variant("A", variant_id="d", f_r=5.0),
        variant("B", variant_id="c", f_r=5.0, fidelity="approx"),
        variant("C", variant_id="b", f_r=9.0, fidelity="approx"),
        variant("D", variant_id="a", f_r=0.0),
        variant("E", variant_id="e", f_r=5.0),
    ]
    assert [meta.variant_id for meta in hottest_first(held)] == ["b", "d", "e", "c", "a"]
    assert hottest_first(held)[-1].variant_id == (choose_victims(held, 1) or ())[0]


class TestOtherContext:
    OWN = variant("X", "SAB")

    def test_other_context_has_least_in_common_then_is_shortest(self):
        alone, near, far = variant("X", "S"), variant("X", "SA"), variant("X", "CDE")
        assert choose_other_context([self.OWN, near, alone], self.OWN) == alone
        assert choose_other_context([near, alone, far], self.OWN) == far
        assert choose_other_context([near, variant("X", "SBA")], self.OWN) == near
        assert choose_other_context([variant("X", "C"), far], self.OWN).prefix_ids == ids("C")

    def test_other_context_must_be_exact_with_the_same_chunk_and_another_prefix(self):
        useless = [self.OWN, variant("X", "S", fidelity="approx"), variant("Y", "S")]
        assert choose_other_context(useless, self.OWN) is None
        assert choose_other_context([], self.OWN) is None


def test_text_and_instructions_are_no_passages_before_a_chunk():
    roles = ("instructions", "text", "passage", "text", "passage")
    assert dataclasses.replace(variant("X", "STAT"), roles=roles).chunks_before == 1
    assert variant("X", "SABC").chunks_before == 3

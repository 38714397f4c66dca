"""CacheCraft eq. 6-14: examples by hand, edge cases that the paper leaves open, and oracles in SciPy and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy import reuse
from ccjax.types import ChunkId
from tests.policy import oracles_policy as oracle
from tests.policy.builders import ids

prefixes = st.lists(st.sampled_from(ids("ABCDE")), max_size=7)
distinct = st.lists(st.sampled_from(ids("ABCDEFGH")), unique=True)
masses = st.floats(0.0, 1e6, allow_subnormal=False)


@st.composite
def old_prefixes(draw) -> tuple[list[ChunkId], list[float]]:
    old = draw(prefixes)
    return old, draw(st.lists(masses, min_size=len(old), max_size=len(old)))


class TestOverlap:
    def test_overlap_beta_is_the_mass_share_of_common_chunks(self):
        # inter = A 0.2, B 0.5, C 0.3; common = A, C: (0.2 + 0.3) / 1.0
        assert reuse.overlap_beta(ids("ABC"), (0.2, 0.5, 0.3), ids("CDA")) == pytest.approx(0.5)

    def test_paper_sec_3_1_one_common_chunk_beats_none(self):
        # cached C3 | C1 C2; prompt (i) C4-C2-C3 keeps C2's share 3/4, prompt (ii) C5-C6-C3 keeps nothing
        assert reuse.overlap_beta(ids("12"), (1.0, 3.0), ids("42")) == 0.75
        assert reuse.overlap_beta(ids("12"), (1.0, 3.0), ids("56")) == 0.0

    def test_additional_new_chunks_do_not_reduce_the_overlap(self):
        assert reuse.overlap_beta(ids("A"), (0.4,), ids("ABC")) == 1.0

    def test_repeated_chunks_match_once_each_in_order(self):
        # old A A B with 1, 2, 5; new holds one A: the first old A matches, (1) / 8; with two As (1 + 2) / 8
        assert reuse.overlap_beta(ids("AAB"), (1.0, 2.0, 5.0), ids("A")) == 0.125
        assert reuse.overlap_beta(ids("AAB"), (1.0, 2.0, 5.0), ids("ACA")) == 0.375

    @pytest.mark.parametrize(("old", "inter"), [("", ()), ("AB", (0.0, 0.0))])
    def test_overlap_is_zero_without_any_mass(self, old, inter):
        assert reuse.overlap_beta(ids(old), inter, ids("AB")) == 0.0

    @given(old_prefixes(), prefixes)
    def test_agrees_with_fractions_and_lies_in_0_1(self, old, new):
        got = reuse.overlap_beta(old[0], old[1], new)
        assert 0.0 <= got <= 1.0
        assert got == pytest.approx(float(oracle.beta(old[0], old[1], new)), rel=1e-12)

    @pytest.mark.parametrize("bad", [(1.0,), (1.0, -0.1), (1.0, math.nan), (math.inf, 1.0)])
    def test_bad_masses_are_named(self, bad):
        with pytest.raises(ValueError, match="inter_by_prefix"):
            reuse.overlap_beta(ids("AB"), bad, ids("A"))


class TestOrder:
    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("12", "21", 1.0),  # the paper's C1-C2-C3 against C2-C1-C3: 1 discordant of 1 pair
            ("ABC", "BAC", 1 / 3),  # of AB, AC, BC only AB is reversed
            ("ABC", "CAB", 2 / 3),  # AC and BC
            ("ABCD", "DXCBYA", 1.0),
            ("ABC", "AXBYC", 0.0),
            ("ABC", "CXY", 0.0),  # m = 1: no pair
            ("", "AB", 0.0),
            ("AAB", "ABA", 1 / 3),  # A1 A2 B against A1 B A2: only (A2, B) is discordant
        ],
    )
    def test_order_gamma_matches_hand_computed_examples(self, old, new, expected):
        assert reuse.order_gamma(ids(old), ids(new)) == pytest.approx(expected)

    @given(distinct, distinct)
    def test_agrees_with_scipy_kendall_tau(self, old, new):
        assert reuse.order_gamma(old, new) == pytest.approx(oracle.gamma(old, new), abs=1e-12)

    @given(prefixes, prefixes)
    def test_order_gamma_is_symmetric_and_in_0_1(self, old, new):
        assert reuse.order_gamma(old, new) == reuse.order_gamma(new, old)
        assert 0.0 <= reuse.order_gamma(old, new) <= 1.0

    @given(prefixes, distinct.filter(lambda chunks: len(chunks) > 1))
    def test_order_gamma_is_zero_for_the_same_order_and_one_for_the_reverse(self, same, chunks):
        assert reuse.order_gamma(same, same) == 0.0
        assert reuse.order_gamma(chunks, chunks[::-1]) == 1.0


class TestAdjustedOverlap:
    def test_eq_8(self):
        # beta = (2 + 1 + 3) / 8 = 3/4 over A, B, C; new order B A C: gamma = 1/3; 3/4 * 2/3 = 1/2
        assert reuse.adjusted_overlap(ids("ABCD"), (2.0, 1.0, 3.0, 2.0), ids("BAC")) == pytest.approx(0.5)

    def test_paper_sec_3_1_reordered_prefix_has_beta_1_but_no_overlap_left(self):
        assert reuse.overlap_beta(ids("12"), (1.0, 1.0), ids("21")) == 1.0
        assert reuse.adjusted_overlap(ids("12"), (1.0, 1.0), ids("21")) == 0.0

    @pytest.mark.parametrize(
        ("old", "inter", "new", "expected"),
        [
            ("", (), "", 1.0),  # equal: exact reuse
            ("", (), "A", 0.0),  # encoded alone: no prefix is known
            ("AB", (0.0, 0.0), "AB", 1.0),  # equal, although eq. 6 is 0/0
            ("AB", (0.0, 0.0), "A", 0.0),
        ],
    )
    def test_cases_the_paper_leaves_open(self, old, inter, new, expected):
        assert reuse.adjusted_overlap(ids(old), inter, ids(new)) == expected

    @given(old_prefixes(), prefixes)
    def test_adjusted_overlap_is_at_most_beta_unless_prefixes_are_equal(self, old, new):
        got = reuse.adjusted_overlap(old[0], old[1], new)
        if old[0] == new:
            assert got == 1.0
        else:
            assert 0.0 <= got <= reuse.overlap_beta(old[0], old[1], new)


class TestContextImpact:
    def test_eq_9(self):
        # |C| = 4, prefixes of 2 and 5 tokens: a = 1.6/(4*2) + 1.0/(4*5) = 0.2 + 0.05; b = 0.8/16
        assert reuse.normalised_masses((1.6, 1.0), 0.8, (2, 5), 4) == pytest.approx((0.25, 0.05))

    def test_no_prefix_has_no_inter_mass(self):
        assert reuse.normalised_masses((), 3.0, (), 2) == (0.0, 0.75)

    @pytest.mark.parametrize(
        ("args", "name"),
        [
            (((1.0,), 1.0, (1, 2), 3), "inter_total"),
            (((-1.0,), 1.0, (1,), 3), r"inter_total\[0\]"),
            (((1.0,), -1.0, (1,), 3), "intra"),
            (((1.0,), 1.0, (0,), 3), r"prefix_lengths\[0\]"),
            (((1.0,), 1.0, (1,), 0), "num_tokens"),
        ],
    )
    def test_bad_arguments_are_named(self, args, name):
        with pytest.raises(ValueError, match=name):
            reuse.normalised_masses(*args)

    def test_eq_11(self):
        # a/b = ln 3: 1 / (1 + 1/3) = 3/4
        assert reuse.chunk_context_impact(2 * math.log(3), 2.0) == pytest.approx(0.75)

    @pytest.mark.parametrize(("a", "b", "expected"), [(0.0, 2.0, 0.5), (0.0, 0.0, 0.5), (0.1, 0.0, 1.0)])
    def test_context_impact_at_its_limits(self, a, b, expected):
        assert reuse.chunk_context_impact(a, b) == expected

    @given(masses, st.floats(1e-9, 1e6))
    def test_agrees_with_scipy_and_never_falls_below_one_half(self, a, b):
        got = reuse.chunk_context_impact(a, b)
        assert 0.5 <= got <= 1.0
        assert got == pytest.approx(oracle.cci(a, b), rel=1e-12)

    def test_a_huge_ratio_does_not_overflow(self):
        assert reuse.chunk_context_impact(1e300, 1e-300) == 1.0

    @pytest.mark.parametrize(("a", "b", "name"), [(-1.0, 1.0, "a"), (1.0, -1.0, "b"), (math.nan, 1.0, "a")])
    def test_bad_masses_are_named(self, a, b, name):
        with pytest.raises(ValueError, match=f"^{name}: "):
            reuse.chunk_context_impact(a, b)


class TestFixOverhead:
    @pytest.mark.parametrize(
        ("cci", "beta", "alpha", "expected"),
        [
            (0.75, 0.5, 1.0, 0.375),
            (0.75, 0.5, 0.4, 0.15),
            (0.5, 0.0, 1.0, 0.5),  # encoded alone, a/b = 0: half at alpha 1
            (0.8, 0.25, 3.0, 1.0),  # 1.8, clipped
            (0.9, 1.0, 5.0, 0.0),
        ],
    )
    def test_eq_12(self, cci, beta, alpha, expected):
        assert reuse.cache_fix_overhead(cci, beta, alpha) == pytest.approx(expected)

    @given(st.floats(0.5, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 10.0))
    def test_agrees_with_fractions_and_lies_in_0_1(self, cci, beta, alpha):
        got = reuse.cache_fix_overhead(cci, beta, alpha)
        assert 0.0 <= got <= 1.0
        assert got == pytest.approx(float(oracle.cfo(cci, beta, alpha)), abs=1e-12)

    @pytest.mark.parametrize(
        ("args", "name"), [((1.1, 0.5, 1.0), "cci"), ((0.5, -0.1, 1.0), "beta_adjusted"), ((0.5, 0.5, -1.0), "alpha")]
    )
    def test_bad_arguments_are_named(self, args, name):
        with pytest.raises(ValueError, match=name):
            reuse.cache_fix_overhead(*args)


class TestTokenCounts:
    @pytest.mark.parametrize(
        ("cfo", "num_tokens", "expected"),
        [(0.15, 20, 3), (0.07, 100, 7), (0.3, 10, 3), (0.301, 10, 4), (0.0, 5, 0), (1.0, 5, 5), (1e-12, 5, 1)],
    )
    def test_eq_14_rounds_up(self, cfo, num_tokens, expected):
        assert reuse.num_recompute_tokens(cfo, num_tokens) == expected

    @given(st.integers(0, 1000), st.integers(1, 5000))
    def test_decimal_shares_round_as_fractions_do(self, thousandths, num_tokens):
        exact = Fraction(thousandths, 1000) * num_tokens
        assert reuse.num_recompute_tokens(thousandths / 1000, num_tokens) == math.ceil(exact)
        assert reuse.max_recompute_tokens(thousandths / 1000, num_tokens) == math.floor(exact)

    def test_binary_rounding_errors_do_not_change_token_counts(self):
        assert math.ceil(0.07 * 100) == 8 and math.floor(0.29 * 100) == 28
        assert reuse.max_recompute_tokens(0.29, 100) == 29

    @pytest.mark.parametrize("cfo", [-0.1, 1.5, math.nan, "0.5", True])
    def test_bad_share_is_named(self, cfo):
        with pytest.raises(ValueError, match="cfo: wanted a number in"):
            reuse.num_recompute_tokens(cfo, 10)

    @pytest.mark.parametrize("num_tokens", [0, -3, 2.0])
    def test_bad_length_is_named(self, num_tokens):
        with pytest.raises(ValueError, match="num_tokens: wanted an integer of at least 1"):
            reuse.num_recompute_tokens(0.5, num_tokens)

    def test_most_contextualised_offsets_are_in_ascending_order(self):
        assert reuse.most_contextualised((4, 0, 3, 1, 2), 5, 3) == (0, 3, 4)
        assert reuse.most_contextualised((4, 0, 3, 1, 2), 5, 0) == ()

    @pytest.mark.parametrize("ranking", [(0, 1), (0, 0, 1), (3, 0, 1), (-1, 0, 1)])
    def test_ranking_that_is_not_a_permutation_is_rejected(self, ranking):
        with pytest.raises(ValueError, match="token_ranking"):
            reuse.most_contextualised(ranking, 3, 2)

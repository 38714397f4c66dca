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
    @pytest.mark.parametrize(
        ("old", "inter", "new", "expected"),
        [
            ("ABC", (0.2, 0.5, 0.3), "CDA", 0.5),  # common = A, C: (0.2 + 0.3) / 1.0
            # sec. 3.1: cached C3 | C1 C2; prompt (i) C4-C2-C3 keeps C2's share 3/4, prompt (ii) C5-C6-C3 keeps nothing
            ("12", (1.0, 3.0), "42", 0.75),
            ("12", (1.0, 3.0), "56", 0.0),
            ("A", (0.4,), "ABC", 1.0),  # more new chunks cost nothing
            # old A A B with 1, 2, 5; new holds one A: the first old A matches, (1) / 8; with two As (1 + 2) / 8
            ("AAB", (1.0, 2.0, 5.0), "A", 0.125),
            ("AAB", (1.0, 2.0, 5.0), "ACA", 0.375),
            ("", (), "AB", 0.0),  # no mass
            ("AB", (0.0, 0.0), "AB", 0.0),
        ],
    )
    def test_overlap_beta_is_the_mass_share_of_common_chunks(self, old, inter, new, expected):
        assert reuse.overlap_beta(ids(old), inter, ids(new)) == pytest.approx(expected)

    @given(old_prefixes(), prefixes)
    def test_agrees_with_fractions_and_lies_in_0_1(self, old, new):
        got = reuse.overlap_beta(old[0], old[1], new)
        assert 0.0 <= got <= 1.0
        assert got == pytest.approx(float(oracle.beta(old[0], old[1], new)), rel=1e-12)


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

    @given(prefixes, prefixes, distinct.filter(lambda chunks: len(chunks) > 1))
    def test_order_gamma_is_symmetric_and_ranges_from_the_same_order_to_the_reverse(self, old, new, chunks):
        assert reuse.order_gamma(old, new) == reuse.order_gamma(new, old)
        assert 0.0 <= reuse.order_gamma(old, new) <= 1.0
        assert reuse.order_gamma(old, old) == 0.0
        assert reuse.order_gamma(chunks, chunks[::-1]) == 1.0


class TestAdjustedOverlap:
    @pytest.mark.parametrize(
        ("old", "inter", "new", "expected"),
        [
            # beta = (2 + 1 + 3) / 8 = 3/4 over A, B, C; new order B A C: gamma = 1/3; 3/4 * 2/3 = 1/2
            ("ABCD", (2.0, 1.0, 3.0, 2.0), "BAC", 0.5),
            ("12", (1.0, 1.0), "21", 0.0),  # sec. 3.1: a reordered prefix, beta = 1
            ("", (), "", 1.0),  # equal: exact reuse
            ("", (), "A", 0.0),  # encoded alone: no prefix is known
            ("AB", (0.0, 0.0), "AB", 1.0),  # equal, although eq. 6 is 0/0
            ("AB", (0.0, 0.0), "A", 0.0),
        ],
    )
    def test_eq_8(self, old, inter, new, expected):
        assert reuse.adjusted_overlap(ids(old), inter, ids(new)) == pytest.approx(expected)

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
        assert reuse.normalised_masses((), 3.0, (), 2) == (0.0, 0.75)

    @pytest.mark.parametrize(
        ("a", "b", "expected"),
        [
            (2 * math.log(3), 2.0, 0.75),  # a/b = ln 3: 1 / (1 + 1/3)
            (0.0, 2.0, 0.5),
            (0.0, 0.0, 0.5),
            (0.1, 0.0, 1.0),
            (1e300, 1e-300, 1.0),
        ],
    )
    def test_eq_11(self, a, b, expected):
        assert reuse.chunk_context_impact(a, b) == pytest.approx(expected)

    @given(masses, st.floats(1e-9, 1e6))
    def test_agrees_with_scipy_and_never_falls_below_one_half(self, a, b):
        got = reuse.chunk_context_impact(a, b)
        assert 0.5 <= got <= 1.0
        assert got == pytest.approx(oracle.cci(a, b), rel=1e-12)


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

    def test_most_contextualised_offsets_are_in_ascending_order(self):
        assert reuse.most_contextualised((4, 0, 3, 1, 2), 5, 3) == (0, 3, 4)
        assert reuse.most_contextualised((4, 0, 3, 1, 2), 5, 0) == ()

    @pytest.mark.parametrize("ranking", [(0, 1), (0, 0, 1), (3, 0, 1), (-1, 0, 1)])
    def test_ranking_that_is_not_a_permutation_is_rejected(self, ranking):
        with pytest.raises(ValueError, match="token_ranking"):
            reuse.most_contextualised(ranking, 3, 2)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        *((reuse.overlap_beta, (ids("AB"), (1.0, bad), ids("A")), r"inter_by_prefix\[1\]") for bad in (-0.1, math.nan)),
        (reuse.overlap_beta, (ids("AB"), (math.inf, 1.0), ids("A")), r"inter_by_prefix\[0\]"),
        (reuse.overlap_beta, (ids("AB"), (1.0,), ids("A")), "inter_by_prefix: wanted one mass"),
        (reuse.normalised_masses, ((1.0,), 1.0, (1, 2), 3), "inter_total"),
        (reuse.normalised_masses, ((-1.0,), 1.0, (1,), 3), r"inter_total\[0\]"),
        (reuse.normalised_masses, ((1.0,), -1.0, (1,), 3), "intra"),
        (reuse.normalised_masses, ((1.0,), 1.0, (0,), 3), r"prefix_lengths\[0\]"),
        (reuse.normalised_masses, ((1.0,), 1.0, (1,), 0), "num_tokens"),
        (reuse.chunk_context_impact, (-1.0, 1.0), "^a: "),
        (reuse.chunk_context_impact, (math.nan, 1.0), "^a: "),
        (reuse.chunk_context_impact, (1.0, -1.0), "^b: "),
        (reuse.cache_fix_overhead, (1.1, 0.5, 1.0), "cci"),
        (reuse.cache_fix_overhead, (0.5, -0.1, 1.0), "beta_adjusted"),
        (reuse.cache_fix_overhead, (0.5, 0.5, -1.0), "alpha"),
        *(
            (reuse.num_recompute_tokens, (bad, 10), "cfo: wanted a number in")
            for bad in (-0.1, 1.5, math.nan, "0.5", True)
        ),
        *(
            (reuse.num_recompute_tokens, (0.5, bad), "num_tokens: wanted an integer of at least 1")
            for bad in (0, -3, 2.0)
        ),
    ],
)
def test_bad_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)

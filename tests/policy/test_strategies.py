"""The registry, and each strategy's decisions for one prompt with every kind of candidate."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import STRATEGIES, get_strategy
from ccjax.types import VariantMeta
from tests.policy.builders import ids, prompt, question, variant

# S exact; A exact after S; B after A and another, CFO 0.5 * 1/2 = 0.25 of 10 tokens: 3; C exact after S A B; D none
PROMPT = prompt("SABCD", system=True)
CANDIDATES = {
    ids("S")[0]: [variant("S")],
    ids("A")[0]: [variant("A", "S"), variant("A")],
    ids("B")[0]: [variant("B", "SAX", variant_id="B|SX|exact")],
    ids("C")[0]: [variant("C", "SAB")],
}


def decided(strategy: str, mode: Any = "bounded", **settings) -> list[tuple[str | None, tuple[int, ...]]]:
    plan = plan_prefill(
        [*PROMPT, question()], CANDIDATES, mode=mode, settings=PlannerSettings(strategy=strategy, **settings)
    )
    return [(segment.variant_id, segment.recompute_offsets) for segment in plan.segments[:-1]]


COMPUTE = (None, ())
# for i in $(seq 0 9); do echo $(printf 'ccjax-random-1/B|SX|exact/%s' $i | sha256sum) $i; done | sort
DRAWN = (8, 0, 7, 3, 1, 5, 2, 6, 4, 9)
S, A, C = ("S||exact", ()), ("A|S|exact", ()), ("C|SAB|exact", ())


@pytest.mark.parametrize(
    ("strategy", "mode", "expected"),
    [
        ("full", "bounded", [COMPUTE] * 5),
        ("full", "exact", [COMPUTE] * 5),
        ("prefix", "bounded", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("prefix", "exact", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("prefix", "fast", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("set", "bounded", [S, A, COMPUTE, COMPUTE, COMPUTE]),  # C's path needs an exact B after S A
        ("set", "exact", [S, A, COMPUTE, COMPUTE, COMPUTE]),
        ("set", "off", [COMPUTE] * 5),
        ("reuse", "bounded", [S, A, ("B|SX|exact", ()), C, COMPUTE]),
        ("reuse", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("cachecraft", "bounded", [S, A, ("B|SX|exact", (7, 8, 9)), C, COMPUTE]),
        ("cachecraft", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("cachecraft", "off", [COMPUTE] * 5),
        ("legolink", "bounded", [S, A, ("B|SX|exact", (0, 1, 2)), C, COMPUTE]),
        ("legolink", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("legolink", "off", [COMPUTE] * 5),
        ("random", "bounded", [S, A, ("B|SX|exact", (0, 7, 8)), C, COMPUTE]),  # DRAWN[:3]
        ("random", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("auto", "bounded", [S, A, ("B|SX|exact", (8, 9)), C, COMPUTE]),  # at most 0.15
        ("auto", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("deviation", "bounded", [S, A, ("B|SX|exact", (7, 8, 9)), C, COMPUTE]),
        ("deviation", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("h2o", "bounded", [S, A, COMPUTE, C, COMPUTE]),  # the mass that B's tokens received was not measured
        ("h2o", "exact", [S, A, COMPUTE, C, COMPUTE]),
        ("random", "off", [COMPUTE] * 5),
        ("reuse", "off", [COMPUTE] * 5),
    ],
)
def test_decisions_of_each_strategy_and_mode(strategy, mode, expected):
    assert decided(strategy, mode) == expected


@pytest.mark.parametrize("strategy", ["cachecraft", "legolink", "random"])
@pytest.mark.parametrize(
    ("mode", "settings", "num_recomputed"),
    [
        ("bounded", {"alpha": 0.4}, 1),  # 0.1 of 10
        ("bounded", {"alpha": 2.0}, 5),
        ("bounded", {"recompute_ratio": 0.0}, 0),
        ("bounded", {"recompute_ratio": 0.75}, 8),
        ("fast", {}, 0),  # at most 0.05 of 10, half a token, so none
        ("fast", {"fast_ratio": 0.1}, 1),
        ("fast", {"fast_ratio": 0.9}, 3),  # CFO needs less than the limit
        ("fast", {"fast_ratio": 0.9, "recompute_ratio": 1.0}, 3),  # the forced share applies only to `bounded`
    ],
)
def test_settings_determine_which_tokens_are_recomputed(strategy, mode, settings, num_recomputed):
    order = {"cachecraft": range(9, -1, -1), "legolink": range(10), "random": DRAWN}[strategy]
    assert decided(strategy, mode, **settings)[2] == ("B|SX|exact", tuple(sorted(order[:num_recomputed])))


class TestAuto:
    """S exact; A computed; B and D stored after A and another, CFO 0.25 of 10 tokens: 3 each."""

    def decided(
        self, b: list[VariantMeta], d: list[VariantMeta], mode: Any = "bounded", strategy: str = "auto", **settings
    ) -> list[tuple]:
        candidates = {ids("S")[0]: [variant("S")], ids("B")[0]: b, ids("D")[0]: d}
        chunks = prompt("SABD", system=True)
        planned = PlannerSettings(strategy=strategy, **{"recompute_cap": 1.0, **settings})
        plan = plan_prefill([*chunks, question()], candidates, mode=mode, settings=planned)
        return [segment.recompute_offsets for segment in plan.segments[2:-1]]

    LOW, HIGH = (0.3, 0.1, 0, 0, 0, 0, 0, 0, 0, 0.2), (0, 0, 0.9, 0.8, 0.25, 0, 0, 0, 0, 0.7)

    def test_budget_is_spent_on_tokens_with_the_largest_deviations(self):
        found = self.decided([variant("B", "SAX", deviations=self.LOW)], [variant("D", "SAX", deviations=self.HIGH)])
        assert found == [(0, 9), (2, 3, 4, 9)]  # 6 tokens: .9 .8 .7 .3 .25 .2

    def test_chunk_with_a_more_similar_prefix_gets_less_recompute(self):
        # After A, half of the chunks that D attended to are present: CFO 0.25. Of B's there is none: 0.5.
        weak = (0.24, *(0.0,) * 9)
        far = variant("B", "SAX", (0.0, 0.0, 1.0), deviations=weak)
        near = variant("D", "SAX", (0.0, 1.0, 1.0), deviations=self.HIGH)
        assert self.decided([far], [near], recompute_ratio=0.2) == [(0,), (2, 3, 9)]  # 0.12 before 0.25 * 0.25
        as_near = variant("B", "SAX", (0.0, 1.0, 1.0), deviations=weak)
        assert self.decided([as_near], [near], recompute_ratio=0.2) == [(), (2, 3, 4, 9)]

    def test_chunk_without_deviations_recomputes_its_own_count_by_attention(self):
        found = self.decided([variant("B", "SAX")], [variant("D", "SAX", deviations=self.HIGH)])
        assert found == [(7, 8, 9), (2, 3, 9)]

    def test_mean_deviation_of_other_variants_is_used(self):
        other = variant("B", "SYZ", deviations=(0, 0, 0, 0, 1, 0.5, 0.1, 0, 0, 0))
        more = variant("B", "SY", deviations=(0, 0, 0, 0, 0, 0.9, 0.2, 0, 0, 0), variant_id="zz")
        chosen = variant("B", "SAX")
        assert self.decided([chosen, other, more], [])[0] == (4, 5, 6)
        assert self.decided([chosen, other, more], [], recompute_ratio=0.1)[0] == (5,)  # mean .7 before .5

    @pytest.mark.parametrize(
        ("mode", "settings", "count"),
        [("bounded", {"alpha": 0.4}, 2), ("bounded", {"recompute_ratio": 0.45}, 10), ("fast", {"fast_ratio": 0.1}, 2)],
    )
    def test_total_recomputed_tokens_equal_those_of_cachecraft(self, mode, settings, count):
        b, d = [variant("B", "SAX", deviations=self.LOW)], [variant("D", "SAX", deviations=self.HIGH)]
        assert sum(map(len, self.decided(b, d, mode, **settings))) == count
        assert self.decided(b, d, "exact") == [(), ()]

    def test_max_deviation_recomputes_every_token_above_it(self):
        b, d = (
            [variant("B", "SAX", deviations=self.LOW)],
            [variant("D", "SAX", deviations=self.HIGH)],
        )  # half of the prefix is missing
        assert self.decided(b, d, max_deviation=0.1) == [(0,), (2, 3, 4, 9)]  # more than 0.2 of their own
        assert self.decided(b, d, max_deviation=0.14) == [(0,), (2, 3, 9)]
        assert self.decided(b, d, max_deviation=0.45) == [(), ()]
        assert self.decided(b, d, max_deviation=0.0) == [(0, 1, 9), (2, 3, 4, 9)]
        assert self.decided(b, d, max_deviation=0.14, recompute_ratio=0.1) == [(), (2, 3)], "a forced share goes first"
        assert self.decided(b, d, "fast", max_deviation=0.0, fast_ratio=0.1) == [(), (2, 3)]
        never = [variant("B", "SAX")]
        assert self.decided(never, d, max_deviation=0.14) == [(7, 8, 9), (2, 3, 9)]

    def test_alpha_does_not_change_which_tokens_deviate_too_much(self):
        b, d = [variant("B", "SAX", deviations=self.LOW)], [variant("D", "SAX", deviations=self.HIGH)]
        for alpha in (0.5, 8.0):  # 8 clips the CFO
            assert self.decided(b, d, max_deviation=0.14, alpha=alpha) == [(0,), (2, 3, 9)]

    def test_recompute_cap_applies_to_the_prompt_and_favours_large_deviations(self):
        b, d = [variant("B", "SAX", deviations=self.LOW)], [variant("D", "SAX", deviations=self.HIGH)]
        assert self.decided(b, d, recompute_cap=0.15) == [(), (2, 3, 9)], "0.15 of 20"
        forced = self.decided(b, d, recompute_cap=0.15, recompute_ratio=0.3)
        assert forced == [(0, 9), (2, 3, 4, 9)], "a forced share is no less"
        never = [variant("B", "SAX")]
        assert self.decided(never, d, recompute_cap=0.15) == [(8, 9), (2, 3)], "each its own 0.15 of 10"
        assert PlannerSettings().recompute_cap == 0.15

    @pytest.mark.parametrize(
        ("settings", "of_b", "of_d"),
        [
            ({"recompute_ratio": 0.0}, (), ()),
            ({"recompute_ratio": 0.1}, (), (0, 1, 2, 3)),  # half a run is rounded up
            ({"recompute_ratio": 0.3}, (), (0, 1, 2, 3, 8, 9)),
            ({"recompute_ratio": 0.4}, (0, 1, 2, 3), (0, 1, 2, 3, 8, 9)),
            ({"max_deviation": 0.14}, (0, 1, 2, 3), (0, 1, 2, 3, 8, 9)),
        ],
    )
    def test_runs_are_recomputed_whole_by_their_highest_deviation(self, settings, of_b, of_d):
        """Runs of 4; the last of each chunk has 2 tokens."""
        b, d = [variant("B", "SAX", deviations=self.LOW)], [variant("D", "SAX", deviations=self.HIGH)]
        assert self.decided(b, d, run_tokens=4, **settings) == [of_b, of_d]

    def test_a_run_with_one_high_deviation_goes_before_one_with_a_higher_mean(self):
        b = [variant("B", "SAX", deviations=(0.2,) * 4 + (0.0, 0.6, 0.0, 0.0, 0.1, 0.1))]
        d = [variant("D", "SAX", deviations=self.LOW)]
        assert self.decided(b, d, run_tokens=4, recompute_ratio=0.2) == [(4, 5, 6, 7), ()]

    def test_question_chooses_tokens_if_most_deviations_are_unknown(self):
        never_b, never_d = variant("B", "SAX"), variant("D", "SAX")
        measured = variant("D", "SAX", deviations=self.HIGH)
        complete = variant("B", "SA", fidelity="approx")  # behind exactly these chunks: nothing to recompute

        def chosen(
            b: VariantMeta, d: VariantMeta, mode: Any = "bounded", question_tokens: int = 4, **settings
        ) -> tuple[list[int], list[int]]:
            """The segments among whose tokens the question chooses, and how many tokens each has to recompute."""
            candidates = {ids("S")[0]: [variant("S")], ids("B")[0]: [b], ids("D")[0]: [d]}
            chunks = prompt("SABD", system=True)
            planned = PlannerSettings(**settings)
            plan = plan_prefill([*chunks, question(question_tokens)], candidates, mode=mode, settings=planned)
            return list(plan.chosen_by_question), [len(segment.recompute_offsets) for segment in plan.segments[2:-1]]

        assert chosen(never_b, never_d) == ([2, 3], [2, 2]), "0.15 of each"
        assert chosen(never_b, never_d, question_tokens=5) == ([], [2, 2]), "it would cost more than it chooses"
        assert chosen(never_b, measured) == ([], [2, 2]), "half is known"
        assert chosen(never_b, never_d, "fast", fast_ratio=0.5) == ([], [2, 2])
        assert chosen(never_b, never_d, max_deviation=0.1) == ([], [2, 2]), "what was tried without"
        assert chosen(never_b, never_d, recompute_ratio=0.5) == ([2, 3], [5, 5]), "a forced share is no less"
        assert chosen(never_b, never_d, recompute_ratio=1.0) == ([], [0, 0]), "computed"
        assert chosen(complete, measured) == ([], [0, 2]), "the complete one has no say"
        assert chosen(complete, never_d, question_tokens=2) == ([3], [0, 2])

    def test_variants_without_a_passage_prefix_are_chosen_last(self):
        """Eq. 12 would put it first, because its CCI is the smallest."""
        alone, framed, live = variant("B", "S"), variant("B", "SFG", cci=0.9), variant("B", "SAX", cci=0.9)

        def chosen(*variants: VariantMeta, strategy: str = "auto", names: str = "SAB") -> str | None:
            candidates = {ids("B")[0]: variants}
            settings = PlannerSettings(strategy=strategy)
            plan = plan_prefill(
                [*prompt(names, system=True), question()], candidates, mode="bounded", settings=settings
            )
            return plan.segments[-2].variant_id

        assert chosen(alone, framed, live) == live.variant_id
        assert chosen(alone, framed) == framed.variant_id
        near = variant("B", "SA")
        assert chosen(alone, framed, near, names="SCAB") == framed.variant_id
        assert chosen(alone, near, names="SCAB") == near.variant_id
        assert chosen(alone, framed, strategy="cachecraft") == alone.variant_id
        assert chosen(alone) == alone.variant_id
        assert chosen(alone, framed, live, names="SB") == alone.variant_id, "exact"

    def test_equal_deviations_are_recomputed_in_prompt_order(self):
        flat = (0.5,) * 10
        found = self.decided([variant("B", "SAX", deviations=flat)], [variant("D", "SAX", deviations=flat)])
        assert found == [(0, 1, 2, 3, 4, 5), ()]


class TestDeviation:
    LOW, HIGH = TestAuto.LOW, TestAuto.HIGH
    decided = TestAuto.decided

    def test_deviation_strategy_counts_tokens_per_chunk(self):
        b, d = [variant("B", "SAX", deviations=self.LOW)], [variant("D", "SAX", deviations=self.HIGH)]
        assert self.decided(b, d, strategy="deviation") == [(0, 1, 9), (2, 3, 9)]
        assert self.decided([variant("B", "SAX")], d, strategy="deviation") == [(7, 8, 9), (2, 3, 9)]
        assert self.decided(b, d, "fast", strategy="deviation", fast_ratio=0.1) == [(0,), (2,)]
        assert self.decided(b, d, "exact", strategy="deviation") == [(), ()]


class TestH2O:
    def decided(self, *variants: VariantMeta, **settings) -> tuple[str | None, tuple[int, ...]]:
        candidates = {ids("S")[0]: [variant("S")], ids("B")[0]: list(variants)}
        planned = PlannerSettings(strategy="h2o", **settings)
        plan = plan_prefill([*prompt("SAB", system=True), question()], candidates, mode="bounded", settings=planned)
        return plan.segments[2].variant_id, plan.segments[2].recompute_offsets

    DREW = (0.1, 3, 0.2, 5, 0.3, 0.3, 4, 0, 0, 0)

    def test_h2o_recomputes_tokens_that_received_the_most_attention(self):
        measured = variant("B", "SAX", received=self.DREW)
        assert self.decided(measured) == ("B|SAX|exact", (1, 3, 6))
        assert self.decided(measured, recompute_ratio=0.5) == ("B|SAX|exact", (1, 3, 4, 5, 6))
        assert self.decided(measured, recompute_ratio=0.4) == ("B|SAX|exact", (1, 3, 4, 6)), "of equal ones the first"

    def test_h2o_does_not_approximate_variants_without_measured_attention(self):
        assert self.decided(variant("B", "SX", fidelity="approx")) == (None, ())
        far = variant("B", "X", received=self.DREW)
        assert self.decided(variant("B", "SX", fidelity="approx"), far)[0] == "B|X|exact"
        assert self.decided(variant("B", "SA"), far) == ("B|SA|exact", ())


class TestSet:
    def decided(self, names: str, *variants: VariantMeta, system: bool = True) -> list[tuple[str | None, str]]:
        candidates = {name: [meta for meta in variants if meta.chunk_id == name] for name in ids(names)}
        chunks = prompt(names, system=system)
        settings = PlannerSettings(strategy="set")
        plan = plan_prefill([*chunks, question()], candidates, mode="bounded", settings=settings)
        assert not any(segment.recompute_offsets for segment in plan.segments)
        return [
            (segment.variant_id and segment.variant_id.split("|")[1], segment.fidelity) for segment in plan.segments
        ]

    def test_set_reuses_a_path_stored_in_another_order(self):
        path = variant("S"), variant("C", "S"), variant("A", "SC")
        assert self.decided("SABCD", *path) == [
            ("", "exact"),
            ("SC", "approx"),
            (None, "approx"),
            ("S", "approx"),
            (None, "approx"),
            (None, "approx"),
        ]

    def test_set_chooses_the_longest_path(self):
        longer = variant("B", "S"), variant("A", "SB"), variant("C", "SBA")
        found = self.decided("SABC", variant("S"), variant("A", "S"), *longer)
        assert [prefix for prefix, _ in found] == ["", "SB", "S", "SBA", None]

    def test_set_prefers_prompt_order_among_equal_paths(self):
        found = self.decided(
            "SAB", variant("S"), variant("A", "S"), variant("B", "SA"), variant("B", "S"), variant("A", "SB")
        )
        assert found == [("", "exact"), ("S", "exact"), ("SA", "exact"), (None, "exact")]

    def test_set_paths_start_with_the_system_prompt_if_there_is_one(self):
        alone = variant("A"), variant("B", "A")
        assert self.decided("SAB", variant("S"), *alone)[1:] == [(None, "exact")] * 3
        assert [prefix for prefix, _ in self.decided("BA", *alone, system=False)] == ["A", "", None]

    def test_set_needs_a_variant_for_each_occurrence_of_a_repeated_chunk(self):
        found = self.decided("SAA", variant("S"), variant("A", "S"))
        assert [prefix for prefix, _ in found] == ["", "S", None, None]
        assert [prefix for prefix, _ in self.decided("SAA", variant("S"), variant("A", "S"), variant("A", "SA"))] == [
            "",
            "S",
            "SA",
            None,
        ]

    def test_set_ignores_approximate_variants(self):
        assert self.decided("SA", variant("S"), variant("A", "S", fidelity="approx"))[1] == (None, "exact")


class TestRandom:
    def offsets(self, meta: VariantMeta, ratio: float) -> tuple[int, ...]:
        settings = PlannerSettings(strategy="random", recompute_ratio=ratio)
        chunks = prompt(f"S{meta.chunk_id}", meta.num_tokens, system=True)
        plan = plan_prefill([*chunks, question()], {meta.chunk_id: [meta]}, mode="bounded", settings=settings)
        return plan.segments[1].recompute_offsets

    def test_random_tokens_differ_between_variants_of_one_chunk(self):
        drawn = {self.offsets(variant("B", prefix, num_tokens=40), 0.5) for prefix in ("X", "Y", "XY", "YX")}
        assert len(drawn) == 4

    def test_random_draw_ignores_masses_and_ranking(self):
        drawn = {
            self.offsets(variant("B", "X", [mass], num_tokens=10, ranking=ranking), 0.3)
            for mass in (0.5, 2.0)
            for ranking in (range(10), range(9, -1, -1))
        }
        assert len(drawn) == 1

    def test_larger_random_share_includes_the_tokens_of_a_smaller_one(self):
        draws = [set(self.offsets(variant("B", "X", num_tokens=40), ratio)) for ratio in (0.1, 0.15, 0.3, 0.5, 0.9)]
        assert [len(draw) for draw in draws] == [4, 6, 12, 20, 36]
        assert all(small < large for small, large in pairwise(draws))

    def test_random_tokens_are_drawn_uniformly(self):
        num_variants, num_tokens = 2000, 20
        counts = Counter(
            offset
            for index in range(num_variants)
            for offset in self.offsets(variant("B", "X", variant_id=f"v{index}", num_tokens=num_tokens), 0.3)
        )
        # 2000 variants at 0.3: 600 of each token, standard deviation sqrt(2000 * 0.3 * 0.7) = 20.5
        assert set(counts) == set(range(num_tokens)) and counts.total() == 12_000
        assert all(abs(count - 600) < 4 * 20.5 for count in counts.values())


def test_reuse_strategy_ignores_a_forced_share():
    assert decided("reuse", recompute_ratio=1.0)[2] == ("B|SX|exact", ())


def test_prefix_strategy_stops_at_the_first_missing_chunk():
    plan = plan_prefill(
        [*prompt("AB"), question()],
        {ids("B")[0]: [variant("B", "A")]},
        mode="exact",
        settings=PlannerSettings(strategy="prefix"),
    )
    assert [segment.action for segment in plan.segments] == ["compute"] * 3


def test_unknown_strategy_name_lists_the_known_ones():
    names = [
        "full",
        "prefix",
        "set",
        "reuse",
        "auto",
        "cachecraft",
        "cacheblend",
        "deviation",
        "legolink",
        "h2o",
        "random",
    ]
    assert list(STRATEGIES) == names
    for name in ("Full", "blend", "cache", ""):
        with pytest.raises(ValueError, match=f"strategy: wanted one of {', '.join(names)}, got '{name}'"):
            get_strategy(name)

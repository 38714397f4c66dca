"""Plans: identities of the reuse modes, invariants over random prompts and stores, errors, and imports."""

from __future__ import annotations

import ast
import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy import planner, strategies
from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategy import Decision, Strategy, best_choices
from ccjax.types import REUSE_MODES, ChunkId, PlannedSegment, PrefillPlan, VariantMeta
from tests.policy.builders import prompt, question, variant

FIXING = ["cachecraft", "legolink", "random"]
LENGTHS = {"S": 3, "A": 1, "B": 2, "C": 7, "D": 20}


def plan(
    names: Any = "", candidates=None, *, mode: Any = "bounded", question_tokens=4, system=False, **settings
) -> PrefillPlan:
    chunks = names if isinstance(names, list) else prompt(names, system=system)
    grouped: dict[ChunkId, list[VariantMeta]] = {}
    for meta in candidates or ():
        grouped.setdefault(meta.chunk_id, []).append(meta)
    return plan_prefill([*chunks, question(question_tokens)], grouped, mode=mode, settings=PlannerSettings(**settings))


def summary(segments: tuple[PlannedSegment, ...]) -> list[tuple[str, str, int]]:
    return [(s.action, s.fidelity, len(s.recompute_offsets)) for s in segments]


@st.composite
def chunk_lists(draw) -> list[PromptChunk]:
    names = draw(st.lists(st.sampled_from("ABCD"), max_size=5))
    chunks = [PromptChunk(ChunkId(name), LENGTHS[name]) for name in names]
    system = [PromptChunk(ChunkId("S"), LENGTHS["S"], "instructions")]
    return system + chunks if draw(st.booleans()) else chunks


@st.composite
def stores(draw, chunks: list[PromptChunk]) -> list[VariantMeta]:
    """Variants of the prompt's chunks: after their true prefix, after a random one, or with other masses."""
    names = [str(chunk.chunk_id) for chunk in chunks]
    built: dict[str, VariantMeta] = {}
    for index, name in enumerate(names):
        for _ in range(draw(st.integers(0, 2))):
            prefix = draw(st.one_of(st.just("".join(names[:index])), st.text("SABCD", max_size=3)))
            meta = variant(
                name,
                prefix,
                [draw(st.sampled_from([0.0, 1.0, 2.5])) for _ in prefix],
                cci=draw(st.sampled_from([0.5, 0.7, 1.0])),
                num_tokens=LENGTHS[name],
                ranking=draw(st.permutations(range(LENGTHS[name]))),
                fidelity=draw(st.sampled_from(["exact", "approx"])),
            )
            built.setdefault(str(meta.variant_id), meta)
    return list(built.values())


@st.composite
def cases(draw):
    chunks = draw(chunk_lists())
    settings = PlannerSettings(
        strategy=draw(st.sampled_from(sorted(strategies.STRATEGIES))),
        alpha=draw(st.sampled_from([0.0, 0.4, 1.0, 3.0])),
        recompute_ratio=draw(st.sampled_from([None, None, 0.0, 0.3, 1.0])),
        fast_ratio=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        focus_window=draw(st.sampled_from([None, 3])),
    )
    return chunks, draw(st.integers(1, 9)), draw(stores(chunks)), draw(st.sampled_from(REUSE_MODES)), settings


def run(case) -> PrefillPlan:
    chunks, question_tokens, variants, mode, settings = case
    grouped = {chunk.chunk_id: [m for m in variants if m.chunk_id == chunk.chunk_id] for chunk in chunks}
    return plan_prefill([*chunks, question(question_tokens)], grouped, mode=mode, settings=settings)


class TestIdentities:
    @pytest.mark.parametrize("mode", REUSE_MODES)
    @pytest.mark.parametrize("strategy", sorted(strategies.STRATEGIES))
    def test_empty_store_gives_a_plain_prefill(self, mode, strategy):
        got = plan("SAB", mode=mode, strategy=strategy, system=True)
        assert summary(got.segments) == [("compute", "exact", 0)] * 4
        assert got.pin == () and got.focus_window is None and got.hkvd_counts_by_layer == ()
        assert [s.role for s in got.segments] == ["instructions", "passage", "passage", "question"]
        assert all(s.cfo is None and s.variant_id is None for s in got.segments)

    @pytest.mark.parametrize("mode", ["exact", "bounded", "fast"])
    @pytest.mark.parametrize("strategy", sorted(set(strategies.STRATEGIES) - {"full"}))
    def test_repeated_prompt_recomputes_nothing(self, mode, strategy):
        stored = [variant("S", cci=1.0), variant("A", "S", cci=1.0), variant("B", "SA", cci=1.0)]
        got = plan("SAB", stored, mode=mode, strategy=strategy, system=True, recompute_ratio=1.0, alpha=9.0)
        assert summary(got.segments) == [("reuse", "exact", 0)] * 3 + [("compute", "exact", 0)]
        assert got.pin == ("S||exact", "A|S|exact", "B|SA|exact")
        assert [s.cfo for s in got.segments] == [0.0, 0.0, 0.0, None]

    @pytest.mark.parametrize("strategy", FIXING)
    def test_recompute_ratio_1_equals_a_full_prefill(self, strategy):
        stored = [variant("A", "X"), variant("B"), variant("C", "AB", fidelity="approx")]
        assert plan("ABC", stored, strategy=strategy, recompute_ratio=1.0) == plan("ABC", stored, mode="off")

    @pytest.mark.parametrize("strategy", FIXING)
    def test_recompute_ratio_0_equals_naive_reuse(self, strategy):
        stored = [variant("A", "X"), variant("B"), variant("C", "AB", fidelity="approx")]
        got = plan("ABC", stored, strategy=strategy, recompute_ratio=0.0)
        assert got == plan("ABC", stored, strategy="reuse") and len(got.pin) == 3

    def test_cfo_of_1_computes_the_whole_chunk(self):
        got = plan("AB", [variant("B", "X", cci=1.0)], strategy="cachecraft")
        assert summary(got.segments) == [("compute", "exact", 0)] * 3
        assert got.segments[1].cfo is None and got.pin == ()

    def test_fast_mode_reuses_a_chunk_with_cfo_of_1(self):
        got = plan("AB", [variant("B", "X", cci=1.0)], strategy="cachecraft", mode="fast", fast_ratio=0.2)
        assert summary(got.segments)[1] == ("reuse", "approx", 2) and got.segments[1].cfo == 1.0


class TestFidelity:
    def test_exact_variant_after_a_computed_chunk_is_reused_exactly(self):
        got = plan("AB", [variant("B", "A")], mode="exact")
        assert summary(got.segments) == [("compute", "exact", 0), ("reuse", "exact", 0), ("compute", "exact", 0)]

    def test_approximate_reuse_makes_later_computed_but_not_exact_chunks_approx(self):
        got = plan("ABCD", [variant("B", "X"), variant("C", "AB")])
        assert [(s.action, s.fidelity) for s in got.segments] == [
            ("compute", "exact"),
            ("reuse", "approx"),
            ("reuse", "exact"),
            ("compute", "approx"),
            ("compute", "approx"),
        ]

    def test_approximate_variant_stays_approximate_after_its_own_prefix(self):
        got = plan("AB", [variant("B", "A", fidelity="approx")])
        assert summary(got.segments)[1] == ("reuse", "approx", 0)
        assert summary(plan("AB", [variant("B", "A", fidelity="approx")], mode="exact").segments)[1][0] == "compute"

    def test_the_system_prompt_counts_as_prefix(self):
        stored = [variant("A", "S")]
        assert summary(plan("SA", stored, mode="exact", system=True).segments)[1] == ("reuse", "exact", 0)
        assert summary(plan("A", stored, mode="exact").segments)[0] == ("compute", "exact", 0)

    def test_repeated_chunk_has_a_different_prefix_each_time(self):
        got = plan("AA", [variant("A")], mode="exact")
        assert summary(got.segments)[:2] == [("reuse", "exact", 0), ("compute", "exact", 0)]
        twice = plan("AA", [variant("A", "X")], recompute_ratio=0.1)
        assert twice.pin == ("A|X|exact",)


class TestRecompute:
    def test_recompute_offsets_are_the_top_ranked_tokens_in_ascending_order(self):
        # A encoded alone, used after X: CFO = 0.4 * 0.5 = 0.2 of 10 tokens
        got = plan("XA", [variant("A", ranking=(6, 2, 9, 0, 1, 3, 4, 5, 7, 8))], strategy="cachecraft", alpha=0.4)
        assert got.segments[1].recompute_offsets == (2, 6)
        assert got.segments[1].cfo == pytest.approx(0.2)

    def test_reported_cfo_is_eq_12_even_with_a_forced_share(self):
        got = plan("XA", [variant("A")], strategy="cachecraft", recompute_ratio=0.3).segments[1]
        assert (got.cfo, len(got.recompute_offsets)) == (0.5, 3)

    @pytest.mark.parametrize(
        ("settings", "expected"), [({}, None), ({"focus_window": 5}, 5), ({"focus_window": None}, None)]
    )
    def test_focus_window_is_set_only_if_tokens_are_recomputed(self, settings, expected):
        assert plan("XA", [variant("A")], **settings).focus_window == expected
        assert plan("XA", [variant("A")], strategy="cacheblend", **settings).focus_window is None, "deviations choose"
        assert plan("XA", [variant("A")], recompute_ratio=0.0, **settings).focus_window is None
        assert plan("XA", [variant("A", "X")], **settings).focus_window is None

    def test_focus_rule_is_copied_to_the_plan(self):
        got = plan("A", focus_rule="largest_gap")
        assert got.focus_rule == "largest_gap"


class TestInvariants:
    @given(cases())
    def test_segments_cover_the_prompt_and_counts_add_up(self, case):
        chunks, question_tokens, _, _, _ = case
        got = run(case)
        assert [(s.chunk_id, s.num_tokens, s.role) for s in got.segments[:-1]] == [
            (c.chunk_id, c.num_tokens, c.role) for c in chunks
        ]
        last = got.segments[-1]
        assert (last.role, last.action, last.num_tokens, last.chunk_id) == (
            "question",
            "compute",
            question_tokens,
            None,
        )
        start = 0
        for segment in got.segments:
            assert segment.start == start
            start += segment.num_tokens
        assert start == got.num_tokens == sum(c.num_tokens for c in chunks) + question_tokens

    @given(cases())
    def test_each_segment_is_consistent(self, case):
        _, _, variants, mode, settings = case
        got = run(case)
        by_id = {m.variant_id: m for m in variants}
        prefix: tuple[ChunkId, ...] = ()
        is_exact = True
        for segment in got.segments:
            if segment.action == "compute":
                assert (segment.variant_id, segment.recompute_offsets, segment.cfo) == (None, (), None)
                assert segment.fidelity == ("exact" if is_exact else "approx")
            else:
                assert segment.variant_id is not None and segment.cfo is not None and 0.0 <= segment.cfo <= 1.0
                meta, count = by_id[segment.variant_id], len(segment.recompute_offsets)
                is_true_reuse = meta.fidelity == "exact" and meta.prefix_ids == prefix
                assert segment.fidelity == ("exact" if is_true_reuse else "approx")
                assert segment.recompute_offsets == tuple(sorted(set(segment.recompute_offsets)))
                assert set(segment.recompute_offsets) <= set(range(segment.num_tokens))
                if settings.strategy == "cachecraft":
                    assert segment.recompute_offsets == tuple(sorted(meta.token_ranking[:count]))
                if settings.strategy == "legolink":
                    assert segment.recompute_offsets == tuple(range(count))
                are_candidates = bool(got.hkvd_counts_by_layer) and count > 0
                assert count == segment.num_tokens if are_candidates else count < segment.num_tokens
                assert not is_true_reuse or (count == 0 and segment.cfo == 0.0)
                is_chosen_now = are_candidates and settings.strategy == "cacheblend"
                assert mode != "fast" or is_chosen_now or count <= settings.fast_ratio * segment.num_tokens
                if settings.strategy in FIXING and mode == "bounded" and not is_true_reuse:
                    share = segment.cfo if settings.recompute_ratio is None else settings.recompute_ratio
                    assert count == math.ceil(round(share * segment.num_tokens, 9))
            is_exact = is_exact and segment.fidelity == "exact"
            prefix += (segment.chunk_id,) if segment.chunk_id is not None else ()
        assert set(got.pin) == {s.variant_id for s in got.segments if s.action == "reuse"}
        assert len(set(got.pin)) == len(got.pin)
        has_fixes = any(s.recompute_offsets for s in got.segments)
        assert got.focus_window == (settings.focus_window if has_fixes and not got.hkvd_counts_by_layer else None)

    @given(cases())
    def test_exact_mode_reuses_only_exactly_and_off_mode_computes_everything(self, case):
        chunks, question_tokens, variants, _, settings = case
        exact = run((chunks, question_tokens, variants, "exact", settings))
        assert all(s.fidelity == "exact" and not s.recompute_offsets for s in exact.segments)
        off = run((chunks, question_tokens, variants, "off", settings))
        assert all(s.action == "compute" and s.fidelity == "exact" for s in off.segments)

    @given(cases())
    def test_approximate_modes_reuse_everything_that_exact_mode_reuses(self, case):
        chunks, question_tokens, variants, _, settings = case
        exact, bounded, fast = (run((chunks, question_tokens, variants, m, settings)) for m in REUSE_MODES[1:])
        for one, *others in zip(exact.segments, bounded.segments, fast.segments, strict=True):
            if one.action == "reuse":
                assert others == [one, one]

    @given(cases())
    def test_recomputing_strategies_differ_only_in_recompute_offsets(self, case):
        chunks, question_tokens, variants, mode, settings = case
        plans = [
            run((chunks, question_tokens, variants, mode, dataclasses.replace(settings, strategy=name)))
            for name in FIXING
        ]
        sizes = [[len(s.recompute_offsets) for s in got.segments] for got in plans]
        bare = [
            dataclasses.replace(got, segments=tuple(dataclasses.replace(s, recompute_offsets=()) for s in got.segments))
            for got in plans
        ]
        assert sizes == [sizes[0]] * 3 and bare == [bare[0]] * 3

    @given(cases(), st.randoms())
    def test_plan_does_not_depend_on_candidate_order(self, case, rng: random.Random):
        chunks, question_tokens, variants, mode, settings = case
        shuffled = list(variants)
        rng.shuffle(shuffled)
        assert run(case) == run(case) == run((chunks, question_tokens, shuffled, mode, settings))


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"names": [PromptChunk(ChunkId("A"), 5), PromptChunk(ChunkId("B"), 0)]},
                r"chunks\[1\].num_tokens: .*got 0",
            ),
            ({"names": [PromptChunk(ChunkId("A"), -5)]}, r"chunks\[0\].num_tokens: .*got -5"),
            ({"question_tokens": 0}, r"chunks\[1\].num_tokens: .*got 0"),
            ({"question_tokens": -1}, r"chunks\[1\].num_tokens: .*got -1"),
            (
                {"names": [PromptChunk(ChunkId("A"), 5, "question")]},
                r"chunks\[0\].role: wanted a question only at the end",
            ),
            ({"mode": "approx"}, "mode: wanted one of off, exact, bounded, fast, got 'approx'"),
            ({"candidates": [variant("A", num_tokens=9)]}, r"candidates\['A'\]: .*10 tokens.*with 9"),
        ],
    )
    def test_bad_input_is_named(self, change, message):
        with pytest.raises(ValueError, match=message):
            plan(**{"names": "A", **change})

    def test_variant_listed_under_another_chunk_is_rejected(self):
        with pytest.raises(ValueError, match="candidates"):
            plan_prefill(
                [*prompt("A"), question()], {ChunkId("A"): [variant("B")]}, mode="exact", settings=PlannerSettings()
            )

    def test_invalid_token_ranking_is_rejected(self):
        with pytest.raises(ValueError, match="token_ranking"):
            plan("XA", [variant("A", ranking=(0,) * 10)], strategy="cachecraft")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("alpha", -0.1),
            ("alpha", math.inf),
            ("alpha", "1"),
            ("recompute_ratio", 1.01),
            ("recompute_ratio", math.nan),
            ("fast_ratio", -0.01),
            ("focus_window", 0),
            ("focus_window", 2.5),
            ("focus_rule", "gap"),
        ],
    )
    def test_settings_out_of_range_are_named(self, field, value):
        with pytest.raises(ValueError, match=f"^{field}: wanted .*, got "):
            PlannerSettings(**{field: value})

    def test_strategy_that_approximates_in_exact_mode_is_rejected(self, monkeypatch):
        def careless(chunks, candidates, mode, settings):
            return [Decision(choice) for choice in best_choices(chunks, candidates, "bounded", settings)]

        monkeypatch.setattr(planner, "get_strategy", lambda name: Strategy(name, "", careless))
        assert summary(plan("XA", [variant("A")]).segments)[1] == ("reuse", "approx", 0)
        with pytest.raises(ValueError, match="mode 'exact' allows exact reuse only"):
            plan("XA", [variant("A")], mode="exact")

    def test_strategy_that_reuses_text_behind_another_prefix_is_rejected(self, monkeypatch):
        def careless(chunks, candidates, mode, settings):
            passages = [dataclasses.replace(chunk, role="passage") for chunk in chunks]
            return [Decision(choice) for choice in best_choices(passages, candidates, mode, settings)]

        text = [PromptChunk(ChunkId("X"), 10), PromptChunk(ChunkId("A"), 10, "text")]
        assert summary(plan(text, [variant("A")]).segments)[1] == ("compute", "exact", 0)
        monkeypatch.setattr(planner, "get_strategy", lambda name: Strategy(name, "", careless))
        with pytest.raises(ValueError, match="wanted text behind its own prefix"):
            plan(text, [variant("A")])


def test_policy_imports_only_pure_stdlib_modules_and_shared_types():
    pure = set(
        "__future__ bisect collections dataclasses enum fractions functools hashlib heapq itertools json".split()
    )
    pure |= {"math", "operator", "types", "typing"}
    files = list(Path(planner.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names = [str(node.module)]
            for name in names:
                is_own = name == "ccjax.types" or name.split(".")[:2] == ["ccjax", "policy"]
                assert is_own or name.split(".")[0] in pure, f"{file} imports {name}"

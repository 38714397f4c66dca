"""Slices of variants in plans: exact only at the beginning, ranked and measured by the slice's own tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.slices import variant_slice
from ccjax.policy.strategies import STRATEGIES
from ccjax.types import ChunkId, ChunkSlice, SegmentRole, VariantMeta
from tests.policy.builders import prompt, question, variant


def piece(offset: int, num_tokens: int = 6, role: SegmentRole = "passage", name: str = "x") -> PromptChunk:
    """A segment that is a slice of chunk A."""
    return PromptChunk(ChunkId(name), num_tokens, role, ChunkSlice(ChunkId("A"), offset))


def plan(chunks, *metas: VariantMeta, mode: Any = "bounded", **settings):
    candidates = {}
    for meta in metas:
        candidates.setdefault(meta.chunk_id, []).append(meta)
    settings = PlannerSettings(**{"strategy": "cachecraft", **settings})
    return plan_prefill([*chunks, question()], candidates, mode=mode, settings=settings).segments


@pytest.mark.parametrize("mode", ["exact", "bounded", "fast"])
@pytest.mark.parametrize("role", ["passage", "text", "instructions"])
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"full"}))
def test_the_beginning_of_an_exact_variant_behind_its_prefix_is_reused_exactly(mode, role, strategy):
    chunks = [PromptChunk(ChunkId("S"), 10, "instructions"), piece(0, role=role)]
    _, segment, last = plan(chunks, variant("S"), variant("A", "S"), mode=mode, strategy=strategy)
    assert (segment.action, segment.fidelity, segment.chunk_offset, segment.num_tokens) == ("reuse", "exact", 0, 6)
    assert (segment.chunk_id, segment.variant_id, segment.recompute_offsets) == ("x", "A|S|exact", ())
    assert last.fidelity == "exact"


@pytest.mark.parametrize(
    ("offset", "prefix", "fidelity"), [(1, "S", "exact"), (4, "S", "exact"), (0, "", "exact"), (0, "S", "approx")]
)
def test_other_slices_are_reused_approximately_if_they_are_passages(offset, prefix, fidelity):
    chunks = [PromptChunk(ChunkId("S"), 10, "instructions"), piece(offset)]
    meta = variant("A", prefix, fidelity=fidelity, ranking=(9, 5, 0, 4, 8, 1, 2, 3, 6, 7))
    _, segment, _ = plan(chunks, meta, recompute_ratio=0.3)
    assert (segment.action, segment.fidelity, segment.chunk_offset) == ("reuse", "approx", offset)
    of_slice = [token - offset for token in meta.token_ranking if offset <= token < offset + 6]
    assert segment.recompute_offsets == tuple(sorted(of_slice[:2]))  # ceil(0.3 * 6)
    assert plan(chunks, meta, mode="exact")[1].action == "compute"
    text = [chunks[0], dataclasses.replace(chunks[1], role="text")]
    assert plan(text, meta)[1].action == ("reuse" if (offset, prefix) == (0, "S") else "compute")


@pytest.mark.parametrize("role", ["passage", "text"])
def test_a_slice_behind_its_own_chunk_is_not_behind_its_prefix(role):
    """The variant of A behind S, and S, A before the slice: the head of A is in no prompt's prefix."""
    chunks = [PromptChunk(ChunkId("S"), 10, "instructions"), PromptChunk(ChunkId("A"), 10), piece(4, role=role)]
    for mode in ("exact", "bounded"):
        segment = plan(chunks, variant("S"), variant("A", "S"), mode=mode)[2]
        assert segment.action == ("reuse" if role == "passage" and mode == "bounded" else "compute")
        assert segment.fidelity == ("approx" if segment.action == "reuse" else "exact")


def test_deviations_and_received_mass_are_those_of_the_slice():
    meta = variant(
        "A",
        "S",
        [2.0],
        deviations=[index / 10 for index in range(10)],
        received=[float(index) for index in range(10)],
        start=20,
    )
    part = variant_slice(meta, piece(3, 4))
    assert part.token_deviations == (0.3, 0.4, 0.5, 0.6) and part.token_received == (3.0, 4.0, 5.0, 6.0)
    assert part.token_ranking == (3, 2, 1, 0) and (part.num_tokens, part.start) == (4, 23)
    assert part.inter_by_prefix == (2.0, 100.0) and len(part.prefix_ids) == len(part.roles) - 1 == 2
    (segment, _) = plan([piece(3, 4)], meta, strategy="deviation", recompute_ratio=0.5)
    assert segment.recompute_offsets == (2, 3)
    (segment, _) = plan([piece(3, 4)], meta, strategy="h2o", recompute_ratio=0.25)
    assert segment.recompute_offsets == (3,)


def test_variants_of_its_own_chunk_are_candidates_of_a_slice_too():
    own, of_source = variant("x", "S", num_tokens=6), variant("A", "S")
    chunks = [PromptChunk(ChunkId("S"), 10, "instructions"), piece(2)]
    segment = plan(chunks, own, of_source)[1]
    assert (segment.variant_id, segment.chunk_offset, segment.fidelity) == ("x|S|exact", 0, "exact")


def test_stored_positions_left_uncorrected_are_those_of_the_slice():
    (segment, _) = plan([piece(3, 4)], variant("A", "S", start=20), fixes_positions=False, recompute_ratio=0.0)
    assert segment.key_shift == 23


def test_slices_of_one_chunk_in_one_prompt():
    chunks = [*prompt("B"), piece(0, name="x"), piece(4, name="y"), piece(0, name="x")]
    segments = plan(chunks, variant("A", "B"), recompute_ratio=0.0)
    assert [segment.chunk_offset for segment in segments] == [0, 0, 4, 0, 0]
    assert [segment.action for segment in segments] == ["compute", "reuse", "reuse", "reuse", "compute"]
    assert [segment.fidelity for segment in segments] == ["exact", "exact", "approx", "approx", "approx"]


@pytest.mark.parametrize(("offset", "num_tokens"), [(5, 6), (10, 1), (-1, 3)])
def test_a_slice_past_the_end_is_an_error(offset, num_tokens):
    with pytest.raises(ValueError, match=r"source\.offset: wanted|with at least"):
        plan([piece(offset, num_tokens)], variant("A"))


def test_a_variant_of_another_chunk_is_no_candidate_of_a_source():
    with pytest.raises(ValueError, match="wanted variants of this chunk"):
        plan_prefill([piece(0), question()], {ChunkId("A"): [variant("B")]}, mode="exact", settings=PlannerSettings())

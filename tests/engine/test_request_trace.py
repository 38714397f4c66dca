"""Traces of plans that drop tokens between layers; tests/server/test_trace.py has the rest."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ccjax.cache.planned_prefill import Prefilled
from ccjax.engine.trace import Tracer
from ccjax.prompts import Prompt
from ccjax.runner.plan_rows import PrefillOutcome
from ccjax.types import Chunk, ChunkId, PlannedSegment, PrefillPlan, Segment, VariantId

NUM_LAYERS = 6


def traced(outcome: PrefillOutcome, counts: tuple[int, ...] = ()):
    """The segments of a prompt with two reused chunks, with three and two recomputed tokens."""
    ids = [ChunkId("a"), ChunkId("b")]
    plan = PrefillPlan(
        (
            *(
                PlannedSegment(
                    "passage", "reuse", 8 * at, 8, key, VariantId(f"v{key}"), offsets, cfo=0.3, fidelity="approx"
                )
                for at, (key, offsets) in enumerate(zip(ids, ((0, 3, 7), (1, 2)), strict=True))
            ),
            PlannedSegment("question", "compute", 16, 4, fidelity="approx"),
        ),
        hkvd_counts_by_layer=counts,
    )
    passages = [Segment("passage", Chunk(key, tuple(range(8)))) for key in ids]
    prompt = Prompt((*passages, Segment("question", Chunk(ChunkId("?"), (1, 2, 3, 4)))), 1)
    ticket = types.SimpleNamespace(tiers={"va": "host", "vb": "disk"})
    prefilled = Prefilled(prompt, prompt, plan, outcome, ticket, 0.0, 0.0, 0, (None, None, "question"))
    tracer = Tracer(NUM_LAYERS, lambda _: {}, lambda num_tokens: num_tokens / 10)
    tracer.prefilled(prefilled)
    trace = tracer.finish(0.0, 0.0)
    assert trace.full_prefill_s == pytest.approx(2.0)
    for segment in trace.segments[:-1]:
        assert len(segment.recomputed_offsets) == segment.recomputed_tokens
    return trace.segments[:-1]


def test_trace_shows_the_focus_cut_ending_recompute_of_other_chunks():
    first, second = traced(PrefillOutcome(focused=frozenset({0}), focus_cut_layer=4, partly_recomputed=frozenset({1})))
    assert (first.recomputed_offsets, first.recomputed_layers, first.focused) == ((0, 3, 7), 6, True)
    assert (second.recomputed_offsets, second.recomputed_layers, second.focused) == ((1, 2), 4, False)
    assert (first.tier, second.tier) == ("host", "disk")


def test_trace_marks_the_tokens_that_deviation_selected_first():
    outcome = PrefillOutcome(
        partly_recomputed=frozenset({0, 1}),
        recomputed_tokens_of={0: 1, 1: 2},
        not_recomputed=[np.asarray([0, 7])],
    )
    first, second = traced(outcome, counts=(5, 5, 3, 2, 2, 1))
    assert (first.recomputed_offsets, second.recomputed_offsets) == ((3,), (1, 2))
    assert first.recomputed_layers == second.recomputed_layers == 3


def test_trace_ends_with_the_first_token():
    tracer = Tracer(2, lambda _: {}, lambda _: None)
    tracer.load(0, 0.0, 0.5)
    tracer.layers([0.0, 1.0, 2.0], has_new_sizes=False)
    tracer.token(2.5)
    tracer.layers([3.0, 4.0, 5.0], has_new_sizes=True)
    trace = tracer.finish(0.0, 0.0)
    assert [(span.kind, span.layer, span.end_s) for span in trace.spans] == [
        ("load", 0, 0.5),
        ("layer", 0, 1.0),
        ("layer", 1, 2.0),
    ]
    assert not trace.has_new_sizes


def test_trace_cuts_a_stored_run_where_the_segments_of_the_prompt_begin():
    """Two segments and half of a third are one run; a title stays with its passage."""
    key, ids = ChunkId("run"), tuple(range(20))
    plan = PrefillPlan(
        (
            PlannedSegment("text", "reuse", 0, 16, key, VariantId("v"), fidelity="exact"),
            PlannedSegment("question", "compute", 16, 4, fidelity="exact"),
        )
    )
    cut = [("instructions", 0, 4, None), ("passage", 4, 10, "Boats"), ("question", 10, 20, None)]
    asked = Prompt(
        tuple(Segment(role, Chunk(ChunkId(role), ids[a:b], title=title)) for role, a, b, title in cut),
        1,
    )
    planned = Prompt((Segment("text", Chunk(key, ids[:16])), Segment("question", Chunk(ChunkId("?"), ids[16:]))), 1)
    ticket = types.SimpleNamespace(tiers={"v": "disk"})
    tracer = Tracer(NUM_LAYERS, lambda _: {}, lambda _: None)
    tracer.prefilled(Prefilled(asked, planned, plan, PrefillOutcome(), ticket, 0.0, 0.0, 0, (None, "question")))
    *reused, last = tracer.finish(0.0, 0.0).segments
    assert [(part.role, part.title, part.start, part.token_ids) for part in reused] == [
        ("instructions", None, 0, ids[:4]),
        ("passage", "Boats", 4, ids[4:10]),
        ("question", None, 10, ids[10:16]),
    ]
    assert [part.reused_tokens for part in reused] == [4, 6, 6] and {part.tier for part in reused} == {"disk"}
    assert (last.action, last.token_ids) == ("compute", ids[16:])

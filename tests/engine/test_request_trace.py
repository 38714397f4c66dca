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
    prefilled = Prefilled(prompt, prompt, plan, outcome, ticket, None, 0.0, 0.0, 0, (None, None, "question"))
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

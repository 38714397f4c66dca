"""The choice of tokens to recompute by the question's attention."""

from __future__ import annotations

import dataclasses

import pytest

from ccjax.policy.question import revise
from ccjax.types import ChunkId, PlannedSegment, PrefillPlan, VariantId

PLAN = PrefillPlan(
    (
        PlannedSegment("instructions", "reuse", 0, 2, ChunkId("s"), VariantId("s")),
        PlannedSegment("passage", "reuse", 2, 4, ChunkId("a"), VariantId("a"), (0, 1), fidelity="approx"),
        PlannedSegment("passage", "compute", 6, 2, ChunkId("b"), fidelity="approx"),
        PlannedSegment("passage", "reuse", 8, 3, ChunkId("c"), VariantId("c"), (2,), fidelity="approx"),
        PlannedSegment("passage", "reuse", 11, 3, ChunkId("d"), VariantId("d"), (1,), fidelity="approx"),
        PlannedSegment("question", "compute", 14, 2, fidelity="approx"),
    ),
    chosen_by_question=(1, 3),
)


def offsets(plan: PrefillPlan) -> list[tuple[int, ...]]:
    return [segment.recompute_offsets for segment in plan.segments]


def test_tokens_with_the_most_attention_are_chosen_among_all_these_segments():
    received = [9.0, 9.0, 0.1, 0.2, 0.5, 0.2, 9.0, 9.0, 0.3, 0.1, 0.6, 9.0, 9.0, 9.0, 9.0, 9.0]
    revised = revise(PLAN, received)
    assert offsets(revised) == [(), (2,), (), (0, 2), (1,), ()], "three tokens of a and c; nothing else changes"
    assert revised.chosen_by_question == ()
    rest = [dataclasses.replace(segment, recompute_offsets=()) for segment in revised.segments]
    assert rest == [dataclasses.replace(segment, recompute_offsets=()) for segment in PLAN.segments]


def test_ties_are_broken_by_position():
    assert offsets(revise(PLAN, [1.0] * 16)) == [(), (0, 1, 2), (), (), (1,), ()]


@pytest.mark.parametrize(
    ("received", "message"),
    [([1.0] * 15, "received: wanted 16 masses, .* got 15"), ([float("nan")] * 16, "received: wanted numbers, got NaN")],
)
def test_wrong_masses_are_refused(received, message):
    with pytest.raises(ValueError, match=message):
        revise(PLAN, received)

"""Which variants a collection is to have: order and number of neighbours, what is there, batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.capture import make_variant_id
from ccjax.precompute.plan import Surroundings, batches, choose_neighbours, make_plan
from ccjax.types import Chunk, ChunkId


def chunk(name: str, num_tokens: int = 10) -> Chunk:
    return Chunk(ChunkId(name), tuple(range(num_tokens)))


SYSTEM = chunk("system", 7)
AROUND = Surroundings(SYSTEM, 9, 100)


def plan_of(chunks, *, stored=(), neighbours=None, num_neighbours=0, compares=False, around=AROUND):
    return make_plan(
        chunks,
        around,
        set(stored),
        neighbours=neighbours or {},
        num_neighbours=num_neighbours,
        compares=compares,
        sizes=lambda one, prefix_ids, has_deviations: (len(one.token_ids), len(prefix_ids) + has_deviations),
    )


def test_neighbours_are_ordered_by_similarity():
    chunks = [chunk(name) for name in "abcd"]
    assert choose_neighbours(0, [2, 3, 1], chunks, 2, 100) == (2, 3)
    assert choose_neighbours(0, [2, 3, 1], chunks, 5, 100) == (2, 3, 1)
    assert choose_neighbours(0, [], chunks, 2, 100) == ()


def test_duplicate_neighbour_texts_are_used_once():
    chunks = [chunk("a"), chunk("a"), chunk("b"), chunk("b"), chunk("c")]
    assert choose_neighbours(0, [1, 2, 3, 4], chunks, 2, 100) == (2, 4)


def test_neighbours_stop_when_the_prompt_is_full():
    chunks = [chunk("a", 10), chunk("b", 20), chunk("c", 30), chunk("d", 1)]
    assert choose_neighbours(0, [1, 2, 3], chunks, 3, 30) == (1,), "a later one that fits would change the order"
    assert choose_neighbours(0, [1, 2, 3], chunks, 3, 29) == ()
    assert choose_neighbours(0, [1, 2, 3], chunks, 3, 61) == (1, 2, 3)


@given(st.lists(st.integers(1, 9), max_size=12), st.data())
def test_smaller_neighbour_count_gives_a_prefix_of_a_larger_one(found, data):
    """So that a larger N, or a longer prompt, only goes on where a smaller one ended."""
    chunks = [chunk(data.draw(st.sampled_from("abcdef")), data.draw(st.integers(1, 20))) for _ in range(10)]
    count, room = data.draw(st.integers(0, 6)), data.draw(st.integers(20, 120))
    chosen = choose_neighbours(0, found, chunks, count, room)
    more = choose_neighbours(0, found, chunks, count + 1, room + 30)
    assert more[: len(chosen)] == chosen and len(chosen) <= count
    ids = [chunks[number].chunk_id for number in (0, *chosen)]
    assert len(set(ids)) == len(ids)
    assert sum(len(chunks[number].token_ids) for number in (0, *chosen)) <= max(room, len(chunks[0].token_ids))


def test_units_are_passages_alone_and_then_after_their_neighbours():
    chunks = [chunk(name, length) for name, length in zip("abc", (10, 20, 30), strict=True)]
    plan = plan_of(chunks, neighbours={0: [2, 1], 1: [0], 2: []}, num_neighbours=2, compares=True)
    assert [unit.passage for unit in plan.alone] == [0, 1, 2]
    assert [(unit.passage, unit.behind) for unit in plan.conditioned] == [(0, (2, 1)), (1, (0,))]
    ids = [unit.variant_id for unit in plan.conditioned]
    assert ids[0] == make_variant_id(ChunkId("a"), tuple(map(ChunkId, ("system", "c", "b"))), "exact")
    # Behind neighbours, all but the first of these, which is stored alone.
    assert [unit.computed_tokens for unit in plan.missing] == [11, 21, 31, 11 + 20, 21]
    assert [(unit.object_bytes, unit.record_bytes) for unit in plan.missing[2:]] == [(30, 1), (10, 4), (20, 3)]


def test_each_passage_is_also_prepared_after_the_frame():
    frame = chunk("f", 12), chunk("g", 8)
    around = Surroundings(SYSTEM, 9, 100, frame)
    chunks = [chunk("a", 10), chunk("b", 71), chunk("c", 72), chunk("f", 12), chunk("a", 10)]
    plan = plan_of(chunks, compares=True, around=around)
    assert [(unit.passage, unit.is_missing) for unit in plan.framed] == [(0, True), (1, True), (4, False)]
    missing = [(unit.passage, unit.is_framed, unit.computed_tokens) for unit in plan.missing]
    assert missing == [(0, False, 11), (0, True, 11), (1, False, 72), (1, True, 72), (2, False, 73), (3, False, 13)]
    prefix = tuple(map(ChunkId, ("system", "f", "g")))
    assert plan.framed[0].variant_id == make_variant_id(ChunkId("a"), prefix, "exact")
    assert plan.framed[0].record_bytes == 3 + 1, "with deviations"


def test_stored_and_duplicate_passages_are_not_missing():
    chunks = [chunk("a"), chunk("b"), chunk("a")]
    first = plan_of(chunks)
    assert [unit.is_missing for unit in first.alone] == [True, True, False]
    again = plan_of(chunks, stored={first.alone[0].variant_id})
    assert [unit.is_missing for unit in again.alone] == [False, True, False]
    assert plan_of(chunks, stored={unit.variant_id for unit in first.alone}).missing == ()


def test_passages_too_long_for_the_prompt_are_reported():
    plan = plan_of([chunk("a", 91), chunk("b", 92)], neighbours={0: [1]}, num_neighbours=1)
    assert plan.too_long == (1,) and [unit.passage for unit in plan.alone] == [0] and plan.conditioned == ()


@pytest.mark.parametrize(("num_tokens", "most", "sizes"), [(25, 9, [3, 3, 1]), (1, 9, [1] * 7), (999, 2, [2, 2, 2, 1])])
def test_batches_stay_within_limits_and_in_order(num_tokens, most, sizes):
    units = plan_of([chunk(str(number), 9) for number in range(7)]).alone
    cut = batches(units, num_tokens, most)
    assert [len(batch) for batch in cut] == sizes and tuple(unit for batch in cut for unit in batch) == units
    assert batches([], 10, 10) == []

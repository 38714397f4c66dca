"""Choice of the replica for a request."""

from __future__ import annotations

import collections
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.routing import (
    BITS_PER_CHUNK,
    LARGEST_FILTER_BYTES,
    ChunkFilter,
    PromptSummary,
    ReplicaState,
    Summary,
    load_cost,
    missing_tokens,
    rank,
)
from ccjax.types import ChunkId


def chunk(name: object) -> ChunkId:
    return ChunkId(hashlib.sha256(str(name).encode()).hexdigest())


def replica(name, held=(), waiting=0, sent=0.0, under_way=0, cost=1.0):
    return ReplicaState(name, Summary(ChunkFilter.of(map(chunk, held)), waiting, cost), sent, under_way)


def prompt(*names, length=100, other=20):
    return PromptSummary(tuple((chunk(name), length) for name in names), other)


@given(st.sets(st.integers(), max_size=300))
def test_chunk_filter_contains_everything_added(names):
    held = ChunkFilter.of(map(chunk, names))
    assert all(chunk(name) in held for name in names)
    assert len(held.bits) <= len(names) * BITS_PER_CHUNK // 8 + 1


def test_chunk_filter_has_few_false_positives():
    held = ChunkFilter.of(chunk(number) for number in range(5000))
    passed = sum(chunk(f"other {number}") in held for number in range(20_000))
    assert passed < 200  # 0.3 % are expected, 60; a filter with one probe would pass 8 %
    assert chunk(1) not in ChunkFilter.of([])


def test_chunk_filter_size_is_bounded():
    held = ChunkFilter.of(chunk(number) for number in range(LARGEST_FILTER_BYTES * 8 // BITS_PER_CHUNK + 5000))
    assert len(held.bits) == LARGEST_FILTER_BYTES


def test_missing_tokens_weight_absent_chunks_by_load_cost():
    one = replica("a", held="x", cost=0.25)
    assert missing_tokens(one, prompt("x", "y", "z")) == 20 + 0.25 * 200
    assert missing_tokens(ReplicaState("b", None, 0.0, 0), prompt("x", "y")) == 220


def test_replica_with_held_chunks_is_preferred_until_its_queue_outweighs_them():
    asked = prompt("x", "y")
    for waiting, best in ((0, "a"), (199, "a"), (201, "b")):
        assert rank([replica("a", held="xy", waiting=waiting), replica("b")], asked, 0.5)[0] == best
    assert rank([replica("a", held="xy", sent=201.0), replica("b")], asked, 0.5)[0] == "b"
    # If loading is cheap, so is another replica.
    assert rank([replica("a", held="xy", waiting=30, cost=0.1), replica("b", cost=0.1)], asked, 0.5)[0] == "b"


def test_prompts_with_the_same_first_chunk_share_a_replica_on_ties():
    replicas = [replica(name) for name in "abcd"]
    homes = {name: rank(replicas, prompt(name), draw)[0] for name in range(400) for draw in (0.1, 0.9)}
    assert all(rank(replicas[::-1], prompt(name), 0.3)[0] == home for name, home in homes.items())
    counts = collections.Counter(homes.values())
    assert all(60 <= counts[name] <= 140 for name in "abcd")
    # Without one replica, only its own prompts move (Thaler, Ravishankar 1998).
    for name, home in homes.items():
        assert rank(replicas[:3], prompt(name), 0.3)[0] == home or home == "d"


def test_turns_of_a_conversation_share_a_replica_until_its_queue_outweighs_them():
    for name in map(str, range(20)):
        first, second = PromptSummary((), 30, name), PromptSummary((), 20, name, earlier_tokens=300)
        home = rank([replica(name) for name in "abcd"], first, 0.5)[0]
        for waiting, stays in ((0, True), (299, True), (301, False)):
            replicas = [replica(name, waiting=waiting if name == home else 0) for name in "abcd"]
            assert (rank(replicas, second, 0.5)[0] == home) == stays
        # A first turn waits for nobody; and where loading is cheap, so is another replica.
        assert rank([replica(name, waiting=name == home) for name in "abcd"], first, 0.5)[0] != home
        cheap = [replica(name, waiting=31 if name == home else 0, cost=0.1) for name in "abcd"]
        assert rank(cheap, second, 0.5)[0] != home
    # Passages count as always.
    both = PromptSummary(((chunk("x"), 100),), 20, "7", earlier_tokens=90)
    assert all(rank([replica("a", held="x"), replica("b")], both, draw)[0] == "a" for draw in (0.1, 0.9))


def test_conversations_are_spread():
    homes = collections.Counter(
        rank([replica(name) for name in "abcd"], PromptSummary((), 30, str(number)), 0.5)[0] for number in range(400)
    )
    assert all(60 <= homes[name] <= 140 for name in "abcd")


def test_replica_without_a_summary_is_not_treated_as_idle():
    silent = ReplicaState("a", None, 0.0, 0)
    order = rank([silent, replica("b", waiting=50), replica("c", waiting=500)], prompt("x"), 0.5)
    assert order == [
        "b",
        *sorted("ac", key=lambda name: rank([silent, replica("c", waiting=500)], prompt("x"), 0).index(name)),
    ]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.floats(0, 1, exclude_max=True),
)
def test_without_chunks_the_first_choice_is_the_less_busy_of_two(busy, draw):
    replicas = [replica(str(number), under_way=count) for number, count in enumerate(busy)]
    order = rank(replicas, PromptSummary(), draw)
    assert sorted(order) == sorted(one.replica_id for one in replicas)
    first, *rest = (busy[int(name)] for name in order)
    assert not rest or first <= rest[0]


def test_two_random_choices_balance_the_load():
    """With 5,000 requests in sequence, the fullest of 50 replicas has little more than the mean (Mitzenmacher)."""
    import random

    drawn, under_way = random.Random(0), collections.Counter({str(number): 0 for number in range(50)})
    for _ in range(5000):
        states = [replica(name, under_way=count) for name, count in under_way.items()]
        under_way[rank(states, PromptSummary(), drawn.random())[0]] += 1
    assert max(under_way.values()) <= 105 and min(under_way.values()) >= 90


def test_every_pair_of_replicas_can_be_drawn():
    replicas = [replica(name) for name in "abc"]
    firsts = {tuple(rank(replicas, PromptSummary(), step / 60)[:2]) for step in range(60)}
    assert len(firsts) == 6


def test_bad_input_is_named():
    assert rank([], prompt("x"), 0.0) == []
    with pytest.raises(ValueError, match="draw"):
        rank([replica("a")], prompt("x"), 1.0)
    with pytest.raises(ValueError, match="load_s"):
        load_cost(-1.0, 1.0)
    with pytest.raises(ValueError, match="compute_s"):
        load_cost(1.0, float("nan"))


@pytest.mark.parametrize(
    ("load_s", "compute_s", "wanted"),
    [(None, 1.0, 1.0), (1.0, None, 1.0), (1.0, 0.0, 1.0), (1.0, 4.0, 0.25), (9.0, 4.0, 1.0)],
)
def test_load_cost_is_load_time_relative_to_compute_time(load_s, compute_s, wanted):
    assert load_cost(load_s, compute_s) == wanted

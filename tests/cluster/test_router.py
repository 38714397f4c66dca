"""The ledger that a sending process keeps of replicas, with Ray's own classes and without a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import warnings

import pytest

from ccjax.policy.routing import ChunkFilter, PromptSummary, Summary
from ccjax.types import ChunkId

CHUNKS = tuple(ChunkId(hashlib.sha256(name.encode()).hexdigest()) for name in "abc")
PROMPT = PromptSummary(tuple((chunk, 100) for chunk in CHUNKS), 10)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Importing Ray takes a second, which only the process that runs these tests should spend."""
    global DeploymentID, RequestMetadata, PendingRequest, ReplicaID, module, NUMBER, STATS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.serve._private.common import DeploymentID, RequestMetadata
        from ray.serve.request_router import PendingRequest, ReplicaID

        from ccjax.cluster import router as module
        from ccjax.cluster.replica import NUMBER, STATS


@dataclasses.dataclass
class Replica:
    """The part of Ray's `RunningReplica` that a router reads."""

    name: str
    routing_stats: dict = dataclasses.field(default_factory=dict)

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DeploymentID("Replica", "ccjax"))

    def publish(self, number, held=(), waiting=0):
        self.routing_stats = {NUMBER: number, STATS: Summary(ChunkFilter.of(held), waiting)}


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def router(clock):
    router = object.__new__(module.CacheAwareRouter)  # without Ray's part, which needs a cluster
    router.initialize_state()
    return router


def pending(prompt=PROMPT, name="r"):
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    return PendingRequest(args=[], kwargs={} if prompt is None else {"prompt": prompt}, metadata=metadata)


def order(router, replicas, prompt=PROMPT):
    ranks = asyncio.run(choose(router, replicas, prompt))
    assert all(len(rank) == 1 for rank in ranks) and len(ranks) == len(replicas)
    return [rank[0].name for rank in ranks]


async def choose(router, replicas, prompt):
    return await router.choose_replicas(replicas, pending(prompt))


async def send(router, replica, name="r", prompt=PROMPT):
    router.on_request_routed(pending(prompt, name), replica.replica_id, None)


def test_request_is_routed_to_the_replica_with_most_of_its_chunks(router):
    one, two = Replica("one"), Replica("two")
    for number, (better, worse) in enumerate([(one, two), (two, one)]):
        better.publish(number, CHUNKS[:2])
        worse.publish(number, CHUNKS[:1])
        assert order(router, [one, two]) == order(router, [two, one]) == [better.name, worse.name]


def test_calls_sent_since_the_last_summary_count_as_load(router, clock):
    one, two = Replica("one"), Replica("two")
    one.publish(1, CHUNKS)
    two.publish(1, CHUNKS[:2])
    assert order(router, [one, two]) == ["one", "two"]
    for number in range(11):  # ten tokens each: more than the chunk that the other one lacks
        asyncio.run(send(router, one, str(number)))
    assert order(router, [one, two]) == ["two", "one"]
    assert order(router, [one, two]) == ["two", "one"]  # the same publication again says nothing new
    clock.now_s += 1.0
    one.publish(2, CHUNKS)
    assert order(router, [one, two]) == ["one", "two"]


def test_calls_sent_just_before_a_summary_still_count_as_load(router, clock):
    one, two = Replica("one"), Replica("two")
    one.publish(1, CHUNKS)
    two.publish(1, CHUNKS[:2])
    order(router, [one, two])
    for number in range(11):
        asyncio.run(send(router, one, str(number)))
    clock.now_s += module._UNDER_WAY_S / 2
    one.publish(2, CHUNKS)
    assert order(router, [one, two]) == ["two", "one"]


def test_stale_summary_is_ignored_and_replica_is_not_considered_idle(router, clock):
    one, two = Replica("one"), Replica("two")
    one.publish(1, CHUNKS)
    two.publish(1, (), waiting=50)
    assert order(router, [one, two]) == ["one", "two"]
    clock.now_s += module.OLDEST_SUMMARY_S + 1
    two.publish(2, CHUNKS[:1], waiting=50)
    assert order(router, [one, two]) == ["two", "one"]


def test_turns_of_a_conversation_go_to_one_replica_until_it_is_busy(router):
    replicas, numbers = {name: Replica(name) for name in ("one", "two")}, itertools.count()

    def publish(**waiting):
        for name, replica in replicas.items():
            replica.publish(next(numbers), waiting=waiting.get(name, 0))

    for name in map(str, range(8)):
        turn = PromptSummary((), 20, name, earlier_tokens=300)
        publish()
        home, away = order(router, list(replicas.values()), turn)
        for _ in range(20):  # by chance once in a million times
            assert order(router, list(replicas.values()), turn) == [home, away]
        publish(**{home: 299})
        assert order(router, list(replicas.values()), turn) == [home, away]
        publish(**{home: 301})
        assert order(router, list(replicas.values()), turn) == [away, home]


def test_without_chunks_the_least_loaded_replica_is_first(router):
    one, two = Replica("one"), Replica("two")
    for replica in (one, two):
        replica.publish(1)
    asyncio.run(send(router, one, "r", PromptSummary()))
    for prompt in (PromptSummary(), None):
        assert order(router, [one, two], prompt) == ["two", "one"]
    router.on_request_completed(one.replica_id, "r")
    asyncio.run(send(router, two, "s", PromptSummary()))
    assert order(router, [one, two], None) == ["one", "two"]


def test_state_of_a_dead_replica_is_dropped(router, monkeypatch):
    replica = Replica("one")
    replica.publish(1, CHUNKS)
    order(router, [replica])
    monkeypatch.setattr(module.RequestRouter, "on_replica_actor_died", lambda *_: None)
    assert list(router._books) == ["one"]
    router.on_replica_actor_died(replica.replica_id)
    assert router._books == {}
    router.on_request_completed(replica.replica_id, "late")  # its requests end after it

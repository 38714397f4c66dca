"""Outages of a bucket: requests are still served, failures are counted and logged once, and only one call waits.

A relay between store and server refuses connections, or accepts them without answering, or loses single answers.
"""

import logging

import pytest

import ccjax.store.buckets
from ccjax.store import CommitUnknownError, ShardNotFoundError, StoreUnavailableError, TensorStoreTier
from tests.polling import wait_until
from tests.store.gate import Gate
from tests.store.kv import OURS, SPEC, assert_same_bytes, get, make_kv, make_record, open_store, put


class _KnownGate(Gate):
    """Shortens the waits while the relay blocks."""

    def __init__(self, upstream_port):
        super().__init__(upstream_port)
        self._waiting = pytest.MonkeyPatch()

    def shut(self):
        self._wait_little()
        super().shut()

    def silence(self):
        self._wait_little()
        super().silence()

    def open(self):
        self._waiting.undo()
        super().open()

    def _wait_little(self):
        self._waiting.undo()
        for name in ("START_S", "ANSWER_S", "TRANSFER_S"):
            self._waiting.setattr(ccjax.store.buckets, name, 0.2)


@pytest.fixture
def gate(bucket_kind, port_of, monkeypatch):
    monkeypatch.setattr(ccjax.store.buckets, "START_S", 1.0)
    monkeypatch.setattr(ccjax.store.buckets, "ANSWER_S", 1.0)
    monkeypatch.setattr(ccjax.store.buckets, "TRANSFER_S", 1.0)
    monkeypatch.setattr(ccjax.store.buckets, "PROBE_INTERVAL_S", 0.2)
    gate = _KnownGate(port_of(bucket_kind))
    yield gate
    gate.shut()
    gate._waiting.undo()


@pytest.fixture
def place(bucket_kind, make_place, gate):
    return make_place(bucket_kind, gate.port)


@pytest.fixture(params=["shut", "silence"])
def fail(request, gate):
    """Makes the server refuse connections, or accept them and never answer."""
    return getattr(gate, request.param)


def test_serving_continues_during_and_after_a_bucket_outage(place, gate, fail, caplog):
    with open_store(place.url) as store, caplog.at_level(logging.INFO, logger="ccjax.store"):
        put(store, "before")
        put(store, "cold")
        store.evict("host", ["cold"])
        caplog.clear()
        fail()
        put(store, "a")  # detects the outage
        for variant_id in ("b", "c"):
            put(store, variant_id)
            assert store.tiers_of(variant_id) == ("host",)
            assert_same_bytes(get(store, variant_id), make_kv(variant_id))
        assert_same_bytes(get(store, "before"), make_kv("before"))
        for _ in range(3):
            with pytest.raises(StoreUnavailableError, match="did not answer recently"):
                get(store, "cold")
        assert store.refresh() == store.refresh() == ((), ())
        assert store.evict("disk", ["before"]) == ()
        store.write_hints({"a": 1})
        usage = store.usage()["disk"]
        assert (usage.failed_writes, usage.corrupt, usage.num_variants) == (3, 0, 2)
        logged = [entry.getMessage() for entry in caplog.records]
        assert sum("a write failed" in message for message in logged) == 1
        assert sum("refresh of" in message for message in logged) == 1
        assert len(logged) == 2, logged

        gate.open()
        wait_until(lambda: store.refresh() == ((), ()) and "succeeds again" in caplog.text)
        assert store.tier_of("cold") == "disk" and store.tiers_of("before") == ("host", "disk")
        assert_same_bytes(get(store, "cold"), make_kv("cold"))
        put(store, "d")
        assert store.tiers_of("d") == ("host", "disk")
        logged = [entry.getMessage() for entry in caplog.records]
        assert sum("succeed again after 3 failures" in message for message in logged) == 1
    with open_store(place.url, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["before", "cold", "d"]


def test_first_operation_in_an_outage_has_a_bounded_wait(place, gate, fail):
    """Each operation is the first to meet the outage."""
    operations = {
        "write": lambda tier: tier.write(make_record("w"), make_kv("w")),
        "read": lambda tier: tier.open("v").wait(0, 3),
        "refresh": lambda tier: tier.refresh(),
        "open": lambda _: TensorStoreTier(place.url, SPEC, OURS),
    }
    for name, operation in operations.items():
        tier = TensorStoreTier(place.url, SPEC, OURS)
        if name == "write":
            tier.write(make_record("v"), make_kv("v"))
        fail()
        with pytest.raises(StoreUnavailableError):
            operation(tier)
        gate.open()
    assert [record.variant_id for record in TensorStoreTier(place.url, SPEC, OURS).records()] == ["v"]


def test_reads_in_progress_fail_and_the_variant_stays(place, gate, fail):
    tier = TensorStoreTier(place.url, SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))
    reader = tier.open("v")
    assert_same_bytes(reader.wait(0, 1), make_kv("v")[:1])
    fail()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="cannot read variant v"):
            reader.wait(1, 3)
    assert "v" in tier and tier.num_corrupt == 0
    gate.open()
    wait_until(lambda: tier._root.outage() is None)
    assert_same_bytes(tier.open("v").wait(0, 3), make_kv("v"))


def test_caller_timeout_may_be_shorter_than_the_server_timeout(place, gate):
    tier = TensorStoreTier(place.url, SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))
    gate.silence()
    reader = tier.open("v")
    with pytest.raises(TimeoutError):
        reader.wait(0, 1, timeout_s=0.05)
    assert tier._root.outage() is None
    with pytest.raises(StoreUnavailableError, match="no answer within 1 s"):
        reader.wait(0, 1)


def test_close_does_not_wait_for_every_queued_write(place, gate):
    store = open_store(place.url)
    gate.silence()
    for number in range(20):
        store.complete_store(store.prepare_store(make_record(f"v{number}")), make_kv(f"v{number}"))
    store.close()
    assert store.usage()["disk"].failed_writes == 20


def test_lost_reply_to_a_commit_is_resolved(place, gate):
    """The record arrives, the reply does not, and the retry is refused because of our own record."""
    tier = TensorStoreTier(place.url, SPEC, OURS)
    gate.cuts = 1
    assert tier.write(make_record("v"), make_kv("v")) is True
    assert gate.cuts == 0
    assert_same_bytes(tier.open("v").wait(0, 3), make_kv("v"))
    assert TensorStoreTier(place.url, SPEC, OURS).records() == tier.records() == [make_record("v")]
    assert tier.write(make_record("v"), make_kv("v")) is False  # a real loser still loses


def test_commit_without_a_reply_is_found_by_the_next_refresh(place, gate):
    """The record was sent and may have arrived; then deleting its object would break it."""
    tier = TensorStoreTier(place.url, SPEC, OURS)
    gate.cuts, gate.is_silent_after_cut = 1, True
    with pytest.raises(CommitUnknownError):
        tier.write(make_record("v"), make_kv("v"))
    assert "v" not in tier and tier.budget.used_bytes == 0
    with pytest.raises(ShardNotFoundError):
        tier.open("v")
    gate.open()
    wait_until(lambda: tier._root.outage() is None)
    assert tier.refresh() == (("v",), ())  # it did
    assert_same_bytes(tier.open("v").wait(0, 3), make_kv("v"))
    assert tier.budget.used_bytes == place.num_bytes()


def test_commit_of_unknown_outcome_keeps_its_data_object(place, monkeypatch):
    tier = TensorStoreTier(place.url, SPEC, OURS)
    create = tier._root.create

    def create_and_lose_the_answer(key, data):
        assert create(key, data)
        raise CommitUnknownError("lost")

    with monkeypatch.context() as patch, pytest.raises(CommitUnknownError):
        patch.setattr(tier._root, "create", create_and_lose_the_answer)
        tier.write(make_record("v"), make_kv("v"))
    assert tier.budget.used_bytes == 0 and tier.refresh() == (("v",), ())
    assert_same_bytes(tier.open("v").wait(0, 3), make_kv("v"))

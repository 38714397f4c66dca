"""The write queue: bounded, in order, flushed and closed without loss. The disk is the real one behind a gate."""

import threading

import pytest

from ccjax.store import HostTier, TensorStoreTier, TieredStore
from tests.polling import wait_until
from tests.store.kv import OURS, SPEC, assert_same_bytes, bytes_on_disk, get, make_kv, make_record, open_store, url_of

ONE = SPEC.num_bytes(5)


class GatedTier(TensorStoreTier):
    """Writes only while `gate` is open; `entered` is set when a write waits at it."""

    def __init__(self, path):
        self.gate = threading.Event()
        self.entered = threading.Event()
        super().__init__(url_of(path), SPEC, OURS)

    def write(self, record, kv, *, reserved=False):
        self.entered.set()
        assert self.gate.wait(120)
        return super().write(record, kv, reserved=reserved)


@pytest.fixture
def gated(tmp_path):
    tier = GatedTier(tmp_path)
    with TieredStore(SPEC, [HostTier(SPEC, 1 << 20)], tier, max_pending_bytes=2 * ONE) as store:
        yield store, tier
        tier.gate.set()


def submit(store, variant_id, **options):
    return store.complete_store(store.prepare_store(make_record(variant_id)), make_kv(variant_id), **options)


def test_queue_is_bounded_and_never_blocks_a_request(gated, tmp_path):
    store, tier = gated
    assert [submit(store, key) for key in ("a", "b", "c")] == [("host", "disk"), ("host", "disk"), ("host",)]
    assert store.usage()["disk"].skipped_writes == 1 and store.tier_of("a") == "host"
    assert store.usage()["disk"].used_bytes == 2 * tier.charge_bytes(make_record("a"))  # what is under way counts
    assert store.flush(0.05) is False and bytes_on_disk(tmp_path) == 0
    tier.gate.set()
    assert store.flush(120) is True
    assert [record.variant_id for record in tier.records()] == ["a", "b"]
    assert store.usage()["disk"].used_bytes == bytes_on_disk(tmp_path)


def test_batch_job_waits_for_queue_space(gated):
    store, tier = gated
    submit(store, "a")
    submit(store, "b")
    took = []
    thread = threading.Thread(target=lambda: took.append(submit(store, "c", wait=True)))
    thread.start()
    wait_until(lambda: store.tier_of("c") == "host")
    thread.join(0.05)
    assert thread.is_alive()  # waits, and does not hold up others
    tier.gate.set()
    thread.join(120)
    assert took == [("host", "disk")] and store.flush(120) and "c" in tier


def test_variant_being_written_is_served_and_not_evicted(gated):
    store, tier = gated
    submit(store, "a")
    assert store.evict("host", ["a"]) == ("a",)
    assert store.tier_of("a") == "disk" and store.records() == []  # on its way, not committed
    assert store.charges("disk", ["a", "b"]) == {"a": None} and store.charges("host", ["a"]) == {}
    ticket = store.prepare_load(["a"])
    view = ticket.read_layers("a", 0, 3)
    assert not view.flags.writeable
    assert_same_bytes(view, make_kv("a"))
    assert store.complete_load(ticket) == {}
    assert store.prepare_store(make_record("a")).exists
    assert store.evict("disk", ["a"]) == ()
    tier.gate.set()
    assert store.flush(120) and store.tier_of("a") == "disk"
    assert_same_bytes(get(store, "a"), make_kv("a"))


def test_discarded_while_being_written_never_appears(gated, tmp_path):
    store, tier = gated
    submit(store, "a")
    submit(store, "b")
    assert tier.entered.wait(120)
    store.discard("a")  # waits at the gate
    store.discard("b")  # waits behind it
    assert store.prepare_load(["a", "b"]).missing == {"a", "b"} and store.charges("disk", ["a", "b"]) == {}
    tier.gate.set()
    assert store.flush(120)
    assert store.records() == [] and bytes_on_disk(tmp_path) == 0 and store.usage()["disk"].used_bytes == 0
    submit(store, "a")
    assert store.flush(120) and "a" in tier


def test_a_queued_write_of_another_record_is_not_discarded(gated):
    store, tier = gated
    submit(store, "a")
    submit(store, "b")
    assert tier.entered.wait(120)
    for key in ("a", "b"):
        store.discard(key, lambda record: record.num_tokens != 5)
        assert_same_bytes(get(store, key), make_kv(key))
    store.discard("b", lambda record: record.num_tokens == 5)
    tier.gate.set()
    assert store.flush(120) and store.ids("disk") == ("a",)


def test_close_finishes_the_queue_and_accepts_no_more(gated, tmp_path):
    store, tier = gated
    late = store.prepare_store(make_record("late"))
    submit(store, "a")
    submit(store, "b")
    threading.Timer(0.05, tier.gate.set).start()
    store.close()
    assert store.complete_store(late, make_kv("late")) == ()
    with open_store(tmp_path, host_bytes=0) as again:
        assert [record.variant_id for record in again.records()] == ["a", "b"]
        assert_same_bytes(get(again, "b"), make_kv("b"))

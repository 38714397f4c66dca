"""KV that a request computed stays in its pages: the store holds these, and copies them in the background."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from ccjax.runner.pool import PAGE_TOKENS, DevicePool, PagedShard
from ccjax.store import StoreUnavailableError, tiered
from tests.store.kv import SPEC, assert_same_bytes, get, make_kv, make_record, open_store

PAGE = SPEC.num_bytes(PAGE_TOKENS)


def request_of(pool: DevicePool, name: str, num_tokens: int) -> PagedShard:
    """A request's pages, with the KV of `make_kv`."""
    (shard,) = pool.allocate([num_tokens])
    pool._write(make_kv(name, num_tokens), shard.slots)
    return shard


def store_paged(store, name, kv, tiers=None):
    ticket = store.prepare_store(make_record(name, len(kv.slots)), is_paged=True)
    assert not ticket.shortfall_bytes.get("device")
    return store.complete_store(ticket, kv, tiers=tiers)


def test_pages_are_free_once_nobody_holds_any_of_their_tokens():
    pool = DevicePool(SPEC, 6 * PAGE)
    request = request_of(pool, "a", 5 * PAGE_TOKENS)
    part, other = request.part(10, 40), request.part(40, 41)  # pages 0 to 2, and page 2
    assert part.num_bytes == SPEC.num_bytes(30) and (part.num_pages, other.num_pages) == (3, 1)
    assert_same_bytes(part.read_layers(0, SPEC.num_layers), make_kv("a", 80)[:, :, 10:40])
    assert not part.begins_pages and request.part(16, 80).begins_pages
    gc.collect()
    assert pool.num_free == 1
    request.free()
    assert pool.num_free == 3
    del part
    assert pool.num_free == 5
    other.free()
    assert pool.num_free == 6


def test_only_pages_of_unused_variants_are_reclaimable():
    pool = DevicePool(SPEC, 10 * PAGE)
    request = request_of(pool, "a", 4 * PAGE_TOKENS)
    for name, first, last in (("x", 0, 40), ("y", 40, 64)):  # both hold the third page
        pool.put(make_record(name, last - first), request.part(first, last))
    assert pool.num_available() == pool.num_free == 6  # the request holds the others
    request.free()
    assert (pool.num_available(), pool.num_free) == (10, 6)
    assert pool.num_available(["x"]) == 7 and pool.num_available(["y"]) == 8 and pool.num_available(["x", "y"]) == 6
    read = pool.get("y").part(23, 24)
    assert pool.num_available() == 9
    pool.remove("x")
    assert (pool.num_available(), pool.num_free) == (9, 8)
    del read
    pool.remove("y")
    assert pool.num_available() == pool.num_free == 10


def test_device_tier_keeps_the_pages_and_others_get_copies(tmp_path):
    pool = DevicePool(SPEC, 4 * PAGE)
    with open_store(tmp_path, device=pool) as store:
        request = request_of(pool, "a", 3 * PAGE_TOKENS)
        kv = request.part(20, 48)
        assert set(store_paged(store, "v", kv)) == {"device", "host", "disk"}
        assert pool.num_free == 1 and np.array_equal(pool.get("v").slots, request.slots[20:48])
        request.free()
        del kv
        assert store.flush(60)
        assert pool.num_free == 2  # pages 1 and 2 belong to the variant now
        assert set(pool.bytes_to_host) == {"store-copy"}
        for tier in ("device", "host", "disk"):
            assert store.tier_of("v") == tier
            assert_same_bytes(get(store, "v", ok=False), make_kv("a", 48)[:, :, 20:48])
            assert store.evict(tier, ["v"]) == ("v",)
        assert pool.num_free == 4


@pytest.mark.parametrize("tiers", [("host",), ("disk",)])
def test_variants_are_read_while_they_are_copied(tiers, tmp_path, monkeypatch):
    pool, may_copy = DevicePool(SPEC, 4 * PAGE), threading.Event()
    read = PagedShard.read_layers

    def later(shard, first, last):
        assert may_copy.wait(60)
        return read(shard, first, last)

    monkeypatch.setattr(PagedShard, "read_layers", later)
    with open_store(tmp_path) as store:
        assert store_paged(store, "v", request_of(pool, "v", 20), tiers) == tiers
        assert store.tier_of("v") == tiers[0] and store.prepare_store(make_record("v", 20)).exists
        ticket = store.prepare_load(["v"])
        assert not ticket.missing and not ticket.ready("v", 0, 1)
        with pytest.raises(TimeoutError):
            ticket.read_layers("v", 0, 1, timeout_s=0.01)
        assert pool.num_free == 2 and not ticket.whole()
        may_copy.set()
        assert_same_bytes(ticket.read_layers("v", 0, SPEC.num_layers), make_kv("v", 20))
        assert store.flush(60) and ticket.ready("v", 0, 1) and "v" in ticket.whole()
        store.complete_load(ticket)
        assert pool.num_free == 4
        assert_same_bytes(get(store, "v"), make_kv("v", 20))


def test_variant_whose_copy_fails_leaves_host_memory_and_disk(tmp_path, monkeypatch, caplog):
    pool = DevicePool(SPEC, 4 * PAGE)

    def lost(shard, first, last):
        raise RuntimeError("Array has been deleted")

    with open_store(tmp_path) as store:
        monkeypatch.setattr(PagedShard, "read_layers", lost)
        assert set(store_paged(store, "v", request_of(pool, "v", 20))) == {"host", "disk"}
        ticket = store.prepare_load(["v"])
        if not ticket.missing:
            with pytest.raises(StoreUnavailableError, match="Array has been deleted"):
                ticket.read_layers("v", 0, 1)
        store.complete_load(ticket)
        assert store.flush(60)
        assert store.tier_of("v") is None and pool.num_free == 4
        assert "could not be copied to host memory" in caplog.text
        monkeypatch.undo()
        assert set(store_paged(store, "v", request_of(pool, "v", 20))) == {"host", "disk"}
        assert_same_bytes(get(store, "v"), make_kv("v", 20))


def test_host_memory_is_skipped_while_too_much_waits_to_be_copied(monkeypatch):
    pool, may_copy = DevicePool(SPEC, 8 * PAGE), threading.Event()
    read = PagedShard.read_layers
    monkeypatch.setattr(tiered, "_MAX_COPYING_BYTES", SPEC.num_bytes(20) + 1)
    monkeypatch.setattr(PagedShard, "read_layers", lambda *args: may_copy.wait(60) and read(*args))
    with open_store(None, device=pool) as store:
        for name, wanted in (("a", {"device", "host"}), ("b", {"device", "host"}), ("c", {"device"})):
            assert set(store_paged(store, name, request_of(pool, name, 20))) == wanted
        assert store.usage()["host"].skipped_writes == 1
        may_copy.set()
        assert store.flush(60)
        assert set(store_paged(store, "d", request_of(pool, "d", 20))) == {"device", "host"}


def test_a_closed_store_has_nothing_to_wait_for_and_copies_nothing():
    pool = DevicePool(SPEC, 4 * PAGE)
    store = open_store(None, device=pool)
    assert set(store_paged(store, "v", request_of(pool, "v", 20), ["device"])) == {"device"}
    ticket = store.prepare_load(["v"])
    store.close()
    assert store.complete_load(ticket, promote={"host": ["v"]}) == {}
    assert store.flush(60) and not pool.bytes_to_host

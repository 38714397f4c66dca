"""Concurrent loads of a variant share the layers that they read, only while they are open."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import pytest

from ccjax.store import ShardCorruptError, ShardNotFoundError, TieredStore
from ccjax.store.arrays import ShardReader
from tests.store.kv import SPEC, assert_same_bytes, get, make_kv, object_files, open_store, put

BYTES = SPEC.num_bytes(5)
LAYER = BYTES // 3


class Reads:
    """Counts the reads of the disk tier; with `hold`, none is done until `release`."""

    def __init__(self, hold: bool = False) -> None:
        self.num_reads = 0
        self.held: list[tuple[Future, object]] | None = [] if hold else None

    def __call__(self, read, num_bytes):
        assert num_bytes == LAYER
        self.num_reads += 1
        if self.held is None:
            return read
        self.held.append((Future(), read))
        return self.held[-1][0]

    def release(self) -> None:
        assert self.held is not None
        for future, read in self.held:
            future.set_result(read.result())


@pytest.fixture
def opened(tmp_path):
    """`opened(reads)`: a store with the variant "a" on disk only."""
    with open_store(tmp_path, host_bytes=0) as store:
        put(store, "a", 5)
    stores: list[TieredStore] = []

    def make(reads: Reads, **options) -> TieredStore:
        stores.append(open_store(tmp_path, **{"host_bytes": 0, **options, "on_read": reads}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_layers_read_by_one_load_are_available_to_the_next(opened) -> None:
    reads = Reads()
    store = opened(reads)
    ahead = store.prepare_load(["a"], counted=False)
    assert store.unread_bytes("a") == BYTES
    ahead.prefetch("a", 0, 2)
    while not ahead.ready("a", 0, 2):
        pass
    assert store.unread_bytes("a") == BYTES - 2 * LAYER
    ticket = store.prepare_load(["a"])
    assert ticket.ready("a", 0, 2) and not ticket.ready("a", 2, 3)
    store.complete_load(ahead, ok=False)
    assert_same_bytes(ticket.read_layers("a", 0, 3), make_kv("a", 5))
    assert reads.num_reads == 3
    store.complete_load(ticket)
    usage = store.usage()["disk"]
    assert (usage.hits, usage.bytes_read) == (1, BYTES)  # the load that only read ahead counts nowhere


def test_nothing_is_shared_once_the_loads_are_complete(opened) -> None:
    reads = Reads()
    store = opened(reads)
    ticket = store.prepare_load(["a"])
    ticket.read_layers("a", 0, 3)
    store.complete_load(ticket)
    assert store.unread_bytes("a") == BYTES  # though the ticket is still there
    assert not store.prepare_load(["a"]).ready("a", 0, 1)


def test_an_evicted_and_rewritten_variant_is_read_again(opened) -> None:
    """Although the old reader is still referenced."""
    store = opened(Reads())
    ticket = store.prepare_load(["a"])
    reader = ticket._sources["a"]
    store.complete_load(ticket)
    assert store.evict("disk", ["a"]) == ("a",)
    put(store, "a", 5)
    again = store.prepare_load(["a"])
    assert again._sources["a"] is not reader
    assert_same_bytes(again.read_layers("a", 0, 3), make_kv("a", 5))
    store.complete_load(again)


def test_a_discarded_and_rewritten_variant_is_read_again(opened) -> None:
    """Although the load of the old one is still open, which may have read nothing yet."""
    store = opened(Reads())
    old = store.prepare_load(["a"])
    store.discard("a")
    put(store, "a", 5)
    assert_same_bytes(get(store, "a"), make_kv("a", 5))
    with pytest.raises(ShardNotFoundError):
        old.read_layers("a", 0, 3)
    store.complete_load(old, ok=False)


def test_an_abandoned_load_frees_its_memory_and_pins(opened) -> None:
    reads = Reads(hold=True)
    store = opened(reads)
    ahead = store.prepare_load(["a"])
    ahead.prefetch("a", 0, 3)
    assert store.evict("disk", ["a"]) == ()
    buffer = weakref.ref(ahead._sources["a"])
    assert isinstance(buffer(), ShardReader)
    store.complete_load(ahead, ok=False)
    del ahead
    reads.release()
    gc.collect()
    assert buffer() is None and not store._pins
    assert store.evict("disk", ["a"]) == ("a",)


def test_a_reader_that_failed_is_not_shared(opened, tmp_path) -> None:
    store = opened(Reads())
    (file,) = object_files(tmp_path)
    sound = file.read_bytes()
    file.write_bytes(sound[:40] + bytes([sound[40] ^ 1]) + sound[41:])
    broken = store.prepare_load(["a"])
    with pytest.raises(ShardCorruptError):
        broken.read_layers("a", 0, 3)
    assert broken.ready("a", 0, 3) and store.unread_bytes("a") == BYTES  # to ask would not wait, and gets an error
    file.write_bytes(sound)
    again = store.prepare_load(["a"])
    assert_same_bytes(again.read_layers("a", 0, 3), make_kv("a", 5))


def test_variant_in_memory_or_missing_has_no_unread_bytes(opened) -> None:
    store = opened(Reads(), host_bytes=1 << 20)
    ticket = store.prepare_load(["a"])
    ticket.read_layers("a", 0, 3)
    assert store.complete_load(ticket) == {"host": ("a",)}
    assert store.unread_bytes("a") == store.unread_bytes("b") == 0
    with pytest.raises(ShardNotFoundError):
        store.prepare_load(["b"]).read_layers("b", 0, 1)

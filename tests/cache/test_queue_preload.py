"""Reading ahead for requests in line: what is there when they run, whose turn it is, that nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from concurrent.futures import Future

import numpy as np
import pytest

from ccjax.cache.queue_preload import Preloader
from ccjax.engine import Request, SamplingParams
from ccjax.store.arrays import ShardReader
from ccjax.types import VariantId
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.polling import wait_until

NUM_LAYERS = 5
MODEL = TinyModel(seed=9, num_hidden_layers=NUM_LAYERS)
SEGMENTS = draw_segments(np.random.default_rng(9), [40, 30, 50])
REQUEST = Request(segments=permuted(SEGMENTS, [1, 2, 0]), sampling=SamplingParams(max_new_tokens=4, logprobs=0))
TOKEN_BYTES = 2 * NUM_LAYERS * 4 * MODEL.config.num_kv_heads * MODEL.config.head_dim
NUM_TOKENS = sum(map(len, SEGMENTS[:-1]))


class Wire:
    """A link on which reads end, in order, when the test lets them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reads: list[tuple[Future, object]] = []
        self.sizes: list[int] = []
        self.num_done = self.num_allowed = 0

    def __call__(self, read, num_bytes):
        with self.changed:
            self.reads.append((Future(), read))
            self.sizes.append(num_bytes)
            self.changed.notify_all()
            future = self.reads[-1][0]
        self._pass_on()
        return future

    def allow(self, num_reads: int) -> None:
        """Lets so many reads end, in all."""
        self.num_allowed = num_reads
        self._pass_on()

    def wait_for(self, num_started: int) -> None:
        """Returns once so many reads have started."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.reads) >= num_started, 120)

    def wait_for_end(self, num_reads: int) -> None:
        """Returns once the first so many reads have started and ended."""
        self.wait_for(num_reads)
        for future, _ in self.reads[:num_reads]:
            future.result(timeout=120)

    def _pass_on(self) -> None:
        with self.changed:
            done = self.reads[self.num_done : self.num_allowed]
            self.num_done += len(done)
        for future, read in done:
            future.set_result(read.result())


def preload_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ccjax-preload"]


def ended() -> None:
    """Returns once no preloader has a thread any more."""
    for thread in preload_threads():
        thread.join(120)
    assert not preload_threads()


def prepared(preloader: Preloader) -> None:
    """Returns once all preloads that were added before have been looked at."""
    asked = threading.Event()
    preload = preloader.add(lambda: (asked.set(), {})[1])
    assert asked.wait(120)
    preload.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A store on disk that holds system prompt and passages."""
    place = f"file://{tmp_path_factory.mktemp('kv')}/store"
    with MODEL.engine(store=place) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
    return place


@pytest.fixture(scope="module")
def wanted(url):
    """The answer without any preload."""
    with MODEL.engine(store=url, read_only=True) as engine:
        return engine.run(REQUEST)


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def engine(url, wire):
    with MODEL.engine(store=url, read_only=True, host_cache_bytes=1, disk_link=wire) as engine:
        yield engine
        wire.allow(10**6)
    ended()


def test_request_queued_long_enough_finds_its_kv_preloaded(engine, wire, wanted):
    wire.allow(10**6)
    preload = engine.preload(REQUEST)
    wire.wait_for_end(4 * NUM_LAYERS)
    got = engine.run(REQUEST)
    preload.close()
    assert (got.token_ids, got.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert got.reuse.preloaded_bytes == got.reuse.loaded_bytes == NUM_TOKENS * TOKEN_BYTES
    assert len(wire.reads) == 4 * NUM_LAYERS, "nothing is read twice"
    assert engine.run(REQUEST).reuse.preloaded_bytes == 0, "and nothing stays behind"


def test_preload_keeps_two_layers_in_flight_and_the_prefill_continues(engine, wire, wanted):
    preload = engine.preload(REQUEST)
    wire.wait_for(2 * 4)
    wire.allow(4)  # layer 0
    wire.wait_for(3 * 4)
    preload.close()  # its turn has come
    assert len(wire.reads) == 3 * 4
    ended()
    again = engine.preload(REQUEST)  # starts over: nobody held what was read
    wire.allow(3 * 4 + 2 * 4)
    wire.wait_for(3 * 4 + 4 * 4)
    wire.allow(3 * 4 + 3 * 4)
    answers = []
    runner = threading.Thread(target=lambda: answers.append(engine.run(REQUEST)))
    runner.start()
    wire.wait_for(3 * 4 + NUM_LAYERS * 4)  # the last layer was started by either
    wait_until(lambda: engine._chunks.planner.is_reading, timeout_s=120)  # the prefill has counted what is there
    wire.allow(10**6)
    runner.join(120)
    again.close()
    assert answers[0].token_ids == wanted.token_ids
    assert answers[0].reuse.preloaded_bytes == NUM_TOKENS * TOKEN_BYTES * 3 // NUM_LAYERS
    assert len(wire.reads) == 3 * 4 + NUM_LAYERS * 4


def test_closing_a_queued_preload_frees_memory_and_pins_and_ends_its_thread(engine, wire, monkeypatch):
    readers: list[weakref.ref] = []
    watch = ShardReader.watch
    monkeypatch.setattr(
        ShardReader, "watch", lambda reader, on_read: (readers.append(weakref.ref(reader)), watch(reader, on_read))
    )
    preload = engine.preload(REQUEST)
    wire.wait_for(2 * 4)
    assert engine._chunks.preloader.held_bytes == NUM_TOKENS * TOKEN_BYTES and len(engine._chunks.store._pins) == 4
    preload.close()
    preload.close()
    ended()
    gc.collect()
    assert len(readers) == 4 and not any(reader() for reader in readers)
    assert not engine._chunks.store._pins and engine._chunks.preloader.held_bytes == 0


def test_queued_requests_read_shared_chunks_once(engine, wire):
    first = engine.preload(REQUEST)
    second = engine.preload(dataclasses.replace(REQUEST, segments=permuted(SEGMENTS, [2, 1, 0])))
    wire.wait_for(2 * 4)
    prepared(engine._chunks.preloader)
    wire.allow(10**6)
    wire.wait_for_end(4 * NUM_LAYERS)
    first.close()
    third = engine.preload(REQUEST)
    assert engine.run(REQUEST).reuse.preloaded_bytes == NUM_TOKENS * TOKEN_BYTES
    assert engine._chunks.preloader.held_bytes == NUM_TOKENS * TOKEN_BYTES
    second.close()
    third.close()
    assert len(wire.reads) == 4 * NUM_LAYERS


def test_shared_chunks_use_the_budget_once_and_are_kept_until_the_last_close(url, wire):
    settings = {"host_cache_bytes": 1, "preload_bytes": NUM_TOKENS * TOKEN_BYTES}
    with MODEL.engine(store=url, read_only=True, disk_link=wire, **settings) as engine:
        first, second = engine.preload(REQUEST), engine.preload(REQUEST)
        prepared(engine._chunks.preloader)
        first.close()
        assert engine._chunks.preloader.held_bytes == NUM_TOKENS * TOKEN_BYTES
        wire.allow(10**6)
        wire.wait_for_end(4 * NUM_LAYERS)
        assert engine.run(REQUEST).reuse.preloaded_bytes == NUM_TOKENS * TOKEN_BYTES
        second.close()


def test_preloading_does_not_count_as_a_lookup(engine, wire):
    before = engine._chunks.store.usage()
    engine.preload(REQUEST)
    wire.wait_for(2 * 4)
    assert engine._chunks.store.usage() == before


def test_variant_evicted_just_before_its_preload_is_skipped(tmp_path, wire, monkeypatch):
    wire.allow(10**6)
    with MODEL.engine(store=f"file://{tmp_path}", host_cache_bytes=1, disk_link=wire) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        assert engine._chunks.store.flush(120)
        store = engine._chunks.store
        sizes = {VariantId(record.variant_id): record.num_bytes for record in store.records()}
        gone = next(iter(sizes))
        prepare = store.prepare_load

        def evicted(variant_ids, **options):
            monkeypatch.undo()
            assert store.evict("disk", [gone]) == (gone,)
            return prepare(variant_ids, **options)

        monkeypatch.setattr(store, "prepare_load", evicted)
        preload = engine._chunks.preloader.add(lambda: sizes)
        wire.wait_for_end(3 * NUM_LAYERS)
        assert engine._chunks.preloader.held_bytes == sum(sizes.values()) - sizes[gone]
        preload.close()
        assert not store._pins


def test_preload_without_memory_reads_nothing_but_the_next_one_succeeds(engine, wire, monkeypatch):
    wire.allow(10**6)

    def refuse(*_, **__):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(engine._chunks.store, "prepare_load", refuse)
    without = engine.preload(REQUEST)
    prepared(engine._chunks.preloader)
    assert engine._chunks.preloader.held_bytes == 0 and not engine._chunks.store._pins and not wire.reads
    engine.preload(REQUEST)
    wire.wait_for_end(4 * NUM_LAYERS)
    without.close()


def test_preload_of_an_invalid_request_does_not_affect_others(engine, wire):
    wire.allow(10**6)
    bad = engine.preload(Request(segments=[[1], [9999], [2]]))
    good = engine.preload(REQUEST)
    wire.wait_for(4 * NUM_LAYERS)
    off = engine.preload(dataclasses.replace(REQUEST, reuse="off"))
    for preload in (bad, good, off):
        preload.close()
    assert not engine._chunks.store._pins


@pytest.mark.parametrize(
    ("budget", "lengths"), [(0, []), (45, [7, 30]), (86, [7, 30, 40]), (87, [7, 30, 50]), (10**6, [7, 30, 50, 40])]
)
def test_preload_reads_only_variants_that_fit_the_budget(url, wire, budget, lengths):
    wire.allow(10**6)
    settings = {"host_cache_bytes": 1, "preload_bytes": budget * TOKEN_BYTES}
    with MODEL.engine(store=url, read_only=True, disk_link=wire, **settings) as engine:
        engine.preload(REQUEST)
        wire.wait_for_end(NUM_LAYERS * len(lengths))
        assert engine._chunks.preloader.held_bytes == sum(lengths) * TOKEN_BYTES
        assert bool(preload_threads()) == bool(lengths)
    ended()  # closing the engine closes what is open


def test_variants_in_host_memory_are_not_preloaded(url, wire):
    wire.allow(10**6)
    with MODEL.engine(store=url, read_only=True, disk_link=wire) as engine:
        engine.run(REQUEST)
        num_reads = len(wire.reads)
        with_nothing_to_do = engine.preload(REQUEST)
        prepared(engine._chunks.preloader)
        assert (
            len(wire.reads) == num_reads and engine._chunks.preloader.held_bytes == 0 and not engine._chunks.store._pins
        )
        with_nothing_to_do.close()


class Turns:
    """`must_wait` of a preloader: says whether a request that runs has reads under way, and notes that it was asked."""

    def __init__(self) -> None:
        self.busy = False
        self._asked = threading.Semaphore(0)

    def __call__(self) -> bool:
        self._asked.release()
        return self.busy

    def wait_for(self, times: int, timeout_s: float = 120.0) -> None:
        """Returns once it has been asked so often from now on."""
        while self._asked.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self._asked.acquire(timeout=timeout_s)


@pytest.fixture
def turns():
    return Turns()


@pytest.fixture
def preloader(engine, turns):
    preloader = Preloader(engine._chunks.store, budget_bytes=1 << 30, must_wait=turns)
    yield preloader
    preloader.close()
    assert not engine._chunks.store._pins


@pytest.fixture
def sizes(engine) -> dict[VariantId, int]:
    """What is on disk, with its bytes; no two variants are equally large."""
    return {VariantId(record.variant_id): record.num_bytes for record in engine._chunks.store.records()}


def test_reads_of_the_running_request_go_first(preloader, turns, sizes, wire):
    wire.allow(10**6)
    turns.busy = True
    preloader.add(lambda: sizes)
    turns.wait_for(3)
    assert not wire.reads
    turns.busy = False
    wire.wait_for(4 * NUM_LAYERS)
    preloader.close()
    assert preloader.add(lambda: sizes) is not None and not preload_threads()  # closed: nothing begins


def test_preload_without_reads_does_not_wait_for_its_turn(preloader, turns):
    turns.busy = True
    preloader.add(dict)
    prepared(preloader)
    with pytest.raises(AssertionError):
        turns.wait_for(1, timeout_s=0.1)


def test_preloads_are_read_in_queue_order(preloader, turns, sizes, wire):
    wire.allow(10**6)
    turns.busy = True
    for variant_id, num_bytes in sizes.items():
        preloader.add(lambda variant_id=variant_id, num_bytes=num_bytes: {variant_id: num_bytes})
    prepared(preloader)
    turns.busy = False
    wire.wait_for(4 * NUM_LAYERS)
    assert wire.sizes == [num_bytes // NUM_LAYERS for num_bytes in sizes.values() for _ in range(NUM_LAYERS)]


def test_third_layer_starts_once_the_first_is_completely_read(preloader, turns, sizes, wire):
    preloader.add(lambda: sizes)
    wire.wait_for(2 * 4)
    wire.allow(3)
    turns.wait_for(3)
    assert len(wire.reads) == 2 * 4
    wire.allow(4)
    wire.wait_for(3 * 4)


def test_preload_of_a_request_that_never_ran_is_not_put_in_host_memory(url, wire):
    wire.allow(10**6)
    with MODEL.engine(store=url, read_only=True, disk_link=wire) as engine:
        preload = engine.preload(REQUEST)
        wire.wait_for_end(4 * NUM_LAYERS)
        preload.close()
        assert engine._chunks.store.usage()["host"].num_variants == 0

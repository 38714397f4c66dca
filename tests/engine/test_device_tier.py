"""Chunk-caches on the device change where KV is read from, but never the answers."""

import contextlib
import dataclasses
import queue
import threading
import weakref

import jax
import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.errors import ConfigError
from ccjax.prompts import chunk_id
from ccjax.runner import budgets
from ccjax.runner import pack as pack_module
from ccjax.runner.budgets import memory_bytes
from ccjax.runner.pool import PAGE_TOKENS, num_pages
from ccjax.store.errors import TierFullError
from ccjax.store.memory import HostTier
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.engine.test_batch_loop import Client, Turns, ask, check
from tests.engine.test_identities import answer, assert_same
from tests.polling import wait_until

MODEL = TinyModel(seed=11)
PAGE = MODEL.page_bytes
ALL = 200 * PAGE
LEAST = 512 // PAGE_TOKENS + 64
"""Pages that a pool needs for requests of 512 tokens."""

LENGTHS = (40, 33, 64, 17)
SEGMENTS = draw_segments(np.random.default_rng(11), LENGTHS)
SHORT = [[1, 2, 3], [4, 5, 6]]
NUM_STORED = sum(map(len, SEGMENTS[:-1]))


def tiers(report):
    return [document.tier for document in report.per_document]


def same_report(got, wanted):
    """Compares reports, except for seconds, tiers, and loaded bytes, because KV on the device is not loaded."""

    def plain(report):
        documents = [dataclasses.replace(document, tier=None) for document in report.per_document]
        seconds = {field.name: 0.0 for field in dataclasses.fields(report) if field.name.endswith("_s")}
        return dataclasses.replace(report, per_document=tuple(documents), preloaded_bytes=0, loaded_bytes=0, **seconds)

    assert plain(got) == plain(wanted)


@pytest.mark.parametrize("device_bytes", [0, ALL])
def test_closed_engine_holds_no_kv_even_while_still_referenced(device_bytes, monkeypatch):
    stored = []
    hold = HostTier._hold
    monkeypatch.setattr(HostTier, "_hold", lambda tier, kv: stored.append(weakref.ref(kv)) or hold(tier, kv))
    others = jax.live_arrays()  # referenced, so that none is freed meanwhile
    before = sum(array.nbytes for array in others)
    with MODEL.engine(max_model_len=512, device_cache_bytes=device_bytes) as engine:
        answer(engine, SEGMENTS, "bounded")
        held = sum(array.nbytes for array in jax.live_arrays())
        assert stored and all(ref() is not None for ref in stored)
    pool_bytes = engine._device.pool.num_pages * PAGE
    assert held >= before + pool_bytes
    assert sum(array.nbytes for array in jax.live_arrays()) < before + pool_bytes // 4  # of params and tables
    assert all(ref() is None for ref in stored)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "reuse"),
    [
        ({}, "exact"),
        ({}, "bounded"),
        ({}, "fast"),
        ({"strategy": "reuse"}, "bounded"),
        ({"recompute_ratio": 0.3}, "bounded"),
        ({"focus_window": None}, "fast"),
    ],
)
def test_reuse_from_device_and_host_gives_identical_answers(settings, reuse):
    with (
        MODEL.engine(**settings) as host,
        MODEL.engine(max_model_len=512, device_cache_bytes=ALL, **settings) as device,
    ):
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0, 2], [1, 1, 0], [2, 3, 1], [2, 3, 1]):
            segments = permuted(SEGMENTS, order)
            wanted, got = answer(host, segments, reuse), answer(device, segments, reuse)
            assert got[:2] == wanted[:2]  # to the bit
            same_report(got[2], wanted[2])
            assert {"device"} >= {tier for tier in tiers(got[2]) if tier is not None}
        assert got[2].reused_tokens > 0 and "device" in tiers(got[2])
        usage = device.cache.usage()
        assert usage["device"].hits > 0 and usage["host"].hits == 0


def test_one_prompt_can_reuse_chunks_from_device_host_and_disk(url):
    """One engine whose variants are evicted from some tiers, so that one context has parts from each tier."""
    with (
        MODEL.engine(store=url, max_model_len=512, device_cache_bytes=ALL, recompute_ratio=0.2) as engine,
        MODEL.engine() as other,
    ):
        first = answer(engine, SEGMENTS, "bounded")
        engine.cache.flush()
        by_chunk = {document.chunk_id: place for place, document in enumerate(first[2].per_document)}
        for meta in list(engine._chunks.variants):
            place = by_chunk[meta.chunk_id]
            for tier in ("device", "host")[: place % 3]:
                assert engine._chunks.store.evict(tier, [meta.variant_id]) == (meta.variant_id,)
                engine._chunks.variants._placement.apply_changes(meta.variant_id)
        again = answer(engine, SEGMENTS, "bounded")
        assert tiers(again[2]) == ["device", "host", "disk", "device", "host"]
        assert again[2].reused_tokens == NUM_STORED and again[2].exact
        assert_same(again, answer(other, SEGMENTS, "off"))
        moved = answer(engine, permuted(SEGMENTS, [2, 0, 1, 3]), "bounded")
        assert set(tiers(moved[2])) == {"device"}  # variants that were read are promoted


def test_chunks_on_the_device_have_no_load_time():
    with MODEL.engine() as host, MODEL.engine(max_model_len=512, device_cache_bytes=ALL) as device:
        for engine in (host, device):
            engine.rates.tiers["host"].add(1_000_000, 0.1)
        reports = [[answer(engine, SEGMENTS, "bounded")[2] for _ in range(4)] for engine in (host, device)]
    assert reports[0][-1].load_s > 0.0 and reports[1][-1].load_s == 0.0
    assert reports[1][-1].reused_tokens == reports[0][-1].reused_tokens > 0


def test_reading_wrong_device_pages_changes_the_answer():
    """Mutant for the tests above."""
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL) as engine:
        wanted = answer(engine, SEGMENTS, "bounded")
        for _, shard in engine._device.pool._shards.values():
            shard.slots = np.roll(shard.slots, 1)
        got = answer(engine, SEGMENTS, "bounded")
    assert "device" in tiers(got[2])
    assert max(abs(a - b) for a, b in zip(got[1], wanted[1], strict=True)) > 100 * TOLERANCE


def test_small_pool_serves_random_prompts_without_leaking_pages():
    random = np.random.default_rng(0)
    passages = draw_segments(random, [int(length) for length in random.integers(20, 60, 40)])[1:-1]
    limits = {"max_model_len": 512, "device_cache_bytes": LEAST * PAGE + 5, "host_cache_bytes": 130 * PAGE}
    seen = set()
    with MODEL.engine(**limits) as engine, MODEL.engine() as plain:
        pool = engine._device.pool
        for number in range(40):
            chosen = random.choice(len(passages), random.integers(1, 5), replace=False)
            segments = [SEGMENTS[0], *(passages[index] for index in chosen), SEGMENTS[-1]]
            reuse = ("exact", "bounded", "fast")[number % 3]
            got = answer(engine, segments, reuse, tokens=2)
            seen |= set(tiers(got[2]))
            if reuse == "exact":
                assert_same(got, answer(plain, segments, "off", tokens=2))
            assert engine._chunks.store.flush(120)  # what is being copied to host memory holds its pages
            used = sum(-(-one.num_tokens // PAGE_TOKENS) for one in pool.summaries())
            assert pool.num_free == LEAST - used and pool.budget.used_bytes == used * PAGE <= LEAST * PAGE
        assert seen == {"device", "host", None}
        usage = engine.cache.usage()
        assert usage["device"].evicted > 0 and usage["host"].evicted > 0
        for meta in list(engine._chunks.variants):
            engine._chunks.store.discard(meta.variant_id)
        assert pool.num_free == LEAST and pool.budget.used_bytes == 0


def test_a_lossy_copy_stays_lossy_on_the_device(url):
    with MODEL.engine(store=url, disk_kv_dtype="int8") as engine:
        answer(engine, SEGMENTS, "bounded")
    with MODEL.engine(store=url, disk_kv_dtype="int8", max_model_len=512, device_cache_bytes=ALL) as engine:
        for _ in range(2):
            reused = answer(engine, SEGMENTS, "bounded")
            assert not reused[2].exact and reused[2].reused_tokens == NUM_STORED
        assert set(tiers(reused[2])) == {"device"}
        exact = answer(engine, SEGMENTS, "exact")
        assert exact[2].exact and exact[2].computed_tokens == exact[2].prompt_tokens
        assert_same(exact, answer(engine, SEGMENTS, "off"))
        again = answer(engine, SEGMENTS, "bounded")  # KV computed in mode exact replaced the lossy copies
        assert again[2].exact and set(tiers(again[2])) == {"device"}


def test_impossible_device_budgets_are_rejected(monkeypatch):
    with pytest.raises(ConfigError, match="device_cache_bytes: wanted an integer of at least 0, got -1"):
        MODEL.engine(device_cache_bytes=-1)
    with pytest.raises(
        ConfigError, match=f"device_cache_bytes: wanted at least {LEAST * PAGE}.*got {LEAST * PAGE - 1}"
    ):
        MODEL.engine(max_model_len=512, device_cache_bytes=LEAST * PAGE - 1)
    left = memory_bytes() - (1 << 20)
    with pytest.raises(ConfigError, match=f"device_cache_bytes: wanted at most {left} .*got {left + 1}"):
        MODEL.engine(host_cache_bytes=1 << 20, device_cache_bytes=left + 1)
    monkeypatch.setattr(budgets, "free_device_bytes", lambda num_shards: num_shards * ALL)
    with pytest.raises(ConfigError, match=f"device_cache_bytes: wanted at most {ALL} .*got {ALL + 1}"):
        MODEL.engine(device_cache_bytes=ALL + 1)
    own = {"host_cache_bytes": memory_bytes(), "device_cache_bytes": ALL}  # the device has its own memory
    MODEL.engine(max_model_len=512, **own).close()


def queued_behind(engine, until, lost=("device",)):
    """The answer to SEGMENTS, which were stored before and are in no tier of `lost` now, queued behind an answer that
    is cancelled once `until()`."""
    events, begun = queue.SimpleQueue(), queue.SimpleQueue()
    engine.cache.flush()
    for meta in list(engine._chunks.variants):
        assert all(engine._chunks.store.evict(tier, [meta.variant_id]) for tier in lost)
        engine._chunks.variants._placement.apply_changes(meta.variant_id)
    long = Request(segments=[[1, 2, 3], [4, 5, 6]], sampling=SamplingParams(400, ignore_eos=True), reuse="off")
    cancel = engine.submit(long, begun.put)
    assert begun.get(timeout=120).token_ids
    request = Request(segments=SEGMENTS, sampling=SamplingParams(4, logprobs=0))
    with contextlib.closing(engine.preload(request)):  # as the server does
        engine.submit(request, events.put)
        wait_until(until, timeout_s=120)
    cancel()
    while True:
        event = events.get(timeout=120)
        assert not isinstance(event, Exception)
        if event.response is not None:
            return event.response


def test_kv_of_a_queued_request_is_copied_to_free_pages_of_the_device_before_it_runs():
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        first = engine.run(Request(segments=SEGMENTS, sampling=SamplingParams(4, logprobs=0)))
        stored_bytes = NUM_STORED * MODEL.token_bytes
        again = queued_behind(engine, lambda: engine.batch_counts.preloaded_bytes == stored_bytes)
        assert set(tiers(again.reuse)) == {"device"} and again.reuse.loaded_bytes == 0
        assert again.token_ids == first.token_ids and again.reuse.reused_tokens == NUM_STORED
        wait_until(lambda: not engine._chunks.store._pins, timeout_s=120)


class HeldCopies:
    """Copies for queued requests that end only when the test allows it."""

    def __init__(self, pool, monkeypatch, *, is_first_wrong=False):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._fill, self._is_wrong = pool.fill, is_first_wrong
        monkeypatch.setattr(pool, "fill", self._held)

    def _held(self, shard, kv):
        self._fill(shard, np.zeros_like(kv) if self._is_wrong else kv)
        self._is_wrong = False
        if threading.current_thread().name.startswith("ccjax-device-preload"):
            self.begun.set()
            assert self.may_end.wait(120)


def test_kv_of_a_queued_request_comes_from_disk_to_the_device_before_it_runs(url):
    with MODEL.engine(store=url, max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        first, size = engine.run(ask(SEGMENTS)), NUM_STORED * MODEL.token_bytes
        again = queued_behind(engine, lambda: engine.batch_counts.preloaded_bytes == size, ("device", "host"))
        assert set(tiers(again.reuse)) == {"device"} and again.reuse.reused_tokens == NUM_STORED
        assert again.token_ids == first.token_ids[:4]


class Layers:
    """Stops the loop in a layer of the first pack until the test goes on."""

    def __init__(self, monkeypatch):
        self.in_first, self.may_go, self.in_last = threading.Event(), threading.Event(), lambda: None
        self._run_layer = pack_module.Pack.run_layer
        monkeypatch.setattr(pack_module.Pack, "run_layer", lambda pack: self._run(pack))

    def _run(self, pack):
        if not self.in_first.is_set():
            self.in_first.set()
            assert self.may_go.wait(120)
        elif pack.layer == MODEL.config.num_layers - 1:
            self.in_last, call = (lambda: None), self.in_last
            call()
        self._run_layer(pack)


def test_copies_begin_while_the_prompt_before_is_computed(monkeypatch):
    """And over a slow link, too."""
    carried = []

    def link(done, num_bytes):
        carried.append(num_bytes)
        return done

    with MODEL.engine(device_link=link, max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        first = engine.run(ask(SEGMENTS))
        to_host(engine, SEGMENTS)
        copies, layers, begun = HeldCopies(engine._device.pool, monkeypatch), Layers(monkeypatch), []
        copies.may_end.set()
        layers.in_last = lambda: begun.append(copies.begun.wait(60))
        Client(engine, ask(SHORT, "off", 1))
        assert layers.in_first.wait(120)
        queued = Client(engine, ask(SEGMENTS))
        layers.may_go.set()
        check(queued.response(), first)
        assert begun == [True]
        assert sum(carried) >= NUM_STORED * MODEL.token_bytes


def test_copies_wait_for_what_a_running_prompt_loads(monkeypatch):
    """As long as it has a layer to come."""
    seen, looked, num_left = [], threading.Event(), []

    def link(done, num_bytes):
        if num_left:
            num_left[0] -= 1
            if not num_left[0]:  # the last layer of the first prompt comes once the loop has looked at the queue
                assert looked.wait(120)
                seen.append(engine._chunks.device_preloader._copy)
        return done

    with MODEL.engine(device_link=link, max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        other = draw_segments(np.random.default_rng(12), LENGTHS)
        first = [engine.run(ask(segments)) for segments in (other, SEGMENTS)]
        to_host(engine, SEGMENTS)
        to_host(engine, other)
        layers, sequences = Layers(monkeypatch), engine._loop._sequences
        num_left.append(MODEL.config.num_layers)
        look_ahead = sequences.look_ahead
        monkeypatch.setattr(sequences, "look_ahead", lambda: (look_ahead(), looked.set()))

        running = Client(engine, ask(other))
        assert layers.in_first.wait(120)
        queued = Client(engine, ask(SEGMENTS))
        layers.may_go.set()
        check(running.response(), first[0])
        check(queued.response(), first[1])
        assert seen == [None] and tiers(running.response().reuse) == ["host"] * 5


def test_copy_for_a_request_that_left_the_queue_is_dropped(monkeypatch):
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        engine.run(Request(segments=SEGMENTS, sampling=SamplingParams(4, logprobs=0)))
        pool, copies = engine._device.pool, HeldCopies(engine._device.pool, monkeypatch)
        queued_behind(engine, copies.begun.is_set)  # is admitted, and loads what is being copied
        assert engine.batch_counts.preloaded_bytes == 0
        copies.may_end.set()
        store = engine._chunks.store

        def num_held():
            return sum(num_pages(store.get_summary(key).num_tokens) for key in store.ids("device"))

        wait_until(lambda: pool.num_pages - pool.num_free == num_held(), timeout_s=120)
        wait_until(lambda: not store._pins, timeout_s=120)


def test_pages_for_the_growth_of_answers_are_not_taken_by_copies():
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL) as engine:
        engine.run(Request(segments=SEGMENTS, sampling=SamplingParams(4, logprobs=0)))
        engine.cache.flush()
        preloader, pool, store = engine._chunks.device_preloader, engine._device.pool, engine._chunks.store
        with engine._loop.exclusive():
            (variant_id, *_) = engine._chunks.variants.ids()
            assert store.evict("device", [variant_id])
            engine._chunks.variants._placement.apply_changes(variant_id)
            num_spare = pool.num_free - num_pages(store.get_summary(variant_id).num_tokens)
            preloader.want([variant_id], num_spare=num_spare + 1)
            assert preloader._copy is None
            preloader.want([variant_id], num_spare=num_spare)
            wait_until(lambda: preloader.collect() == variant_id, timeout_s=120)
            assert pool.num_free == num_spare


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_pages_of_a_failed_copy_are_free_even_if_a_log_keeps_its_traceback(caplog, monkeypatch, is_forgotten):
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL) as engine:
        engine.run(Request(segments=SEGMENTS, sampling=SamplingParams(4, logprobs=0)))
        engine.cache.flush()
        preloader, pool, store = engine._chunks.device_preloader, engine._device.pool, engine._chunks.store

        def fails(*_, **__):
            raise KeyError("a damaged index")

        with engine._loop.exclusive():
            (variant_id, *_) = engine._chunks.variants.ids()
            assert store.evict("device", [variant_id])
            engine._chunks.variants._placement.apply_changes(variant_id)
            num_free = pool.num_free
            monkeypatch.setattr(pool, "fill", fails)
            preloader.want([variant_id], num_spare=0)
            assert pool.num_free < num_free
            if is_forgotten:
                preloader.forget()
            wait_until(lambda: preloader.collect() is None and preloader._copy is None, timeout_s=120)
            wait_until(lambda: pool.num_free == num_free, timeout_s=120)
        assert caplog.records[-1].exc_info is not None and "damaged index" in caplog.text


def to_host(engine, segments):
    """The variants of these segments, which from now on are in host memory alone."""
    store, variants = engine._chunks.store, engine._chunks.variants
    assert store.flush(120)
    ids = [meta.variant_id for metas in variants.of_chunks(set(map(chunk_id, segments))).values() for meta in metas]
    for variant_id in ids:
        assert engine._device.pool.remove(variant_id)  # also if it is pinned
        variants._placement.apply_changes(variant_id)
    return ids


def between_steps(client, turns, call):
    """Calls something on the loop's thread, before the next step."""
    done = threading.Event()

    def once():
        client.on_delta = lambda: None
        call()
        done.set()

    client.on_delta = once
    turns.until(done.is_set)


def test_pages_of_a_queued_request_are_given_back_before_any_others():
    """Before those of chunks that were used less often, and before an answer has to stop."""
    other = draw_segments(np.random.default_rng(12), LENGTHS)
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        store, pool = engine._chunks.store, engine._device.pool
        for segments in (SEGMENTS, other, SEGMENTS, SEGMENTS):
            engine.run(ask(segments))
        queued_ids = to_host(engine, SEGMENTS)
        others, held, seen = set(store.ids("device")), [], []

        def look():
            if answering.deltas[-1].response is not None:  # the queued request was not admitted yet
                seen.extend(store.ids("device"))
                held.clear()

        with Turns(engine) as turns:
            answering = Client(engine, ask(SHORT, "off", 200, ignore_eos=True), look)
            turns.until(lambda: answering.deltas)
            queued = Client(engine, ask(SEGMENTS))
            turns.until(lambda: set(queued_ids) <= set(store.ids("device")))
            held.extend(pool.allocate([pool.num_free * PAGE_TOKENS]))
        assert len(answering.response().token_ids) == 200
        assert queued.response().reuse.reused_tokens == NUM_STORED
        assert others <= set(seen) and not set(queued_ids) <= set(seen)
        assert engine.batch_counts.preemptions == 0


def test_no_answer_stops_for_the_pages_of_a_copy_under_way(monkeypatch):
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=2) as engine:
        engine.run(ask(SEGMENTS))
        pool, preloader = engine._device.pool, engine._chunks.device_preloader
        to_host(engine, SEGMENTS)
        copies, give_back = HeldCopies(pool, monkeypatch), preloader.give_back
        monkeypatch.setattr(preloader, "give_back", lambda: copies.may_end.set() or give_back())
        with Turns(engine) as turns:
            answering = [Client(engine, ask(SHORT, "off", 100, ignore_eos=True)) for _ in range(2)]
            turns.until(lambda: all(client.deltas for client in answering))
            queued = Client(engine, ask(SEGMENTS))
            turns.until(copies.begun.is_set)
            held = pool.allocate([pool.num_free * PAGE_TOKENS])
            turns.until(copies.may_end.is_set)
            held.clear()
        for client in answering:
            assert len(client.response().token_ids) == 100
        assert queued.response().reuse.reused_tokens == NUM_STORED
        assert engine.batch_counts.preemptions == 0


def test_kv_of_a_queued_request_stays_where_it_is_without_free_pages(monkeypatch):
    """Nothing is evicted for it, and what a full pool refuses once is not tried again."""
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        engine.run(Request(segments=SEGMENTS, sampling=SamplingParams(4, logprobs=0)))
        pool, tried = engine._device.pool, []

        def refuse(shard, kv):
            tried.append(kv.shape[2])
            raise TierFullError("full")

        monkeypatch.setattr(pool, "fill", refuse)
        num_variants = len(list(engine._chunks.variants))
        again = queued_behind(engine, lambda: len(tried) == num_variants)
        assert set(tiers(again.reuse)) == {"host"} and engine.batch_counts.preloaded_bytes == 0


def test_copy_into_a_pool_that_is_lost_meanwhile_is_dropped(monkeypatch):
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=1) as engine:
        first, pool = engine.run(ask(SEGMENTS)), engine._device.pool
        to_host(engine, SEGMENTS)
        copies = HeldCopies(pool, monkeypatch, is_first_wrong=True)
        with Turns(engine) as turns:
            answering = Client(engine, ask(SHORT, "off", 300, ignore_eos=True))
            turns.until(lambda: answering.deltas)
            queued = Client(engine, ask(SEGMENTS))
            turns.until(copies.begun.is_set)
            between_steps(answering, turns, lambda: [pages.k.delete() for pages in pool._layers])
            turns.until(lambda: engine.batch_counts.retries)
            assert engine.batch_counts.free_pages < engine.batch_counts.num_pages  # not replaced while it is written to
            copies.may_end.set()
        assert len(answering.response().token_ids) == 300
        check(queued.response(), first)
        check(engine.run(ask(SEGMENTS)), first)
        assert queued.response().reuse.reused_tokens == NUM_STORED


@pytest.mark.parametrize("is_computed_again", [False, True])
def test_copy_of_variants_that_are_erased_meanwhile_is_dropped(monkeypatch, is_computed_again):
    """A variant that is computed again has the same id, but may have been computed in another context."""
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL, max_num_seqs=2) as engine:
        first, store = engine.run(ask(SEGMENTS)), engine._chunks.store
        erased_ids = to_host(engine, SEGMENTS)
        copies = HeldCopies(engine._device.pool, monkeypatch, is_first_wrong=True)
        variants, preloader = engine._chunks.variants, engine._chunks.device_preloader
        with Turns(engine) as turns:
            answering = [Client(engine, ask(SHORT, "off", 300, ignore_eos=True)) for _ in range(2)]
            turns.until(lambda: all(client.deltas for client in answering))
            queued = Client(engine, ask(SEGMENTS))
            turns.until(copies.begun.is_set)
            between_steps(answering[0], turns, lambda: [variants.discard(variant_id) for variant_id in erased_ids])
            if is_computed_again:
                answering[1].cancel()
                turns.until(queued.done.is_set)
                check(queued.response(), first)
                assert queued.response().reuse.reused_tokens == 0
                between_steps(answering[0], turns, lambda: to_host(engine, SEGMENTS))
            else:
                queued.cancel()
            copies.may_end.set()
            turns.until(lambda: preloader._copy is None)
            assert not store.ids("device")
            assert not answering[0].done.is_set()  # else the copy would have been dropped for another reason
            answering[0].cancel()
        check(engine.run(ask(SEGMENTS)), first)

"""Engines on one store and one shared index: each knows what the others stored, evicted or erased when it makes its
next plan, whatever happens to the index."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig
from ccjax.engine.maintenance import MaintenanceCounts
from ccjax.runner.pack import Pack
from ccjax.server.metrics import ServerMetrics
from ccjax.store.index.outage import Outage
from ccjax.types import Document
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.sharing_worker import LENGTHS, SEGMENTS
from tests.polling import wait_until

MODEL = TinyModel()
NUM_QUESTION_TOKENS = len(SEGMENTS[-1])
NUM_CHUNKS = 1 + len(LENGTHS)


@pytest.fixture
def start(url):
    """`start(index, **settings)` returns an engine on the store that all engines of a test share."""
    with contextlib.ExitStack() as engines:
        yield lambda index, **settings: engines.enter_context(
            MODEL.engine(**{"store": url, "store_index": index, **settings})
        )


def answer(engine, segments=SEGMENTS, **options):
    return engine.generate_from_tokens(segments, **{"max_new_tokens": 4, **options})


def only_by_requests(engine) -> None:
    """From now on, only requests apply received changes."""
    engine._chunks.updater.close()


def refuse(*_, **__):
    raise AssertionError("not to be called")


def others(seed: int):
    return draw_segments(np.random.default_rng(seed), LENGTHS)


@contextlib.contextmanager
def constant_load(engine):
    """Runs requests without a pause, two at a time; yields the list of failures."""
    is_over, failed = threading.Event(), []
    seeds = itertools.count(1000)

    def ask() -> None:
        while not is_over.is_set():
            try:
                answer(engine, others(next(seeds)), max_new_tokens=8)
            except Exception as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


# -- what another engine stored --------------------------------------------------------------------------------------


def test_the_next_request_reuses_what_another_engine_just_stored(start, index_url, monkeypatch):
    first, second = start(index_url), start(index_url)
    monkeypatch.setattr(second.cache, "refresh", refuse)
    wanted = answer(first)
    first.cache.flush()
    wait_until(lambda: second.cache.num_variants == NUM_CHUNKS)  # without any request
    got = answer(second)
    assert got.token_ids == wanted.token_ids
    assert (got.reuse.computed_tokens, got.reuse.recomputed_tokens) == (NUM_QUESTION_TOKENS, 0)
    assert second.cache.maintenance_counts == MaintenanceCounts(adopted=NUM_CHUNKS)
    assert first.cache.maintenance_counts == MaintenanceCounts()
    monkeypatch.undo()
    second.cache.refresh()
    first.cache.refresh()
    assert second.cache.maintenance_counts == MaintenanceCounts(adopted=NUM_CHUNKS)
    assert first.cache.maintenance_counts == MaintenanceCounts()


def test_planning_applies_changes_on_the_loop_thread_without_reading_the_disk(start, index_url, monkeypatch):
    first, second = start(index_url), start(index_url)
    answer(second, others(1))  # compiles
    only_by_requests(second)
    follow, threads = second._chunks.updater.apply_changes, []
    monkeypatch.setattr(
        second._chunks.updater,
        "apply_changes",
        lambda *news: threads.append(threading.current_thread().name) or follow(*news),
    )
    answer(first)
    first.cache.flush()
    wait_until(lambda: len(second._chunks.store.change_feed._added) == NUM_CHUNKS)
    assert second.cache.num_variants == NUM_CHUNKS and threads == []  # its own variants
    for name in ("read", "names"):
        monkeypatch.setattr(second._chunks.store._disk._root, name, refuse)
    assert answer(second).reuse.computed_tokens == NUM_QUESTION_TOKENS
    assert threads == ["ccjax-batch"] and second.cache.num_variants == 2 * NUM_CHUNKS


def test_engine_under_constant_load_applies_changes_of_others(start, index_url, monkeypatch):
    first, second = start(index_url), start(index_url, host_cache_bytes=1 << 16)
    answer(first, others(1))
    answer(second, others(1))
    only_by_requests(second)
    with constant_load(second) as failed:
        answer(first)
        first.cache.flush()
        wait_until(lambda: first._chunks.variants.chunk_ids() <= second._chunks.variants.chunk_ids(), timeout_s=120)
        assert answer(second).reuse.computed_tokens == NUM_QUESTION_TOKENS
    assert failed == []


def test_exclusive_access_applies_pending_changes_first(start, index_url):
    first, second = start(index_url), start(index_url)
    only_by_requests(second)
    answer(first)
    first.cache.flush()
    wait_until(lambda: len(second._chunks.store.change_feed._added) == NUM_CHUNKS)
    with second._loop.exclusive() as is_ours:
        assert is_ours and second.cache.num_variants == NUM_CHUNKS


def test_changes_that_cannot_be_applied_fail_no_request(start, index_url, monkeypatch, caplog):
    first, second = start(index_url), start(index_url)
    only_by_requests(second)

    def fail(*_):
        raise ValueError("made to fail")

    monkeypatch.setattr(second._chunks.updater, "apply_changes", fail)
    answer(first)
    first.cache.flush()
    wait_until(lambda: second._chunks.store.change_feed.has_changes)
    assert answer(second).reuse.prompt_tokens == sum(map(len, SEGMENTS))
    assert "could not be applied" in caplog.text


def test_changes_by_another_engine_count_only_for_their_own_chunks(start, index_url):
    first, second = start(index_url), start(index_url)
    answer(second, others(1))
    chunks = [meta.chunk_id for meta in second._chunks.variants]
    before = second._chunks.variants.changes.last(chunks)
    answer(first)
    first.cache.flush()
    wait_until(lambda: second.cache.num_variants == 2 * NUM_CHUNKS)
    assert second._chunks.variants.changes.last(chunks) == before
    assert second._chunks.variants.changes.last([meta.chunk_id for meta in first._chunks.variants]) > before


# -- what another engine evicted -------------------------------------------------------------------------------------


def test_eviction_by_another_engine_is_applied_except_to_chunks_in_memory(start, index_url, monkeypatch):
    first, second = start(index_url), start(index_url)
    monkeypatch.setattr(second.cache, "refresh", refuse)
    answer(first)
    first.cache.flush()
    wait_until(lambda: second.cache.num_variants == NUM_CHUNKS)
    answer(second, [*SEGMENTS[:2], SEGMENTS[-1]])  # the system prompt and a passage, now in its memory
    for meta in tuple(first._chunks.variants):
        first._chunks.variants.discard(meta.variant_id)
    wait_until(lambda: second.cache.num_variants == 2)
    assert second.cache.maintenance_counts == MaintenanceCounts(adopted=NUM_CHUNKS, vanished=NUM_CHUNKS - 2)
    report = answer(second).reuse
    assert report.failed_loads == 0 and report.reused_tokens == len(SEGMENTS[0]) + len(SEGMENTS[1])


def test_variants_reused_by_a_running_prefill_stay_known_until_it_ends(start, index_url, monkeypatch):
    """Otherwise the texts that a repaired chunk attended to would be unknown, and their erasure would miss it."""
    first, second = start(index_url), start(index_url, max_num_batched_tokens=16, strategy="reuse", host_cache_bytes=1)
    answer(first)
    first.cache.flush()
    wait_until(lambda: second.cache.num_variants == NUM_CHUNKS)
    run_layer, keep, known = Pack.run_layer, second._chunks.capture.keep, []

    def evict_first(pack) -> None:
        if (
            pack._pool is second._device.pool and first.cache.num_variants and not pack._loaders()
        ):  # all is in the pages
            gone = {meta.variant_id for meta in tuple(first._chunks.variants)}
            for variant_id in gone:
                first._chunks.variants.discard(variant_id)
            news, followed = (
                second._chunks.store.change_feed,
                second._chunks.store._watcher,
            )  # keeps pinned variants for now
            wait_until(
                lambda: gone <= {*tuple(news._removed), *(key for key, _ in tuple(followed._unapplied_removals))}
            )
        run_layer(pack)

    def look(prefilled) -> None:
        known.extend(variant_id in second._chunks.variants for variant_id in prefilled.plan.pin)
        keep(prefilled)

    monkeypatch.setattr(Pack, "run_layer", evict_first)
    monkeypatch.setattr(second._chunks.capture, "keep", look)
    report = answer(second, [*permuted(SEGMENTS, (3, 2, 1, 0))[:-1], [5] * 40, SEGMENTS[-1]]).reuse
    assert report.reused_tokens > 0 and report.failed_loads == 0
    assert len(known) == NUM_CHUNKS and all(known)
    wait_until(lambda: second.cache.num_variants == 1)  # the fifth passage; the others are gone


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_erasure_reaches_the_memory_of_others_at_once(model, url, index_url, is_busy):
    anna, bob = Document("Anna lives in Paris. " * 4, "anna"), Document("Bob works in Rome. " * 4, "bob")
    settings = {"store": url, "store_index": index_url, "max_model_len": 512}
    with (
        Engine.from_pretrained(model, **settings) as first,
        Engine.from_pretrained(model, **settings) as other,
    ):
        for engine in (first, other):
            engine.generate("Who?", [anna, bob], max_new_tokens=1)
            engine.cache.flush()
        is_over = threading.Event()

        def ask() -> None:
            for number in itertools.count():
                if is_over.is_set():
                    return
                other.generate(f"Question {number}?", [bob], max_new_tokens=8)

        asking = threading.Thread(target=ask)
        if is_busy:
            asking.start()
        try:
            assert {"anna", "bob"} == {document.document_id for document in other.documents.list()}
            first.documents.erase("anna")
            wait_until(lambda: {one.document_id for one in other.documents.list()} == {"bob"}, timeout_s=120)
            erased = {
                chunk
                for erasure in first.documents._documents.registry._erasures.values()
                for chunk in erasure.chunk_ids
            }
            with other._loop.exclusive():
                assert erased and not other._chunks.variants.of_chunks(erased)
        finally:
            is_over.set()
            if is_busy:
                asking.join()


# -- an index that is unreachable, lost, or used only by some ----------------------------------------------------------


def shares(giver, taker, segments) -> bool:
    """True if `taker` soon reuses, without a refresh, what `giver` computes now."""
    expected = answer(giver, segments).token_ids
    giver.cache.flush()
    wait_until(lambda: giver._chunks.variants.chunk_ids() <= taker._chunks.variants.chunk_ids(), timeout_s=120)
    got = answer(taker, segments)
    assert got.token_ids == expected
    return got.reuse.computed_tokens == NUM_QUESTION_TOKENS


@pytest.mark.parametrize("way", ["killed", "stopped", "flushed"])
def test_requests_survive_redis_outages_and_sharing_resumes_afterwards(start, own_redis, way, caplog):
    first, second = (start(own_redis.url, share_computation=True) for _ in range(2))
    assert shares(first, second, others(1))
    stopped = own_redis.stopped()
    if way == "flushed":
        own_redis.run("FLUSHALL")
    elif way == "killed":
        own_redis.kill()
    else:
        stopped.__enter__()
    if way != "flushed":
        for engine in (first, second):
            wait_until(lambda engine=engine: not engine.cache.change_feed_counts.is_up)
        asked = []  # calls that wait for an unreachable index
        begin = Outage.begin
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Outage, "begin", lambda *args: (asked.append(threading.current_thread().name), begin(*args))[1]
            )
            for seed in range(100, 106):
                assert answer(first, others(seed)).finish_reason == "length"
        assert "ccjax-batch" not in asked
    answer(first)
    first.cache.flush()
    if way == "killed":
        own_redis.start()
    elif way == "stopped":
        stopped.__exit__(None, None, None)
    wait_until(lambda: first.cache.change_feed_counts.is_up and second.cache.change_feed_counts.is_up)
    wait_until(lambda: second.cache.num_variants == first.cache.num_variants)  # including variants stored meanwhile
    assert answer(second).reuse.computed_tokens == NUM_QUESTION_TOKENS
    assert shares(first, second, others(2)) and shares(second, first, others(3))
    logged = [one.getMessage() for one in caplog.records if "index" in one.getMessage()]
    assert len(logged) == (0 if way == "flushed" else 4), logged  # outage and recovery, for each engine


def test_engines_with_and_without_an_index_share_a_store(start, index_url):
    with_it, without = (start(index, share_computation=True) for index in (index_url, None))
    assert without.cache.change_feed_counts is None
    tokens = answer(with_it).token_ids
    with_it.cache.flush()
    without.cache.refresh()
    got = answer(without)
    assert got.token_ids == tokens and got.reuse.computed_tokens == NUM_QUESTION_TOKENS
    answer(without, others(1))
    without.cache.flush()
    with_it.cache.refresh()
    assert answer(with_it, others(1)).reuse.computed_tokens == NUM_QUESTION_TOKENS


# -- settings and metrics ----------------------------------------------------------------------------------------------


def test_password_of_an_index_is_not_shown():
    assert "hidden" not in repr(EngineConfig(store="file:///x", store_index="redis://:hidden@host"))


def metrics_of(engine) -> list[str]:
    metrics = ServerMetrics()
    metrics.attach(version="0", model="tiny", engine=engine, retriever=None)
    return metrics.render().decode().splitlines()


def test_metrics_report_index_health_and_received_changes(start, own_redis):
    first, second, without = start(own_redis.url), start(own_redis.url), start(None)
    answer(first)
    first.cache.flush()
    wait_until(lambda: second.cache.num_variants == NUM_CHUNKS)
    assert {"ccjax_store_index_up 1.0", f"ccjax_store_index_changes_total {NUM_CHUNKS}.0"} <= {*metrics_of(second)}
    own_redis.kill()
    wait_until(lambda: "ccjax_store_index_up 0.0" in metrics_of(second))
    assert not [line for line in metrics_of(without) if "store_index" in line]

"""Queued requests, and a generator engine that computes the chunks they will need (Shared RAG-DCache sec. III-B)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ccjax.cache import variant_records
from ccjax.cache.warming.order import PrefillOrder
from ccjax.engine import Request, SamplingParams, prefill_orders
from ccjax.errors import ConfigError, ReadOnlyError, RequestError
from ccjax.prompts import chunk_id
from ccjax.types import Chunk, Segment
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.polling import wait_until

MODEL = TinyModel()
LENGTHS = (23, 31, 17)
SEGMENTS = draw_segments(np.random.default_rng(5), LENGTHS)
NUM_PASSAGE_TOKENS = sum(LENGTHS)
NUM_QUESTION_TOKENS = len(SEGMENTS[-1])


@pytest.fixture
def engines(tmp_path):
    """A replica and a generator that share only a store."""
    shared = {"store": f"file://{tmp_path}/store", "store_index": f"sqlite://{tmp_path}/index.db"}
    with (
        MODEL.engine(**shared, order_after_s=0.0, share_computation=True) as replica,
        MODEL.engine(**shared) as generator,
    ):
        yield replica, generator


def request(segments, reuse="bounded"):
    return Request(segments=segments, sampling=SamplingParams(4), reuse=reuse)


@contextlib.contextmanager
def in_line(engine, *requests):
    """The futures of requests that stay queued until the block ends."""
    with ThreadPoolExecutor() as pool:
        with engine._loop.exclusive():
            futures = [pool.submit(engine.run, one) for one in requests]
            wait_until(lambda: len(engine._loop.waiting()) == len(requests), timeout_s=120)
            yield futures


def work_off(generator):
    """The outcome of every order on the board."""
    results = []
    while (done := generator.orders.compute()) is not None:
        results.append([one.status for one in done])
    return results


@pytest.mark.parametrize("mode", ["exact", "bounded", "fast"])
def test_generator_computes_all_chunks_of_a_queued_request(engines, mode):
    replica, generator = engines
    with MODEL.engine() as plain:
        wanted = plain.run(request(SEGMENTS, "off")).token_ids
    with in_line(replica, request(SEGMENTS, mode)) as (future,):
        assert replica.orders.place() == 1
        assert work_off(generator) == [["computed"] * 3]
    response = future.result()
    assert response.token_ids == wanted
    assert response.reuse.computed_tokens == NUM_QUESTION_TOKENS and response.reuse.exact
    assert generator.orders.counts.computed_tokens >= NUM_PASSAGE_TOKENS


def test_common_prefix_of_two_queued_prompts_is_computed_once(engines):
    replica, generator = engines
    with in_line(replica, request(SEGMENTS), request(permuted(SEGMENTS, (0, 2)))) as futures:
        assert replica.orders.place() == 2
        assert sorted(work_off(generator)) == [["computed"] * 3, ["present", "computed"]]
    assert all(future.result().reuse.computed_tokens == NUM_QUESTION_TOKENS for future in futures)


@pytest.mark.parametrize(("dtype", "is_exact"), [("float32", False), ("bfloat16", True)])
def test_kv_from_another_platform_is_exact_only_within_rounding(tmp_path, monkeypatch, dtype, is_exact):
    model, store = TinyModel(), f"file://{tmp_path}/store"
    params = jax.tree.map(lambda weight: weight.astype(dtype), model.loaded.params)
    model.loaded = dataclasses.replace(model.loaded, params=params)
    with monkeypatch.context() as patch, model.engine(store=store, dtype=dtype) as other:
        patch.setattr(variant_records, "own_platform", lambda: "elsewhere")
        other.run(request(SEGMENTS))
    with model.engine(store=store, dtype=dtype) as engine:
        exact = engine.run(request(SEGMENTS, "exact")).reuse
        assert exact.exact and (exact.computed_tokens == NUM_QUESTION_TOKENS) is is_exact
        assert engine.run(request(SEGMENTS, "bounded")).reuse.reused_tokens > 0
        records = engine._chunks.store.records()
        assert {record.meta["platform"] for record in records} == {"elsewhere"}
    with model.engine(store=f"file://{tmp_path}/own", dtype=dtype) as engine:
        engine.run(request(SEGMENTS))
        assert {record.meta["platform"] for record in engine._chunks.store.records()} == {"cpu"}


def test_chunks_already_ordered_or_stored_are_not_ordered(engines):
    replica, generator = engines
    replica.run(request(SEGMENTS))
    replica.cache.flush()
    with in_line(replica, request(SEGMENTS, "exact"), request(permuted(SEGMENTS, (0, 1)), "exact")):
        assert replica.orders.place() == 0  # the first is stored completely, and so is the second, a shorter path
    with in_line(replica, request(permuted(SEGMENTS, (2, 1)), "exact")):
        assert replica.orders.place() == 1
        assert replica.orders.place() == 0
        assert work_off(generator) == [["computed"] * 2]


def test_request_places_no_order_before_order_after_s(tmp_path, monkeypatch):
    shared = {"store": f"file://{tmp_path}/store", "store_index": f"sqlite://{tmp_path}/index.db"}
    with MODEL.engine(**shared, order_after_s=3600.0) as replica, in_line(replica, request(SEGMENTS)):
        (waiting,) = replica._loop.waiting()
        clock = [waiting.group.arrived_s + 3599.0]
        monkeypatch.setattr(prefill_orders, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        assert replica.orders.place() == 0
        clock[0] += 2.0
        assert replica.orders.place() == 1


def test_reuse_off_and_engines_without_an_index_place_no_orders(engines, tmp_path):
    replica, _ = engines
    with in_line(replica, request(SEGMENTS, "off")):
        assert replica.orders.place() == 0
    with MODEL.engine(store=f"file://{tmp_path}/other") as alone, in_line(alone, request(SEGMENTS)):
        assert alone.orders.place() == 0
        with pytest.raises(ConfigError, match="store_index"):
            alone.orders.compute()
    with (
        MODEL.engine(store=f"file://{tmp_path}/other", read_only=True) as reader,
        pytest.raises(ReadOnlyError, match="read_only"),
    ):
        reader.orders.compute()


def test_order_of_a_dead_generator_is_claimed_by_another(engines, monkeypatch):
    replica, generator = engines
    with in_line(replica, request(SEGMENTS, "exact")) as (future,):
        assert replica.orders.place() == 1
        clock = [time.time()]
        monkeypatch.setattr(generator.orders._orders, "_clock", lambda: clock[0])
        order = generator.orders._orders.take(20.0)
        assert order is not None and order.attempt == 1
        assert generator.orders.compute() is None
        clock[0] += 20.0
        assert work_off(generator) == [["computed"] * 3]
    assert future.result().reuse.computed_tokens == NUM_QUESTION_TOKENS


def test_invalid_orders_are_dropped(engines):
    replica, generator = engines
    chunk = Chunk(chunk_id([1, 2]), (1, 2))
    foreign = PrefillOrder((Segment("passage", Chunk(chunk_id([1, 500]), (1, 500))),))
    long = PrefillOrder((Segment("passage", Chunk(chunk_id([1] * 5000), (1,) * 5000)),))
    value = json.loads(PrefillOrder((Segment("passage", chunk),)).encode())
    bad = [
        b"",
        b"[]",
        b'{"version": 2}',
        json.dumps(value | {"segments": [{"role": "passage", "token_ids": ["1"]}]}).encode(),
    ]
    for number, raw in enumerate([*bad, foreign.encode(), long.encode(), PrefillOrder(()).encode()]):
        assert replica.orders._orders.place(f"order-{number}", raw, 60.0)
    assert work_off(generator) == [["failed"]] * 7
    assert generator.orders.counts.failed == generator.orders.counts.taken == 7
    assert len(replica.orders._orders) == 0 and generator.cache.num_variants == 0


def test_order_survives_encoding_and_its_key_depends_on_chunk_order():
    chunks = [
        Chunk(chunk_id(ids), tuple(ids), document_id=f"d{ids[0]}", version="v", title="T", source_id="s")
        for ids in ([1, 2, 3], [4, 5])
    ]
    segments = tuple(Segment(role, chunk) for role, chunk in zip(("instructions", "passage"), chunks, strict=True))
    ahead = PrefillOrder(segments)
    assert PrefillOrder.decode(ahead.encode()) == ahead
    assert ahead.warming(max_model_len=100, vocab_size=97).total == 1 and len(ahead.key) == 64
    assert ahead.key != PrefillOrder(segments[::-1]).key
    with pytest.raises(RequestError, match="max_model_len"):
        ahead.warming(max_model_len=5, vocab_size=97)

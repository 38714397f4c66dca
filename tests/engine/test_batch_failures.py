"""A device that runs out of memory, or loses what it held: who fails then, what is left behind, and who comes next."""

import threading

import jax
import numpy as np
import pytest

from ccjax.engine.batch import decode as decode_module
from ccjax.engine.batch import pack as pack_module
from ccjax.engine.pool import PAGE_TOKENS, DevicePool
from ccjax.engine.snapshot.cache import kv_spec_of
from ccjax.errors import DeviceMemoryError
from tests.engine.helpers import TinyModel, draw_segments
from tests.engine.test_batch_loop import Client, ask, check, settled
from tests.polling import wait_until

MODEL = TinyModel(seed=23)
SPEC = kv_spec_of(MODEL.config, "float32")
PAGE = SPEC.num_bytes(PAGE_TOKENS)
SEGMENTS = draw_segments(np.random.default_rng(1), [40, 30])


@pytest.fixture(scope="module")
def engine():
    with MODEL.engine(max_model_len=512, max_num_seqs=4, device_cache_bytes=200 * PAGE) as engine:
        yield engine


def out_of_memory(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.")


class FailsOnce:
    """A step that fails the first time it is called once `is_armed` is set, with what `failure` raises."""

    def __init__(self, step, failure=out_of_memory):
        self.step, self.failure, self.is_armed, self.num_failed = step, failure, threading.Event(), 0

    def __call__(self, *args, **kwargs):
        if self.is_armed.is_set():
            self.is_armed.clear()
            self.num_failed += 1
            self.failure(*args, **kwargs)
        return self.step(*args, **kwargs)


def decoding(engine, tokens=60):
    client = Client(engine, ask(SEGMENTS, "off", tokens=tokens))
    wait_until(lambda: client.deltas, timeout_s=60)
    return client


def test_a_prefill_without_memory_fails_alone(engine, monkeypatch, caplog):
    wanted, short = engine.run(ask(SEGMENTS, "off", tokens=60)), engine.run(ask(SEGMENTS, "off"))
    free = engine.batch_counts.free_pages
    step = FailsOnce(pack_module.paged_layer_step)
    monkeypatch.setattr(pack_module, "paged_layer_step", step)
    running = [decoding(engine), decoding(engine)]
    step.is_armed.set()
    failed = Client(engine, ask(SEGMENTS, "off"))
    with pytest.raises(DeviceMemoryError, match="memory"):
        failed.response()
    following = Client(engine, ask(SEGMENTS, "off"))
    for client in running:
        check(client.response(), wanted)
    check(following.response(), short)
    assert step.num_failed == 1 and not failed.deltas
    settled(engine)
    assert engine.batch_counts.free_pages == free
    assert "1073741824" in caplog.text  # what the device said is for the log


def test_a_decode_step_without_memory_fails_those_that_were_in_it(engine, monkeypatch):
    wanted = engine.run(ask(SEGMENTS, "off"))
    free = engine.batch_counts.free_pages
    step = FailsOnce(decode_module.paged_decode_step)
    monkeypatch.setattr(decode_module, "paged_decode_step", step)
    running = [decoding(engine, 400) for _ in range(4)]
    in_line = [Client(engine, ask(SEGMENTS, "off")) for _ in range(3)]
    step.is_armed.set()
    for client in running:
        with pytest.raises(DeviceMemoryError):
            client.response()
    for client in in_line:
        check(client.response(), wanted)
    assert step.num_failed == 1
    settled(engine)
    assert engine.batch_counts.free_pages == free


def test_pages_that_a_failed_step_took_along_are_replaced_and_nobody_reads_them(engine, monkeypatch):
    wanted = engine.run(ask(SEGMENTS, "exact"))
    assert engine.run(ask(SEGMENTS, "exact")).reuse.reused_tokens > 0

    def lose(layer, x, k_pages, v_pages, *_, **__):
        k_pages.delete()
        out_of_memory()

    step = FailsOnce(decode_module.paged_decode_step, lose)
    monkeypatch.setattr(decode_module, "paged_decode_step", step)
    running = [decoding(engine, 400) for _ in range(2)]
    step.is_armed.set()
    for client in running:
        with pytest.raises(DeviceMemoryError):
            client.response()
    settled(engine)
    assert not engine._pool.is_lost()
    assert engine.batch_counts.free_pages == engine.batch_counts.num_pages  # what was cached there is gone
    got = engine.run(ask(SEGMENTS, "exact"))
    check(got, wanted)
    assert {document.tier for document in got.reuse.per_document} <= {"host", None}
    check(engine.run(ask(SEGMENTS, "exact")), wanted)


def test_a_pool_that_lost_a_page_says_so_and_is_renewed_only_when_free():
    pool = DevicePool(SPEC, 4 * PAGE)
    assert not pool.is_lost()
    (shard,) = pool.allocate([20])
    pool._layers[0][1].delete()
    assert pool.is_lost()
    with pytest.raises(RuntimeError, match="all 4 pages free, got 2"):
        pool.renew()
    shard.free()
    pool.renew()
    assert not pool.is_lost() and not np.asarray(pool._layers[0][1]).any()

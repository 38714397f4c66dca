"""A device that fails a step, runs out of memory or loses its contents: which requests are retried, which fail, and
that nothing is leaked."""

import collections
import dataclasses
import threading

import jax
import numpy as np
import pytest

from ccjax.engine import EngineConfig
from ccjax.engine.batch import sequence as sequence_module
from ccjax.errors import DeviceMemoryError
from ccjax.runner import decode as decode_module
from ccjax.runner import pack as pack_module
from ccjax.runner.device import kv_spec_of
from ccjax.runner.pool import PAGE_TOKENS, DevicePool, num_pages
from ccjax.store.errors import TierFullError
from ccjax.store.usage import DEVICE, HOST
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.test_batch_loop import Client, Turns, ask, check, settled
from tests.polling import wait_until

MODEL = TinyModel(seed=23)
SPEC = kv_spec_of(MODEL.config, "float32")
PAGE = SPEC.num_bytes(PAGE_TOKENS)
SEGMENTS = draw_segments(np.random.default_rng(1), [40, 30])
OTHERS = [draw_segments(np.random.default_rng(seed), [50, 20]) for seed in range(2, 5)]
LONG = draw_segments(np.random.default_rng(5), [150, 150])
"""Has another length than all others, so that a step can recognise it."""


def build(**changes):
    return MODEL.engine(**{"max_model_len": 512, "max_num_seqs": 4, "device_cache_bytes": 200 * PAGE, **changes})


@pytest.fixture(scope="module")
def engine():
    with build() as engine:
        yield engine


@pytest.fixture(scope="module")
def strict():
    with build(max_retries=0) as engine:
        yield engine


def out_of_memory(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.")


class FailsOnce:
    """A step that fails at its first call after `is_armed` is set, with the exception of `failure`."""

    def __init__(self, step, failure=out_of_memory):
        self.step, self.failure, self.is_armed, self.num_failed = step, failure, threading.Event(), 0

    def __call__(self, *args, **kwargs):
        if self.is_armed.is_set():
            self.is_armed.clear()
            self.num_failed += 1
            self.failure(*args, **kwargs)
        return self.step(*args, **kwargs)


def decoding(engine, tokens=60, segments=SEGMENTS, reuse="off", **sampling):
    client = Client(engine, ask(segments, reuse, tokens=tokens, **sampling))
    wait_until(lambda: client.deltas, timeout_s=120)
    return client


def lose(pool):
    """Deletes the pool's memory, as a reset of the device does."""
    for pages in pool._layers:
        for array in (pages.k, pages.v):
            array.delete()


def check_pages(engine):
    """Checks that only cached chunks hold pages, each its own."""
    settled(engine)
    summaries = [engine._chunks.store.get_summary(key) for key in engine._chunks.store.ids(DEVICE)]
    used = sum(num_pages(one.num_tokens) for one in summaries)
    pool = engine._device.pool
    wait_until(lambda: pool.num_pages - pool.num_free == used, timeout_s=120)  # a copy may be ending


@pytest.fixture
def jobs(monkeypatch):
    """Collects all prefills that begin from now on."""
    begun = []

    class Noted(sequence_module.PrefillJob):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            begun.append(self)

    monkeypatch.setattr(sequence_module, "PrefillJob", Noted)
    return begun


# -- without retries ---------------------------------------------------------------------------------------------------


def test_prefill_out_of_memory_fails_only_its_own_request(strict, monkeypatch, caplog):
    engine = strict
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
    assert "1073741824" in caplog.text  # the device's message goes to the log


def test_decode_step_out_of_memory_fails_only_the_requests_in_it(strict, monkeypatch):
    engine = strict
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
    assert step.num_failed == 1 and not engine.batch_counts.retries
    settled(engine)
    assert engine.batch_counts.free_pages == free


def test_pages_lost_in_a_failed_step_are_replaced_and_never_read(strict, monkeypatch):
    engine = strict
    wanted = engine.run(ask(SEGMENTS, "exact"))
    assert engine.run(ask(SEGMENTS, "exact")).reuse.reused_tokens > 0

    def take_along(layers, top, x, pages, *_, **__):
        pages[0].k.delete()
        out_of_memory()

    step = FailsOnce(decode_module.paged_decode_step, take_along)
    monkeypatch.setattr(decode_module, "paged_decode_step", step)
    running = [decoding(engine, 400) for _ in range(2)]
    step.is_armed.set()
    for client in running:
        with pytest.raises(DeviceMemoryError):
            client.response()
    settled(engine)
    assert not engine._device.pool.is_lost()
    assert engine.batch_counts.free_pages == engine.batch_counts.num_pages  # the cached chunks are gone
    got = engine.run(ask(SEGMENTS, "exact"))
    check(got, wanted)
    assert {document.tier for document in got.reuse.per_document} <= {"host", None}
    check(engine.run(ask(SEGMENTS, "exact")), wanted)


# -- with retries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), [(pack_module, "paged_layer_step"), (decode_module, "paged_decode_step")])
def test_requests_in_a_failed_step_are_retried_with_the_same_answers(engine, monkeypatch, module, name):
    requests = [
        ask(SEGMENTS, "off", tokens=30),
        ask(OTHERS[0], "exact", tokens=30, temperature=1.0, seed=3),
        ask(OTHERS[1], "bounded", tokens=30, temperature=0.8, top_p=0.9, seed=4),
        ask(OTHERS[2], "off", tokens=30, n=3, temperature=1.0, seed=5),
    ]
    wanted = [engine.run(request) for request in requests]
    before = engine.batch_counts.retries
    step = FailsOnce(getattr(module, name))
    monkeypatch.setattr(module, name, step)
    running = decoding(engine, 60)
    if module is pack_module:
        step.is_armed.set()
    clients = [Client(engine, request) for request in requests]
    if module is decode_module:
        wait_until(lambda: sum(bool(client.deltas) for client in clients) > 1, timeout_s=120)
        step.is_armed.set()
    for client, alone in zip(clients, wanted, strict=True):
        assert client.done.wait(120) and client.error is None
        assert [one.token_ids for one in client.deltas[-1].response.choices] == [one.token_ids for one in alone.choices]
        emitted = collections.defaultdict(list)
        for delta in client.deltas:
            emitted[delta.index] += delta.token_ids
        assert [tuple(emitted[index]) for index in sorted(emitted)] == [one.token_ids for one in alone.choices]
    assert len(running.response().token_ids) == 60
    assert step.num_failed == 1 and engine.batch_counts.retries > before
    check_pages(engine)


@pytest.mark.parametrize("takes_pages", [False, True])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_request_that_fails_every_step_does_not_fail_others(engine, monkeypatch, where, takes_pages):
    """It shares packs and steps with others, which all get their answers; its own error is that of the step."""
    wanted = [engine.run(ask(segments, "exact", tokens=20)) for segments in OTHERS]
    before, num_failed = engine.batch_counts.retries, 0

    def fail():
        nonlocal num_failed
        num_failed += 1
        if takes_pages:
            lose(engine._device.pool)
        raise RuntimeError("a poisoned step")

    if where == "prefill":
        run_layer = pack_module.Pack.run_layer

        def poisoned(pack):
            if any(piece.job.plan.num_tokens > 300 for piece in pack._pieces) and pack.layer == 1:
                fail()
            run_layer(pack)

        monkeypatch.setattr(pack_module.Pack, "run_layer", poisoned)
    else:
        step = decode_module.DecodeBatch.step

        def poisoned_step(self, requests, token_ids):
            if any(pages.num_tokens > 300 for pages in requests):
                fail()
            return step(self, requests, token_ids)

        monkeypatch.setattr(decode_module.DecodeBatch, "step", poisoned_step)
    with engine._loop.exclusive():
        clients = [Client(engine, ask(segments, "exact", tokens=20)) for segments in OTHERS[:2]]
        poison = Client(engine, ask(LONG, "off", tokens=20))
        clients.append(Client(engine, ask(OTHERS[2], "exact", tokens=20)))
    with pytest.raises(RuntimeError, match="a poisoned step"):
        poison.response()
    for client, alone in zip(clients, wanted, strict=True):
        check(client.response(), alone)
    retries = engine.batch_counts.retries - before
    assert engine.config.max_retries <= retries <= engine.config.max_retries + len(OTHERS)
    assert num_failed == engine.config.max_retries + 1
    assert len(poison.deltas) == (0 if where == "prefill" else num_failed)  # each prefill gives one token, none twice
    check_pages(engine)


def test_request_without_retries_left_is_not_failed_by_another_request(monkeypatch):
    """Two requests that fail every decode step, one after the other, while other answers continue."""
    with build(max_retries=1) as engine:
        wanted = [engine.run(ask(segments, "off", tokens=40)) for segments in OTHERS[:2]]
        step, met = decode_module.DecodeBatch.step, []

        def poisoned(self, requests, token_ids):
            if any(pages.num_tokens > 300 for pages in requests):
                met.append(len(requests))
                raise RuntimeError("a poisoned step")
            return step(self, requests, token_ids)

        monkeypatch.setattr(decode_module.DecodeBatch, "step", poisoned)
        with Turns(engine) as turns:
            with engine._loop.exclusive():
                clients = [Client(engine, ask(segments, "off", tokens=40)) for segments in OTHERS[:2]]
            turns.until(lambda: all(client.deltas for client in clients))
            for _ in range(2):
                poison = Client(engine, ask(LONG, "off", tokens=12))
                turns.until(poison.done.is_set)
                with pytest.raises(RuntimeError, match="poisoned"):
                    poison.response()
            assert not any(client.done.is_set() for client in clients)
        for client, alone in zip(clients, wanted, strict=True):
            check(client.response(), alone)
        assert met == [3, 1, 1, 1]
        check_pages(engine)


def test_client_callback_that_raises_does_not_affect_other_requests(engine):
    wanted = engine.run(ask(SEGMENTS, "off", tokens=40))

    def refuse(event):
        raise ValueError("the connection is gone")

    running = decoding(engine, 40)
    engine.submit(ask(SEGMENTS, "off", tokens=5), refuse)
    check(running.response(), wanted)
    check(engine.run(ask(SEGMENTS, "off", tokens=40)), wanted)
    check_pages(engine)


def test_prompt_of_a_request_that_fails_at_its_first_token_is_not_stored(engine, monkeypatch, caplog):
    segments = draw_segments(np.random.default_rng(9), [40, 30])

    def refuse(*_):
        raise ValueError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(sequence_module.TokenSequence, "append_token", refuse)
        with pytest.raises(ValueError, match="no such token"):
            engine.run(ask(segments, "exact"))
    assert [record.message for record in caplog.records] == ["a request failed over a token of its answer"]
    assert engine.run(ask(segments, "exact")).reuse.reused_tokens == 0
    check_pages(engine)


# -- the pool is lost --------------------------------------------------------------------------------------------------


class LosesPool:
    """Deletes the pool's arrays before the `number`-th call after it is armed, so that this call fails."""

    def __init__(self, engine, call, number):
        self.engine, self.call, self.left, self.is_armed = engine, call, number, False

    def __call__(self, *args, **kwargs):
        if self.is_armed:
            self.left -= 1
            if not self.left:
                lose(self.engine._device.pool)
        return self.call(*args, **kwargs)


@pytest.mark.parametrize(
    ("where", "number", "policy"),
    [
        ("prefill", 1, "default"),
        pytest.param("prefill", 2, "pgdsf", marks=pytest.mark.slow),
        ("decode", 1, "pgdsf"),
        pytest.param("decode", 6, "default", marks=pytest.mark.slow),
    ],
)
def test_lost_pool_only_requires_loading_the_chunks_again(monkeypatch, jobs, where, number, policy):
    """With running answers, a running prefill and queued requests."""
    settings = {} if policy == "default" else {"eviction_policy": policy, "strategy": "prefix"}
    documents = [permuted(OTHERS[0], order) for order in ([0, 1], [1, 0])]
    asked = [*documents, SEGMENTS, *documents, SEGMENTS, *documents]
    with build(max_num_seqs=3, **settings) as engine:
        for segments in (*documents, SEGMENTS):
            engine.run(ask(segments, "exact", tokens=1))
        engine._chunks.planner.read_only = True
        assert all("host" in engine._chunks.store.tiers_of(key) for key in engine._chunks.store.ids(DEVICE))
        requests = [
            ask(segments, "exact", tokens=20, temperature=1.0, seed=number) for number, segments in enumerate(asked)
        ]
        wanted = [engine.run(request) for request in requests]
        assert {one.tier for reply in wanted for one in reply.reuse.per_document} == {"device"}
        before, promoted = engine.batch_counts.retries, engine.cache.usage()[DEVICE].writes
        module, name = (pack_module.Pack, "run_layer") if where == "prefill" else (decode_module.DecodeBatch, "step")
        step = LosesPool(engine, getattr(module, name), number)
        monkeypatch.setattr(module, name, lambda *args: step(*args))
        running = decoding(engine, 40, LONG)
        jobs.clear()
        step.is_armed = True
        clients = [Client(engine, request) for request in requests]
        for client, alone in zip(clients, wanted, strict=True):
            got = client.response()
            check(got, alone)
            assert got.reuse.computed_tokens == alone.reuse.computed_tokens == 9
        check(running.response(), engine.run(ask(LONG, "off", tokens=40)))
        assert step.left <= 0 < engine.batch_counts.retries - before
        again = collections.Counter(job.token_ids[: job.plan.num_tokens].tobytes() for job in jobs)
        assert max(again.values()) > 1
        for job in jobs:  # only question and answer so far where chunks have a copy in host memory
            answered = len(job.token_ids) - job.plan.num_tokens
            assert len(job.offsets) == answered + (9 if job.plan.num_tokens < 300 else job.plan.num_tokens)
        assert engine.cache.usage()[DEVICE].writes > promoted
        assert engine.run(requests[0]).reuse.per_document[0].tier == "device"
        check_pages(engine)


def test_chunks_held_only_on_a_lost_device_are_computed_again(monkeypatch):
    with build() as engine:
        wanted = engine.run(ask(SEGMENTS, "exact"))
        assert engine._chunks.store.ids(DEVICE)
        engine._chunks.store.evict(HOST, engine._chunks.store.ids(HOST))
        step = LosesPool(engine, pack_module.Pack.run_layer, 2)
        monkeypatch.setattr(pack_module.Pack, "run_layer", lambda pack: step(pack))
        step.is_armed = True
        got = engine.run(ask(SEGMENTS, "exact"))
        check(got, wanted)
        assert got.reuse.computed_tokens == wanted.reuse.computed_tokens == sum(map(len, SEGMENTS))
        check_pages(engine)


@pytest.mark.parametrize("policy", ["pgdsf", "lru", "cost"])
def test_device_chunks_in_use_are_copied_to_host_and_survive_a_lost_pool(monkeypatch, policy):
    """RAGCache sec. 6: the hot upper nodes on the device have a replica in host memory."""
    policy = EngineConfig().eviction_policy if policy == "cost" else policy
    with build(eviction_policy=policy) as engine:
        wanted = engine.run(ask(SEGMENTS, "exact"))
        for victim in reversed(engine._chunks.store.ids(HOST)):  # from the leaf to the root
            engine._chunks.variants._placement._evict(HOST, (victim,))
        assert not engine._chunks.store.ids(HOST) and len(engine._chunks.store.ids(DEVICE)) == 3
        read = engine.cache.usage()[DEVICE].bytes_read
        check(engine.run(ask(SEGMENTS, "exact")), wanted)
        settled(engine)
        assert engine._chunks.store.flush(120)
        assert set(engine._chunks.store.ids(HOST)) == set(engine._chunks.store.ids(DEVICE))
        assert engine.cache.usage()[DEVICE].bytes_read == read  # copies do not count as uses
        lose(engine._device.pool)
        got = engine.run(ask(SEGMENTS, "exact"))
        check(got, wanted)
        assert got.reuse.computed_tokens == 9
        assert {one.tier for one in got.reuse.per_document} == {"host"}
        check_pages(engine)


def test_failed_copy_from_a_lost_pool_leaves_no_pin(caplog):
    with build() as engine:
        wanted = engine.run(ask(SEGMENTS, "exact"))
        engine._chunks.store.evict(HOST, engine._chunks.store.ids(HOST))
        ticket = engine._chunks.store.prepare_load(engine._chunks.store.ids(DEVICE))
        lose(engine._device.pool)
        engine._chunks.variants.complete_load(ticket)
        assert engine._chunks.store.flush(120)
        assert "could not be copied" in caplog.text
        assert not engine._chunks.store._pins and not engine._chunks.store.ids(HOST)
        del ticket
        check(engine.run(ask(SEGMENTS, "exact")), wanted)
        check_pages(engine)


def test_device_chunks_are_not_copied_to_host_memory_without_room(monkeypatch):
    """Nor are chunks for which host memory has no space at all."""
    with build(host_cache_bytes=20 * SPEC.num_bytes(1)) as engine:
        for _ in range(3):
            assert engine.run(ask(SEGMENTS, "exact")).reuse.exact
        settled(engine)
        assert {engine._chunks.store.get_summary(key).num_tokens for key in engine._chunks.store.ids(HOST)} <= {7}
        assert len(engine._chunks.store.ids(DEVICE)) == 3
        check_pages(engine)


def test_answers_share_their_prompt_again_after_a_lost_pool(engine, monkeypatch):
    request = ask(SEGMENTS, "exact", tokens=25, n=4, temperature=1.0, seed=1)
    wanted = engine.run(request)
    step = LosesPool(engine, decode_module.DecodeBatch.step, 5)
    monkeypatch.setattr(decode_module.DecodeBatch, "step", lambda *args: step(*args))
    step.is_armed = True
    got = engine.run(request)
    assert step.left <= 0
    assert [one.token_ids for one in got.choices] == [one.token_ids for one in wanted.choices]
    assert not engine._loop._sequences.pages.shared
    check_pages(engine)


def test_lost_pages_of_pinned_documents_are_dropped(engine, monkeypatch):
    wanted = engine.run(ask(SEGMENTS, "exact"))
    engine.run(ask(SEGMENTS, "exact"))

    @dataclasses.dataclass
    class Pins:
        ids: frozenset

        def pinned_ids(self, tier):
            return self.ids

    monkeypatch.setattr(engine._chunks.variants._placement, "pins", Pins(frozenset(engine._chunks.store.ids(DEVICE))))
    lose(engine._device.pool)
    check(engine.run(ask(SEGMENTS, "exact")), wanted)
    assert engine.run(ask(SEGMENTS, "exact")).reuse.computed_tokens == 9
    check_pages(engine)


def test_requests_wait_until_readers_release_lost_pages(engine, monkeypatch):
    """For example for a snapshot; waiting does not use up another retry."""
    wanted = engine.run(ask(SEGMENTS, "exact"))
    engine.run(ask(SEGMENTS, "exact"))
    before = engine.batch_counts.retries
    ticket = engine._chunks.store.prepare_load(engine._chunks.store.ids(DEVICE))
    assert DEVICE in ticket.tiers.values()
    looks, look = [], engine._loop._wait_briefly
    monkeypatch.setattr(engine._loop, "_wait_briefly", lambda: looks.append(look()))
    monkeypatch.setattr("ccjax.engine.batch.sequences._RENEW_S", 3600.0)
    lose(engine._device.pool)
    client = Client(engine, ask(SEGMENTS, "exact"))
    wait_until(lambda: engine.batch_counts.retries == before + 1, timeout_s=120)
    wait_until(lambda: len(looks) > 20, timeout_s=120)
    assert not client.done.is_set()
    engine._chunks.store.complete_load(ticket, ok=False)
    check(client.response(), wanted)
    assert engine.batch_counts.retries == before + 1
    check_pages(engine)


def test_requests_fail_if_the_lost_pool_cannot_be_renewed_in_time(engine, monkeypatch):
    wanted = engine.run(ask(SEGMENTS, "exact"))
    monkeypatch.setattr("ccjax.engine.batch.sequences._RENEW_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(DevicePool, "_empty_layers", out_of_memory)
        lose(engine._device.pool)
        with pytest.raises(DeviceMemoryError):
            engine.run(ask(SEGMENTS, "exact"))
        with pytest.raises(DeviceMemoryError):
            engine.run(ask(SEGMENTS, "exact"))
    check(engine.run(ask(SEGMENTS, "exact")), wanted)
    check_pages(engine)


def test_pool_reports_lost_pages_and_is_renewed_only_when_all_are_free():
    pool = DevicePool(SPEC, 4 * PAGE)
    assert not pool.is_lost()
    (shard,) = pool.allocate([20])
    pool._layers[0].v.delete()
    assert pool.is_lost()
    with pytest.raises(RuntimeError, match="all 4 pages free, got 2"):
        pool.renew()
    shard.free()
    pool.renew()
    assert not pool.is_lost() and not np.asarray(pool._layers[0].v).any()


def test_write_to_a_lost_pool_fails_and_frees_its_pages():
    pool = DevicePool(SPEC, 4 * PAGE)
    lose(pool)
    with pytest.raises(TierFullError, match="20 tokens could not be written"):
        pool._hold(np.zeros(SPEC.shape(20), SPEC.np_dtype))
    assert pool.num_free == 4
    pool.renew()
    pool._hold(np.zeros(SPEC.shape(20), SPEC.np_dtype))


def test_write_whose_pages_are_lost_as_it_begins_fails_in_the_same_way(monkeypatch):
    """JAX raises another error if they are deleted after it has looked at them."""
    pool = DevicePool(SPEC, 4 * PAGE)

    def deleted_meanwhile(*_, **__):
        lose(pool)
        raise ValueError("INVALID_ARGUMENT: Buffer has been deleted or donated.")

    monkeypatch.setattr("ccjax.runner.pool.write_pages_step", deleted_meanwhile)
    with pytest.raises(TierFullError, match="20 tokens could not be written"):
        pool._hold(np.zeros(SPEC.shape(20), SPEC.np_dtype))
    assert pool.num_free == 4 and pool.is_lost()
    pool.renew()
    monkeypatch.setattr("ccjax.runner.pool.write_pages_step", lambda *_, **__: int("no number"))
    with pytest.raises(ValueError, match="no number"):  # no loss, but a fault of ours
        pool._hold(np.zeros(SPEC.shape(20), SPEC.np_dtype))

"""Layer-ahead loading: the same bits as loading all first, bounded reads in flight, no thread or pin left behind."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.cache.contexts import LayerLoader, _aligned
from ccjax.cache.reads import LoadFailedError
from ccjax.engine import Request, SamplingParams
from ccjax.runner.buckets import load_buckets, slot_bucket
from ccjax.runner.cancellation import PrefillCancelledError
from ccjax.runner.job import LoadedRows
from ccjax.store.arrays import ShardReader
from ccjax.store.errors import ShardCorruptError
from ccjax.store.throttle import ThrottledLink
from ccjax.types import ChunkId, PlannedSegment, PrefillPlan, VariantId
from tests.engine.helpers import After, Memory, TinyModel, draw_segments, loader, permuted, run_plan, run_reusing

NUM_LAYERS = 6
MODEL = TinyModel(seed=8, num_hidden_layers=NUM_LAYERS)
SEGMENTS = draw_segments(np.random.default_rng(8), [40, 30, 50])
ANSWER = SamplingParams(max_new_tokens=5, logprobs=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_backend_uses_the_buffers_without_a_copy(dtype):
    for num_rows in (256, 2048, 2049):
        rows = _aligned((num_rows, 2, 16), np.dtype(jnp.dtype(dtype)))
        assert rows.shape == (num_rows, 2, 16) and rows.dtype == dtype
        assert jax.device_put(rows).unsafe_buffer_pointer() == rows.ctypes.data
        assert jax.device_put(rows[256:]).unsafe_buffer_pointer() == rows[256:].ctypes.data or num_rows == 256


def load_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ccjax-load"]


def plan(depth: int = NUM_LAYERS) -> PrefillPlan:
    """Two reused passages, the first one twice, a computed one, a question."""
    segments, start = [], 0
    for name, length, offsets in (("a", 20, (3, 9)), ("b", 33, ()), ("n", 10, None), ("a", 20, (0,)), ("q", 9, None)):
        kind = {"action": "compute"}
        if offsets is not None:
            kind = {"action": "reuse", "variant_id": VariantId(name), "recompute_offsets": offsets}
        role = "question" if name == "q" else "passage"
        segments.append(PlannedSegment(role=role, start=start, num_tokens=length, chunk_id=ChunkId(name), **kind))
        start += length
    return PrefillPlan(tuple(segments), preload_depth=depth)


class SteeredTicket(Memory):
    """Layers of a and b that arrive when the test says so; notes what was asked for."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        heads = (MODEL.config.num_kv_heads, MODEL.config.head_dim)
        self.kv = {
            name: random.normal(size=(NUM_LAYERS, 2, length, *heads)).astype(np.float32)
            for name, length in (("a", 20), ("b", 33))
        }
        super().__init__(lambda variant_id, first, last: self.kv[variant_id][first:last])
        self.changed = threading.Condition()
        self.there = 0
        self.started: set[tuple[str, int]] = set()
        self.failure: Exception | None = None

    def arrive(self, num_layers: int) -> None:
        """The first `num_layers` layers of both are there."""
        with self.changed:
            self.there = num_layers
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60)

    def prefetch(self, variant_id, first, last):
        with self.changed:
            self.started |= {(variant_id, layer) for layer in range(first, last)}
            self.changed.notify_all()

    def ready(self, variant_id, first, last):
        return last <= self.there

    def read_layers(self, variant_id, first, last, *, timeout_s=None):
        with self.changed:
            if not self.changed.wait_for(lambda: last <= self.there or self.failure, timeout_s):
                raise TimeoutError
            if self.failure is not None and last > self.there:
                raise self.failure
        return super().read_layers(variant_id, first, last)


@pytest.mark.parametrize("depth", [1, 2, NUM_LAYERS])
def test_reads_stay_preload_depth_layers_ahead_of_the_merged_layer(depth):
    ticket, model = SteeredTicket(), MODEL.device_model()
    with loader(model, plan(depth), ticket) as contexts:
        for there in range(NUM_LAYERS):
            first_behind = min(there + 1 + depth, NUM_LAYERS)
            ticket.wait_for(lambda first_behind=first_behind: ("b", first_behind - 1) in ticket.started)
            assert {layer for _, layer in ticket.started} == set(range(first_behind))
            assert not contexts.is_ready(there) and contexts.is_reading
            ticket.arrive(there + 1)
            contexts.take(there)
    assert (
        contexts.loaded_bytes == (2 * 20 + 33) * 2 * NUM_LAYERS * 4 * MODEL.config.num_kv_heads * MODEL.config.head_dim
    )
    assert not load_threads() and not contexts.is_reading


def test_at_most_two_contexts_are_merged_ahead():
    merged: list[int] = []
    two = threading.Event()

    def on_layer(layer: int, start_s: float, end_s: float) -> None:
        merged.append(layer)
        if len(merged) == 2:
            two.set()

    ticket, model = SteeredTicket(), MODEL.device_model()
    ticket.arrive(NUM_LAYERS)
    with loader(model, plan(1), ticket, on_layer=on_layer) as contexts:
        assert two.wait(120)
        contexts._thread.join(0.05)
        assert len(merged) == 2 and {layer for _, layer in ticket.started} == {0, 1, 2}
        for layer in range(NUM_LAYERS):
            contexts.take(layer)
    assert merged == [*range(NUM_LAYERS)]


@pytest.mark.parametrize(("lead", "num_layers"), [(1, 1), (3, 3), (NUM_LAYERS, NUM_LAYERS), (99, NUM_LAYERS)])
def test_first_context_waits_until_the_lead_layers_are_read(lead, num_layers):
    ticket, model = SteeredTicket(), MODEL.device_model()
    with loader(model, plan(1), ticket, lead=lead) as contexts:
        if num_layers > 1:
            ticket.arrive(num_layers - 1)
            ticket.wait_for(lambda: ("b", num_layers - 1) in ticket.started)
            contexts._thread.join(0.05)
            assert not contexts.is_ready(0)
        ticket.arrive(num_layers)
        contexts.take(0)


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (3, 1), (3, 3), (NUM_LAYERS, NUM_LAYERS)])
def test_all_loading_methods_give_bit_identical_results(depth, lead):
    ticket, model = SteeredTicket(), MODEL.device_model()
    ticket.arrive(NUM_LAYERS)
    tokens = np.random.default_rng(1).integers(0, 97, plan().num_tokens).astype(np.int32)

    class AllAtOnce:
        """The contexts as they are defined, each made when it is asked for."""

        loaded_bytes, waited_s = 0, 0.0

        def is_ready(self, layer):
            return True

        def take(self, layer):
            reused = [segment for segment in plan().segments if segment.variant_id is not None]
            return [
                LoadedRows(
                    np.arange(segment.start, segment.start + segment.num_tokens),
                    *(jnp.array(part, copy=True) for part in ticket.kv[segment.variant_id][layer]),
                )
                for segment in reused
            ]

    wanted = run_plan(model, tokens, plan(), contexts=AllAtOnce())
    with loader(model, plan(depth), ticket, lead=lead) as contexts:
        got = run_plan(model, tokens, plan(depth), contexts=contexts)
    np.testing.assert_array_equal(got.last_logits, wanted.last_logits)
    # The mutant: one row of one layer off.
    ticket.kv["b"][3, 1, 5] += 1e-3
    wrong = run_reusing(model, tokens, plan(), lambda variant, first, last: ticket.kv[variant][first:last])
    assert (wrong.last_logits != wanted.last_logits).any()


def test_failed_read_stops_the_prefill_before_its_layer_runs():
    ticket, model = SteeredTicket(), MODEL.device_model()
    error = ShardCorruptError("bit flip")
    ticket.arrive(2)
    with loader(model, plan(), ticket) as contexts:
        contexts.take(0)
        contexts.take(1)
        ticket.fail(error)
        with pytest.raises(LoadFailedError) as caught:
            contexts.take(2)
    assert caught.value.causes == {"a": error} and not load_threads()


def test_any_error_in_the_loading_thread_is_raised_in_the_prefill():
    def read_layers(variant, first, last):
        raise MemoryError("no room")

    model = MODEL.device_model()
    with pytest.raises(MemoryError, match="no room"):
        run_reusing(model, np.zeros(plan().num_tokens, np.int32), plan(), read_layers)
    assert not load_threads()


def test_cancelling_the_request_ends_the_wait_and_the_loading_thread():
    ticket, model = SteeredTicket(), MODEL.device_model()
    ticket.arrive(1)
    with pytest.raises(PrefillCancelledError), loader(model, plan(), ticket, is_cancelled=After(2)) as contexts:
        contexts.take(0)
        contexts.take(1)
    assert not load_threads()


# -- through the engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A store on disk that holds system prompt and passages."""
    place = f"file://{tmp_path_factory.mktemp('kv')}/store"
    with MODEL.engine(store=place) as engine:
        engine.run(Request(segments=SEGMENTS, sampling=ANSWER))
    return place


def test_load_wait_is_measured_only_while_the_device_is_idle(url, events, monkeypatch):
    """Before it waits for KV, the host waits for the layer that runs."""
    take = LayerLoader.take

    def noted(contexts, layer):
        if layer == 2:
            events.append("take2")
        return take(contexts, layer)

    monkeypatch.setattr(LayerLoader, "take", noted)
    monkeypatch.setattr(LayerLoader, "is_ready", lambda _, layer: layer != 2)
    with MODEL.engine(store=url, read_only=True) as engine:
        engine.run(Request(segments=SEGMENTS, sampling=SamplingParams(max_new_tokens=1)))
    assert events[events.index("run1") + 1 : events.index("take2")][:1] == ["wait1"]


@pytest.mark.parametrize("loading", ["layerwise", "alg2", "sync"])
@pytest.mark.parametrize("where", ["disk", "slow disk", "host"])
def test_answers_do_not_depend_on_loading_mode_or_tier(url, loading, where):
    request = Request(segments=permuted(SEGMENTS, [2, 0, 1]), sampling=ANSWER)
    with MODEL.engine(store=url, read_only=True) as engine:
        engine.run(request)
        wanted = engine.run(request)
    link = ThrottledLink(5e6, 0.001) if where == "slow disk" else None
    settings = {} if where == "host" else {"host_cache_bytes": 1}
    with MODEL.engine(store=url, read_only=True, loading=loading, disk_link=link, **settings) as engine:
        for _ in range(3):  # the second and third plan with measured rates
            got = engine.run(request)
            assert got.token_ids == wanted.token_ids
            assert got.logprobs == wanted.logprobs  # the same bits
            assert got.reuse.loaded_bytes == wanted.reuse.loaded_bytes and got.reuse.failed_loads == 0
            tiers = {document.tier for document in got.reuse.per_document}
        assert tiers == {"host" if where == "host" else "disk"}
        assert got.reuse.load_s > 0.0
    assert not load_threads()


def test_preload_depth_follows_eq_16_with_measured_rates(url, monkeypatch):
    with MODEL.engine(store=url, read_only=True, host_cache_bytes=1) as engine:
        seen: list[PrefillPlan] = []
        start = LayerLoader.__init__

        def noted(self, ticket, plan, **settings):
            seen.append(plan)
            start(self, ticket, plan, **settings)

        monkeypatch.setattr(LayerLoader, "__init__", noted)
        request = Request(segments=SEGMENTS, sampling=ANSWER)
        engine.run(request)
        assert seen[-1].preload_depth == NUM_LAYERS  # nothing is known yet
        kv_bytes = engine.run(request).reuse.loaded_bytes
        computed = len(SEGMENTS[-1])
        for load_s, depth in ((0.5, 1), (2.0, 4), (1e9, NUM_LAYERS)):  # 5 (1 - 1/2) + 1 = 3.5
            costs = engine.rates
            monkeypatch.setattr(costs, "compute_s", lambda tokens: tokens / computed)
            monkeypatch.setattr(
                costs, "load_s", lambda tier, size, s=load_s: s * size / kv_bytes if tier == "disk" else 0
            )
            monkeypatch.setattr(type(costs), "seconds_per_token", property(lambda _: 1e9))
            engine.run(request)
            assert seen[-1].preload_depth == depth


def test_chunk_is_computed_if_its_background_read_fails(url, monkeypatch, caplog):
    wait = ShardReader.wait
    covered = ShardCorruptError("bit flip")

    def flip(reader, first, last, timeout_s=None):
        if reader._buffer.shape[2] == 30 and last == NUM_LAYERS:
            raise covered
        return wait(reader, first, last, timeout_s)

    request = Request(segments=SEGMENTS, sampling=ANSWER)
    with MODEL.engine(store=url, read_only=True, host_cache_bytes=1) as engine:
        wanted = engine.run(dataclasses.replace(request, reuse="off"))
        monkeypatch.setattr(ShardReader, "wait", flip)
        discarded: list[VariantId] = []
        monkeypatch.setattr(engine._chunks.variants, "discard", discarded.append)  # the store serves other tests
        monkeypatch.setattr(
            engine._chunks.variants, "of_chunks", _without(engine._chunks.variants.of_chunks, discarded)
        )
        got = engine.run(request)
        assert got.token_ids == wanted.token_ids and got.reuse.failed_loads == len(discarded) == 1
        assert [d.num_tokens for d in got.reuse.per_document if d.computed_tokens] == [30]
        assert not engine._chunks.store._pins and not load_threads()


def _without(of_chunks, discarded):
    return lambda chunks: {
        chunk: tuple(meta for meta in metas if meta.variant_id not in discarded)
        for chunk, metas in of_chunks(chunks).items()
    }


def test_only_reused_rows_are_put_on_the_device(monkeypatch):
    """One passage of 30 tokens is known, in a prompt of more than 2,000."""
    known, question = SEGMENTS[2], SEGMENTS[-1]
    long = draw_segments(np.random.default_rng(1), [2000])[1]
    put: list[int] = []
    take = LayerLoader.take

    def counted(contexts, layer):
        pieces = take(contexts, layer)
        put.append(sum(rows.k.nbytes + rows.v.nbytes for rows in pieces))
        return pieces

    with MODEL.engine() as engine:
        engine.run(Request(segments=[SEGMENTS[0], known, question], sampling=ANSWER))
        monkeypatch.setattr(LayerLoader, "take", counted)
        link = _Noted()
        monkeypatch.setattr(engine._chunks.planner, "_link", link)
        reuse = engine.run(Request(segments=[SEGMENTS[0], known, long, question], sampling=ANSWER)).reuse
    assert reuse.loaded_bytes == (7 + 30) * MODEL.token_bytes
    assert put == link.num_bytes == [256 * MODEL.token_bytes // NUM_LAYERS] * NUM_LAYERS


class _Noted:
    """A link that only notes the bytes that pass it."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def __call__(self, read, num_bytes):
        self.num_bytes.append(num_bytes)
        return read


def test_a_layer_is_on_its_way_before_the_copy_of_the_one_before_it_ends():
    """The copy of each layer ends only once that of the next one has begun."""
    ticket, model = SteeredTicket(), MODEL.device_model()
    ticket.arrive(NUM_LAYERS)

    class Link:
        num_begun = 0

        def __call__(self, read, num_bytes):
            with ticket.changed:
                self.num_begun = own = self.num_begun + 1
                ticket.changed.notify_all()
            ticket.wait_for(lambda: self.num_begun > own or own == NUM_LAYERS)
            return read

    with loader(model, plan(), ticket, link=Link()) as contexts:
        for layer in range(NUM_LAYERS):
            for positions, k, v in contexts.take(layer):
                wanted = np.concatenate([ticket.kv[name][layer] for name in "aba"], axis=1)
                assert len(positions) == wanted.shape[1] == 73
                np.testing.assert_array_equal(np.asarray(k)[:73], wanted[0])
                np.testing.assert_array_equal(np.asarray(v)[:73], wanted[1])
    assert contexts._copies._shutdown and not load_threads()


def test_copies_that_share_the_link_are_not_counted_twice():
    """Else a load of this link would count as twice as long as it takes."""
    ticket, model, counted = SteeredTicket(), MODEL.device_model(), []
    ticket.arrive(NUM_LAYERS)
    link = ThrottledLink(NUM_LAYERS * 256 * MODEL.token_bytes)
    began_s = time.perf_counter()
    with loader(model, plan(), ticket, link=link, on_merge=lambda _, seconds: counted.append(seconds)) as contexts:
        for layer in range(NUM_LAYERS):
            contexts.take(layer)
    assert 0 < counted[0] <= time.perf_counter() - began_s and len(counted) == 1


def test_memory_of_copied_layers_is_used_again(monkeypatch):
    ticket, model = SteeredTicket(), MODEL.device_model()
    ticket.arrive(NUM_LAYERS)
    with loader(model, plan(), ticket, link=_Noted()) as contexts:
        monkeypatch.setattr(contexts, "_is_copied", True)
        places = {contexts._buffers(layer)[0].ctypes.data for layer in range(NUM_LAYERS)}
    assert len(places) == 2


@given(st.integers(0, 70_000))
def test_pieces_of_a_load_are_few_and_hardly_padded(num_rows):
    sizes = load_buckets(num_rows)
    assert all(size >= 256 and size.bit_count() == 1 and size == slot_bucket(size) for size in sizes)
    assert 0 <= sum(sizes) - num_rows <= max(255, num_rows // 8 + 255) and len(sizes) <= 5
    assert sizes == sorted(sizes, reverse=True)


def test_a_slow_link_to_the_device_is_measured_and_given_up(monkeypatch):
    """Half a second for the KV of this prompt, which computing takes some milliseconds for: told, not measured, since
    this machine may be busy."""
    request = Request(segments=SEGMENTS, sampling=ANSWER)
    link = ThrottledLink(2 * 256 * MODEL.token_bytes)
    with MODEL.engine(device_link=link) as engine:
        for num_tokens in (10, 100, 200):
            engine.rates.compute.add(num_tokens, num_tokens * 1e-5)
        monkeypatch.setattr(engine.rates.compute, "add", lambda num_tokens, seconds: None)
        wanted = engine.run(dataclasses.replace(request, reuse="off"))
        engine.run(request)
        for _ in range(5):
            loaded = engine.run(request)
            assert loaded.reuse.given_up_loads == 0
        assert engine.rates.tiers["host"].cost.seconds(loaded.reuse.loaded_bytes) > 0.4
        computed = engine.run(request)
    assert computed.reuse.given_up_loads > 0 and computed.reuse.loaded_bytes < loaded.reuse.loaded_bytes
    assert computed.token_ids == wanted.token_ids


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_loads_from_host_memory_are_skipped_where_computing_is_faster(mode):
    """Computing takes next to nothing on this model, and the way to the device a second per kilobyte, as it seems."""
    request = Request(segments=SEGMENTS, sampling=ANSWER, reuse=mode)
    with MODEL.engine() as engine:
        wanted = engine.run(dataclasses.replace(request, reuse="off"))
        engine.run(request)  # stores
        for number in range(6):
            got = engine.run(request)
            assert got.reuse.given_up_loads == 0 and got.reuse.loaded_bytes, number
        host = engine.rates.tiers["host"]
        assert host.is_settled and host._bursts._recent[-1][0] == got.reuse.loaded_bytes  # of all layers together
        for _ in range(32):
            host.add(1000, 1.0)
        skipped = engine.run(request)
        assert skipped.reuse.given_up_loads == 4 and not skipped.reuse.loaded_bytes
        assert [part.cause for part in skipped.reuse.per_document] == ["load"] * 4
        assert skipped.reuse.computed_tokens == skipped.reuse.prompt_tokens
        assert skipped.token_ids == got.token_ids == wanted.token_ids
        for _ in range(32):
            host.add(10**9, 1e-3)
        assert engine.run(request).reuse.given_up_loads == 0
        assert not engine._chunks.store._pins


def test_loads_from_a_slow_disk_are_skipped_and_occasionally_retried(url):
    """Computing takes next to nothing on this model, and the disk a second per kilobyte, as it seems."""
    request = Request(segments=SEGMENTS, sampling=ANSWER)
    with MODEL.engine(store=url, read_only=True, host_cache_bytes=1) as engine:
        wanted = engine.run(dataclasses.replace(request, reuse="off"))
        engine.run(dataclasses.replace(request, reuse="off"))  # measured, now that it is compiled
        fast = engine.run(request)
        assert fast.reuse.given_up_loads == 0 and fast.reuse.reused_tokens == sum(map(len, SEGMENTS[:-1]))
        for _ in range(32):
            engine.rates.tiers["disk"].add(1000, 1.0)
        for number in range(1, 18):
            got = engine.run(request)
            assert got.token_ids == wanted.token_ids and got.reuse.failed_loads == 0
            assert got.reuse.given_up_loads == (3 if number == 17 else 4), number  # the 17th reads the quickest
        assert not engine._chunks.store._pins
        for _ in range(32):
            engine.rates.tiers["disk"].add(10**9, 1e-3)
        assert engine.run(request).reuse.given_up_loads == 0

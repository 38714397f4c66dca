"""Prompts that reuse slices of stored chunks: exact at the beginning, elsewhere the stored rows at new positions; on
every tier, from whole pages or from the middle of one."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from ccjax.cache.contexts import LayerLoader
from ccjax.cache.reads import WaitLimit
from ccjax.prompts import Prompt, chunk_id
from ccjax.requests import Request, SamplingParams
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.types import Chunk, ChunkSlice, Segment, SegmentRole
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, selective_oracle

MODEL = TinyModel(seed=3)
SYSTEM, PASSAGE, OTHER, QUESTION = draw_segments(np.random.default_rng(3), [70, 40], system=20)
DEVICE_BYTES = 200 * MODEL.page_bytes


def segment(role: SegmentRole, ids: list[int], source: ChunkSlice | None = None) -> Segment:
    return Segment(role, Chunk(chunk_id(ids), tuple(ids)), source=source)


def piece(offset: int, num_tokens: int, role: SegmentRole = "passage") -> Segment:
    """A slice of the stored passage."""
    return segment(role, PASSAGE[offset : offset + num_tokens], ChunkSlice(chunk_id(PASSAGE), offset))


def prompt(*segments: Segment) -> Prompt:
    return Prompt((segment("instructions", SYSTEM), *segments, segment("question", QUESTION)), 6)


def ask(engine, prompt: Prompt, reuse="bounded", n: int = 1):
    sampling = SamplingParams(max_new_tokens=6, logprobs=0, n=n)
    found: queue.Queue = queue.Queue()
    engine.submit(Request(segments=(), sampling=sampling, reuse=reuse), found.put, prompt=prompt)
    while True:
        delta = found.get(timeout=120)
        if isinstance(delta, BaseException):
            raise delta
        if delta.response is not None:
            return delta.response


@pytest.fixture(params=["host", "device", "disk"])
def tier(request) -> str:
    return request.param


@pytest.fixture
def engine(tier, tmp_path):
    """An engine that has the passage in one tier."""
    settings = {
        "host": {"max_model_len": 512},
        "device": {"device_cache_bytes": DEVICE_BYTES, "max_model_len": 512},
        "disk": {"store": f"file://{tmp_path}/kv", "host_cache_bytes": MODEL.token_bytes, "max_model_len": 512},
    }[tier]
    with MODEL.engine(strategy="reuse", **settings) as engine:
        ask(engine, prompt(segment("passage", PASSAGE)))
        yield engine


def stored(engine) -> np.ndarray:
    """KV [L, 2, T, K, H] of the passage."""
    (meta,) = engine._chunks.variants.of_chunks({chunk_id(PASSAGE)})[chunk_id(PASSAGE)]
    kv = engine._chunks.capture.stored_kv(meta.variant_id)
    return kv if isinstance(kv, np.ndarray) else kv.read_layers(0, engine.model_config.num_layers)


def first_logprob(wanted: Prompt, kv: np.ndarray, offset: int, token: int) -> float:
    """Log-probability of the first token of the answer, if the second segment is rows of `kv` from `offset` on."""
    ids, start, length = wanted.token_ids.tolist(), len(SYSTEM), len(wanted.segments[1].chunk.token_ids)
    cached = [(np.zeros((len(ids), *kv.shape[3:])), np.zeros((len(ids), *kv.shape[3:]))) for _ in kv]
    for layer, parts in enumerate(cached):
        for part, rows in zip(parts, kv[layer], strict=True):
            part[start : start + length] = rows[offset : offset + length]
    computed = np.delete(np.arange(len(ids)), np.arange(start, start + length))
    logits, _ = selective_oracle(MODEL.weights, MODEL.raw, ids, cached, [computed] * len(kv))
    return float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


@pytest.mark.parametrize("num_tokens", [69, 48, 33, 1])
@pytest.mark.parametrize("role", ["passage", "text"])
def test_a_beginning_behind_the_same_prefix_gives_the_tokens_of_a_full_prefill(engine, tier, num_tokens, role):
    own = prompt(piece(0, num_tokens, role), segment("passage", OTHER))
    full, response = ask(engine, own, "off"), ask(engine, own, "exact")
    assert response.token_ids == full.token_ids
    assert [token.logprob for token in response.logprobs] == pytest.approx(
        [token.logprob for token in full.logprobs], abs=TOLERANCE
    )
    told = response.reuse.per_document[1]
    assert (told.reused_tokens, told.exact, told.tier) == (num_tokens, True, tier)
    assert response.reuse.exact and full.reuse.reused_tokens == 0


@pytest.mark.parametrize(("offset", "num_tokens"), [(16, 33), (5, 33), (32, 16), (69, 1), (0, 70)])
def test_other_slices_are_the_stored_rows_at_their_new_positions(engine, tier, offset, num_tokens):
    own, kv = prompt(piece(offset, num_tokens)), stored(engine)
    response = ask(engine, own)
    told = response.reuse.per_document[1]
    assert (told.reused_tokens, told.exact, told.tier) == (num_tokens, offset == 0, tier)
    token, logprob = response.logprobs[0].token_id, response.logprobs[0].logprob
    assert logprob == pytest.approx(first_logprob(own, kv, offset, token), abs=TOLERANCE)
    wrong = first_logprob(own, kv, offset + (1 if offset + num_tokens < len(PASSAGE) else -1), token) if offset else 9.0
    assert abs(logprob - wrong) > 3 * TOLERANCE
    assert chunk_id(PASSAGE[offset : offset + num_tokens]) not in engine._chunks.variants.chunk_ids() or offset == 0


def test_answers_to_one_prompt_share_its_slices(engine):
    own = prompt(piece(16, 32), piece(5, 20), segment("passage", OTHER))
    alone, both = ask(engine, own), ask(engine, own, n=2)
    assert alone.token_ids == both.choices[0].token_ids == both.choices[1].token_ids


def test_a_slice_on_the_device_is_read_in_place_if_it_begins_a_page():
    with MODEL.engine(strategy="reuse", device_cache_bytes=DEVICE_BYTES, max_model_len=512) as engine:
        ask(engine, prompt(segment("passage", PASSAGE)))
        for offset, in_place in ((16, True), (5, False), (2 * PAGE_TOKENS, True)):
            response = ask(engine, prompt(piece(offset, 20)))
            assert response.reuse.per_document[1].reused_tokens == 20
            assert response.reuse.loaded_bytes == (0 if in_place else 20 * MODEL.token_bytes)


def test_use_of_a_slice_earns_credit_for_its_share():
    with MODEL.engine(strategy="reuse") as engine:
        ask(engine, prompt(segment("passage", PASSAGE)))
        for num_tokens, credit in ((35, 2.0), (70, 70.0)):
            before = used(engine)
            ask(engine, prompt(piece(0, num_tokens)))
            assert used(engine) - before == pytest.approx(credit)


def used(engine) -> float:
    (meta,) = engine._chunks.variants.of_chunks({chunk_id(PASSAGE)})[chunk_id(PASSAGE)]
    return meta.frequency_reuse


def test_a_reused_slice_is_not_stored_and_idle_time_prepares_its_whole_chunk():
    with MODEL.engine(strategy="cachecraft", recompute_ratio=0.3) as engine:
        ask(engine, prompt(segment("passage", PASSAGE)))
        while engine._chunks.capture.unprepared.pop(only_reused=False):
            pass
        own = prompt(segment("passage", OTHER), piece(16, 32))
        told = ask(engine, own).reuse.per_document[2]
        assert told.recomputed_tokens == 10 and told.reused_tokens == 22  # ceil(0.3 * 32)
        assert own.chunks[2].chunk_id not in engine._chunks.variants.chunk_ids()
        noted = engine._chunks.capture.unprepared.pop(only_reused=True)
        assert noted is not None and noted[0].chunks[-1].token_ids == tuple(PASSAGE)


def test_a_slice_whose_chunk_is_gone_is_computed_and_stored():
    with MODEL.engine() as engine:
        own = prompt(piece(16, 32))
        told = ask(engine, own).reuse.per_document[1]
        assert told.computed_tokens == 32 and told.exact
        assert own.chunks[1].chunk_id in engine._chunks.variants.chunk_ids()


def test_variants_that_the_pool_has_no_room_for_beside_the_prompt_are_left_out():
    """A slice pins its whole variant, which must not keep a prompt from ever running."""
    long = draw_segments(np.random.default_rng(1), [400])[1]
    with MODEL.engine(strategy="reuse", device_cache_bytes=96 * MODEL.page_bytes, max_model_len=512) as engine:
        ask(engine, prompt(segment("passage", long)))
        parts = [segment("passage", long[at : at + 24], ChunkSlice(chunk_id(long), at)) for at in (16, 64, 128)]
        few = ask(engine, prompt(*parts))
        assert few.reuse.reused_tokens == len(SYSTEM) + 3 * 24
        planner, large = engine._chunks.planner, Prompt(prompt(*parts).segments, 1100)
        assert planner.usable(prompt(*parts))[chunk_id(long)]
        assert not planner.usable(large)[chunk_id(long)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("offset", [0, 16, 5])
def test_loader_returns_the_rows_of_the_slice(on_device, offset):
    device_bytes = DEVICE_BYTES if on_device else 0
    with MODEL.engine(strategy="reuse", device_cache_bytes=device_bytes, max_model_len=512) as engine:
        ask(engine, prompt(segment("passage", PASSAGE)))
        kv, planner = stored(engine), engine._chunks.planner
        own = prompt(segment("passage", OTHER), piece(offset, 40))
        plan = planner.plan(own, "bounded", planner.usable(own))
        ticket, wait_limit = planner.pin(plan), WaitLimit(None)
        assert set(ticket.tiers.values()) == {"device" if on_device else "host"}
        wait_limit.expect({variant_id: 1 for variant_id in plan.pin})
        with planner.loader(ticket, plan, wait_limit, skip={0}) as contexts:
            assert isinstance(contexts, LayerLoader)
            start = len(SYSTEM) + len(OTHER)
            for layer in range(len(kv)):
                ((positions, k, v),) = contexts.take(layer)
                assert positions.tolist() == [*range(start, start + 40)]
                for got, rows in ((k, kv[layer, 0]), (v, kv[layer, 1])):
                    np.testing.assert_array_equal(np.asarray(got)[:40], rows[offset : offset + 40])
            assert contexts.loaded_bytes == 40 * MODEL.token_bytes
        planner.unpin(ticket)

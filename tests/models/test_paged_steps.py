"""Batched prefill and decode steps against each request alone and the float64 oracle; mutants must fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.models.llama3 import paged_steps
from ccjax.models.llama3.inputs import StepSettings
from ccjax.models.llama3.pages import read_slots
from ccjax.models.llama3.steps import rotate_step
from tests.engine.helpers import selective_oracle
from tests.models.paged import (
    LENGTHS,
    MODELS,
    Pool,
    Request,
    Work,
    decode,
    draw,
    load,
    make,
    pack,
    run_alone,
    run_packed,
    some_work,
    whole,
    worst,
)
from tests.oracles import llama_forward, random_llama

TOLERANCE = 3e-5
"""Largest difference to one request alone, float32; measured 3.4e-6 for logits up to 5, and 1.1e-5 for real weights
with logits up to 18."""
ORACLE_TOLERANCE = 1e-4
"""As in test_parity.py; twice that for the real weights, as in test_convert.py."""


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def tiny():
    return make(*random_llama(4, num_hidden_layers=2, hidden_size=48, intermediate_size=64))


def test_a_packed_batch_equals_each_request_alone(model):
    pool, work = some_work(model)
    for got, piece in zip(run_packed(model, pool, work), work, strict=True):
        assert worst(got, run_alone(model, piece.token_ids)) < TOLERANCE
        oracle = llama_forward(model.weights, model.raw, piece.token_ids.tolist())[0]
        assert np.abs(oracle).max() > 1
        np.testing.assert_allclose(
            got.logits, oracle, atol=2 * ORACLE_TOLERANCE if oracle.max() > 10 else ORACLE_TOLERANCE
        )


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_rows_and_context_may_stand_in_any_order(implementation):
    """Positions of adjacent rows do not ascend and belong to different requests; more rows than a block."""
    model = make(*random_llama(5, num_hidden_layers=1, head_dim=16))
    pool, work = some_work(model, lengths=(70, 30, 100))
    order = np.random.default_rng(0).permutation(200)
    packed = pack(work, rows=200, slots=256)
    token_ids = np.concatenate([piece.token_ids for piece in work])
    slot_order = np.random.default_rng(1).permutation(256)
    for name in ("q_pos", "q_slot", "q_request", "k_slot", "k_pos", "k_request", "k_segment"):
        values = getattr(packed, name)
        setattr(packed, name, values[order] if name.startswith("q") else values[slot_order])
    x = jnp.asarray(model.params.embedding[token_ids[order]])
    inputs, settings = packed.on_device(model.config), StepSettings(model.config, implementation)
    out = paged_steps.paged_layer_step(model.params.layers[0], x, pool.layers[0], inputs, settings=settings)
    values = np.asarray(read_slots(out.pages.v, inputs.q_slot))
    for n, piece in enumerate(work):
        mine = np.flatnonzero(packed.q_request == n)
        mine = mine[np.argsort(packed.q_pos[mine])]
        (k, v, mass, self_mass), *_ = run_alone(model, piece.token_ids).layers
        segments = slice(8 * n, 8 * n + mass.shape[1])
        assert np.abs(np.asarray(out.mass)[mine, segments] - mass).max() < TOLERANCE
        assert np.abs(np.asarray(out.self_mass)[mine] - self_mass).max() < TOLERANCE
        assert np.abs(values[mine] - v).max() < TOLERANCE
    assert np.abs(np.asarray(out.mass).sum(-1) - 1).max() < 1e-4


def _other_request(packed):
    packed.q_request[packed.q_request == 2] = 4


def _one_row_of_another_request(packed):
    packed.q_request[40] = 0


def _pages_swapped(packed):
    first = len(packed.k_slot[packed.k_request == 0]) + 5  # where request 2 begins
    head, tail = slice(first, first + 16), slice(first + 16, first + 32)
    packed.k_slot[head], packed.k_slot[tail] = packed.k_slot[tail].copy(), packed.k_slot[head].copy()


def _written_a_slot_late(packed):
    packed.q_slot[:37] = np.roll(packed.q_slot[:37], 1)


def _read_a_slot_late(packed):
    packed.k_slot[:37] = np.roll(packed.k_slot[:37], -1)


def _mask_off_by_one(packed):
    packed.k_pos[:37] += 1


def _no_request_ids(packed):
    packed.q_request[:], packed.k_request[:] = 0, 0


def _wrong_segment(packed):
    packed.k_segment[7] += 1


MUTANTS = (
    _other_request,
    _one_row_of_another_request,
    _pages_swapped,
    _written_a_slot_late,
    _read_a_slot_late,
    _mask_off_by_one,
    _no_request_ids,
    _wrong_segment,
)


@pytest.fixture(scope="module")
def alone(tiny):
    """The result of each request of `some_work` alone."""
    return [run_alone(tiny, piece.token_ids) for piece in some_work(tiny)[1]]


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_wrong_packing_exceeds_the_tolerance(tiny, alone, change):
    pool, work = some_work(tiny)
    got = run_packed(tiny, pool, work, change=change)
    assert max(worst(computed, other) for computed, other in zip(got, alone, strict=True)) > 30 * TOLERANCE


@pytest.mark.parametrize("seed", range(2))
def test_a_prefill_in_pieces_equals_one_in_one_piece(tiny, seed):
    """Each request in random pieces by position, packed with the current pieces of the others."""
    random, pool = np.random.default_rng(seed), Pool(tiny.config, 40, seed)
    prompts = [draw(random, tiny, length) for length in LENGTHS]
    requests, got = [Request(pool) for _ in prompts], [[] for _ in prompts]
    num_packs = 0
    while any(request.num_tokens < len(prompt) for request, prompt in zip(requests, prompts, strict=True)):
        work, owners = [], []
        for owner in random.permutation(len(prompts)):
            request, prompt = requests[owner], prompts[owner]
            first = request.num_tokens
            last = min(len(prompt), first + int(random.integers(0, 30)))
            if last > first:
                request.extend(last - first)
                work.append(Work(request, prompt[first:last], np.arange(first, last)))
                owners.append(owner)
        if work:
            num_packs += 1
            for owner, part in zip(owners, run_packed(tiny, pool, work), strict=True):
                got[owner].append(part.logits)
    assert num_packs > 4
    for parts, prompt in zip(got, prompts, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), run_alone(tiny, prompt).logits, atol=TOLERANCE)


def cached_chunk(model, pool, token_ids, behind):
    """Slots of a chunk whose KV was computed after the text `behind`, and that KV: (k before RoPE, v) per layer."""
    rows = run_alone(model, np.concatenate([behind, token_ids])).layers
    kv = [(k[len(behind) :], v[len(behind) :]) for k, v, _, _ in rows]
    chunk = Request(pool)
    slots = chunk.extend(len(token_ids))
    pool.write(slots, kv)
    return slots, kv


def test_two_requests_share_the_pages_of_a_chunk_at_different_positions(model):
    """Question and head are computed; the chunk between them is read in place, and its pages are not written."""
    random, pool = np.random.default_rng(5), Pool(model.config, 60, 5)
    chunk = draw(random, model, 45)
    slots, kv = cached_chunk(model, pool, chunk, draw(random, model, 11))
    before = [[np.asarray(part) for part in (pages.k, pages.v)] for pages in pool.layers]
    work, prompts, cached_at = [], [], []
    for head, tail in ((3, 9), (30, 20), (17, 1)):
        request, parts = Request(pool), (draw(random, model, head), chunk, draw(random, model, tail))
        request.extend(head)
        request.share(slots)
        request.extend(tail)
        positions = np.r_[:head, head + 45 : head + 45 + tail]
        prompts.append(np.concatenate(parts))
        work.append(Work(request, prompts[-1][positions], positions))
        cached_at.append(head)
    got = run_packed(model, pool, work)
    for piece, prompt, head, computed in zip(work, prompts, cached_at, got, strict=True):
        assert worst(computed, run_alone(model, prompt, piece.positions, rotated(model, prompt, kv, head))) < TOLERANCE
        logits = oracle_logits(model, prompt, kv, head, piece.positions)
        np.testing.assert_allclose(computed.logits[-1], logits, atol=2 * ORACLE_TOLERANCE)
    for pages, old in zip(pool.layers, before, strict=True):
        for part, other in zip((pages.k, pages.v), old, strict=True):
            np.testing.assert_array_equal(
                np.asarray(part)[:, slots // 16, slots % 16], other[:, slots // 16, slots % 16]
            )
    # Also the first tokens of their answers.
    tokens = [int(computed.logits[-1].argmax()) for computed in got]
    logits = decode(model, [piece.request for piece in work], tokens, batch=4)
    for n, (prompt, token, head, piece) in enumerate(zip(prompts, tokens, cached_at, work, strict=True)):
        longer = np.append(prompt, token).astype(np.int32)
        positions = np.append(piece.positions, len(prompt))
        alone = run_alone(model, longer, positions, rotated(model, longer, kv, head))
        np.testing.assert_allclose(logits[n], alone.logits[-1], atol=TOLERANCE)


@pytest.mark.parametrize("shift", [0, 1])
def test_some_rows_of_a_cached_chunk_are_recomputed(model, shift):
    """The chunk's KV is in the request's own pages; recomputed rows overwrite it. A shift by one is detected."""
    random, pool = np.random.default_rng(6), Pool(model.config, 40, 6)
    chunk, head = draw(random, model, 50), 21
    _, kv = cached_chunk(model, pool, chunk, draw(random, model, 8))
    other = whole(pool, draw(random, model, 33))
    request, prompt = Request(pool), np.concatenate([draw(random, model, head), chunk, draw(random, model, 12)])
    slots = request.extend(len(prompt))
    pool.write(slots[head + shift : head + 50], [(k[: 50 - shift], v[: 50 - shift]) for k, v in kv])
    if shift:
        pool.write(slots[head : head + 1], [(k[:1], v[:1]) for k, v in kv])
    anew = head + np.sort(random.choice(50, 15, replace=False))
    positions = np.r_[:head, anew, head + 50 : len(prompt)]
    got = run_packed(model, pool, [other, Work(request, prompt[positions], positions)])
    difference = worst(got[1], run_alone(model, prompt, positions, rotated(model, prompt, kv, head)))
    assert difference > 30 * TOLERANCE if shift else difference < TOLERANCE
    if not shift:
        logits = oracle_logits(model, prompt, kv, head, positions)
        np.testing.assert_allclose(got[1].logits[-1], logits, atol=2 * ORACLE_TOLERANCE)
        assert worst(got[0], run_alone(model, other.token_ids)) < TOLERANCE


def placed(prompt, kv, head):
    """Per layer, keys before RoPE and values of the whole prompt, with zeros outside the chunk."""
    rows = []
    for pair in kv:
        rows.append(tuple(np.zeros((len(prompt), *part.shape[1:]), np.float32) for part in pair))
        for whole_part, part in zip(rows[-1], pair, strict=True):
            whole_part[head : head + len(part)] = part
    return rows


def rotated(model, prompt, kv, head):
    positions = jnp.arange(len(prompt), dtype=jnp.int32)
    return [(rotate_step(jnp.asarray(k), positions, config=model.config), v) for k, v in placed(prompt, kv, head)]


def oracle_logits(model, prompt, kv, head, positions):
    weights = {"lm_head.weight": model.weights["model.embed_tokens.weight"], **model.weights}
    computed = [positions] * model.config.num_layers
    return selective_oracle(weights, model.raw, prompt.tolist(), placed(prompt, kv, head), computed)[0]


@pytest.mark.parametrize(("implementation", "in_parts"), [(None, False), (None, True), ("reference", False)])
def test_decode_matches_prefill(implementation, in_parts):
    """Decodes prompts token by token; compares the logits of every step."""
    model = make(*random_llama(7, num_hidden_layers=2, head_dim=32, num_attention_heads=4))
    random = np.random.default_rng(0)
    prompts = [draw(random, model, 20) for _ in range(3)]
    wanted = [run_alone(model, prompt).logits for prompt in prompts]
    assert np.abs(np.stack(wanted)).max() > 1
    pool = Pool(model.config, 20)
    requests = [Request(pool) for _ in prompts]
    for step in range(20):
        tokens = [prompt[step] for prompt in prompts]
        how = {"implementation": implementation, "in_parts": in_parts}
        logits = decode(model, requests, tokens, batch=4, entries=4, **how)
        np.testing.assert_allclose(logits, [rows[step] for rows in wanted], atol=TOLERANCE)


DECODE_MUTANTS = {
    "a start off by one": lambda entries: [(page, length, start + (start > 0)) for page, length, start in entries],
    "pages swapped": lambda entries: [
        (entries[n ^ 1][0] if n < 2 else page, length, start) for n, (page, length, start) in enumerate(entries)
    ],
    "a token too few": lambda entries: [(entries[0][0], 15, 0), *entries[1:]],
}


@pytest.mark.parametrize("mutant", DECODE_MUTANTS.values(), ids=DECODE_MUTANTS)
def test_wrong_page_table_exceeds_the_tolerance(tiny, mutant):
    pool, work = some_work(tiny)
    run_packed(tiny, pool, work)
    request = work[2].request
    wanted = run_alone(tiny, np.append(work[2].token_ids, 5)).logits[-1]
    request.extend(1)
    request.entries = mutant(request.entries)
    page, length, start = request.entries[-1]
    request.entries[-1] = (page, length - 1, start)
    if length == 1:
        request.entries.pop()
    # `decode` adds the token again, in its right place.
    request.pool.free.append(page)
    assert np.abs(decode(tiny, [request], [5], batch=1)[0] - wanted).max() > 30 * TOLERANCE


def test_padding_rows_do_not_write_to_pages(tiny):
    pool, work = some_work(tiny, lengths=(20,))
    run_packed(tiny, pool, work)
    before = [np.asarray(part) for part in jax.tree.leaves(pool.layers)]
    decode(tiny, [work[0].request], [3], batch=8)
    after = [np.asarray(part) for part in jax.tree.leaves(pool.layers)]
    slot = work[0].request.slots()[-1]
    for old, new in zip(before, after, strict=True):
        changed = ~((old == new) | (np.isnan(old) & np.isnan(new)))
        assert set(map(tuple, np.argwhere(changed.any((0, 3))))) == {(slot // 16, slot % 16)}

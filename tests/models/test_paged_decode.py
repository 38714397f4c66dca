"""Batched decode against each request alone and against prefill; mutants must fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ccjax.models.llama3 import paged_steps
from tests.models.paged import (
    MODELS,
    Model,
    Pool,
    Request,
    decode,
    draw,
    load,
    make,
    run_alone,
    run_packed,
    some_work,
    whole,
)
from tests.models.test_paged_steps import TOLERANCE
from tests.oracles import random_llama


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def tiny():
    return make(*random_llama(4, num_hidden_layers=2, hidden_size=48, intermediate_size=64))


def likeliest_alone(model, prompt, answer):
    """The likeliest tokens, by a prefill of one request, after the prompt and each answer token except the last."""
    logits = run_alone(model, [*prompt, *answer[:-1]]).logits
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_requests_joining_and_leaving_a_batch_get_the_same_tokens_as_alone(model):
    """16 greedy tokens each; a request joins when there is space, its prefill packed with others."""
    random, pool = np.random.default_rng(2), Pool(model.config, 48)
    num_pages = len(pool.free)
    prompts = [draw(random, model, int(length)) for length in random.integers(1, 60, 6)]
    waiting, running, answers, sizes = list(range(len(prompts))), {}, {}, set()
    while waiting or running:
        joining = waiting[: int(random.integers(0, 3))] if len(running) < 4 else []
        if joining:
            waiting = waiting[len(joining) :]
            work = [whole(pool, prompts[number]) for number in joining]
            for number, piece, computed in zip(joining, work, run_packed(model, pool, work), strict=True):
                running[number] = piece.request
                answers[number] = [int(computed.logits[-1].argmax())]
        if not running:
            continue
        order = list(random.permutation(list(running)))
        batch = next(size for size in (1, 4, 8) if size >= len(order))
        sizes.add(batch)
        logits = decode(model, [running[n] for n in order], [answers[n][-1] for n in order], batch=batch)
        for number, row in zip(order, logits, strict=True):
            answers[number].append(int(row.argmax()))
            if len(answers[number]) == 16:
                running.pop(number).leave()
    assert len(pool.free) == num_pages and len(sizes) > 1
    for number, prompt in enumerate(prompts):
        assert answers[number] == likeliest_alone(model, prompt, answers[number])
    assert len({token for answer in answers.values() for token in answer}) > 8


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_decode_matches_prefill_with_and_without_rotated_keys(implementation):
    """Decodes prompts token by token; compares the logits of every step, in both kinds of pool."""
    model = make(*random_llama(7, num_hidden_layers=2, head_dim=32, num_attention_heads=4))
    random = np.random.default_rng(0)
    prompts = [draw(random, model, 20) for _ in range(3)]
    wanted = [run_alone(model, prompt).logits for prompt in prompts]
    assert np.abs(np.stack(wanted)).max() > 1
    for rotates in (True, False):
        pool = Pool(model.config, 20)
        requests = [Request(pool) for _ in prompts]
        for step in range(20):
            tokens = [prompt[step] for prompt in prompts]
            settings = dict(batch=4, entries=4, rotates=rotates, implementation=implementation)
            logits = decode(model, requests, tokens, **settings)
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
    before = [np.asarray(part) for pair in pool.layers for part in pair]
    decode(tiny, [work[0].request], [3], batch=8)
    after = [np.asarray(part) for pair in pool.layers for part in pair]
    slot = work[0].request.slots()[-1]
    for old, new in zip(before, after, strict=True):
        changed = ~((old == new) | (np.isnan(old) & np.isnan(new)))
        assert set(map(tuple, np.argwhere(changed.any((0, 3))))) == {(slot // 16, slot % 16)}


def test_number_of_traces_is_bounded_by_the_sizes(tiny):
    """For any pack: one compilation per (rows, slots), and one per (batch, entries)."""
    model = Model(
        *tiny[:1], dataclasses.replace(tiny.config, rms_norm_eps=2e-5), *tiny[2:]
    )  # not compiled by other tests
    random, pool = np.random.default_rng(0), Pool(model.config, 64)
    steps = paged_steps.paged_layer_step, paged_steps.paged_decode_step
    before = [step._cache_size() for step in steps]
    sizes, batches = set(), set()
    for _ in range(12):
        count = int(random.integers(1, 5))
        work = [whole(pool, draw(random, model, int(length))) for length in random.integers(1, 40, count)]
        rows = 64 if sum(len(piece.positions) for piece in work) <= 64 else 160
        sizes.add((rows, 2 * rows))
        run_packed(model, pool, work, rows=rows, slots=2 * rows)
        batch = int(random.choice([4, 8]))
        batches.add(batch)
        decode(model, [piece.request for piece in work], [1] * count, batch=batch)
        for piece in work:
            piece.request.leave()
    grown = [step._cache_size() - old for step, old in zip(steps, before, strict=True)]
    assert grown == [len(sizes), len(batches)] == [2, 2]

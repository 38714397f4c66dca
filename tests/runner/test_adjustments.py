"""Sampling parameters against a float64 reading of vLLM's order of operations, and transformers' logits processors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ccjax.models.llama3.sampling as model_sampling
from ccjax.models.llama3.inputs import SamplingState
from ccjax.models.llama3.sampling import adjust
from ccjax.runner.adjustments import Adjustments, batched
from ccjax.runner.sampling import SampleSpec, mask_of, sample_tokens
from ccjax.sampling import SamplingParams

V = 24
END = 3
PROMPT = np.array([1, 1, 5, 6, 7], np.int32)
ANSWER = (6, 6, 6, 8, 9)
LOGITS = (1.5 * np.random.default_rng(5).standard_normal(V)).astype(np.float32)
COUNT = 2048
TOLERANCE = 2e-6
"""Largest error of changed logits of up to 10 in float32; measured 5e-7."""


def following(sampling, prompt=PROMPT, answer=ANSWER, bad_words=()):
    adjustments = Adjustments(sampling, prompt, ends=(END,), bad_words=bad_words)
    for token in answer:
        adjustments.push(token)
    return adjustments


def drawn(sampling, logits=LOGITS, **more):
    """COUNT tokens, each sampled as another one of the answer."""
    adjustments = following(sampling, **more) if sampling.is_adjusted else None
    ids = sampling.allowed_token_ids
    mask = None if ids is None else (lambda: mask_of(ids, V))
    rows = jnp.asarray(np.tile(logits, (COUNT, 1)))
    specs = [SampleSpec(sampling, 7, index, mask, adjustments) for index in range(COUNT)]
    return [token.token_id for token in sample_tokens(rows, specs)]


def changed_logits(logits, params, prompt=PROMPT, answer=ANSWER, bad_words=(), order=("bias", "penalties")):
    """The logits before temperature, float64, in vLLM's order (`Sampler.apply_logits_processors`)."""
    changed = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        changed[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = -np.inf
    for *start, last in bad_words:
        if list(answer[len(answer) - len(start) :]) == start:
            changed[last] = -np.inf
    if len(answer) < params.min_tokens:
        changed[END] = -np.inf
    for step in order:
        if step == "bias":
            for token, bias in params.logit_bias.items():
                changed[token] += bias
        else:
            for token in {*prompt.tolist(), *answer}:
                factor = params.repetition_penalty
                changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
            for token in set(answer):
                changed[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    return changed


def probabilities(changed, params, order=("temperature", "min_p", "top_k", "top_p")):
    """The distribution that tokens are drawn from, float64."""
    kept = changed.copy()

    def shares():
        weights = np.exp(kept - kept.max())
        return weights / weights.sum()

    for step in order:
        if step == "temperature":
            kept = kept / params.temperature
        elif step == "min_p":
            kept[shares() < params.min_p * shares().max()] = -np.inf
        elif step == "top_k" and params.top_k > 0:
            kept[kept < np.sort(kept)[-min(params.top_k, len(kept))]] = -np.inf
        elif step == "top_p" and params.top_p < 1:
            ranked = np.argsort(-kept, kind="stable")
            num_kept = int(np.searchsorted(np.cumsum(shares()[ranked]), params.top_p)) + 1
            kept[ranked[num_kept:]] = -np.inf
    return shares()


def chi_square(tokens, wanted):
    """Per degree of freedom; infinite if a token was drawn that cannot be."""
    counts, possible = np.bincount(tokens, minlength=len(wanted)), wanted > 0
    if counts[~possible].any():
        return np.inf
    expected = wanted[possible] * len(tokens)
    return float(((counts[possible] - expected) ** 2 / expected).sum() / max(possible.sum() - 1, 1))


SAMPLING = SamplingParams(temperature=1.3)
CASES = [
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 500},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 6, "top_p": 0.9},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": -0.4},
    {"logit_bias": {0: 2.0, 6: 3.5, 11: -100.0}},
    {"logit_bias": {6: 4.0, 8: -2.0}, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"allowed_token_ids": (2, 6, 9, 20)},
    {"allowed_token_ids": (2, 6, 9, 20), "repetition_penalty": 2.0, "top_k": 2},
    {"min_tokens": 6, "logit_bias": {END: 6.0}},
    {"min_tokens": 5, "logit_bias": {END: 6.0}},
]


@pytest.mark.parametrize("fields", CASES)
def test_draws_follow_vllms_order(fields):
    params = dataclasses.replace(SAMPLING, **fields)
    changed = changed_logits(LOGITS, params)
    tokens, wanted = drawn(params), probabilities(changed, params)
    assert chi_square(tokens, wanted) < 3.2
    greedy = dataclasses.replace(params, temperature=0.0)
    assert set(drawn(greedy)) == {int(changed.argmax())}


@pytest.mark.parametrize(
    ("case", "order"),
    [
        (5, ("temperature", "top_p", "min_p", "top_k")),
        (3, ("min_p", "temperature", "top_k", "top_p")),
        (6, ("temperature", "min_p", "top_p", "top_k")),
    ],
)
def test_draws_differ_from_another_order(case, order):
    params = dataclasses.replace(SAMPLING, **CASES[case])
    wrong = probabilities(changed_logits(LOGITS, params), params, order)
    assert chi_square(drawn(params), wrong) > 8


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (9, {"prompt": PROMPT[:0]}),
        (7, {"answer": (*ANSWER, *PROMPT.tolist())}),
        (8, {"answer": (6, 8, 9)}),
        (12, {"order": ("penalties", "bias")}),
        (15, {"answer": (*ANSWER, 9)}),
    ],
)
def test_changed_logits_differ_from_other_counts_and_orders(case, change):
    params = dataclasses.replace(SAMPLING, **CASES[case])
    got = np.asarray(adjust(jnp.asarray(LOGITS[None]), batched([following(params)], 1, V)))[0]
    np.testing.assert_allclose(got, changed_logits(LOGITS, params), atol=TOLERANCE, rtol=0)
    wrong = changed_logits(LOGITS, params, **change)
    assert not np.allclose(got, wrong, atol=30 * TOLERANCE, rtol=0)


def test_changed_logits_equal_transformers_processors():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = (3 * np.random.default_rng(6).standard_normal((1, 1000))).astype(np.float32)
    prompt = np.random.default_rng(7).integers(0, 1000, 300).astype(np.int32)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    wanted = processor(torch.tensor(prompt[None].astype(np.int64)), torch.tensor(logits)).numpy()
    params = SamplingParams(repetition_penalty=1.7)
    got = adjust(jnp.asarray(logits), batched([following(params, prompt, ())], 1, 1000))
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=0)
    for sampling, warper in (
        (SamplingParams(temperature=1.0, top_k=4), transformers.TopKLogitsWarper(4)),
        (SamplingParams(temperature=1.0, min_p=0.1), transformers.MinPLogitsWarper(0.1)),
    ):
        kept = np.isfinite(warper(None, torch.tensor(LOGITS[None])).numpy()[0])
        assert set(drawn(sampling)) == set(np.flatnonzero(kept))


def test_changed_logits_of_many_tokens_equal_float64():
    random = np.random.default_rng(8)
    logits = (4 * random.standard_normal(2000)).astype(np.float32)
    prompt, answer = random.integers(0, 2000, 700).astype(np.int32), tuple(random.integers(0, 300, 90).tolist())
    bias = {int(token): float(value) for token, value in enumerate(random.normal(size=50))}
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.21,
        logit_bias=bias,
        min_tokens=91,
        max_new_tokens=None,
    )
    got = np.asarray(adjust(jnp.asarray(logits[None]), batched([following(params, prompt, answer)], 1, 2000)))[0]
    wanted = changed_logits(logits, params, prompt, answer)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=0)
    assert np.isneginf(got[END]) and np.isfinite(np.delete(got, END)).all()
    others = [
        changed_logits(logits, dataclasses.replace(params, **{name: value}), prompt, answer)
        for name, value in (("repetition_penalty", 1.301), ("presence_penalty", 0.701), ("frequency_penalty", 0.211))
    ]
    for other in others:
        assert np.abs(np.delete(got, END) - np.delete(other, END)).max() > 30 * TOLERANCE


def test_bad_words_are_ruled_out_where_they_would_end():
    words = [[6, 6, 8], [4], [9, 2], [8, 9, 7]]
    params = dataclasses.replace(SAMPLING, bad_words=("x",))
    wanted = probabilities(changed_logits(LOGITS, params, bad_words=words), params)
    assert np.flatnonzero(wanted == 0).tolist() == [2, 4, 7]
    assert chi_square(drawn(params, bad_words=words), wanted) < 3.2
    assert {2, 4, 7} & set(drawn(params))


def test_what_rules_out_every_token_has_no_effect():
    params = SamplingParams(min_tokens=9, allowed_token_ids=(END,))
    assert set(drawn(params)) == {END}
    params = SamplingParams(temperature=1.0, bad_words=("x",), allowed_token_ids=(2, 6))
    assert set(drawn(params, bad_words=[[2], [6]])) == {2, 6}
    assert set(drawn(params, bad_words=[[2]])) == {6}


@pytest.mark.parametrize("top_p", [1e-3, 1e-30, 1e-46, 5e-324])
def test_tiny_top_p_is_greedy(top_p):
    assert set(drawn(SamplingParams(temperature=2.0, top_p=top_p))) == {int(LOGITS.argmax())}


def test_rows_without_changes_are_sampled_as_in_a_batch_without_any():
    logits = jnp.asarray((2 * np.random.default_rng(9).standard_normal((6, 300))).astype(np.float32))
    plain = [
        SamplingParams(temperature=t, top_p=p) for t, p in ((0, 1), (1, 1), (1, 0.8), (0.7, 0.5), (2, 1), (1, 0.9))
    ]
    changed = dataclasses.replace(plain[1], top_k=2, frequency_penalty=2.0)
    specs = [SampleSpec(params, 3, index) for index, params in enumerate(plain)]
    mixed = specs.copy()
    mixed[4] = SampleSpec(changed, 3, 4, adjustments=following(changed))
    wanted, got = sample_tokens(logits, specs), sample_tokens(logits, mixed)
    assert wanted[:4] + wanted[5:] == got[:4] + got[5:]
    alone = sample_tokens(logits[4:5], [mixed[4]])
    assert alone[0].token_id == got[4].token_id


def test_a_batch_without_the_fields_computes_nothing_for_them(monkeypatch):
    traced = []

    def note(name):
        function = getattr(model_sampling, name)
        monkeypatch.setattr(model_sampling, name, lambda *given: traced.append((name, len(given))) or function(*given))

    for name in ("adjust", "_bits", "_likeliest", "draw"):
        note(name)
    rows = np.zeros(2, np.float32)
    state = SamplingState(rows, rows, np.zeros((2, 2), np.uint32), np.zeros(2, np.int32))  # pyright: ignore
    adjustments = batched([following(SamplingParams(temperature=1.0, top_k=5))], 2, V)
    told = {}
    for name, more in (("plain", {}), ("all", {"allowed": np.zeros((2, 1), np.uint32), "adjustments": adjustments})):
        traced.clear()
        given = jax.tree.map(jnp.asarray, dataclasses.replace(state, **more))
        jax.make_jaxpr(lambda logits, given=given: model_sampling.sample(logits, given, 0))(jnp.zeros((2, V)))
        told[name] = {function: num_arguments for function, num_arguments in traced}
    assert told["plain"] == {"draw": 4} and told["all"] == {"adjust": 2, "_bits": 2, "_likeliest": 2, "draw": 6}

"""Sampling on the device against a float64 softmax, cut to the nucleus."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.models.llama3 import sampling
from ccjax.models.llama3.inputs import SamplingState
from ccjax.models.llama3.sampling import GREEDY_BELOW, seed_words
from ccjax.models.llama3.steps import sample_step

LOGPROB_TOLERANCE = 3e-6
"""Largest error of float32 log-probabilities of up to -25; measured 3e-7 over 32,000 tokens."""


one_drawn = jax.jit(sampling.draw)


def run(logits, temperature=0.0, top_p=1.0, seed=0, index=0, num_top=0, allowed=None):
    """`sample_step`; single values apply to every row. `allowed` has a boolean for each token of each row."""
    batch = len(logits)
    if allowed is not None:
        padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
        allowed = jnp.asarray(np.packbits(padded, axis=1, bitorder="little").view(np.uint32))
    state = SamplingState(
        jnp.asarray(np.broadcast_to(np.float32(temperature), batch)),
        jnp.asarray(np.broadcast_to(np.float32(top_p), batch)),
        jnp.asarray(np.stack([seed_words(int(value)) for value in np.broadcast_to(np.asarray(seed, object), batch)])),
        jnp.asarray(np.broadcast_to(np.int32(index), batch)),
        allowed,
    )
    return sample_step(jnp.asarray(logits, jnp.float32), state, num_top=num_top)


def softmax(logits, temperature=1.0):
    wide = logits.astype(np.float64) / temperature
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def nucleus(logits, temperature, top_p):
    """Probabilities [V], float64, cut to the smallest set of likeliest tokens that reaches top_p; ties by id."""
    weights = softmax(logits, temperature)
    order = np.argsort(-logits, kind="stable")
    num_kept = len(order) if top_p == 1.0 else int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
    cut = np.zeros(len(weights))
    cut[order[:num_kept]] = weights[order[:num_kept]]
    return cut / cut.sum()


def draws(logits, temperature, top_p, count, seed=0):
    """`count` sampled tokens: rows that differ only in their index."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    return np.asarray(run(rows, temperature, top_p, seed, np.arange(count)).token_ids)


LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 0.5, 2.5, -np.inf], np.float32)
CASES = [(0.5, 1.0), (1.8, 1.0), (1.0, 0.8), (0.7, 0.5), (2.0, 0.99)]
COUNT = 8192


def chi_square(tokens, wanted):
    """Chi-square of counts against probabilities, over tokens of non-zero probability, per degree of freedom."""
    counts, possible = np.bincount(tokens, minlength=len(wanted)), wanted > 0
    expected = wanted[possible] * len(tokens)
    return float(((counts[possible] - expected) ** 2 / expected).sum() / max(possible.sum() - 1, 1))


@pytest.mark.parametrize(("temperature", "top_p"), CASES)
def test_draws_follow_the_distribution(temperature, top_p):
    tokens = draws(LOGITS, temperature, top_p, COUNT)
    wanted = nucleus(LOGITS, temperature, top_p)
    assert set(tokens) == set(np.flatnonzero(wanted)), "the kept set"
    assert chi_square(tokens, wanted) < 4  # at most five degrees of freedom: a chance of one in a thousand
    if top_p == 1.0:
        for other in (0.8 * temperature, 1.25 * temperature):
            assert chi_square(tokens, nucleus(LOGITS, other, top_p)) > 8


def test_ties_at_the_nucleus_boundary_are_broken_by_token_id():
    logits = np.array([0.0, 1.0, 0.0, 0.0, 0.0], np.float32)  # probabilities 0.40, and four of 0.15
    for top_p, kept in ((0.3, {1}), (0.5, {1, 0}), (0.6, {1, 0, 2}), (0.8, {1, 0, 2, 3}), (0.9, {0, 1, 2, 3, 4})):
        assert set(draws(logits, 1.0, top_p, 400)) == kept == set(np.flatnonzero(nucleus(logits, 1.0, top_p)))


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_nucleus_sampling_over_a_real_vocabulary(top_p):
    """Never samples a token outside of it, and samples all of a small one; each eighth of it has the right share."""
    logits = (3 * np.random.default_rng(1).standard_normal(32000)).astype(np.float32)
    wanted = nucleus(logits, 1.0, top_p)
    tokens = draws(logits, 1.0, top_p, 192)
    assert wanted[tokens].all()
    order = np.argsort(-wanted)
    eighth = np.minimum((np.cumsum(wanted[order]) * 8).astype(int), 7)
    part = np.empty(32000, int)
    part[order] = eighth
    shares = np.bincount(part, weights=wanted, minlength=8)
    possible = shares > 0
    assert chi_square(np.searchsorted(np.flatnonzero(possible), part[tokens]), shares[possible]) < 3.5


def test_sampling_is_independent_of_the_batch():
    random = np.random.default_rng(2)
    logits = (2 * random.standard_normal((12, 500))).astype(np.float32)
    temperature, top_p = random.uniform(0.5, 2, 12), random.uniform(0.5, 1, 12)
    temperature[3] = top_p[4] = 1.0
    temperature[5:7] = 0.0
    seed, index = [2**40 + n for n in range(12)], np.arange(12) * 7
    together = np.asarray(run(logits, temperature, top_p, seed, index).token_ids)
    order = random.permutation(12)
    shuffled = run(logits[order], temperature[order], top_p[order], [seed[n] for n in order], index[order])
    np.testing.assert_array_equal(shuffled.token_ids, together[order])
    alone = [int(run(logits[n : n + 1], temperature[n], top_p[n], seed[n], index[n]).token_ids[0]) for n in range(12)]
    assert alone == together.tolist()
    for other in (
        run(logits, temperature, top_p, [s + 2**32 for s in seed], index),
        run(logits, temperature, top_p, [s + 1 for s in seed], index),
        run(logits, temperature, top_p, seed, index + 1),
    ):
        is_greedy = temperature == 0.0
        same = np.asarray(other.token_ids) == together
        assert same[is_greedy].all() and same[~is_greedy].sum() < 5


def test_low_temperature_is_greedy_and_ties_go_to_the_lowest_id():
    logits = np.tile(np.array([1.0, 3.0, -2.0, 3.0, 2.99], np.float32), (4, 1))
    temperature = [0.0, 1e-6, 0.9 * GREEDY_BELOW, 1e-30]
    assert run(logits, temperature, 0.5).token_ids.tolist() == [1, 1, 1, 1]
    # Also next to a sampled row; and just above the threshold nothing overflows.
    assert run(logits, [0.0, 1.0, 0.0, 2 * GREEDY_BELOW], 0.5).token_ids[jnp.array([0, 2])].tolist() == [1, 1]
    assert int(run(logits[:1], 2 * GREEDY_BELOW, 0.3).token_ids[0]) == 1


def test_log_probabilities_are_log_softmax_before_temperature_and_nucleus():
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal((4, 32000)) + 20).astype(np.float32)
    wanted = np.log(softmax(logits))
    for temperature in (0.0, 1.5):
        out = run(logits, temperature, 0.9, num_top=20)
        tokens = np.asarray(out.token_ids)
        np.testing.assert_allclose(out.logprobs, wanted[np.arange(4), tokens], atol=LOGPROB_TOLERANCE, rtol=0)
        np.testing.assert_array_equal(out.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :20])
        top = np.take_along_axis(wanted, np.asarray(out.top_ids), 1)
        np.testing.assert_allclose(out.top_logprobs, top, atol=LOGPROB_TOLERANCE, rtol=0)
    assert np.abs(np.log(softmax(logits, 1.001)) - wanted).max() > 30 * LOGPROB_TOLERANCE
    assert run(logits).top_ids.shape == run(logits).top_logprobs.shape == (4, 0)
    ties = run(np.array([[1.0, 2.0, 2.0, 0.0, 2.0]], np.float32), num_top=4)
    assert ties.top_ids.tolist() == [[1, 2, 4, 0]]


def test_nan_row_does_not_affect_other_rows():
    logits = (2 * np.random.default_rng(4).standard_normal((5, 300))).astype(np.float32)
    for temperature in (0.0, 1.0):
        clean = run(logits, temperature, 0.9, [3, 4, 5, 6, 7], num_top=5)
        broken = logits.copy()
        broken[1], broken[3, 17], broken[4, 17] = np.nan, np.inf, -np.inf
        out = run(broken, temperature, 0.9, [3, 4, 5, 6, 7], num_top=5)
        for got, wanted in zip(out, clean, strict=True):
            np.testing.assert_array_equal(got[jnp.array([0, 2])], wanted[jnp.array([0, 2])])
        assert (
            np.isnan(np.asarray(out.logprobs)[[1, 3, 4]]).all() and np.isfinite(np.asarray(out.logprobs)[[0, 2]]).all()
        )
        assert (0 <= np.asarray(out.token_ids)).all() and (np.asarray(out.token_ids) < 300).all()


def test_64_bit_seeds_are_distinguished_and_negative_seeds_are_rejected():
    assert seed_words(2**32 * 5 + 7).tolist() == [5, 7] and seed_words(2**64 + 3).tolist() == [0, 3]
    with pytest.raises(ValueError, match="seed: wanted a non-negative integer, got -1"):
        seed_words(-1)


def test_extreme_uniforms_draw_tokens_with_nonzero_probability():
    """At 0 and just below 1, if the first and last tokens, and those outside the nucleus, have no weight."""
    random = np.random.default_rng(6)
    for top_p in (1.0, 0.7):
        for _ in range(20):
            logits = (4 * random.standard_normal(1000)).astype(np.float32)
            logits[:2] = logits[-2:] = -np.inf
            below, wanted = jnp.asarray(logits - logits.max()), nucleus(logits, 1.0, top_p)
            for uniform, token in ((0.0, np.flatnonzero(wanted)[0]), (1 - 2**-24, np.flatnonzero(wanted)[-1])):
                drawn = int(one_drawn(below, jnp.float32(1.0), jnp.float32(top_p), jnp.float32(uniform)))
                assert wanted[drawn] and abs(wanted[: drawn + 1].sum() - wanted[: token + 1].sum()) < 1e-6


def test_batched_draws_match_one_by_one_draws():
    """A CPU samples row by row, other devices all rows at once."""
    random = np.random.default_rng(5)
    logits = 2 * random.standard_normal((9, 200)).astype(np.float32)
    settings = random.uniform(0.3, 1, (3, 9))
    settings[1, :3] = 1.0
    rows = [jnp.asarray(x, jnp.float32) for x in (logits - logits.max(1, keepdims=True), *settings)]
    one_by_one = [int(one_drawn(*(part[n] for part in rows))) for n in range(9)]
    assert jax.jit(jax.vmap(sampling.draw))(*rows).tolist() == one_by_one and len(set(one_by_one)) > 3


def test_batched_draws_with_top_k_and_min_p_match_one_by_one_draws():
    random = np.random.default_rng(8)
    logits = 2 * random.standard_normal((9, 200)).astype(np.float32)
    settings = random.uniform(0.3, 1, (3, 9))
    top_k, min_p = jnp.asarray([1, 2, 5, 20, 199, 200, 200, 3, 50], jnp.int32), random.uniform(0, 0.2, 9)
    rows = [jnp.asarray(x, jnp.float32) for x in (logits - logits.max(1, keepdims=True), *settings)]
    rows += [top_k, jnp.asarray(min_p, jnp.float32)]
    one_by_one = [int(one_drawn(*(part[n] for part in rows))) for n in range(9)]
    assert jax.jit(jax.vmap(sampling.draw))(*rows).tolist() == one_by_one and len(set(one_by_one)) > 3
    ranks = np.argsort(np.argsort(-logits, axis=1), axis=1)[np.arange(9), one_by_one]
    assert (ranks < np.asarray(top_k)).all()


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 300])
def test_only_allowed_tokens_are_sampled(num_tokens):
    """As from logits in which all others are impossible; log-probabilities remain those of all tokens."""
    random = np.random.default_rng(7)
    logits = (2 * random.standard_normal((24, num_tokens))).astype(np.float32)
    allowed = random.random(logits.shape) < 0.3
    allowed[:, 0], allowed[3] = True, True
    temperature, top_p = random.uniform(0, 2, 24), random.uniform(0.5, 1, 24)
    temperature[:6] = 0.0
    seed, index = [2**40 + n for n in range(24)], np.arange(24)
    out = run(logits, temperature, top_p, seed, index, 5, allowed)
    only = run(np.where(allowed, logits, -np.inf), temperature, top_p, seed, index)
    tokens = np.asarray(out.token_ids)
    np.testing.assert_array_equal(tokens, only.token_ids)
    assert allowed[np.arange(24), tokens].all()
    free = run(logits, temperature, top_p, seed, index, 5)
    assert tokens[3] == free.token_ids[3] and (tokens != np.asarray(free.token_ids)).any()
    np.testing.assert_array_equal(out.top_ids, free.top_ids)
    np.testing.assert_array_equal(out.top_logprobs, free.top_logprobs)
    wanted = np.log(softmax(logits))[np.arange(24), tokens]
    np.testing.assert_allclose(out.logprobs, wanted, atol=LOGPROB_TOLERANCE, rtol=0)

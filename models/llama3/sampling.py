"""Samples the next token of every row of a batch on the device: greedy, temperature, nucleus.

Sorting and cumulative sums of the vocabulary are slow on CPUs and are avoided: the nucleus is every token whose weight
reaches a threshold, found by bisection over the bits of the weights, and sampling inverts the distribution in order of
ids, also by bisection. Within a bisection all sums differ only in their mask, so their rounding is monotonic, and a
token without weight is never sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from ccjax.models.llama3.inputs import SamplingState

GREEDY_BELOW = 1e-5
"""Temperatures below this are treated as greedy; dividing by them would overflow."""


class SampleOutput(NamedTuple):
    """One sampled token per row. Log-probabilities are the model's own, before temperature and nucleus, float32.

    Attributes:
      token_ids: [B] int32.
      logprobs: [B], log-probability of the sampled token.
      top_ids, top_logprobs: [B, n], the n likeliest tokens, likeliest first, ties by id.
    """

    token_ids: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    top_ids: Int[Array, "B n"]
    top_logprobs: Float[Array, "B n"]


def seed_words(seed: int) -> np.ndarray:
    """A seed in the format of `sample`, [2] uint32; only the low 64 bits are used.

    Raises:
      ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed: wanted a non-negative integer, got {seed}")
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def sample(logits: Float[Array, "B V"], state: SamplingState, num_top: int) -> SampleOutput:
    """Samples a token for every row. The result for a row depends only on its own arguments.

    Args:
      logits: float32; a row with NaN gives an arbitrary token with a log-probability of NaN.
      num_top: static, number of likeliest tokens to list.
    """
    num_tokens = logits.shape[1]
    top = logits.max(-1, keepdims=True)
    ids = jnp.arange(num_tokens, dtype=jnp.int32)
    # Several times faster on a CPU than argmax. A row with NaN matches no id, hence the minimum.
    greedy = jnp.minimum(jnp.where(logits == top, ids[None], num_tokens).min(-1), num_tokens - 1)
    is_greedy = state.temperature < GREEDY_BELOW
    uniform = jax.vmap(_uniform)(state.seeds, state.index)

    def drawn(row: tuple[Array, ...]) -> Array:
        is_greedy, greedy, *arguments = row
        return lax.cond(is_greedy, lambda: greedy, lambda: draw(*arguments))

    def all_drawn() -> Array:
        temperature = jnp.where(is_greedy, 1.0, state.temperature)
        rows = is_greedy, greedy, logits - top, temperature, state.top_p, uniform
        # Row by row, the weights of a row stay in the processor's cache: 20 times faster, and greedy rows cost nothing.
        return lax.platform_dependent(rows, cpu=functools.partial(lax.map, drawn), default=jax.vmap(drawn))

    token_ids = lax.cond(is_greedy.all(), lambda: greedy, all_drawn)
    log_total = jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))

    def log_probabilities(of: Array) -> Array:
        return of - top - log_total

    top_logits, top_ids = lax.top_k(logits, num_top)
    own = log_probabilities(jnp.take_along_axis(logits, token_ids[:, None], 1))
    return SampleOutput(token_ids, own[:, 0], top_ids, log_probabilities(top_logits))


def _uniform(seed: Array, index: Array) -> Array:
    """A number in [0, 1). The generator is fixed, so that settings of the process do not change the result."""
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index))


def draw(
    below_top: Float[Array, "V"], temperature: Float[Array, ""], top_p: Float[Array, ""], uniform: Float[Array, ""]
) -> Int[Array, ""]:
    """The token id, int32, that `uniform` in [0, 1) selects; `below_top` is the logits minus the largest of them."""
    weights = jnp.exp(below_top / temperature)
    ids = jnp.arange(len(weights), dtype=jnp.int32)
    kept = lax.cond(top_p >= 1.0, lambda: weights, lambda: _nucleus(weights, top_p))
    target, end = uniform * kept.sum(), jnp.where(kept > 0.0, ids, 0).max() + 1
    return _last(lambda token_id: _mass(kept, ids < token_id) <= target, 0, end)


def _nucleus(weights: Array, top_p: Array) -> Array:
    """The weights with zeros outside the nucleus; the largest weight is 1."""
    ids = jnp.arange(len(weights), dtype=jnp.int32)
    goal = top_p * weights.sum()
    num_bits = int(np.float32(1.0).view(np.int32)) + 1
    threshold = _float(_last(lambda bits: _mass(weights, weights >= _float(bits)) >= goal, 0, num_bits))
    above, equal = _mass(weights, weights > threshold), jnp.where(weights == threshold, weights, 0.0)
    last_id = _last(lambda token_id: above + _mass(equal, ids < token_id) < goal, 0, len(ids))
    return jnp.where((weights > threshold) | ((weights == threshold) & (ids <= last_id)), weights, 0.0)


def _mass(weights: Array, mask: Array) -> Array:
    return jnp.where(mask, weights, 0.0).sum()


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _last(holds: Callable[[Array], Array], low: int, high: int | Array) -> Array:
    """The largest integer in [low, high) for which `holds` is true, by bisection; it is false for all larger ones."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_true = holds(middle)
        return jnp.where(is_true, middle, low), jnp.where(is_true, high, middle)

    bounds = jnp.int32(low), jnp.asarray(high, jnp.int32)
    return lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, halve, bounds)[0]

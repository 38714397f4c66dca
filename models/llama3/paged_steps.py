"""The jitted steps of a running batch; keys and values of all requests are in one pool of pages per layer.

A prefill runs layer by layer, so that loads overlap and decode steps cut in; a decode step is one call for many layers.
Both write the new rows to the donated pages, then attend over the pages of their requests. Keys are stored before
RoPE and rotated when read, so requests can share a page at different positions. The caller assigns pages to requests
and schedules the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, nn
from jaxtyping import Float, Int

from ccjax.kernels.attention import attention
from ccjax.kernels.attention.bounds import UNUSED
from ccjax.kernels.decode import decode_attention
from ccjax.kernels.inputs import KVPages
from ccjax.kernels.rope import apply_rope, rotate, rotation_rows
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.inputs import DecodeInputs, StepInputs, StepSettings
from ccjax.models.llama3.layers import finish_layer, own_mass, project_qkv, rope_frequencies, unembed
from ccjax.models.llama3.pages import read_slots, write_rows
from ccjax.models.llama3.params import LayerParams, Params
from ccjax.models.llama3.products import einsum
from ccjax.models.llama3.sharding import (
    ATTENTION_OUTPUT,
    EVERYWHERE,
    HEADS,
    PAGES,
    constrain,
    over_heads,
)

QUESTION_ROWS = 16
"""Computed tokens whose attention weights `question_step` holds at once: so few that it takes no more memory than a
pack."""


_SPECS = (HEADS, PAGES, EVERYWHERE)
"""Layouts of queries, pages and inputs."""


class PagedLayerOutput(NamedTuple):
    """Result of `paged_layer_step`.

    Attributes:
      x: [N, D], hidden states after the layer.
      pages: the pool with the computed rows written; keys before RoPE.
      mass: [N, C] float32, softmax mass of each computed token on each segment, mean over heads; None if not requested.
      self_mass: [N] float32, its softmax weight on itself, mean over heads; None if not requested.
    """

    x: Float[Array, "N D"]
    pages: KVPages
    mass: Float[Array, "N C"] | None
    self_mass: Float[Array, "N"] | None


class QuestionOutput(NamedTuple):
    """Result of `question_step`.

    Attributes:
      x: [N, D], hidden states after the layer.
      pages: the pool with the computed rows written; keys before RoPE.
      received: [S] float32, softmax mass on each context token, summed over the computed tokens, mean over heads.
    """

    x: Float[Array, "N D"]
    pages: KVPages
    received: Float[Array, "S"]


class PagedDecodeOutput(NamedTuple):
    """Result of `paged_decode_step`.

    Attributes:
      x: [B, D], hidden states after the layers or, from all of the model, [B, V] float32, the logits of the next token.
      pages: the pools of the layers with the new rows written.
    """

    x: Float[Array, "B X"]
    pages: tuple[KVPages, ...]


@jax.jit(static_argnames=("config",))
def deviation_step(
    layer: LayerParams, x: Float[Array, "N D"], pages: KVPages, q_slot: Int[Array, "N"], *, config: LlamaConfig
) -> Float[Array, "N"]:
    """Euclidean distance over all heads, float32, between the keys (before RoPE) and values that the layer computes for
    some tokens and those in their slots (CacheBlend sec. 4.2). Slots past the end count as zeros."""
    _, k, v = project_qkv(x, layer, config.rms_norm_eps)
    pairs = (k, read_slots(pages.k, q_slot)), (v, read_slots(pages.v, q_slot))
    squares = (jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum((1, 2)) for new, old in pairs)
    return jnp.sqrt(sum(squares))


def _projected(
    layer: LayerParams, x: Array, pages: KVPages, inputs: StepInputs | DecodeInputs, settings: StepSettings
) -> tuple[Array, Array, KVPages]:
    """Queries and keys of the computed tokens before RoPE, and the pages with these keys and their values written.

    A value that is not finite would reach all requests of the step, since attention weights of 0 times NaN are NaN. So
    it is zero, and its key is NaN, which reaches those tokens alone whose scores are not masked.
    """
    q, k, v = project_qkv(x, layer, settings.config.rms_norm_eps)
    is_finite = jnp.isfinite(v).all(-1, keepdims=True)
    k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, 0.0)
    return q, k, write_rows(pages, inputs.q_slot, k, v, settings.mesh)


def _finished(
    layer: LayerParams, x: Array, attended: Array, pages: KVPages, settings: StepSettings
) -> tuple[Array, KVPages]:
    """Hidden states after the layer, and the pages, as they leave the step."""
    x = finish_layer(x, attended, layer, settings.config.rms_norm_eps)
    return constrain(x, settings.mesh, EVERYWHERE), constrain(pages, settings.mesh, PAGES)


@jax.jit(static_argnames=("settings",), donate_argnames=("pages",))
def paged_layer_step(
    layer: LayerParams, x: Float[Array, "N D"], pages: KVPages, inputs: StepInputs, *, settings: StepSettings
) -> PagedLayerOutput:
    """One transformer layer for the computed tokens of several requests, packed one after another.

    A token attends to context tokens of its own request at its own or an earlier position; positions restart with every
    request. The result does not depend on the order of rows and context tokens; if requests are in the same order on
    both sides and positions ascend, the attention skips the blocks of other requests. `pages` of this layer are
    donated.
    """
    scale, mesh = settings.config.head_dim**-0.5, settings.mesh

    def attend(q: Array, pages: KVPages, inputs: StepInputs) -> tuple[Any, ...]:
        k, v = read_slots(pages.k, inputs.k_slot), read_slots(pages.v, inputs.k_slot)
        return tuple(attention(q, k, v, inputs, scale=scale, implementation=settings.implementation))

    q, k, pages = _projected(layer, x, pages, inputs, settings)
    q = rotate(q, inputs.q_rotation)
    attended, mass, lse = over_heads(attend, mesh, _SPECS, ATTENTION_OUTPUT)(q, pages, inputs)
    self_mass = None
    if mass is not None:
        self_mass = constrain(own_mass(q, rotate(k, inputs.q_rotation), lse, scale), mesh, EVERYWHERE)
        mass = constrain(mass.mean(1), mesh, EVERYWHERE)
    x, pages = _finished(layer, x, attended, pages, settings)
    return PagedLayerOutput(x, pages, mass, self_mass)


@jax.jit(static_argnames=("settings",), donate_argnames=("pages",))
def question_step(
    layer: LayerParams, x: Float[Array, "N D"], pages: KVPages, inputs: StepInputs, *, settings: StepSettings
) -> QuestionOutput:
    """`paged_layer_step` for a few computed tokens; also returns how much attention each context token receives.

    Materialises the attention weights of `QUESTION_ROWS` computed tokens at a time; N is a multiple of that, or less.
    Positions of the context need not ascend: INT32_MAX hides a token.
    """
    scale = settings.config.head_dim**-0.5

    def attend(q: Array, pages: KVPages, inputs: StepInputs) -> tuple[Array, Array]:
        # Heads first, once for all blocks.
        keys = jnp.swapaxes(rotate(read_slots(pages.k, inputs.k_slot), inputs.k_rotation), 0, 1)
        values = jnp.swapaxes(read_slots(pages.v, inputs.k_slot), 0, 1)

        def block(rows: tuple[Array, ...]) -> tuple[Array, Array]:
            q, q_pos, q_request, is_row = rows
            is_visible = (q_request[:, None] == inputs.k_request[None]) & (q_pos[:, None] >= inputs.k_pos[None])
            grouped = q.reshape(q.shape[0], keys.shape[0], -1, q.shape[2]).transpose(1, 2, 0, 3)
            scores = einsum("kgnh,ksh->kgns", grouped, keys, preferred_element_type=jnp.float32) * scale
            weights = nn.softmax(jnp.where(is_visible[None, None], scores, -jnp.inf), axis=-1)
            counted = (is_visible & is_row[:, None])[None, None]  # in a row with NaN all weights are NaN
            received = jnp.where(counted, weights, 0.0).sum(-2).reshape(-1, keys.shape[1]).T
            out = einsum("kgns,ksh->kgnh", weights.astype(values.dtype), values)
            return out.transpose(2, 0, 1, 3).reshape(q.shape), received

        def nothing(rows: tuple[Array, ...]) -> tuple[Array, Array]:
            return jnp.zeros_like(rows[0]), jnp.zeros((keys.shape[1], q.shape[1]), jnp.float32)

        rows = (q, inputs.q_pos, inputs.q_request, inputs.q_slot < pages.num_slots)  # padding rows count no mass
        if q.shape[0] <= QUESTION_ROWS:
            return block(rows)
        blocks = tuple(value.reshape(-1, QUESTION_ROWS, *value.shape[1:]) for value in rows)
        attended, received = lax.map(lambda rows: lax.cond(rows[-1].any(), block, nothing, rows), blocks)
        return attended.reshape(q.shape), received.sum(0)

    q, _, pages = _projected(layer, x, pages, inputs, settings)
    q = rotate(q, inputs.q_rotation)
    attended, received = over_heads(attend, settings.mesh, _SPECS, (HEADS, HEADS))(q, pages, inputs)
    received = constrain(received.mean(1), settings.mesh, EVERYWHERE)
    return QuestionOutput(*_finished(layer, x, attended, pages, settings), received)


@jax.jit(static_argnames=("settings",))
def rotation_step(positions: Int[Array, "*N"], *, settings: StepSettings) -> Float[Array, "*N H"]:
    """Cosines and sines of positions for the steps of all layers; INT32_MAX counts as 0."""
    rows = rotation_rows(jnp.where(positions == UNUSED, 0, positions), rope_frequencies(settings.config))
    return constrain(rows, settings.mesh, EVERYWHERE)


@jax.jit(static_argnames=("settings",), donate_argnames=("pages",))
def paged_decode_step(
    layers: Sequence[LayerParams],
    top: Params | None,
    x: Float[Array, "B D"] | Int[Array, "B"],
    pages: Sequence[KVPages],
    inputs: DecodeInputs,
    *,
    settings: StepSettings,
) -> PagedDecodeOutput:
    """Some layers for one new token of each request; positions may differ. The `pages` of these layers are donated.

    Args:
      top: the weights outside the layers, if `layers` are all of the model: `x` is token ids then, and the result
        logits. None if both are hidden states.
    """
    config, frequencies = settings.config, rope_frequencies(settings.config)

    def attend(q: Array, pages: KVPages, inputs: DecodeInputs) -> Array:
        how = {"k_frequencies": frequencies, "scale": config.head_dim**-0.5}
        return decode_attention(q, pages, inputs, **how, implementation=settings.implementation).out

    x, updated = x if top is None else top.embedding[x], []
    for layer, pool in zip(layers, pages, strict=True):
        q, _, pool = _projected(layer, x, pool, inputs, settings)
        q = apply_rope(q, inputs.q_pos, frequencies)
        attended = over_heads(attend, settings.mesh, _SPECS, HEADS)(q, pool, inputs)
        x, pool = _finished(layer, x, attended, pool, settings)
        updated.append(pool)
    return PagedDecodeOutput(x if top is None else unembed(x, top, config.rms_norm_eps), tuple(updated))

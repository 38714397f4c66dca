"""The jitted layer steps of a running batch; keys and values of all requests are in one pool of pages per layer.

Both steps write the new rows to the donated pages, then attend over the pages of their requests. Keys are stored before
RoPE and rotated when read, so requests can share a page at different positions. The caller assigns pages to requests
and schedules the steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, nn
from jax.sharding import Mesh
from jaxtyping import Float, Int

from ccjax.kernels.attention import attention
from ccjax.kernels.attention.bounds import UNUSED
from ccjax.kernels.decode import decode_attention
from ccjax.kernels.rope import apply_rope, rotate, rotation_rows
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.layers import finish_layer, own_mass, project_qkv, rope_frequencies
from ccjax.models.llama3.pages import read_slots, write_slots
from ccjax.models.llama3.params import LayerParams
from ccjax.models.llama3.products import einsum
from ccjax.models.llama3.sharding import (
    ATTENTION_OUTPUT,
    EVERYWHERE,
    HEADS,
    KV_ROWS,
    PAGES,
    constrain,
    over_heads,
)

QUESTION_ROWS = 16
"""Computed tokens whose attention weights `question_step` holds at once: so few that it takes no more memory than a
pack."""


class PagedLayerOutput(NamedTuple):
    """Result of `paged_layer_step`.

    Attributes:
      x: [N, D], hidden states after the layer.
      k_pages, v_pages: [K, P, T, H], the pool with the computed rows written; keys before RoPE.
      k, v: [N, K, H], the computed rows, keys before RoPE, as stored in a chunk variant.
      mass: [N, C] float32, softmax mass of each computed token on each segment, mean over heads; None if not requested.
      self_mass: [N] float32, its softmax weight on itself, mean over heads; None if not requested.
    """

    x: Float[Array, "N D"]
    k_pages: Float[Array, "K P T H"]
    v_pages: Float[Array, "K P T H"]
    k: Float[Array, "N K H"]
    v: Float[Array, "N K H"]
    mass: Float[Array, "N C"] | None
    self_mass: Float[Array, "N"] | None


class QuestionOutput(NamedTuple):
    """Result of `question_step`.

    Attributes:
      x: [N, D], hidden states after the layer.
      k_pages, v_pages: [K, P, T, H], the pool with the computed rows written; keys before RoPE.
      received: [S] float32, softmax mass on each context token, summed over the computed tokens, mean over heads.
    """

    x: Float[Array, "N D"]
    k_pages: Float[Array, "K P T H"]
    v_pages: Float[Array, "K P T H"]
    received: Float[Array, "S"]


class PagedDecodeOutput(NamedTuple):
    """Result of `paged_decode_step`.

    Attributes:
      x: [B, D], hidden states after the layer.
      k_pages, v_pages: [K, P, T, H], the pool with the new rows written.
    """

    x: Float[Array, "B D"]
    k_pages: Float[Array, "K P T H"]
    v_pages: Float[Array, "K P T H"]


class WrittenPages(NamedTuple):
    """`k_pages`, `v_pages`: [K, P, T, H], the pool with rows written."""

    k_pages: Float[Array, "K P T H"]
    v_pages: Float[Array, "K P T H"]


@jax.jit(static_argnames=("mesh",), donate_argnames=("k_pages", "v_pages"))
def write_rows_step(
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    slots: Int[Array, "N"],
    k: Float[Array, "N K H"],
    v: Float[Array, "N K H"],
    *,
    mesh: Mesh | None,
) -> WrittenPages:
    """The pages of one layer, donated, with rows written to `slots`; rows whose slot is past the end are dropped.
    `mesh` as in `paged_layer_step`."""
    return WrittenPages(write_slots(k_pages, slots, k, mesh), write_slots(v_pages, slots, v, mesh))


@jax.jit(static_argnames=("config",))
def deviation_step(
    layer: LayerParams,
    x: Float[Array, "N D"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    q_slot: Int[Array, "N"],
    *,
    config: LlamaConfig,
) -> Float[Array, "N"]:
    """Euclidean distance over all heads, float32, between the keys (before RoPE) and values that the layer computes for
    some tokens and those in their slots (CacheBlend sec. 4.2). Slots past the end count as zeros."""
    _, k, v = project_qkv(x, layer, config.rms_norm_eps)
    pairs = (k, read_slots(k_pages, q_slot)), (v, read_slots(v_pages, q_slot))
    squares = (jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum((1, 2)) for new, old in pairs)
    return jnp.sqrt(sum(squares))


@jax.jit(
    static_argnames=("config", "num_segments", "implementation", "mesh"),
    donate_argnames=("k_pages", "v_pages"),
)
def paged_layer_step(
    layer: LayerParams,
    x: Float[Array, "N D"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    q_pos: Int[Array, "N"],
    q_slot: Int[Array, "N"],
    q_request: Int[Array, "N"],
    slots: Int[Array, "S"],
    k_pos: Int[Array, "S"],
    k_request: Int[Array, "S"],
    k_segment: Int[Array, "S"] | None,
    q_rotation: Float[Array, "N H"],
    k_rotation: Float[Array, "S H"],
    *,
    config: LlamaConfig,
    num_segments: int,
    implementation: str | None,
    mesh: Mesh | None,
) -> PagedLayerOutput:
    """One transformer layer for the computed tokens of several requests, packed one after another.

    A token attends to context tokens of its own request at its own or an earlier position; positions restart with every
    request. The result does not depend on the order of rows and context tokens; if requests are in the same order on
    both sides and positions ascend, the attention skips the blocks of other requests. Arguments have no defaults,
    because calls with and without an argument would be compiled separately.

    Args:
      k_pages, v_pages: pool of this layer, keys before RoPE; donated.
      q_pos: positions of the computed tokens; padding rows repeat the last one.
      q_slot: slot of the pool (page * T + offset) that each computed row is written to; all distinct, and not read by
        other requests; padding rows point past the end and are dropped.
      q_request: request of each computed token; padding rows repeat the last one.
      slots: slot of every context token of the pack, including the computed ones; past the end for padding. A slot may
        occur several times, for several requests. Each must be written before or in this call.
      k_pos: position of every context token; INT32_MAX for padding.
      k_request: request of every context token; padding repeats the last one.
      k_segment, num_segments: segment of every context token, to compute the mass per segment; None and 0 to omit it.
      q_rotation, k_rotation: `rotation_step` of `q_pos` and of `k_pos`.
      implementation: see `ccjax.kernels.attention.attention`.
      mesh: mesh of weights and pages, see `ccjax.models.llama3.sharding`; None for a single device.
    """
    q, k, v = project_qkv(x, layer, config.rms_norm_eps)
    q = rotate(q, q_rotation)
    k_pages, v_pages = write_slots(k_pages, q_slot, k, mesh), write_slots(v_pages, q_slot, v, mesh)
    scale = config.head_dim**-0.5

    def attend(q: Array, k_pages: Array, v_pages: Array, *where: Any) -> Any:
        slots, q_pos, k_pos, k_segment, q_request, k_request, k_rotation = where
        return tuple(
            attention(
                q,
                read_slots(k_pages, slots),
                read_slots(v_pages, slots),
                q_pos=q_pos,
                k_pos=k_pos,
                scale=scale,
                k_segment=k_segment,
                num_segments=num_segments,
                q_request=q_request,
                k_request=k_request,
                k_rotation=k_rotation,
                implementation=implementation,
            )
        )

    where = (slots, q_pos, k_pos, k_segment, q_request, k_request, k_rotation)
    specs = (HEADS, PAGES, PAGES, *(EVERYWHERE for _ in where))
    attended, mass, lse = over_heads(attend, mesh, specs, ATTENTION_OUTPUT)(q, k_pages, v_pages, *where)
    self_mass = None
    if mass is not None:
        self_mass = constrain(own_mass(q, rotate(k, q_rotation), lse, scale), mesh, EVERYWHERE)
        mass = constrain(mass.mean(1), mesh, EVERYWHERE)
    x = constrain(finish_layer(x, attended, layer, config.rms_norm_eps), mesh, EVERYWHERE)
    k_pages, v_pages = constrain((k_pages, v_pages), mesh, PAGES)
    k, v = constrain((k, v), mesh, KV_ROWS)
    return PagedLayerOutput(x, k_pages, v_pages, k, v, mass, self_mass)


@jax.jit(static_argnames=("config", "mesh"), donate_argnames=("k_pages", "v_pages"))
def question_step(
    layer: LayerParams,
    x: Float[Array, "N D"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    q_pos: Int[Array, "N"],
    q_slot: Int[Array, "N"],
    q_request: Int[Array, "N"],
    slots: Int[Array, "S"],
    k_pos: Int[Array, "S"],
    k_request: Int[Array, "S"],
    q_rotation: Float[Array, "N H"],
    k_rotation: Float[Array, "S H"],
    *,
    config: LlamaConfig,
    mesh: Mesh | None,
) -> QuestionOutput:
    """`paged_layer_step` for a few computed tokens; also returns how much attention each context token receives.

    Materialises the attention weights of `QUESTION_ROWS` computed tokens at a time; N is a multiple of that, or less.
    Positions of the context need not ascend: INT32_MAX hides a token.
    """
    q, k, v = project_qkv(x, layer, config.rms_norm_eps)
    q = rotate(q, q_rotation)
    k_pages, v_pages = write_slots(k_pages, q_slot, k, mesh), write_slots(v_pages, q_slot, v, mesh)
    is_row = q_slot < k_pages.shape[1] * k_pages.shape[2]  # padding rows count no mass

    def attend(q: Array, k_pages: Array, v_pages: Array, *where: Any) -> tuple[Array, Array]:
        slots, k_pos, k_request, k_rotation, *rows = where
        keys, values = rotate(read_slots(k_pages, slots), k_rotation), read_slots(v_pages, slots)

        def block(rows: tuple[Array, ...]) -> tuple[Array, Array]:
            q, q_pos, q_request, is_row = rows
            is_visible = (q_request[:, None] == k_request[None]) & (q_pos[:, None] >= k_pos[None])
            grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
            scores = einsum("nkgh,skh->kgns", grouped, keys, preferred_element_type=jnp.float32) * config.head_dim**-0.5
            weights = nn.softmax(jnp.where(is_visible[None, None], scores, -jnp.inf), axis=-1)
            received = jnp.where(is_row[None, None, :, None], weights, 0.0).sum(-2).reshape(-1, slots.shape[0]).T
            return einsum("kgns,skh->nkgh", weights.astype(values.dtype), values).reshape(q.shape), received

        rows = (q, *rows)
        if q.shape[0] <= QUESTION_ROWS:
            return block(rows)
        blocks = tuple(value.reshape(-1, QUESTION_ROWS, *value.shape[1:]) for value in rows)
        attended, received = lax.map(block, blocks)
        return attended.reshape(q.shape), received.sum(0)

    where = (slots, k_pos, k_request, k_rotation, q_pos, q_request, is_row)
    specs = (HEADS, PAGES, PAGES, *(EVERYWHERE for _ in where))
    attended, received = over_heads(attend, mesh, specs, (HEADS, HEADS))(q, k_pages, v_pages, *where)
    received = constrain(received.mean(1), mesh, EVERYWHERE)
    x = constrain(finish_layer(x, attended, layer, config.rms_norm_eps), mesh, EVERYWHERE)
    k_pages, v_pages = constrain((k_pages, v_pages), mesh, PAGES)
    return QuestionOutput(x, k_pages, v_pages, received)


@jax.jit(static_argnames=("config", "mesh"))
def rotation_step(positions: Int[Array, "*N"], *, config: LlamaConfig, mesh: Mesh | None) -> Float[Array, "*N H"]:
    """Cosines and sines of positions for the steps of all layers; INT32_MAX counts as 0."""
    rows = rotation_rows(jnp.where(positions == UNUSED, 0, positions), rope_frequencies(config))
    return constrain(rows, mesh, EVERYWHERE)


@jax.jit(static_argnames=("config", "implementation", "mesh"), donate_argnames=("k_pages", "v_pages"))
def paged_decode_step(
    layer: LayerParams,
    x: Float[Array, "B D"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    q_pos: Int[Array, "B"],
    q_slot: Int[Array, "B"],
    page_table: Int[Array, "B M"],
    page_length: Int[Array, "B M"],
    page_rotation: Float[Array, "B M H"],
    *,
    config: LlamaConfig,
    implementation: str | None,
    mesh: Mesh | None,
) -> PagedDecodeOutput:
    """One transformer layer for one new token of each request; positions may differ.

    Args:
      k_pages, v_pages: pool of this layer; donated.
      q_pos: position of each new token.
      q_slot: slot of the pool (page * T + offset) that its row is written to; past the end for padding rows.
      page_table, page_length: see `ccjax.kernels.decode.decode_attention`; they include the new token. Padding rows
        have lengths of 0, and their output is meaningless.
      page_rotation: `rotation_step` of the position of each entry's first token.
      implementation: see `ccjax.kernels.decode.decode_attention`.
      mesh: as in `paged_layer_step`.
    """
    q, k, v = project_qkv(x, layer, config.rms_norm_eps)
    frequencies = rope_frequencies(config)
    q = apply_rope(q, q_pos, frequencies)
    k_pages, v_pages = write_slots(k_pages, q_slot, k, mesh), write_slots(v_pages, q_slot, v, mesh)

    def attend(q: Array, k_pages: Array, v_pages: Array, *where: Any) -> Array:
        page_table, page_length, page_rotation = where
        return decode_attention(
            q,
            k_pages,
            v_pages,
            page_table=page_table,
            page_length=page_length,
            page_rotation=page_rotation,
            k_frequencies=frequencies,
            scale=config.head_dim**-0.5,
            implementation=implementation,
        ).out

    where = (page_table, page_length, page_rotation)
    specs = (HEADS, PAGES, PAGES, *(EVERYWHERE for _ in where))
    attended = over_heads(attend, mesh, specs, HEADS)(q, k_pages, v_pages, *where)
    x = constrain(finish_layer(x, attended, layer, config.rms_norm_eps), mesh, EVERYWHERE)
    k_pages, v_pages = constrain((k_pages, v_pages), mesh, PAGES)
    return PagedDecodeOutput(x, k_pages, v_pages)

"""Partial-prefill attention for NVIDIA GPUs in Pallas-Triton.

One program computes a block of queries of one head; it iterates over key blocks with a running softmax in registers:
  - blocks beyond the last position of its queries, or with only other requests, are never loaded;
  - blocks in which every query sees all slots run in a loop without a mask;
  - the segment mass is one more product per step, P @ onehot(segment), with the same softmax.
Triton can neither slice nor join values, so a fused rotation keeps the halves of a head separate and adds two products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from ccjax.kernels.attention.blocks import TritonBlocks
from ccjax.kernels.attention.bounds import (
    LOG2_E,
    MASKED,
    UNUSED,
    block_bounds,
    block_specs,
    padded,
    padded_inputs,
    power_of_two,
)
from ccjax.kernels.attention.output import AttentionOutput, OutputParts
from ccjax.kernels.inputs import AttentionInputs
from ccjax.kernels.rope import rotate

_LEAST = 16
"""Smallest size of each dimension in a Triton matrix product."""
_A_BT = (((1,), (1,)), ((), ()))
_A_B = (((1,), (0,)), ((), ()))


class _AttentionTritonInputs(NamedTuple):
    """Inputs of a program; refs inside the kernel, None for inputs that a call does not have.

    Attributes:
      bounds: [4], the query block's `BlockBounds`.
      q: [B, H].
      k, v: [S, H] of the kv head.
      at: q_pos, q_request: [B]; k_pos, k_segment, k_request: [S].
      cos, sin: [S, H / 2] float32, of each slot's position.
    """

    bounds: Any
    q: Any
    k: Any
    v: Any
    at: AttentionInputs
    cos: Any = None
    sin: Any = None


class _Carry(NamedTuple):
    """Running softmax of B rows: weighted values [B, H], weighted one-hots [B, C] or None, top score and sum [B]."""

    values: Array
    mass: Array | None
    top: Array
    total: Array


def _kernel(inputs: _AttentionTritonInputs, outputs: OutputParts, *, scale: float, keys: int, columns: int) -> None:
    block, head_dim = inputs.q.shape
    half = head_dim // 2
    # Otherwise float32 products would be rounded to TF32.
    precision = lax.Precision.HIGHEST if inputs.q.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    q_pos = inputs.at.q_pos[...]

    def scores_of(slots: Any) -> Array:
        if inputs.cos is None:
            return product(inputs.q[...], inputs.k[slots, :], _A_BT)
        cos, sin = inputs.cos[slots, :], inputs.sin[slots, :]
        first, second = (inputs.k[slots, part].astype(jnp.float32) for part in (pl.ds(0, half), pl.ds(half, half)))
        turned = (
            (first * cos - second * sin).astype(inputs.k.dtype),
            (first * sin + second * cos).astype(inputs.k.dtype),
        )
        return product(inputs.q[:, pl.ds(0, half)], turned[0], _A_BT) + product(
            inputs.q[:, pl.ds(half, half)], turned[1], _A_BT
        )

    def step(j: Array, carry: _Carry, *, is_masked: bool) -> _Carry:
        slots = pl.ds(j * keys, keys)
        # Base 2, because its exponential is cheaper.
        scores = scores_of(slots) * (scale * LOG2_E)
        v = inputs.v[slots, :]
        if is_masked:
            k_pos = inputs.at.k_pos[slots]
            visible = k_pos[None, :] <= q_pos[:, None]
            if inputs.at.q_request is not None and inputs.at.k_request is not None:
                visible &= inputs.at.k_request[slots][None, :] == inputs.at.q_request[...][:, None]
            scores = jnp.where(visible, scores, MASKED)
            v = jnp.where((k_pos != UNUSED)[:, None], v, jnp.zeros((), v.dtype))
        top = jnp.maximum(carry.top, scores.max(1))
        # A row that has seen no slot yet keeps top = MASKED; without the guard its masked scores would count as 1.
        origin = jnp.where(top <= 0.5 * MASKED, 0.0, top) if is_masked else top
        weights = jnp.exp2(scores - origin[:, None])
        decay = jnp.exp2(carry.top - top)
        total = carry.total * decay + weights.sum(1)
        weights = weights.astype(v.dtype)
        values = carry.values * decay[:, None] + product(weights, v, _A_B)
        mass = carry.mass
        if mass is not None and inputs.at.k_segment is not None:
            segments = jnp.arange(columns, dtype=jnp.int32)
            onehot = (inputs.at.k_segment[slots][:, None] == segments[None, :]).astype(v.dtype)
            mass = mass * decay[:, None] + product(weights, onehot, _A_B)
        return _Carry(values, mass, top, total)

    carry = _Carry(
        jnp.zeros((block, head_dim), jnp.float32),
        jnp.zeros((block, columns), jnp.float32) if columns else None,
        jnp.full((block,), MASKED, jnp.float32),
        jnp.zeros((block,), jnp.float32),
    )
    first, full_first, full_last, last = (inputs.bounds[n] for n in range(4))
    masked, unmasked = (functools.partial(step, is_masked=is_masked) for is_masked in (True, False))
    carry = lax.fori_loop(first, full_first, masked, carry)
    carry = lax.fori_loop(full_first, full_last, unmasked, carry)
    carry = lax.fori_loop(full_last, last, masked, carry)
    is_empty = carry.total == 0.0
    total = jnp.where(is_empty, 1.0, carry.total)
    outputs.out[...] = (carry.values / total[:, None]).astype(outputs.out.dtype)
    outputs.lse[...] = jnp.where(is_empty, -jnp.inf, (carry.top + jnp.log2(total)) / LOG2_E)
    if carry.mass is not None:
        outputs.mass[...] = carry.mass / total[:, None]


def triton_attention(
    q: Float[Array, "N Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    blocks: TritonBlocks,
    interpret: bool = False,
) -> AttentionOutput:
    """See `ccjax.kernels.attention.attention`.

    Args:
      blocks: sizes for the chip, from `ccjax.kernels.attention.blocks`.
      interpret: run the kernel as XLA operations, on any platform.

    Raises:
      NotImplementedError: the head dimension is not a power of two from 16 to 256.
    """
    num_queries, num_slots, head_dim = q.shape[0], k.shape[0], q.shape[2]
    if head_dim not in (16, 32, 64, 128, 256):
        raise NotImplementedError(f"triton: wanted a head dimension of 16, 32, 64, 128 or 256, got {head_dim}")
    # Float32 takes a quarter of the slots and no pipeline: its products run outside the tensor cores, and their
    # operands need registers (with half the slots, H100 spilled 32 kB a thread).
    most_queries = blocks.queries if q.dtype.itemsize == 2 else blocks.float32_queries
    most_keys = max(_LEAST, blocks.keys * 4 // k.dtype.itemsize**2)
    if head_dim > 128:  # the sizes are for heads of 128
        most_queries, most_keys = most_queries // 2, max(_LEAST, most_keys // 2)
    query_block = min(most_queries, power_of_two(num_queries, _LEAST))
    key_block = min(most_keys, power_of_two(num_slots, _LEAST))
    k_rotation = inputs.k_rotation
    # Half a head of 16 is too small for a product; Triton compiles one anyway, and it counts the half twice.
    if k_rotation is not None and not (blocks.rotates and 2 * _LEAST <= head_dim <= 128):
        k, k_rotation = rotate(k, k_rotation), None
    q, k, v = padded(q, query_block), padded(k, key_block), padded(v, key_block)
    at = padded_inputs(inputs, q_block=query_block, k_block=key_block)
    bounds = block_bounds(at, q_block=query_block, k_block=key_block)
    refs = _AttentionTritonInputs(jnp.stack(bounds, -1), q, k, v, at)
    if k_rotation is not None:
        cos, sin = jnp.split(padded(k_rotation, key_block), 2, -1)
        refs = refs._replace(cos=cos, sin=sin)
    if at.k_segment is None:
        result = _call(refs, 0, query_block, key_block, scale, blocks, interpret)
        return AttentionOutput(result.out[:num_queries], None, result.lse[:, :num_queries].T)
    columns = min(blocks.max_segments, power_of_two(at.num_segments, _LEAST))
    passes = []
    for start in range(0, at.num_segments, columns):
        some = refs._replace(at=dataclasses.replace(at, k_segment=at.k_segment - start))
        passes.append(_call(some, columns, query_block, key_block, scale, blocks, interpret))
    mass = jnp.concatenate([result.mass for result in passes], -1)[:num_queries, :, : at.num_segments]
    return AttentionOutput(passes[0].out[:num_queries], mass, passes[0].lse[:, :num_queries].T)


def _call(
    inputs: _AttentionTritonInputs,
    columns: int,
    query_block: int,
    key_block: int,
    scale: float,
    blocks: TritonBlocks,
    interpret: bool,
) -> Any:
    """One launch over all heads and query blocks; `lse` is [Q, N], so that programs write contiguous rows."""
    num_queries, num_heads, head_dim = inputs.q.shape
    num_slots, num_kv_heads, _ = inputs.k.shape
    group = num_heads // num_kv_heads

    def queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((query_block, None, width), lambda i, head: (i, head, 0))

    query_row = pl.BlockSpec((query_block,), lambda i, head: (i,))
    slots = pl.BlockSpec((num_slots, None, head_dim), lambda i, head: (0, head // group, 0))
    slot_row = pl.BlockSpec((num_slots,), lambda i, head: (0,))
    table = pl.BlockSpec((num_slots, head_dim // 2), lambda i, head: (0, 0))
    rows = {"q_pos": query_row, "q_request": query_row, "k_pos": slot_row, "k_request": slot_row}
    specs = _AttentionTritonInputs(
        bounds=pl.BlockSpec((None, 4), lambda i, head: (i, 0)),
        q=queries(head_dim),
        k=slots,
        v=slots,
        at=block_specs(inputs.at, **rows, k_segment=slot_row),
        cos=None if inputs.cos is None else table,
        sin=None if inputs.sin is None else table,
    )
    shape = jax.ShapeDtypeStruct
    (result,) = pl.pallas_call(
        functools.partial(_kernel, scale=scale, keys=key_block, columns=columns),
        grid=(num_queries // query_block, num_heads),
        in_specs=[specs],
        out_specs=[
            OutputParts(
                queries(head_dim),
                queries(columns) if columns else None,
                pl.BlockSpec((None, query_block), lambda i, head: (head, i)),
            )
        ],
        out_shape=[
            OutputParts(
                shape(inputs.q.shape, inputs.q.dtype),
                shape((num_queries, num_heads, columns), jnp.float32) if columns else None,
                shape((num_heads, num_queries), jnp.float32),
            )
        ],
        # Fewer than 64 rows are not enough work for eight warps.
        compiler_params=plt.CompilerParams(
            num_warps=blocks.num_warps if query_block >= 64 else 4,
            num_stages=blocks.num_stages if inputs.k.dtype.itemsize <= 2 else 1,
        ),
        interpret=interpret,
        name="partial_prefill",
    )(inputs)
    return result

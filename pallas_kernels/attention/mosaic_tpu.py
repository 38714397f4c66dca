"""Partial-prefill attention for TPUs in Pallas-Mosaic.

The grid is (kv head, query block, key block), key blocks innermost; scratch memory keeps the running softmax between
the steps of one query block. All query heads of one kv head are rows of the same products.
  - The bounds of each query block are prefetched scalars. A step outside them does nothing, and its block index repeats
    its neighbour's, so nothing is loaded for it either.
  - Blocks in which every query sees all slots take a branch without a mask.
  - The sum of a row's weights and their sums per segment are one more product per step, onehot(segment) @ P^T with a
    row of ones: the matrix units hold the weights as stationary operand and stream the few rows of one-hots.
  - The rows are computed in two halves, the second half's scores before the first half's softmax, so that matrix units
    and vector units work at the same time.
  - A fused rotation rotates a key block once for all query heads of its kv head.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from ccjax.kernels.attention.blocks import MosaicBlocks
from ccjax.kernels.attention.bounds import (
    LOG2_E,
    MASKED,
    block_bounds,
    block_specs,
    padded,
    padded_inputs,
    power_of_two,
    used_values,
)
from ccjax.kernels.attention.output import AttentionOutput, OutputParts
from ccjax.kernels.inputs import AttentionInputs
from ccjax.kernels.rope.mosaic_tpu import turned, turns

_LANES = 128
_SUBLANES = 8
_LEAST_QUERIES = 16
"""Rows of one bfloat16 tile."""
_A_BT = (((1,), (1,)), ((), ()))
_A_B = (((1,), (0,)), ((), ()))


class _AttentionTpuInputs(NamedTuple):
    """Inputs of a step; refs inside the kernel, None for inputs that a call does not have.

    Attributes:
      q: [G, B, H], the query heads of one kv head.
      k, v: [T, H] of a key block.
      at: q_pos, q_request: [B, 1]; k_pos, k_segment, k_request: [1, T]; k_rotation: [T, H].
    """

    q: Any
    k: Any
    v: Any
    at: AttentionInputs


class _AttentionTpuScratch(NamedTuple):
    """Running softmax of R = G * B rows: weighted values [R, H], top score [R, 128], equal in all lanes, and sums of
    weights [C, R], per segment and in the last row over all slots."""

    values: Any
    top: Any
    sums: Any


def _kernel(
    bounds: Any, inputs: _AttentionTpuInputs, outputs: OutputParts, scratch: _AttentionTpuScratch, *, scale: float
) -> None:
    group, block, head_dim = inputs.q.shape
    keys = inputs.k.shape[0]
    rows = group * block
    # Otherwise float32 products would be rounded to bfloat16.
    precision = lax.Precision.HIGHEST if inputs.q.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    i, j = pl.program_id(1), pl.program_id(2)
    first, full_first, full_last, last = (bounds[n, i] for n in range(4))
    halves = _halves(group, block)

    @pl.when(j == 0)
    def _start() -> None:
        scratch.top[...] = jnp.full_like(scratch.top, MASKED)
        scratch.sums[...] = jnp.zeros_like(scratch.sums)
        scratch.values[...] = jnp.zeros_like(scratch.values)

    def rotated_keys() -> Array:
        rotation = inputs.at.k_rotation
        return inputs.k[...] if rotation is None else turned(inputs.k[...], *turns(rotation[...]))

    def onehots() -> Array:
        columns = scratch.sums.shape[0]
        column = lax.broadcasted_iota(jnp.int32, (columns, keys), 0)
        is_counted = column == columns - 1
        if inputs.at.k_segment is not None:
            is_counted |= column == inputs.at.k_segment[...]
        return is_counted.astype(inputs.v.dtype)

    def step(is_masked: bool) -> None:
        queries, step_keys, step_onehots = inputs.q[...].reshape(rows, head_dim), rotated_keys(), onehots()
        if is_masked:
            visible = inputs.at.k_pos[...] <= inputs.at.q_pos[...]
            if inputs.at.q_request is not None and inputs.at.k_request is not None:
                visible &= inputs.at.k_request[...] == inputs.at.q_request[...]
        # Base 2, because its exponential is cheaper.
        all_scores = [product(queries[half], step_keys, _A_BT) * (scale * LOG2_E) for half in halves]
        for half, scores in zip(halves, all_scores, strict=True):
            if is_masked:
                scores = jnp.where(visible[None], scores.reshape(-1, block, keys), MASKED).reshape(-1, keys)
            old_top = scratch.top[half, :1]
            top = jnp.maximum(old_top, scores.max(-1, keepdims=True))
            # A row that has seen no slot yet keeps top = MASKED; without the guard its masked scores would count as 1.
            origin = jnp.where(top <= 0.5 * MASKED, 0.0, top) if is_masked else top
            weights = jnp.exp2(scores - origin).astype(inputs.v.dtype)
            decay = jnp.exp2(old_top - top)
            scratch.top[half] = jnp.broadcast_to(top, (top.shape[0], _LANES))
            scratch.values[half] = scratch.values[half] * decay + product(weights, inputs.v[...], _A_B)
            scratch.sums[:, half] = scratch.sums[:, half] * _as_row(decay) + product(step_onehots, weights, _A_BT)

    is_full = (j >= full_first) & (j < full_last)
    pl.when(is_full)(lambda: step(False))
    pl.when((j >= first) & (j < last) & ~is_full)(lambda: step(True))

    @pl.when(j == pl.num_programs(2) - 1)
    def _finish() -> None:
        total = scratch.sums[-1:]
        is_empty = total == 0.0
        inverse = jnp.where(is_empty, 1.0, 1.0 / total)
        outputs.lse[...] = jnp.where(is_empty, -jnp.inf, (_as_row(scratch.top[...]) + jnp.log2(total)) / LOG2_E)
        values = scratch.values[...] * jnp.broadcast_to(inverse, (_LANES, rows)).T[:, :1]
        outputs.out[...] = values.reshape(group, block, head_dim).astype(outputs.out.dtype)
        if outputs.mass is not None:
            outputs.mass[...] = scratch.sums[...] * inverse


def _halves(group: int, block: int) -> list[slice]:
    """Splits the rows in two parts, as equal as possible at multiples of whole heads and of the lanes; one part if
    that is impossible."""
    rows, unit = group * block, math.lcm(block, _LANES)
    middle = rows // 2 // unit * unit
    return [slice(0, middle), slice(middle, rows)] if middle else [slice(0, rows)]


def _as_row(column: Array) -> Array:
    """[R, 1 or 128], equal in all lanes, as [1, R]."""
    return jnp.broadcast_to(column, (column.shape[0], _LANES)).T[:1]


def mosaic_tpu_attention(
    q: Float[Array, "N Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    blocks: MosaicBlocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionOutput:
    """See `ccjax.kernels.attention.attention`.

    Args:
      blocks: sizes for the chip, from `ccjax.kernels.attention.blocks`.
      interpret: run the kernel as XLA operations, on any platform; `pltpu.InterpretParams` simulates the memories too.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # Powers of two, also for groups of 3, 5 or 7 heads: a block must consist of whole tiles.
    query_block = max(power_of_two(blocks.rows // group + 1, 1) // 2, _LEAST_QUERIES)
    query_block = min(query_block, power_of_two(num_queries, _LEAST_QUERIES))
    # The sizes are for two-byte elements; wider ones take shorter steps, for the same VMEM.
    key_block = min(max(_LANES, blocks.keys * 2 // k.dtype.itemsize), power_of_two(k.shape[0], _LANES))
    num_segments = inputs.num_segments
    columns = -(-(num_segments + 1) // _SUBLANES) * _SUBLANES

    v = used_values(v, inputs.k_pos)
    k, v = (padded(x, key_block).transpose(1, 0, 2) for x in (k, v))
    q = padded(q, query_block)
    num_rows, num_slots = q.shape[0], k.shape[1]
    q = q.reshape(num_rows, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    at = padded_inputs(inputs, q_block=query_block, k_block=key_block)
    bounds = jnp.stack(block_bounds(at, q_block=query_block, k_block=key_block))

    def column(x: Array | None) -> Array | None:
        return None if x is None else x[:, None]

    def row(x: Array | None) -> Array | None:
        return None if x is None else x[None]

    at = AttentionInputs(
        q_pos=at.q_pos[:, None],
        k_pos=at.k_pos[None],
        q_request=column(at.q_request),
        k_request=row(at.k_request),
        k_segment=row(at.k_segment),
        k_rotation=None if inputs.k_rotation is None else padded(inputs.k_rotation, key_block),
        num_segments=num_segments,
    )

    def key_index(i: Array, j: Array, bounds: Any) -> Array:
        return jnp.clip(j, bounds[0, i], jnp.maximum(bounds[3, i] - 1, bounds[0, i]))

    def queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, group, query_block, width), lambda head, i, j, bounds: (head, 0, i, 0))

    def rows_of(height: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, height, rows), lambda head, i, j, bounds: (head, i, 0, 0))

    query_column = pl.BlockSpec((query_block, 1), lambda head, i, j, bounds: (i, 0))
    slot_row = pl.BlockSpec((1, key_block), lambda head, i, j, bounds: (0, key_index(i, j, bounds)))
    head_slots = pl.BlockSpec(
        (None, key_block, head_dim), lambda head, i, j, bounds: (head, key_index(i, j, bounds), 0)
    )
    slot_rows = pl.BlockSpec((key_block, head_dim), lambda head, i, j, bounds: (key_index(i, j, bounds), 0))
    scalars = {"q_pos": query_column, "q_request": query_column, "k_pos": slot_row, "k_request": slot_row}
    at_specs = block_specs(at, **scalars, k_segment=slot_row, k_rotation=slot_rows)
    specs = _AttentionTpuInputs(queries(head_dim), head_slots, head_slots, at_specs)
    rows, num_blocks = group * query_block, num_rows // query_block
    shape, memory = jax.ShapeDtypeStruct, functools.partial(pltpu.VMEM, dtype=jnp.float32)
    (result,) = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_kv_heads, num_blocks, num_slots // key_block),
            in_specs=[specs],
            out_specs=[
                OutputParts(
                    queries(head_dim),
                    rows_of(columns) if num_segments else None,
                    rows_of(1),
                )
            ],
            scratch_shapes=[
                _AttentionTpuScratch(memory((rows, head_dim)), memory((rows, _LANES)), memory((columns, rows))),
            ],
        ),
        out_shape=[
            OutputParts(
                shape(q.shape, q.dtype),
                shape((num_kv_heads, num_blocks, columns, rows), jnp.float32) if num_segments else None,
                shape((num_kv_heads, num_blocks, 1, rows), jnp.float32),
            )
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="partial_prefill",
    )(bounds, _AttentionTpuInputs(q, k, v, at))

    def by_query(x: Array) -> Array:
        """[K, blocks, X, G * B] -> [N, Q, X]."""
        x = x.reshape(num_kv_heads, num_blocks, -1, group, query_block).transpose(1, 4, 0, 3, 2)
        return x.reshape(num_rows, num_heads, -1)[:num_queries]

    out = result.out.transpose(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)[:num_queries]
    mass = by_query(result.mass)[..., :num_segments] if num_segments else None
    return AttentionOutput(out, mass, by_query(result.lse)[..., 0])

"""Paged decode attention for NVIDIA GPUs in Pallas-Triton.

One program computes one kv head of one request, for one of several equal parts of its pages: a batch too small to fill
the GPU is split along the context. A program gathers a few pages per step and keeps a running softmax for the head's
query group; afterwards the parts are combined by their log-sums.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from ccjax.kernels.attention.bounds import LOG2_E, MASKED, power_of_two
from ccjax.kernels.decode.blocks import TritonDecodeBlocks
from ccjax.kernels.decode.output import DecodeOutput, DecodeParts
from ccjax.kernels.decode.pages import num_entries, padded_tables, page_rows, valid_pages
from ccjax.kernels.inputs import KVPages, PageTables

_LEAST = 16
"""Smallest size of each dimension in a Triton matrix product."""
_A_BT = (((1,), (1,)), ((), ()))
_A_B = (((1,), (0,)), ((), ()))


class _DecodeTritonInputs(NamedTuple):
    """Inputs of a program; refs inside the kernel.

    Attributes:
      count: [], entries of the request's table up to the last used one.
      table, length: [M], pages of the request and the number of used slots of each.
      q: [G, H], the query heads of the kv head, padded.
      k, v: [P, T, H], the whole pool of the kv head.
      starts: [M, H] float32, `page_rotation` of the request.
      within: [T, H] float32, `page_rows`.
    """

    count: Any
    table: Any
    length: Any
    q: Any
    k: Any
    v: Any
    starts: Any
    within: Any


def _kernel(inputs: _DecodeTritonInputs, outputs: DecodeParts, *, scale: float, entries: int, num_parts: int) -> None:
    rows, head_dim = inputs.q.shape
    page_size, half = inputs.k.shape[1], head_dim // 2
    slots = entries * page_size
    # Otherwise float32 products would be rounded to TF32.
    precision = lax.Precision.HIGHEST if inputs.q.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def scores_of(pages: Array, j: Array) -> Array:
        # Broadcast instead of gathered by slot, which spilled registers.
        cos, sin = (inputs.starts[pl.ds(j * entries, entries), pl.ds(part, half)][:, None] for part in (0, half))
        within_cos, within_sin = (inputs.within[:, pl.ds(part, half)][None] for part in (0, half))
        cos, sin = (
            table.reshape(slots, half)
            for table in (cos * within_cos - sin * within_sin, sin * within_cos + cos * within_sin)
        )
        # Triton can neither slice nor join values, so the halves of a head stay separate.
        first, second = (
            inputs.k[pages, :, part].reshape(slots, half).astype(jnp.float32)
            for part in (pl.ds(0, half), pl.ds(half, half))
        )
        turned = (
            (first * cos - second * sin).astype(inputs.k.dtype),
            (first * sin + second * cos).astype(inputs.k.dtype),
        )
        return product(inputs.q[:, pl.ds(0, half)], turned[0], _A_BT) + product(
            inputs.q[:, pl.ds(half, half)], turned[1], _A_BT
        )

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, top, total = carry
        here = pl.ds(j * entries, entries)
        pages = inputs.table[here]
        used = jnp.arange(page_size, dtype=jnp.int32)[None, :] < inputs.length[here][:, None]
        used = used.reshape(slots)
        # Base 2, because its exponential is cheaper.
        scores = jnp.where(used[None, :], scores_of(pages, j) * (scale * LOG2_E), MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        # Before the first token, top = MASKED and masked scores count as 1. The decay at the first token multiplies
        # them by 0; a part without any token gets weight 0.
        weights = jnp.exp2(scores - new_top[:, None])
        decay = jnp.exp2(top - new_top)
        v = inputs.v[pages].reshape(slots, head_dim)
        v = jnp.where(used[:, None], v, jnp.zeros((), v.dtype))
        values = values * decay[:, None] + product(weights.astype(v.dtype), v, _A_B)
        return values, new_top, total * decay + weights.sum(1)

    num_steps = (inputs.count[...] + entries - 1) // entries
    per_part = (num_steps + num_parts - 1) // num_parts
    first = pl.program_id(2) * per_part
    start = (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    values, top, total = lax.fori_loop(first, jnp.minimum(first + per_part, num_steps), step, start)
    is_empty = total == 0.0
    total = jnp.where(is_empty, 1.0, total)
    outputs.out[...] = values / total[:, None]
    outputs.lse[...] = jnp.where(is_empty, -jnp.inf, (top + jnp.log2(total)) / LOG2_E)


def triton_decode(
    q: Float[Array, "B Q H"],
    pages: KVPages,
    tables: PageTables,
    *,
    k_frequencies: Float[Array, "half"] | np.ndarray,
    scale: float,
    blocks: TritonDecodeBlocks,
    interpret: bool = False,
) -> DecodeOutput:
    """See `ccjax.kernels.decode.decode_attention`.

    Args:
      blocks: sizes for the chip, from `ccjax.kernels.decode.blocks`.
      interpret: run the kernel as XLA operations, on any platform.

    Raises:
      NotImplementedError: the head dimension or page size is not a power of two, or out of range.
    """
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size, _ = pages.k.shape
    if head_dim not in (32, 64, 128, 256):
        raise NotImplementedError(f"triton: wanted a head dimension of 32, 64, 128 or 256, got {head_dim}")
    if page_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(f"triton: wanted pages of 8, 16, 32, 64 or 128 tokens, got {page_size}")
    group = num_heads // num_kv_heads
    rows = power_of_two(group, _LEAST)
    # The sizes are for two-byte elements. Float32 takes short steps without a pipeline: its products run outside the
    # tensor cores, and with a pipeline their operands spilled registers.
    is_wide = pages.k.dtype.itemsize > 2
    entries = max(_LEAST if is_wide else blocks.slots, page_size) // page_size
    tables = padded_tables(tables, entries)
    max_entries = tables.page_table.shape[1]
    num_parts = max(1, min(blocks.programs // (num_requests * num_kv_heads), max_entries // entries))
    grouped = q.reshape(num_requests, num_kv_heads, group, head_dim)
    inputs = _DecodeTritonInputs(
        num_entries(tables),
        valid_pages(tables),
        tables.page_length,
        jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0))),
        pages.k,
        pages.v,
        tables.page_rotation,
        page_rows(k_frequencies, page_size),
    )

    row = pl.BlockSpec((None, max_entries), lambda request, head, part: (request, 0))
    pool = pl.BlockSpec((None, num_pages, page_size, head_dim), lambda request, head, part: (head, 0, 0, 0))
    specs = _DecodeTritonInputs(
        count=pl.BlockSpec((None,), lambda request, head, part: (request,)),
        table=row,
        length=row,
        q=pl.BlockSpec((None, None, rows, head_dim), lambda request, head, part: (request, head, 0, 0)),
        k=pool,
        v=pool,
        starts=pl.BlockSpec((None, max_entries, head_dim), lambda request, head, part: (request, 0, 0)),
        within=pl.BlockSpec((page_size, head_dim), lambda request, head, part: (0, 0)),
    )
    shape = (num_parts, num_requests, num_kv_heads, rows)
    (result,) = pl.pallas_call(
        functools.partial(_kernel, scale=scale, entries=entries, num_parts=num_parts),
        grid=(num_requests, num_kv_heads, num_parts),
        in_specs=[specs],
        out_specs=[
            DecodeParts(
                pl.BlockSpec(
                    (None, None, None, rows, head_dim), lambda request, head, part: (part, request, head, 0, 0)
                ),
                pl.BlockSpec((None, None, None, rows), lambda request, head, part: (part, request, head, 0)),
            )
        ],
        out_shape=[
            DecodeParts(jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32))
        ],
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=1 if is_wide else blocks.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(inputs)
    out, lse = _joined(result)
    return DecodeOutput(
        out[:, :, :group].reshape(q.shape).astype(q.dtype), lse[:, :, :group].reshape(num_requests, num_heads)
    )


def _joined(parts: DecodeParts) -> tuple[Array, Array]:
    """Combines output and log-sum of the parts along axis 0 to those of whole requests."""
    lse = jax.nn.logsumexp(parts.lse, axis=0, keepdims=True)
    weights = jnp.exp(parts.lse - jnp.where(jnp.isfinite(lse), lse, 0.0))
    return (parts.out * weights[..., None]).sum(0), lse[0]

"""Paged decode attention for TPUs in Pallas-Mosaic.

The grid has one step per request; inside it, a loop processes the request's pages, a few at a time with all their kv
heads. Pages are copied from HBM explicitly into one of two buffers: while one part is computed, the next part, of this
or the next request, is loaded. (As 2 x 16 operands of a pipelined grid, pages took 3,774 bundles per 256 slots on v5e,
mostly bookkeeping, compared with 1,789 now.)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from ccjax.kernels.attention.bounds import LOG2_E, MASKED
from ccjax.kernels.decode.blocks import MosaicDecodeBlocks
from ccjax.kernels.decode.output import DecodeOutput, DecodeParts
from ccjax.kernels.decode.pages import num_entries, padded_tables, page_rows, valid_pages
from ccjax.kernels.inputs import KVPages, PageTables
from ccjax.kernels.rope.mosaic_tpu import sums_of_turns, turned

_LANES, _SUBLANES = 128, 8
_MOST_ENTRIES = 1 << 17
"""Most entries in the tables of one call: they are in SMEM, which has a megabyte; twice as many do not compile."""
_A_BT = (((1,), (1,)), ((), ()))
_HEADS_A_B = (((2,), (1,)), ((0,), (0,)))


class _Plan(NamedTuple):
    """Prefetched scalars.

    Attributes:
      steps: [B], number of parts of each request, at least 1.
      earlier: [B], number of parts of all earlier requests; determines the buffer of a part.
      table: [B, M], pages, all valid.
    """

    steps: Any
    earlier: Any
    table: Any


class _DecodeTpuInputs(NamedTuple):
    """Inputs of a request; refs inside the kernel.

    Attributes:
      q: [K, G, H], the request's query heads by kv head.
      used: [M / E, S] int32, 1 for slots that hold a token; a row for the E entries of each part.
      k, v: [K, P, T, H], the pools, in HBM.
      starts: [B, M / E, E, H] float32, `page_rotation` of the E entries of each part, padded to 8, in HBM.
      within: [T, H] float32, `page_rows`.
    """

    q: Any
    used: Any
    k: Any
    v: Any
    starts: Any
    within: Any


class _DecodeTpuScratch(NamedTuple):
    """Two buffers of E entries (S slots), with a semaphore for each buffer: k, v [2, K, S, H]; starts [2, E, H]."""

    arrived: Any
    k: Any
    v: Any
    starts: Any


def _kernel(
    plan: _Plan,
    inputs: _DecodeTpuInputs,
    outputs: DecodeParts,
    scratch: _DecodeTpuScratch,
    *,
    scale: float,
    entries: int,
) -> None:
    num_kv_heads, group, head_dim = inputs.q.shape
    page_size = inputs.k.shape[2]
    # Otherwise float32 products would be rounded to bfloat16.
    precision = lax.Precision.HIGHEST if inputs.q.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    request = pl.program_id(0)
    num_steps = plan.steps[request]

    def start_loading(whose: Array, j: Array, buffer: Array) -> None:
        arrived = scratch.arrived.at[buffer]
        for number in range(entries):
            page = plan.table[whose, j * entries + number]
            here = pl.ds(number * page_size, page_size)
            for pool, loaded in ((inputs.k, scratch.k), (inputs.v, scratch.v)):
                pltpu.make_async_copy(pool.at[:, page], loaded.at[buffer, :, here], arrived).start()
        pltpu.make_async_copy(inputs.starts.at[whose, j], scratch.starts.at[buffer], arrived).start()

    def wait_for(buffer: Array) -> None:
        """Waits for a part. Semaphores count bytes, so one wait per array covers all of its pages."""
        for loaded in (scratch.k, scratch.v, scratch.starts):
            pltpu.make_async_copy(loaded.at[buffer], loaded.at[buffer], scratch.arrived.at[buffer]).wait()

    def scores_of(buffer: Array) -> Array:
        cos, sin = sums_of_turns(scratch.starts[buffer, :entries], inputs.within[...])
        # One head at a time: the rotated keys of all heads would not fit into registers.
        scores = [
            product(inputs.q[head], turned(scratch.k[buffer, head], cos, sin), _A_BT) for head in range(num_kv_heads)
        ]
        return jnp.stack(scores)

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, top, total = carry
        buffer = (plan.earlier[request] + j) % 2
        is_last = j + 1 == num_steps

        @pl.when(jnp.logical_not(is_last) | (request + 1 < pl.num_programs(0)))
        def _load_the_next() -> None:
            start_loading(jnp.where(is_last, request + 1, request), jnp.where(is_last, 0, j + 1), 1 - buffer)

        wait_for(buffer)
        used = inputs.used[pl.ds(j, 1)] != 0
        # Base 2, because its exponential is cheaper.
        scores = scores_of(buffer) * (scale * LOG2_E)
        scores = jnp.where(used[None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        # A request that has seen no token yet keeps top = MASKED; its masked scores must not count as 1.
        weights = jnp.exp2(scores - jnp.where(new_top <= 0.5 * MASKED, 0.0, new_top))
        decay = jnp.exp2(top - new_top)
        v = scratch.v[buffer]
        is_used = used.astype(jnp.float32).T[None] != 0.0  # [1, S, 1]
        v = jnp.where(is_used, v, jnp.zeros((), v.dtype))
        values = values * decay + product(weights.astype(v.dtype), v, _HEADS_A_B)
        return values, new_top, total * decay + weights.sum(-1, keepdims=True)

    @pl.when(request == 0)
    def _load_the_first() -> None:
        start_loading(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    rows = (num_kv_heads, group, 1)
    start = (
        jnp.zeros((num_kv_heads, group, head_dim), jnp.float32),
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    values, top, total = lax.fori_loop(0, num_steps, step, start)
    is_empty = total == 0.0
    total = jnp.where(is_empty, 1.0, total)
    outputs.out[...] = (values / total).astype(outputs.out.dtype)
    lse = jnp.where(is_empty, -jnp.inf, (top + jnp.log2(total)) / LOG2_E)
    outputs.lse[...] = jnp.broadcast_to(lse, outputs.lse.shape)


def mosaic_tpu_decode(
    q: Float[Array, "B Q H"],
    pages: KVPages,
    tables: PageTables,
    *,
    k_frequencies: Float[Array, "half"] | np.ndarray,
    scale: float,
    blocks: MosaicDecodeBlocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> DecodeOutput:
    """See `ccjax.kernels.decode.decode_attention`.

    Args:
      blocks: sizes for the chip, from `ccjax.kernels.decode.blocks`.
      interpret: run the kernel as XLA operations, on any platform; `pltpu.InterpretParams` simulates the memories too.

    Raises:
      NotImplementedError: the page size is not a multiple of 8 tokens, or does not divide a step.
    """
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = pages.k.shape
    # The sizes are for two-byte elements; wider ones take shorter steps, for the same VMEM.
    slots = blocks.slots * 2 // pages.k.dtype.itemsize
    if page_size % 8 or slots % page_size:
        raise NotImplementedError(
            f"mosaic_tpu: wanted pages of a multiple of 8 tokens that divides {slots}, got {page_size}"
        )
    most_requests = max(1, _MOST_ENTRIES // tables.page_table.shape[1])
    if num_requests > most_requests:
        how = {"k_frequencies": k_frequencies, "scale": scale, "blocks": blocks, "interpret": interpret}
        parts = []
        for first in range(0, num_requests, most_requests):
            some_q, some_tables = jax.tree.map(lambda x, first=first: x[first : first + most_requests], (q, tables))
            parts.append(mosaic_tpu_decode(some_q, pages, some_tables, **how))
        return DecodeOutput(*(jnp.concatenate(each) for each in zip(*parts, strict=True)))
    group = num_heads // num_kv_heads
    entries = slots // page_size
    tables = padded_tables(tables, entries)
    # A request without any token takes one fully masked step, so that every request has a part to load.
    steps = jnp.maximum((num_entries(tables) + entries - 1) // entries, 1)
    plan = _Plan(steps, jnp.cumsum(steps) - steps, valid_pages(tables))
    starts = tables.page_rotation.reshape(num_requests, -1, entries, head_dim)
    starts = jnp.pad(starts, ((0, 0), (0, 0), (0, -entries % _SUBLANES), (0, 0)))
    inputs = _DecodeTpuInputs(
        q.reshape(num_requests, num_kv_heads, group, head_dim),
        _used_slots(tables.page_length.reshape(num_requests, -1, entries), page_size),
        pages.k,
        pages.v,
        starts,
        page_rows(k_frequencies, page_size),
    )

    def heads(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, num_kv_heads, group, width), lambda request, plan: (request, 0, 0, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    specs = _DecodeTpuInputs(
        q=heads(head_dim),
        used=pl.BlockSpec((None, *inputs.used.shape[1:]), lambda request, plan: (request, 0, 0)),
        k=in_hbm,
        v=in_hbm,
        starts=in_hbm,
        within=pl.BlockSpec((page_size, head_dim), lambda request, plan: (0, 0)),
    )
    pool = pltpu.VMEM((2, num_kv_heads, slots, head_dim), pages.k.dtype)
    loaded_starts = pltpu.VMEM((2, *starts.shape[2:]), jnp.float32)
    (result,) = pl.pallas_call(
        functools.partial(_kernel, scale=scale, entries=entries),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_requests,),
            in_specs=[specs],
            out_specs=[DecodeParts(heads(head_dim), heads(_LANES))],
            scratch_shapes=[_DecodeTpuScratch(pltpu.SemaphoreType.DMA((2,)), pool, pool, loaded_starts)],
        ),
        out_shape=[
            DecodeParts(
                jax.ShapeDtypeStruct(inputs.q.shape, q.dtype),
                jax.ShapeDtypeStruct((*inputs.q.shape[:3], _LANES), jnp.float32),
            )
        ],
        # Requests run in order on one core, because each loads the first part of the next one.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_decode",
    )(plan, inputs)
    return DecodeOutput(result.out.reshape(q.shape), result.lse[..., 0].reshape(num_requests, num_heads))


def _used_slots(lengths: Int[Array, "B parts E"], page_size: int) -> Int[Array, "B parts S"]:
    """1 for slots that hold a token.

    Lengths are expanded to slots by a product. An axis for the slots of a page would use only 16 of 128 lanes, which
    took as long on v5e as all norms of a layer.
    """
    slot = jnp.arange(lengths.shape[2] * page_size, dtype=jnp.int32)
    is_of = slot[None] // page_size == jnp.arange(lengths.shape[2], dtype=jnp.int32)[:, None]
    product = functools.partial(jnp.einsum, "bpe,es->bps", precision=lax.Precision.HIGHEST)
    spread = product(lengths.astype(jnp.float32), is_of.astype(jnp.float32))
    return (slot[None, None] % page_size < spread.astype(jnp.int32)).astype(jnp.int32)

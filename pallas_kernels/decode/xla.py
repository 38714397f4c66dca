"""Paged decode attention for XLA: the CPU path.

For each request, a loop runs over its own pages, a block of them at a time, with a running softmax; later entries of
the table are never read.
Pages that follow each other in the pool, as those of most prompts do, are read as one slice, others one by one, and
keys are rotated as a whole. Processor time of 30 layers, 9 / 3 heads of 64, float32, on two EPYC cores with AVX2, with
a gather of pages and keys rotated by halves before: 1 request of 2,000 tokens 60 to 34 ms, 8 requests of 300 tokens
126 to 63 ms; pages in random order 73 to 62 and 158 to 110 ms.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from ccjax.kernels.attention.bounds import LOG2_E, MASKED
from ccjax.kernels.decode.output import DecodeOutput
from ccjax.kernels.decode.pages import num_entries, padded_tables, page_rows, used_slots, valid_pages
from ccjax.kernels.inputs import KVPages, PageTables

SLOTS = 128
"""Most slots per step; with more, much of the last step of a short context is unused."""
BLOCK_BYTES = 100_000
"""Most bytes of keys per step, as float32: with the copies of their rotation they have to fit a core's second-level
cache. Twice as many made attention 1.3 to 1.9 times slower for the shapes of four models of five."""


def blocked_decode(
    q: Float[Array, "B Q H"],
    pages: KVPages,
    tables: PageTables,
    *,
    k_frequencies: Float[Array, "half"] | np.ndarray,
    scale: float,
) -> DecodeOutput:
    """See `ccjax.kernels.decode.decode_attention`."""
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = pages.k.shape
    slots = min(SLOTS, BLOCK_BYTES // (4 * num_kv_heads * head_dim))
    # At least two steps: XLA hoists the read out of a loop with a single step, and then copies the whole donated pool.
    entries = max(1, min(slots // page_size, tables.page_table.shape[1] // 2))
    tables = padded_tables(tables, entries)
    table, used = valid_pages(tables), used_slots(tables, page_size)
    starts, within, counts = tables.page_rotation, page_rows(k_frequencies, page_size), num_entries(tables)
    group, half = num_heads // num_kv_heads, head_dim // 2
    q = q.reshape(num_requests, num_kv_heads, group, head_dim)

    # Otherwise a GPU would round float32 products to TF32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def rotations(starts: Array) -> tuple[Array, Array]:
        """Cosines of every slot for both halves of a key, and sines, negative for the first: [E, T, H] each."""
        (first_cos, first_sin), (cos, sin) = ((x[..., :half], x[..., half:]) for x in (starts[:, None], within[None]))
        cos, sin = first_cos * cos - first_sin * sin, first_sin * cos + first_cos * sin
        # Without a barrier XLA would recompute these for each head.
        return lax.optimization_barrier((jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)))

    def read(pool: Array, table: Array, is_run: Array) -> Array:
        """The pages [K, E, T, H] in a part of a table. XLA would read a gather element by element; slices are copied,
        and a run of pages that follow each other in the pool is a single one."""

        def sliced(first: Array, count: int) -> Array:
            return lax.dynamic_slice_in_dim(pool, first, count, 1)

        def one_by_one() -> Array:
            def copied(number: Array, read: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(read, sliced(table[number], 1), number, 1)

            empty = jnp.zeros((num_kv_heads, entries, page_size, head_dim), pool.dtype)
            return lax.fori_loop(0, entries, copied, empty)

        if entries > pool.shape[1]:
            return one_by_one()
        return lax.cond(is_run, lambda: sliced(table[0], entries), one_by_one)

    def attend(request: Array) -> tuple[Array, Array]:
        queries = q[request]

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            values, top, total = carry

            def here(x: Array, width: int) -> Array:
                return lax.dynamic_slice_in_dim(x[request], j * width, width)

            visible, part = here(used, entries * page_size), here(table, entries)
            run = part[0] + jnp.arange(entries, dtype=part.dtype)
            is_run = ((part == run) | (here(tables.page_length, entries) == 0)).all() & (run[-1] < pages.k.shape[1])
            k, v = read(pages.k, part, is_run), read(pages.v, part, is_run)
            cos, sin = rotations(here(starts, entries))
            wide = k.astype(jnp.float32)
            swapped = jnp.concatenate([wide[..., half:], wide[..., :half]], -1)
            k = (wide * cos[None] + swapped * sin[None]).astype(k.dtype).reshape(num_kv_heads, -1, head_dim)
            scores = einsum("kgh,ksh->kgs", queries, k)
            v = v.reshape(num_kv_heads, -1, head_dim)
            v = jnp.where(visible[None, :, None], v, jnp.zeros((), v.dtype))
            # Base 2, because its exponential is cheaper.
            scores = jnp.where(visible[None, None], scores * (scale * LOG2_E), MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            # Before the first token, top = MASKED and masked scores count as 1. The decay at the first token, which is
            # in the last step at the latest, multiplies them by 0.
            weights = jnp.exp2(scores - new_top[..., None])
            decay = jnp.exp2(top - new_top)
            product = einsum("kgs,ksh->kgh", weights.astype(v.dtype), v)
            return values * decay[..., None] + product, new_top, total * decay + weights.sum(-1)

        rows = (num_kv_heads, group)
        start = (jnp.zeros((*rows, head_dim), jnp.float32), jnp.full(rows, MASKED), jnp.zeros(rows, jnp.float32))
        values, top, total = lax.fori_loop(0, (counts[request] + entries - 1) // entries, step, start)
        safe_total = jnp.where(total == 0.0, 1.0, total)
        lse = jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(safe_total)) / LOG2_E)
        return values / safe_total[..., None], lse

    out, lse = lax.map(attend, jnp.arange(num_requests))
    return DecodeOutput(out.reshape(num_requests, num_heads, head_dim).astype(q.dtype), lse.reshape(num_requests, -1))

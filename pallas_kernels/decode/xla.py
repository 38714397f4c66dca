"""Paged decode attention for XLA: the CPU path.

The contexts of all requests are cut into blocks of a few pages, and a loop takes some blocks at a time, whichever
requests they belong to; entries behind a request's last page cost nothing. Each block has its own softmax, and those of
a request are joined at the end. Several blocks at once are read by all cores, in any order of pages, and the halves of
the keys are rotated as they are read: joined again they would be copied. Wall time of 30 layers, 9 / 3 heads of 64,
float32, on two Xeon cores with AVX-512, with a loop over one request's blocks at a time before: 8 requests of 320
tokens 45 to 37 ms, and 71 to 40 where pages are in random order; 1 request of 2,000 tokens 33 to 26 and 47 to 29.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from ccjax.kernels.attention.bounds import LOG2_E, MASKED
from ccjax.kernels.decode.output import DecodeOutput
from ccjax.kernels.decode.pages import num_entries, padded_tables, page_rows, used_slots, valid_pages
from ccjax.kernels.inputs import KVPages, PageTables

SLOTS = 128
"""Most slots of a block; with more, much of the last block of a short context is unused."""
BLOCKS = 8
"""Most blocks at a time."""
STEP_BYTES = 800_000
"""Most bytes of keys at a time, as float32, if one page of a block is less: with as many values they have to fit the
second-level caches."""


def blocked_decode(
    q: Float[Array, "B Q H"],
    pages: KVPages,
    tables: PageTables,
    *,
    k_frequencies: Float[Array, "half"] | np.ndarray,
    scale: float,
) -> DecodeOutput:
    """See `ccjax.kernels.decode.decode_attention`."""
    pages = lax.optimization_barrier(pages)
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size, _ = pages.k.shape
    group, half = num_heads // num_kv_heads, head_dim // 2
    # Two steps at least, and a barrier: otherwise XLA fuses the write of the new rows into the reads, for which it
    # copies the whole donated pool.
    page_bytes = 4 * num_kv_heads * page_size * head_dim
    entries = max(1, min(SLOTS // page_size, tables.page_table.shape[1] // 2, STEP_BYTES // (BLOCKS * page_bytes)))
    tables = padded_tables(tables, entries)
    per_request = tables.page_table.shape[1] // entries
    at_once = max(1, min(BLOCKS, num_requests * per_request // 2, STEP_BYTES // (entries * page_bytes)))

    def in_blocks(x: Array) -> Array:
        return x.reshape(num_requests, per_request, entries, *x.shape[2:])

    table, starts = in_blocks(valid_pages(tables)), in_blocks(tables.page_rotation)
    used = used_slots(tables, page_size).reshape(num_requests, per_request, -1)
    within = page_rows(k_frequencies, page_size)
    counts = (num_entries(tables) + entries - 1) // entries
    ends = jnp.cumsum(counts)
    firsts = ends - counts
    first_rows = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None] * num_pages
    queries = q.reshape(num_requests, num_kv_heads, group, head_dim)

    # Otherwise a GPU would round float32 products to TF32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def rotations(starts: Array) -> tuple[Array, Array]:
        """Cosines and sines of every slot: [W, 1, S, H / 2] each."""
        (first_cos, first_sin), (cos, sin) = (
            (x[..., :half], x[..., half:]) for x in (starts[:, :, None], within[None, None])
        )
        both = first_cos * cos - first_sin * sin, first_sin * cos + first_cos * sin
        # Without a barrier XLA would recompute these for each head.
        return lax.optimization_barrier(tuple(x.reshape(at_once, 1, -1, half) for x in both))

    def step(j: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number = j * at_once + jnp.arange(at_once, dtype=jnp.int32)
        # Behind the last block: any block, whose result is not read.
        request = jnp.minimum((number[:, None] >= ends[None]).sum(1), num_requests - 1)
        block = jnp.clip(number - firsts[request], 0, per_request - 1)

        def read(pool: Array) -> Array:
            """Rows [W, K, S, H]."""
            flat = pool.reshape(-1, page_size * head_dim)
            return flat.at[rows].get(mode="clip").reshape(at_once, num_kv_heads, -1, head_dim)

        rows, is_used = table[request, block][:, None] + first_rows, used[request, block][:, None]
        cos, sin = rotations(starts[request, block])
        wide, ours = read(pages.k).astype(jnp.float32), queries[request]
        first, second = wide[..., :half], wide[..., half:]
        halves = first * cos - second * sin, first * sin + second * cos
        both = zip((ours[..., :half], ours[..., half:]), halves, strict=True)
        scores = sum(einsum("wkgh,wksh->wkgs", part, k.astype(pages.k.dtype)) for part, k in both)
        # Base 2, because its exponential is cheaper.
        scores = jnp.where(is_used[:, None], scores * (scale * LOG2_E), MASKED)
        top = scores.max(-1)
        weights = jnp.where(is_used[:, None], jnp.exp2(scores - top[..., None]), 0.0)
        v = read(pages.v)
        v = jnp.where(is_used[..., None], v, jnp.zeros((), v.dtype))
        new = einsum("wkgs,wksh->wkgh", weights.astype(v.dtype), v), top, weights.sum(-1)
        return jax.tree.map(lambda into, x: lax.dynamic_update_slice_in_dim(into, x, number[0], 0), parts, new)

    rows = (num_requests * per_request + at_once, num_kv_heads, group)
    empty = jnp.zeros((*rows, head_dim), jnp.float32), jnp.full(rows, MASKED), jnp.zeros(rows, jnp.float32)
    parts = lax.fori_loop(0, (ends[-1] + at_once - 1) // at_once, step, empty)

    # The blocks of each request, [B, M, K, G].
    own = jnp.arange(per_request, dtype=jnp.int32)[None]
    is_own = (own < counts[:, None])[..., None, None]
    values, top, total = (x[firsts[:, None] + own] for x in parts)
    top = jnp.where(is_own, top, MASKED)
    most = top.max(1)
    decay = jnp.where(is_own, jnp.exp2(top - most[:, None]), 0.0)
    total = jnp.where(is_own, total * decay, 0.0).sum(1)
    safe_total = jnp.where(total == 0.0, 1.0, total)
    out = jnp.where(is_own[..., None], values * decay[..., None], 0.0).sum(1) / safe_total[..., None]
    lse = jnp.where(total == 0.0, -jnp.inf, (most + jnp.log2(safe_total)) / LOG2_E)
    return DecodeOutput(out.reshape(q.shape).astype(q.dtype), lse.reshape(num_requests, -1))

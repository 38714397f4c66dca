"""Paged decode attention for XLA: the CPU path. Knows no Pallas.

Each request walks over its own pages, a block of them at a time, with a running softmax; pages behind its last one are
never read.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.attention.bounds import LOG2_E, MASKED
from pallas_kernels.decode.output import DecodeOutput
from pallas_kernels.decode.pages import num_entries, slot_positions, used_slots, valid_pages
from pallas_kernels.rope import rotate_by, rotation_table

SLOTS = 512
"""Slots per step."""


def blocked_decode(
    q: Float[Array, "B Q H"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    *,
    page_table: Int[Array, "B M"],
    page_length: Int[Array, "B M"],
    scale: float,
    page_start: Int[Array, "B M"] | None = None,
    k_frequencies: Float[Array, "half"] | None = None,
) -> DecodeOutput:
    """See `pallas_kernels.decode.decode_attention`."""
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    entries = max(1, min(SLOTS // page_size, page_table.shape[1]))
    widths = ((0, 0), (0, -page_table.shape[1] % entries))
    page_table, page_length = jnp.pad(page_table, widths), jnp.pad(page_length, widths)
    table, used = valid_pages(page_table, page_length), used_slots(page_length, page_size)
    page_start = None if page_start is None else jnp.pad(page_start, widths)
    counts = num_entries(page_length)
    group = num_heads // num_kv_heads
    q = q.reshape(num_requests, num_kv_heads, group, head_dim)

    # Without the request a GPU would round float32 products to TF32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def attend(request: Array) -> tuple[Array, Array]:
        queries = q[request]

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            values, top, total = carry

            def here(x: Array, width: int) -> Array:
                return lax.dynamic_slice_in_dim(x[request], j * width, width)

            def gathered(pages: Array) -> Array:
                return pages[:, here(table, entries)].reshape(num_kv_heads, entries * page_size, head_dim)

            visible, k = here(used, entries * page_size), gathered(k_pages)
            if page_start is not None and k_frequencies is not None:
                # A loop of its own: otherwise XLA computes every cosine anew for each head and half (2.2 times slower).
                positions = slot_positions(here(page_start, entries), page_size).reshape(entries, page_size)
                cos, sin = lax.map(functools.partial(rotation_table, frequencies=k_frequencies), positions)
                shape = (1, entries * page_size, head_dim // 2)
                k = rotate_by(k, cos.reshape(shape), sin.reshape(shape))
            v = jnp.where(visible[None, :, None], gathered(v_pages), jnp.zeros((), v_pages.dtype))
            scores = einsum("kgh,ksh->kgs", queries, k)
            # In base 2, whose exponential is the cheaper one.
            scores = jnp.where(visible[None, None], scores * (scale * LOG2_E), MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            # While it has seen no token, top = MASKED and masked scores count as 1; the decay of the first one, which
            # comes at the latest in the last step, makes 0 of that.
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

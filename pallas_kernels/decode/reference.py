"""The definition of paged decode attention in plain jnp, float32, all pages gathered.

score[b, q, s] = scale * q[b, q] . k[s, q // (Q/K)] over the used slots s of the pages of request b
p = softmax over s;  out = p @ v
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ccjax.kernels.decode.output import DecodeOutput
from ccjax.kernels.decode.pages import PageRotation, slot_positions, used_slots, valid_pages
from ccjax.kernels.rope import apply_rope


def reference_decode(
    q: Float[Array, "B Q H"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    *,
    page_table: Int[Array, "B M"],
    page_length: Int[Array, "B M"],
    scale: float,
    rotation: PageRotation | None = None,
) -> DecodeOutput:
    """See `ccjax.kernels.decode.decode_attention`."""
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    table, used = valid_pages(page_table, page_length), used_slots(page_length, page_size)

    def gathered(pages: Array) -> Array:
        return pages[:, table].transpose(1, 2, 3, 0, 4).reshape(num_requests, -1, num_kv_heads, head_dim)

    k = gathered(k_pages)
    if rotation is not None:
        k = apply_rope(k, slot_positions(rotation.start, page_size), rotation.frequencies)
    v = jnp.where(used[..., None, None], gathered(v_pages), 0)
    k, v = (jnp.repeat(x.astype(jnp.float32), num_heads // num_kv_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("bqh,bsqh->bqs", q.astype(jnp.float32), k, precision="highest") * scale
    scores = jnp.where(used[:, None, :], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bqs,bsqh->bqh", weights, v, precision="highest") / jnp.where(total == 0.0, 1.0, total)
    return DecodeOutput(out.astype(q.dtype), (top + jnp.log(total))[..., 0])

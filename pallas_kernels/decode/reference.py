"""The definition of paged decode attention in plain jnp, float32, all pages gathered.

score[b, q, s] = scale * q[b, q] . k'[s, q // (Q/K)] over the used slots s of the pages of request b, with k' the keys
  rotated by the angle of their page's first position plus that of their slot within the page
p = softmax over s;  out = p @ v
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from ccjax.kernels.decode.output import DecodeOutput
from ccjax.kernels.decode.pages import page_rows, used_slots, valid_pages
from ccjax.kernels.inputs import KVPages, PageTables
from ccjax.kernels.rope import rotate_by


def reference_decode(
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
    table, used = valid_pages(tables), used_slots(tables, page_size)

    def gathered(pool: Array) -> Array:
        return pool[:, table].transpose(1, 2, 3, 0, 4).reshape(num_requests, -1, num_kv_heads, head_dim)

    within = page_rows(k_frequencies, page_size)[None, None]
    (first_cos, first_sin), (cos, sin) = (jnp.split(rows, 2, -1) for rows in (tables.page_rotation[:, :, None], within))
    sums = first_cos * cos - first_sin * sin, first_sin * cos + first_cos * sin  # [B, M, T, H / 2]
    k = rotate_by(gathered(pages.k), *(part.reshape(num_requests, -1, 1, head_dim // 2) for part in sums))
    v = jnp.where(used[..., None, None], gathered(pages.v), 0)
    k, v = (jnp.repeat(x.astype(jnp.float32), num_heads // num_kv_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("bqh,bsqh->bqs", q.astype(jnp.float32), k, precision="highest") * scale
    scores = jnp.where(used[:, None, :], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bqs,bsqh->bqh", weights, v, precision="highest") / jnp.where(total == 0.0, 1.0, total)
    return DecodeOutput(out.astype(q.dtype), (top + jnp.log(total))[..., 0])

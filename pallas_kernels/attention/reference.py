"""The definition of partial-prefill attention in plain jnp, float32, all scores at once.

score[n, q, s] = scale * q[n, q] . k[s, q // (Q/K)]  where slot s is visible to query n, else -inf
p = softmax over s;  out = p @ v;  mass[n, q, c] = sum of p over the slots of segment c
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ccjax.kernels.attention.bounds import used_values
from ccjax.kernels.attention.output import AttentionOutput
from ccjax.kernels.inputs import AttentionInputs
from ccjax.kernels.rope import rotate


def reference_attention(
    q: Float[Array, "N Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
) -> AttentionOutput:
    """See `ccjax.kernels.attention.attention`."""
    group = q.shape[1] // k.shape[1]
    if inputs.k_rotation is not None:
        k = rotate(k, inputs.k_rotation)
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, used_values(v, inputs.k_pos)))
    wide_k, wide_v = jnp.repeat(wide_k, group, axis=1), jnp.repeat(wide_v, group, axis=1)
    visible = inputs.k_pos[None, :] <= inputs.q_pos[:, None]
    if inputs.q_request is not None and inputs.k_request is not None:
        visible &= inputs.k_request[None, :] == inputs.q_request[:, None]
    scores = jnp.einsum("nqh,sqh->nqs", wide_q, wide_k, precision="highest") * scale
    scores = jnp.where(visible[:, None, :], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    lse = (top + jnp.log(total))[..., 0]
    out = jnp.einsum("nqs,sqh->nqh", weights, wide_v, precision="highest").astype(q.dtype)
    if inputs.k_segment is None:
        return AttentionOutput(out, None, lse)
    onehot = (inputs.k_segment[:, None] == jnp.arange(inputs.num_segments)[None, :]).astype(jnp.float32)
    return AttentionOutput(out, jnp.einsum("nqs,sc->nqc", weights, onehot, precision="highest"), lse)

"""Blocked attention for XLA: the CPU path, and the fallback of other platforms.

For each block of queries, a loop runs over blocks of keys with a running softmax, so that scores stay in the CPU cache;
key blocks beyond a query block's last position are skipped. The segment mass is computed as extra columns of the
values: V' = [V | onehot(segment)], so P @ V' gives output and mass in one product. Queries, one-hots and outputs are
laid out block by block, when they are needed; only rotated keys and used values are made for all slots at once.
Measured on two AMD EPYC cores (AVX-512), 2,048 queries and keys, 16 / 4 heads of 64, float32: 45 ms, compared with
480 ms for all scores at once; the mass adds about 12 %.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from ccjax.kernels.attention.bounds import LOG2_E, MASKED, block_bounds, padded, padded_inputs, used_values
from ccjax.kernels.attention.output import AttentionOutput
from ccjax.kernels.inputs import AttentionInputs
from ccjax.kernels.rope import rotate

_FEW_QUERIES, _MANY_QUERIES = 384, 2048
_FEW_BLOCK, _BLOCK, _MANY_BLOCK = (80, 512), (128, 256), (256, 256)
"""Most queries of a block, and its keys: for fewer than `_FEW_QUERIES` queries, for others, and for at least
`_MANY_QUERIES`. XLA runs smaller products on one core. On two AMD EPYC cores with AVX-512, 16 / 4 heads of 64, blocks
of 64, 128 and 256 queries take 21 / 26 / 40 ms for 320 queries over 2,048 slots, 58 / 46 / 47 for 1,024, 110 / 88 / 84
for 2,048, and 363 / 316 / 283 for 4,096 over 4,096. With AVX2, 2,048 queries took 95 to 130 ms with the second size and
129 to 148 with the first. On two Xeon cores, 9 / 3 heads, 160 queries over 1,024 slots take 4.2 ms in two blocks of 80,
and 5.6 in three of 64."""
_MOST_SCORES = 1 << 20
"""Most scores in a block of the largest size, all heads: with 32 heads of 128, 2,048 queries took 331 ms in blocks of
256 queries and 314 ms in blocks of 128."""
_OVER_LAST = (((2,), (2,)), ((0,), (0,)))
_OVER_SLOTS = (((2,), (1,)), ((0,), (0,)))


def _block(num_queries: int, num_slots: int, num_heads: int) -> tuple[int, int]:
    """Queries and keys of a block. The queries are divided evenly: padding takes as long as queries do."""
    most, keys = _FEW_BLOCK if num_queries < _FEW_QUERIES else _BLOCK
    if num_queries >= _MANY_QUERIES and num_heads * _MANY_BLOCK[0] * _MANY_BLOCK[1] <= _MOST_SCORES:
        most, keys = _MANY_BLOCK
    queries = -(-num_queries // -(-num_queries // most))
    return queries + -queries % 8, min(keys, num_slots)


def blocked_attention(
    q: Float[Array, "N Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
) -> AttentionOutput:
    """See `ccjax.kernels.attention.attention`."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
    q_block, k_block = _block(num_queries, k.shape[0], num_heads)

    if inputs.k_rotation is not None:
        k = rotate(k, inputs.k_rotation)
    v = used_values(v, inputs.k_pos)
    inputs = padded_inputs(inputs, q_block=q_block, k_block=k_block)
    num_segments = inputs.num_segments
    q, k, v = padded(q, q_block), padded(k, k_block), padded(v, k_block)
    # Heads first, as in the caller's pages, so that a step reads contiguous slots of a head.
    k, v = jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1)
    bounds = block_bounds(inputs, q_block=q_block, k_block=k_block)

    # Otherwise a GPU would round float32 products to TF32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def attend(i: Array, results: AttentionOutput) -> AttentionOutput:
        queries_of = functools.partial(lax.dynamic_slice_in_dim, start_index=i * q_block, slice_size=q_block)
        # `results.out` starts as the queries; each block is replaced by its output.
        queries = queries_of(results.out).reshape(q_block, num_kv_heads, group, head_dim)
        queries = queries.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * q_block, head_dim)

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            accumulated, top, total = carry
            keys_of = functools.partial(lax.dynamic_slice_in_dim, start_index=j * k_block, slice_size=k_block)
            visible = keys_of(inputs.k_pos)[None, :] <= queries_of(inputs.q_pos)[:, None]
            if inputs.q_request is not None and inputs.k_request is not None:
                visible &= keys_of(inputs.k_request)[None, :] == queries_of(inputs.q_request)[:, None]
            scores = product(queries, keys_of(k, axis=1), _OVER_LAST).reshape(num_kv_heads, group, q_block, k_block)
            # Base 2, because its exponential is cheaper.
            scores = jnp.where(visible[None, None], scores * (scale * LOG2_E), MASKED).reshape(
                num_kv_heads, -1, k_block
            )
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen no slot yet keeps top = MASKED; without the guard its masked scores would count as 1.
            weights = jnp.exp2(scores - jnp.where(new_top <= 0.5 * MASKED, 0.0, new_top)[..., None]).astype(v.dtype)
            decay = jnp.exp2(top - new_top)
            values = keys_of(v, axis=1)
            if inputs.k_segment is not None:
                onehot = keys_of(inputs.k_segment)[:, None] == jnp.arange(num_segments)[None, :]
                onehot = jnp.broadcast_to(onehot.astype(v.dtype), (num_kv_heads, k_block, num_segments))
                values = jnp.concatenate([values, onehot], -1)
            new = product(weights, values, _OVER_SLOTS)
            return accumulated * decay[..., None] + new, new_top, total * decay + weights.sum(-1, dtype=jnp.float32)

        rows = (num_kv_heads, group * q_block)
        start = (
            jnp.zeros((*rows, head_dim + num_segments), jnp.float32),
            jnp.full(rows, MASKED, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )
        accumulated, top, total = lax.fori_loop(bounds.first[i], bounds.last[i], step, start)
        safe_total = jnp.where(total == 0.0, 1.0, total)
        lse = jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(safe_total)) / LOG2_E)
        parts = jnp.split(accumulated / safe_total[..., None], [head_dim], -1)

        def put(into: Array, part: Array) -> Array:
            part = part.reshape(num_kv_heads, group, q_block, -1).transpose(2, 0, 1, 3)
            part = part.reshape(q_block, *into.shape[1:]).astype(into.dtype)
            return lax.dynamic_update_slice_in_dim(into, part, i * q_block, 0)

        mass = None if results.mass is None else put(results.mass, parts[1])
        return AttentionOutput(put(results.out, parts[0]), mass, put(results.lse, lse))

    per_head = (q.shape[0], num_heads)
    mass = jnp.zeros((*per_head, num_segments), jnp.float32) if num_segments else None
    begun = AttentionOutput(q, mass, jnp.zeros(per_head, jnp.float32))
    out, mass, lse = lax.fori_loop(0, q.shape[0] // q_block, attend, begun)
    return AttentionOutput(out[:num_queries], None if mass is None else mass[:num_queries], lse[:num_queries])

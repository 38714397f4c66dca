"""Mixture of experts in a layer's MLP: routing of tokens, and the computation of the chosen experts.

No token is dropped, and rows are independent: padding rows do not affect others, whatever they contain.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ccjax.models.llama3.params import RoutedLayerParams
from ccjax.models.llama3.products import einsum, precision_of
from ccjax.models.llama3.quantized import QuantizedWeight, project

_LEAST_BLOCK, _LARGEST_BLOCK = 8, 128
_FEW_TOKENS = 64


class Routing(NamedTuple):
    """Routing of tokens to experts.

    Attributes:
      experts: [N, C], indices of the chosen experts, the likeliest first.
      weights: [N, C] float32, their weights in the token's output; the sum is 1.
    """

    experts: Int[Array, "N C"]
    weights: Float[Array, "N C"]


class _ExpertRows(NamedTuple):
    """Rows sorted by expert; the rows of each expert are padded to whole blocks or to the same number.

    Attributes:
      row_of_pair: [N * C], row of each pair of token and chosen expert.
      token_of_row: [R], token of each row; 0 for padding, whose results are ignored.
    """

    row_of_pair: Int[Array, "M"]
    token_of_row: Int[Array, "R"]


def route(x: Float[Array, "N D"], router: Float[Array, "D E"], num_chosen: int) -> Routing:
    """The `num_chosen` experts with the largest router logits, weighted by the softmax over these.

    This equals the softmax over all experts, float32, renormalised over the chosen ones, as in Mixtral (Jiang et al.
    2024, sec. 2.1, and Hugging Face's MixtralTopKRouter).
    """
    logits = einsum("nd,de->ne", x, router, preferred_element_type=jnp.float32)
    largest, experts = jax.lax.top_k(logits, num_chosen)
    return Routing(experts, jax.nn.softmax(largest, axis=-1))


def routed_mlp(x: Float[Array, "*B N D"], layer: RoutedLayerParams) -> Float[Array, "*B N D"]:
    """Output of the chosen experts for each token; the cost grows with these, not with the number of all experts.

    The form depends on the platform, see docs/weights.md. TPUs use `jax.lax.ragged_dot`, which XLA compiles to a
    grouped product there; elsewhere jax 0.10 and 0.11 expand it to a product over all experts, with a copy of the rows
    for each. If the weights' inner width (`ffn`) is split over several devices, each computes its part of the sum.
    """
    flat = x.reshape(-1, x.shape[-1])
    routing = route(flat, layer.router, layer.num_chosen)
    mean = -(-routing.experts.size // layer.router.shape[-1])
    power = 1 << (mean - 1).bit_length()
    block_size = min(max(power, _LEAST_BLOCK), _LARGEST_BLOCK)
    capacity = flat.shape[0] if flat.shape[0] <= _FEW_TOKENS else min(2 * power, flat.shape[0])
    out = jax.lax.platform_dependent(
        flat,
        routing,
        layer,
        cpu=functools.partial(blocked_experts, block_size=block_size),
        tpu=ragged_experts,
        default=functools.partial(batched_experts, capacity=capacity),
    )
    return out.reshape(x.shape)


def plain_routed_mlp(x: Float[Array, "*B N D"], layer: RoutedLayerParams) -> Float[Array, "*B N D"]:
    """`routed_mlp` with `dense_experts`, which is differentiable."""
    flat = x.reshape(-1, x.shape[-1])
    return dense_experts(flat, route(flat, layer.router, layer.num_chosen), layer).reshape(x.shape)


def dense_experts(x: Float[Array, "N D"], routing: Routing, layer: RoutedLayerParams) -> Float[Array, "N D"]:
    """The definition, differentiable: every expert computes every token, and unchosen ones get weight 0.

    A weight of 0 removes an expert's finite output, but not the cost of computing it.
    """
    is_chosen = jax.nn.one_hot(routing.experts, layer.router.shape[-1], dtype=jnp.float32)
    weights = einsum("nc,nce->ne", routing.weights, is_chosen)
    gate = jax.nn.silu(_of_each("nd,edf->enf", x, layer.w_gate))
    each = _of_each("enf,efd->end", gate * _of_each("nd,edf->enf", x, layer.w_up), layer.w_down)
    return einsum("ne,end->nd", weights, each.astype(jnp.float32)).astype(x.dtype)


def ragged_experts(x: Float[Array, "N D"], routing: Routing, layer: RoutedLayerParams) -> Float[Array, "N D"]:
    """`dense_experts` over rows sorted by expert, with `jax.lax.ragged_dot`."""
    rank, num_pairs = _ranks(routing.experts, layer.router.shape[-1])
    rows = _sorted(routing.experts, jnp.cumsum(num_pairs) - num_pairs, rank, routing.experts.size)
    taken = x[rows.token_of_row]
    precision = precision_of(x)

    def product(x: Array, weight: Array | QuantizedWeight) -> Array:
        if not isinstance(weight, QuantizedWeight):
            return jax.lax.ragged_dot(x, weight, num_pairs, precision=precision)
        values = weight.values.astype(x.dtype)
        sums = jax.lax.ragged_dot(x, values, num_pairs, precision, jnp.float32)
        expert = jnp.searchsorted(jnp.cumsum(num_pairs), jnp.arange(len(x)), side="right")
        return (sums * weight.scales[expert]).astype(x.dtype)

    inner = jax.nn.silu(product(taken, layer.w_gate)) * product(taken, layer.w_up)
    return _combine(product(inner, layer.w_down), rows, routing, x)


def blocked_experts(
    x: Float[Array, "N D"], routing: Routing, layer: RoutedLayerParams, block_size: int
) -> Float[Array, "N D"]:
    """`dense_experts` over rows sorted by expert, in blocks of `block_size` rows of one expert; only the blocks with
    rows are computed.

    Each block copies the weights of its expert: 3 D F elements, compared with 3 D F `block_size` multiplications.
    """
    num_experts, num_all = layer.router.shape[-1], routing.experts.size
    rank, num_pairs = _ranks(routing.experts, num_experts)
    blocks = -(-num_pairs // block_size)
    ends = jnp.cumsum(blocks)
    most = min(num_all, (num_all + num_experts * (block_size - 1)) // block_size)
    rows = _sorted(routing.experts, (ends - blocks) * block_size, rank, most * block_size)
    taken = x[rows.token_of_row].reshape(most, block_size, -1)

    def compute(number: Array, out: Array) -> Array:
        expert = jnp.searchsorted(ends, number, side="right")
        gate, up, down = jax.tree.map(
            lambda weight: jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False),
            (layer.w_gate, layer.w_up, layer.w_down),
        )
        block = jax.lax.dynamic_index_in_dim(taken, number, keepdims=False)
        inner = jax.nn.silu(project("nd,df->nf", block, gate)) * project("nd,df->nf", block, up)
        block = project("nf,fd->nd", inner, down)
        return jax.lax.dynamic_update_index_in_dim(out, block, number, 0)

    out = jax.lax.fori_loop(0, ends[-1], compute, jnp.zeros_like(taken))
    return _combine(out.reshape(-1, x.shape[-1]), rows, routing, x)


def batched_experts(
    x: Float[Array, "N D"], routing: Routing, layer: RoutedLayerParams, capacity: int
) -> Float[Array, "N D"]:
    """`dense_experts` as one product over all experts, with `capacity` rows for each, without copying weights.

    If an expert has more rows than that, `blocked_experts` runs instead.
    """
    num_experts = layer.router.shape[-1]
    rank, num_pairs = _ranks(routing.experts, num_experts)
    starts = jnp.arange(num_experts, dtype=jnp.int32) * capacity

    def at_once() -> Array:
        rows = _sorted(routing.experts, starts, rank, num_experts * capacity)
        taken = x[rows.token_of_row].reshape(num_experts, capacity, -1)
        inner = jax.nn.silu(_of_each("end,edf->enf", taken, layer.w_gate))
        inner = inner * _of_each("end,edf->enf", taken, layer.w_up)
        out = _of_each("enf,efd->end", inner, layer.w_down)
        return _combine(out.reshape(-1, x.shape[-1]), rows, routing, x)

    if capacity >= x.shape[0]:  # a token chooses an expert at most once
        return at_once()
    return jax.lax.cond(num_pairs.max() <= capacity, at_once, lambda: blocked_experts(x, routing, layer, capacity // 2))


def _of_each(subscripts: str, x: Array, weight: Array | QuantizedWeight) -> Float[Array, "E N M"]:
    """`project` for weights of all experts, stacked on a first axis."""
    if not isinstance(weight, QuantizedWeight):
        return einsum(subscripts, x, weight)
    sums = einsum(subscripts, x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (sums * weight.scales[:, None]).astype(x.dtype)


def _ranks(experts: Int[Array, "N C"], num_experts: int) -> tuple[Int[Array, "M"], Int[Array, "E"]]:
    """For each pair of token and expert, the number of earlier pairs with the same expert; and the number of pairs per
    expert."""
    pairs = experts.reshape(-1)
    is_expert = (pairs[:, None] == jnp.arange(num_experts)[None]).astype(jnp.int32)
    before = jnp.take_along_axis(jnp.cumsum(is_expert, 0), pairs[:, None], 1)[:, 0] - 1
    return before, is_expert.sum(0)


def _sorted(experts: Int[Array, "N C"], starts: Int[Array, "E"], rank: Int[Array, "M"], num_rows: int) -> _ExpertRows:
    """Assigns rows to the pairs: those of each expert from its entry in `starts` on."""
    row = starts[experts.reshape(-1)] + rank
    token = jnp.arange(rank.size, dtype=jnp.int32) // experts.shape[1]
    return _ExpertRows(row, jnp.zeros(num_rows, jnp.int32).at[row].set(token, mode="drop"))


def _combine(
    out: Float[Array, "R D"], rows: _ExpertRows, routing: Routing, x: Float[Array, "N D"]
) -> Float[Array, "N D"]:
    """The weighted sum over each token's experts, in float32."""
    each = out[rows.row_of_pair].reshape(*routing.experts.shape, -1).astype(jnp.float32)
    return (each * routing.weights[..., None]).sum(1).astype(x.dtype)

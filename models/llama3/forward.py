"""The whole model as a pure function over a dense context, for `ccjax.functional` and as a plain, differentiable
reference."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ccjax.kernels.attention import attention
from ccjax.kernels.attention.bounds import UNUSED
from ccjax.kernels.inputs import AttentionInputs
from ccjax.kernels.rope import rotate, rotation_rows
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.inputs import StepSettings
from ccjax.models.llama3.layers import finish_layer, project_qkv, rope_frequencies, unembed
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sharding import ATTENTION_OUTPUT, EVERYWHERE, HEADS, KV_ROWS, constrain, over_heads


class ForwardOutput(NamedTuple):
    """Result of `forward_rows`.

    Attributes:
      x: [N, D], hidden states of the computed tokens after the last layer.
      k, v: [L, S, K, H], the context with the computed rows written; keys rotated to their positions.
      mass: [L, N, C] float32, softmax mass of each computed token on each segment, mean over heads; None if not
        requested.
    """

    x: Float[Array, "N D"]
    k: Float[Array, "L S K H"]
    v: Float[Array, "L S K H"]
    mass: Float[Array, "L N C"] | None


def forward_rows(
    params: Params,
    token_ids: Int[Array, "N"],
    rows: Int[Array, "N"],
    k: Float[Array, "L S K H"],
    v: Float[Array, "L S K H"],
    positions: Int[Array, "S"],
    segments: Int[Array, "S"] | None = None,
    num_segments: int = 0,
    *,
    settings: StepSettings,
) -> ForwardOutput:
    """Computes the tokens in some slots of a context; the layers of `params` may be the first ones of a model.

    A token attends to the slots at its own position and earlier ones, computed in this call or not. The implementation
    "reference" is differentiable.

    Args:
      rows: slots of the computed tokens, all distinct. A row past the end, or whose position is INT32_MAX, is padding,
        and attends to nothing.
      k, v: the context of these layers, keys rotated to `positions`.
      positions: of all slots; INT32_MAX for an unused slot, which no token attends to.
      segments, num_segments: segment of each slot and their number, as in `AttentionInputs`.
    """
    config, mesh = settings.config, settings.mesh
    eps, is_plain = config.rms_norm_eps, settings.implementation == "reference"
    q_pos = positions.at[rows].get(mode="fill", fill_value=UNUSED)
    q_pos = jnp.where(q_pos == UNUSED, -1, q_pos)
    rotation = rotation_rows(q_pos, rope_frequencies(config))
    inputs = AttentionInputs(q_pos=q_pos, k_pos=positions, k_segment=segments, num_segments=num_segments)

    def attend(q: Array, k: Array, v: Array, inputs: AttentionInputs) -> tuple[Any, ...]:
        return tuple(attention(q, k, v, inputs, scale=config.head_dim**-0.5, implementation=settings.implementation))

    attend = over_heads(attend, mesh, (HEADS, KV_ROWS, KV_ROWS, EVERYWHERE), ATTENTION_OUTPUT)
    x, masses = params.embedding[token_ids], []
    for number, layer in enumerate(params.layers):
        q, new_k, new_v = project_qkv(x, layer, eps)
        q, new_k = rotate(q, rotation), rotate(new_k, rotation)
        k, v = k.at[number, rows].set(new_k, mode="drop"), v.at[number, rows].set(new_v, mode="drop")
        attended, mass, _ = attend(q, k[number], v[number], inputs)
        masses += [] if mass is None else [mass.mean(1)]
        x = constrain(finish_layer(x, attended, layer, eps, is_plain=is_plain), mesh, EVERYWHERE)
    return ForwardOutput(x, k, v, jnp.stack(masses) if masses else None)


def forward(params: Params, config: LlamaConfig, token_ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Next-token logits, float32, of sequences that all start at position 0; causal attention, no padding mask.

    Pad on the right: with causal attention, tokens do not see the padding after them.
    """
    positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    shape = len(params.layers), token_ids.shape[1], config.num_kv_heads, config.head_dim
    context = jnp.zeros(shape, params.embedding.dtype)
    compute = functools.partial(forward_rows, settings=StepSettings(config, "reference"))
    rows = jax.vmap(lambda ids: compute(params, ids, positions, context, context, positions).x)(token_ids)
    return unembed(rows, params, config.rms_norm_eps)

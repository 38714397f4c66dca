"""BERT encoder and sentence pooling as pure functions over a parameter tree.

Axes: B texts, N tokens, D model, Q heads, H head dim, F feed-forward, L layers (stacked, iterated with `lax.scan`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from ccjax.models.minilm.config import BertConfig


@struct.dataclass
class Linear:
    """`x @ weight + bias`."""

    weight: Float[Array, "*L I O"]
    bias: Float[Array, "*L O"]


@struct.dataclass
class Norm:
    """Scale and shift of a layer norm."""

    weight: Float[Array, "*L D"]
    bias: Float[Array, "*L D"]


@struct.dataclass
class Layers:
    """Weights of all layers, stacked on a leading axis L."""

    query: Linear
    key: Linear
    value: Linear
    attention_out: Linear
    attention_norm: Norm
    ff_in: Linear
    ff_out: Linear
    ff_norm: Norm


@struct.dataclass
class EncoderParams:
    """All weights of the encoder, float32. `segment` is the token type embedding of a single text."""

    tokens: Float[Array, "V D"]
    positions: Float[Array, "P D"]
    segment: Float[Array, " D"]
    norm: Norm
    layers: Layers


def _linear(x: Float[Array, "B N I"], layer: Linear) -> Float[Array, "B N O"]:
    return x @ layer.weight + layer.bias[None, None]


def _layer_norm(x: Float[Array, "B N D"], norm: Norm, eps: float) -> Float[Array, "B N D"]:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
    return centred * scale * norm.weight[None, None] + norm.bias[None, None]


def hidden_states(
    params: EncoderParams, ids: Int[Array, "B N"], mask: Bool[Array, "B N"], config: BertConfig
) -> Float[Array, "B N D"]:
    """The last layer's output; rows where `mask` is False are meaningless and do not affect other rows."""
    batch, length = ids.shape
    x = params.tokens[ids] + (params.positions[:length] + params.segment[None])[None]
    x = _layer_norm(x, params.norm, config.layer_norm_eps)

    def heads(x: Array, layer: Linear) -> Float[Array, "B N Q H"]:
        return _linear(x, layer).reshape(batch, length, config.num_heads, -1)

    def step(x: Array, layer: Layers) -> tuple[Array, None]:
        q, k, v = heads(x, layer.query), heads(x, layer.key), heads(x, layer.value)
        attended = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])  # scale 1 / sqrt(H)
        attended = _linear(attended.reshape(x.shape), layer.attention_out)
        x = _layer_norm(x + attended, layer.attention_norm, config.layer_norm_eps)
        inner = jax.nn.gelu(_linear(x, layer.ff_in), approximate=False)
        return _layer_norm(x + _linear(inner, layer.ff_out), layer.ff_norm, config.layer_norm_eps), None

    return jax.lax.scan(step, x, params.layers)[0]


def sentence_embeddings(
    params: EncoderParams, ids: Int[Array, "B N"], mask: Bool[Array, "B N"], config: BertConfig
) -> Float[Array, "B D"]:
    """L2-normalised sentence vectors, as computed by sentence-transformers' Transformer, Pooling and Normalize.

    Products are computed in full float32 on every device (GPUs default to TF32, TPUs to bfloat16), so that all devices
    can use the same index. A row without any token gives a finite vector.
    """
    with jax.default_matmul_precision("highest"):
        x = hidden_states(params, ids, mask, config)
    if config.pooling == "cls":
        pooled = x[:, 0]
    else:
        weight = mask[..., None].astype(x.dtype)
        pooled = (x * weight).sum(1) / jnp.maximum(weight.sum(1), 1e-9)
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)

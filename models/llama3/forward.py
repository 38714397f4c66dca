"""The whole model over a batch of full sequences, differentiable: for training, and as a plain reference."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ccjax.kernels.rope import apply_rope
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.layers import finish_layer, project_qkv, rope_frequencies, unembed
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.products import einsum


def forward(params: Params, config: LlamaConfig, token_ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Next-token logits, float32, of sequences that all start at position 0; causal attention, no padding mask.

    Pad on the right: with causal attention, tokens do not see the padding after them.
    """
    num_batch, num_tokens = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(num_tokens), (num_batch, num_tokens))
    frequencies = rope_frequencies(config)
    group = config.num_heads // config.num_kv_heads
    causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    x = params.embedding[token_ids]
    for layer in params.layers:
        q, k, v = project_qkv(x, layer, config.rms_norm_eps)
        q, k = apply_rope(q, positions, frequencies), apply_rope(k, positions, frequencies)
        q = q.reshape(num_batch, num_tokens, config.num_kv_heads, group, config.head_dim)
        scores = einsum("bnkgh,bskh->bkgns", q, k, preferred_element_type=jnp.float32) * config.head_dim**-0.5
        scores = jnp.where(causal[None, None, None], scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).astype(v.dtype)
        attended = einsum("bkgns,bskh->bnkgh", weights, v)
        attended = attended.reshape(num_batch, num_tokens, -1, config.head_dim)
        x = finish_layer(x, attended, layer, config.rms_norm_eps, is_plain=True)
    return unembed(x, params, config.rms_norm_eps)

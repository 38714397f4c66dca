"""The parts of a Llama layer as pure functions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from ccjax.kernels.rope import llama3_frequencies
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.experts import plain_routed_mlp, routed_mlp
from ccjax.models.llama3.params import LayerParams, Params, RoutedLayerParams
from ccjax.models.llama3.products import einsum
from ccjax.models.llama3.quantized import project


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Inverse RoPE frequencies [H / 2] of the model, float32, scaling included."""
    scaling = {} if config.rope_scaling is None else dataclasses.asdict(config.rope_scaling)
    return llama3_frequencies(config.head_dim, config.rope_theta, **scaling)


def rms_norm(x: Float[Array, "*B N D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B N D"]:
    """`x` divided by its root mean square and scaled; the mean is computed in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))


def _biased(x: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - bias.ndim))


def project_qkv(
    x: Float[Array, "*B N D"], layer: LayerParams, eps: float
) -> tuple[Float[Array, "*B N Q H"], Float[Array, "*B N K H"], Float[Array, "*B N K H"]]:
    """Queries, keys (both before RoPE, and normed if the model norms them) and values of the normed input."""
    normed = rms_norm(x, layer.attention_norm, eps)
    q = project("...nd,dqh->...nqh", normed, layer.wq)
    if layer.wk is None or layer.wv is None:
        num_heads = layer.wo.shape[0]
        q, k, v = jnp.split(q, (num_heads, (num_heads + q.shape[-2]) // 2), axis=-2)
    else:
        k, v = (project("...nd,dkh->...nkh", normed, weight) for weight in (layer.wk, layer.wv))
    q, k, v = _biased(q, layer.bq), _biased(k, layer.bk), _biased(v, layer.bv)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
    return q, k, v


def own_mass(
    q: Float[Array, "N Q H"], k: Float[Array, "N K H"], lse: Float[Array, "N Q"], scale: float
) -> Float[Array, "N"]:
    """Softmax weight of each token on itself, mean over heads, float32; queries and keys rotated."""
    grouped = q.reshape(*k.shape[:2], -1, k.shape[-1])
    own = einsum("nkgh,nkh->nkg", grouped, k, preferred_element_type=jnp.float32) * scale
    return jnp.exp(own.reshape(lse.shape) - lse).mean(-1)


def finish_layer(
    x: Float[Array, "*B N D"],
    attended: Float[Array, "*B N Q H"],
    layer: LayerParams,
    eps: float,
    *,
    is_plain: bool = False,
) -> Float[Array, "*B N D"]:
    """The layer's output: attention projected and added, then the MLP (or that of the chosen experts) added.

    `is_plain`: compute experts in the differentiable form, which costs as much as computing all of them.
    """
    x = x + _biased(project("...nqh,qhd->...nd", attended, layer.wo), layer.bo)
    normed = rms_norm(x, layer.mlp_norm, eps)
    if isinstance(layer, RoutedLayerParams):
        return x + (plain_routed_mlp if is_plain else routed_mlp)(normed, layer)
    gate = project("...nd,df->...nf", normed, layer.w_gate)
    if layer.w_up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    else:
        up = project("...nd,df->...nf", normed, layer.w_up)
    return x + project("...nf,fd->...nd", jax.nn.silu(gate) * up, layer.w_down)


def unembed(x: Float[Array, "*B N D"], params: Params, eps: float) -> Float[Array, "*B N V"]:
    """Logits in float32, from hidden states before the final norm."""
    normed = rms_norm(x, params.final_norm, eps)
    if params.lm_head is None:
        return einsum("...nd,vd->...nv", normed, params.embedding, preferred_element_type=jnp.float32)
    return project("...nd,dv->...nv", normed, params.lm_head, jnp.float32)

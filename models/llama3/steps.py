"""The jitted steps before and after the layers of a prefill or decode; `paged_steps.py` has the layers.

Each step has arrays and static sizes as arguments. Callers pad rows and slots to fixed buckets, so that few shapes are
compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from ccjax.kernels.inputs import KVPages
from ccjax.kernels.rope import apply_rope, move_keys
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.inputs import SamplingState
from ccjax.models.llama3.layers import finish_layer, project_qkv, rope_frequencies, unembed
from ccjax.models.llama3.pages import read_slots, write_rows
from ccjax.models.llama3.params import LayerParams, Params
from ccjax.models.llama3.products import einsum
from ccjax.models.llama3.quantized import LinearWeight, QuantizedWeight, quantize
from ccjax.models.llama3.sampling import SampleOutput, TokenScores, sample, score


@jax.jit
def embed_step(params: Params, token_ids: Int[Array, "N"]) -> Float[Array, "N D"]:
    """Hidden states of the tokens before the first layer."""
    return params.embedding[token_ids]


@jax.jit(static_argnames=("config",))
def rotate_step(k: Float[Array, "S K H"], positions: Int[Array, "S"], *, config: LlamaConfig) -> Float[Array, "S K H"]:
    """Stored keys rotated to their positions in this prompt (CacheCraft sec. 3.4.3)."""
    return move_keys(k, jnp.zeros_like(positions), positions, rope_frequencies(config))


@jax.jit(static_argnames=("mesh",), donate_argnames=("pages",))
def write_rows_step(
    pages: KVPages, slots: Int[Array, "N"], k: Float[Array, "N K H"], v: Float[Array, "N K H"], *, mesh: Mesh | None
) -> KVPages:
    """The pages of one layer, donated, with rows written to `slots`; rows whose slot is past the end are dropped.
    `mesh` as in `StepSettings`."""
    return write_rows(pages, slots, k, v, mesh)


@jax.jit(static_argnames=("mesh",), donate_argnames=("pages",))
def write_pages_step(
    pages: KVPages, kv: Float[Array, "L 2 N K H"], layer: Int[Array, ""], slots: Int[Array, "N"], *, mesh: Mesh | None
) -> KVPages:
    """`write_rows_step` with the rows `kv[layer]`."""
    k, v = kv[layer]
    return write_rows(pages, slots, k, v, mesh)


@jax.jit
def read_pages_step(pages: KVPages, slots: Int[Array, "S"]) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
    """Keys and values of one layer as stored in the pages at `slots`; zeros for slots past the end."""
    return read_slots(pages.k, slots), read_slots(pages.v, slots)


@jax.jit
def deviation_step(
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    k_other: Float[Array, "S K H"],
    v_other: Float[Array, "S K H"],
    num_tokens: Int[Array, ""],
) -> Float[Array, "S"]:
    """Distance of each token's KV in one layer from other KV of it, float32: Euclidean over all heads, relative to the
    root mean square norm of the first `num_tokens` rows; mean over keys and values."""
    is_token = jnp.arange(k.shape[0]) < num_tokens
    total = jnp.zeros(k.shape[0], jnp.float32)
    for own, other in ((k, k_other), (v, v_other)):
        own, other = own.astype(jnp.float32), other.astype(jnp.float32)
        norms = jnp.where(is_token, jnp.square(own).sum((1, 2)), 0.0)
        scale = jnp.maximum(norms.sum() / num_tokens.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
        total += jnp.sqrt(jnp.square(own - other).sum((1, 2)) / scale)
    return total / 2


@jax.jit(static_argnames=("config",))
def received_step(
    layer: LayerParams, x: Float[Array, "N D"], num_tokens: Int[Array, ""], *, config: LlamaConfig
) -> tuple[Float[Array, "N D"], Float[Array, "N"]]:
    """One layer of a prompt that begins at position 0; also returns the softmax mass that each token receives from the
    first `num_tokens`, summed over these, mean over heads, float32. Materialises the attention weights: memory grows
    with N squared."""
    q, k, v = project_qkv(x, layer, config.rms_norm_eps)
    positions, frequencies = jnp.arange(x.shape[0]), rope_frequencies(config)
    q, k = apply_rope(q, positions, frequencies), apply_rope(k, positions, frequencies)
    grouped = q.reshape(*k.shape[:2], -1, k.shape[-1])
    scores = einsum("nkgh,skh->kgns", grouped, k, preferred_element_type=jnp.float32) * config.head_dim**-0.5
    is_causal = positions[:, None] >= positions[None, :]
    weights = jax.nn.softmax(jnp.where(is_causal[None, None], scores, -jnp.inf), axis=-1)
    received = jnp.where((positions < num_tokens)[None, None, :, None], weights, 0.0).sum(-2).mean((0, 1))
    attended = einsum("kgns,skh->nkgh", weights.astype(v.dtype), v).reshape(q.shape)
    return finish_layer(x, attended, layer, config.rms_norm_eps), received


@jax.jit
def select_step(x: Float[Array, "N D"], rows: Int[Array, "M"]) -> Float[Array, "M D"]:
    """The hidden states of some rows, in the given order."""
    return x[rows]


@jax.jit
def int8_head_step(params: Params) -> LinearWeight:
    """The head in int8; a tied embedding is one."""
    head = params.lm_head
    if head is None:
        rows = params.embedding
    else:
        assert not isinstance(head, QuantizedWeight)
        rows = head.rows if isinstance(head, LinearWeight) else head.T
    rounded = quantize(rows, (1,), "int8")
    return LinearWeight(rounded.values, rounded.scales, rows.shape[::-1])


@jax.jit(static_argnames=("config",))
def logits_step(params: Params, x: Float[Array, "N D"], *, config: LlamaConfig) -> Float[Array, "N V"]:
    """Next-token logits, float32, from hidden states after the last layer."""
    return unembed(x, params, config.rms_norm_eps)


@jax.jit(static_argnames=("num_top",))
def sample_step(logits: Float[Array, "B V"], state: SamplingState, *, num_top: int) -> SampleOutput:
    """Samples a token for every row of logits on the device: `ccjax.models.llama3.sampling.sample`."""
    return sample(logits, state, num_top)


@jax.jit(static_argnames=("num_top",))
def score_step(logits: Float[Array, "B V"], token_ids: Int[Array, "B"], *, num_top: int) -> TokenScores:
    """Log-probabilities of given tokens: `ccjax.models.llama3.sampling.score`."""
    return score(logits, token_ids, num_top)

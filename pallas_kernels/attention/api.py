"""Public attention function: selects an implementation and never falls back silently."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ccjax.kernels.attention.blocks import MOSAIC_TPU, TRITON
from ccjax.kernels.attention.mosaic_tpu import mosaic_tpu_attention
from ccjax.kernels.attention.output import AttentionOutput
from ccjax.kernels.attention.reference import reference_attention
from ccjax.kernels.attention.triton import triton_attention
from ccjax.kernels.attention.xla import blocked_attention
from ccjax.kernels.dispatch import implementation as implementation_of
from ccjax.kernels.inputs import AttentionInputs, check_shapes

PLAIN = {"reference": reference_attention, "xla": blocked_attention}
KERNELS = {"triton": (triton_attention, TRITON), "mosaic_tpu": (mosaic_tpu_attention, MOSAIC_TPU)}


def check_implementation(name: str | None, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
    """Checks that `attention` supports these heads, with segments and keys to rotate; computes nothing.

    Raises:
      NotImplementedError: the implementation does not exist, or does not support this platform, chip or these heads.
    """
    array, rows = jax.ShapeDtypeStruct, 16
    kv = array((rows, num_kv_heads, head_dim), dtype)
    index = array((rows,), jnp.int32)
    rotation = array((rows, head_dim), jnp.float32)
    inputs = AttentionInputs(q_pos=index, k_pos=index, k_segment=index, k_rotation=rotation, num_segments=1)  # pyright: ignore[reportArgumentType]
    call = functools.partial(attention, scale=1.0, implementation=name)
    jax.eval_shape(call, array((rows, num_heads, head_dim), dtype), kv, kv, inputs)


def attention(
    q: Float[Array, "N Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    implementation: str | None = None,
) -> AttentionOutput:
    """Masked partial prefill (CacheCraft sec. 3.4.3): queries are any subset of the context's tokens.

    Query n sees slot s iff `k_pos[s] <= q_pos[n]` and, if request ids are given, `k_request[s] == q_request[n]`.
    Causality is by position, not by index. Query heads are grouped: head `q` reads kv head `q // (Q / K)`.

    Args:
      q, k: rotated queries and keys; with `inputs.k_rotation`, keys before RoPE.
      scale: factor on the dot products, usually H ** -0.5; deliberately without a default.
      implementation: None for the platform's own: "xla" on CPU, "triton" on NVIDIA GPUs, "mosaic_tpu" on TPUs. Or by
        name: "reference", "xla", "triton", "mosaic_tpu"; "triton:h100" to compile for a chip that is not present;
        "triton_interpret", "mosaic_tpu_interpret" to run a kernel's operations slowly, without its chip.

    Returns:
      AttentionOutput; rows that see no slot are 0 with lse = -inf.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the implementation does not exist or does not support this call; there is no fallback.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: wanted a multiple of {k.shape[1]} kv heads, got {q.shape[1]} query heads")
    if (inputs.num_segments > 0) != (inputs.k_segment is not None):
        raise ValueError(f"k_segment and num_segments={inputs.num_segments}: wanted both or neither")
    if (inputs.q_request is None) != (inputs.k_request is None):
        raise ValueError("q_request and k_request: wanted both or neither")
    rows, slots = q.shape[:1], k.shape[:1]
    shapes = {"q_pos": rows, "q_request": rows, "k_pos": slots, "k_request": slots, "k_segment": slots}
    check_shapes(inputs, {**shapes, "k_rotation": (*slots, k.shape[2])})
    return implementation_of(implementation, PLAIN, KERNELS)(q, k, v, inputs, scale=scale)

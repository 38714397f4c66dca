"""Public attention function: selects an implementation and never falls back silently."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ccjax.kernels.attention.blocks import MOSAIC_TPU, TRITON
from ccjax.kernels.attention.bounds import UNUSED
from ccjax.kernels.attention.mosaic_tpu import mosaic_tpu_attention
from ccjax.kernels.attention.output import AttentionOutput
from ccjax.kernels.attention.reference import reference_attention
from ccjax.kernels.attention.triton import triton_attention
from ccjax.kernels.attention.xla import blocked_attention
from ccjax.kernels.dispatch import implementation as implementation_of
from ccjax.kernels.rope import rotation_rows

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
    call = functools.partial(attention, scale=1.0, num_segments=1, implementation=name)
    jax.eval_shape(
        call,
        array((rows, num_heads, head_dim), dtype),
        kv,
        kv,
        q_pos=index,
        k_pos=index,
        k_segment=index,
        k_rotation=array((rows, head_dim), jnp.float32),
    )


def attention(
    q: Float[Array, "N Q H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    *,
    q_pos: Int[Array, "N"],
    k_pos: Int[Array, "S"],
    scale: float,
    k_segment: Int[Array, "S"] | None = None,
    num_segments: int = 0,
    q_request: Int[Array, "N"] | None = None,
    k_request: Int[Array, "S"] | None = None,
    k_frequencies: Float[Array, "half"] | np.ndarray | None = None,
    k_rotation: Float[Array, "S H"] | None = None,
    implementation: str | None = None,
) -> AttentionOutput:
    """Masked partial prefill (CacheCraft sec. 3.4.3): queries are any subset of the context's tokens.

    Query n sees slot s iff `k_pos[s] <= q_pos[n]` and, if request ids are given, `k_request[s] == q_request[n]`.
    Causality is by position, not by index. Query heads are grouped: head `q` reads kv head `q // (Q / K)`.

    Args:
      q, k: rotated queries and keys; with `k_frequencies` or `k_rotation`, keys before RoPE.
      q_pos: positions, in any order; repeat the last one for padding rows. If they ascend, and requests are in the same
        order in queries and slots, key blocks that no query of a block sees are skipped.
      k_pos: positions of the context slots, in any order; INT32_MAX marks an unused slot, whose key and value may be
        anything, including NaN. A used slot must have finite values even if no query sees it.
      scale: factor on the dot products, usually H ** -0.5; deliberately without a default.
      k_segment: segment (chunk) of each slot in [0, num_segments); other values belong to no segment.
      num_segments: static; 0 to omit the mass.
      q_request, k_request: request ids of a packed batch; both or neither.
      k_frequencies: inverse RoPE frequencies [H / 2]: the call rotates the keys to `k_pos` in float32 and rounds them
        to their dtype, as `apply_rope` does.
      k_rotation: instead of these, `ccjax.kernels.rope.rotation_rows` of `k_pos`, for callers that share it between
        layers; any finite rows for unused slots.
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
    if (num_segments > 0) != (k_segment is not None):
        raise ValueError(f"k_segment and num_segments={num_segments}: wanted both or neither")
    if (q_request is None) != (k_request is None):
        raise ValueError("q_request and k_request: wanted both or neither")
    if k_frequencies is not None and k_frequencies.shape != (q.shape[2] // 2,):
        raise ValueError(f"k_frequencies: wanted shape ({q.shape[2] // 2},), got {k_frequencies.shape}")
    if k_frequencies is not None and k_rotation is not None:
        raise ValueError("k_frequencies and k_rotation: wanted at most one of them, got both")
    if k_rotation is not None and k_rotation.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"k_rotation: wanted shape {(k.shape[0], k.shape[2])}, got {k_rotation.shape}")
    if k_frequencies is not None:
        k_rotation = rotation_rows(jnp.where(k_pos == UNUSED, 0, k_pos), k_frequencies)
    return implementation_of(implementation, PLAIN, KERNELS)(
        q,
        k,
        v,
        q_pos=q_pos,
        k_pos=k_pos,
        scale=scale,
        k_segment=k_segment,
        num_segments=num_segments,
        q_request=q_request,
        k_request=k_request,
        k_rotation=k_rotation,
    )

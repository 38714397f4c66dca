"""Public attention function: picks an implementation, never falls back silently. Knows no model, plan or cache."""

from __future__ import annotations

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.attention.output import AttentionOutput
from pallas_kernels.attention.reference import reference_attention
from pallas_kernels.attention.xla import blocked_attention

IMPLEMENTATIONS = {"reference": reference_attention, "xla": blocked_attention}


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
    implementation: str | None = None,
) -> AttentionOutput:
    """Masked partial prefill (CacheCraft sec. 3.4.3): queries are any subset of the context's tokens.

    Query n sees slot s iff `k_pos[s] <= q_pos[n]` and, where request ids are given, `k_request[s] == q_request[n]`.
    Causality is by position, not by index. Query heads are grouped: head `q` reads kv head `q // (Q / K)`.

    Args:
      q, k: rotated queries and keys.
      q_pos: ascending positions; repeat the last one for padding rows.
      k_pos: positions of the context slots, in any order; INT32_MAX marks an unused slot, whose key and value may hold
        anything finite.
      scale: factor on the dot products, usually H ** -0.5; required on purpose.
      k_segment: segment (chunk) of each slot in [0, num_segments); other values belong to no segment.
      num_segments: static; 0 leaves the mass out.
      q_request, k_request: request ids of a packed batch; both or none.
      implementation: "reference", "xla", or None for the best one on this platform.

    Returns:
      AttentionOutput; rows that see no slot are 0 with lse = -inf.

    Raises:
      ValueError: arguments that do not fit together.
      NotImplementedError: a named implementation does not exist.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: wanted a multiple of {k.shape[1]} kv heads, got {q.shape[1]} query heads")
    if (num_segments > 0) != (k_segment is not None):
        raise ValueError(f"k_segment and num_segments={num_segments}: wanted both or neither")
    if (q_request is None) != (k_request is None):
        raise ValueError("q_request and k_request: wanted both or neither")
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise NotImplementedError(f"implementation: wanted one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name](
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
    )

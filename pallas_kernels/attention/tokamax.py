"""Attention with tokamax, Google's kernel library; used only if selected by name.

tokamax masks by slot index, with a range [k_start, k_end) for each query; `attention` masks by position and request,
over slots in any order. So the slots are first sorted by (request, position), after which a query sees one range. That
costs a sort of S integers and one more pass over keys and values per call, which the mass needs for the values anyway:
it is computed as extra columns, V' = [V | onehot(segment)]. The log of the sum comes from the softmax residuals.

The operation with ranges, residuals and wider values is private to tokamax, so the extra `tokamax` pins exact versions.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from ccjax.kernels.attention.bounds import padded, power_of_two, used_values
from ccjax.kernels.attention.output import AttentionOutput
from ccjax.kernels.rope import rotate

OPERATIONS = {
    "xla": ("base", "DotProductAttention"),
    "triton": ("pallas_triton", "PallasTritonFlashAttention"),
    "mosaic_gpu": ("pallas_mosaic_gpu", "PallasMosaicGpuFlashAttention"),
}
"""Kernel -> module and class in tokamax. Its chunked XLA form has no residuals, and its TPU kernel has no ranges."""
_MOSAIC_QUERIES, _TRITON_QUERIES = 128, 64
"""Queries are padded to multiples of these. The Mosaic kernel reduces ranges over the queries of two warpgroups and
fails on a remainder."""
_COLUMNS = 256
"""Columns of V' in one launch: the widest product of a warpgroup. More columns take further launches."""


def tokamax_attention(
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
    k_rotation: Float[Array, "S H"] | None = None,
    kernel: str | None = None,
) -> AttentionOutput:
    """See `ccjax.kernels.attention.attention`. The mass is rounded to the dtype of the queries.

    Args:
      kernel: key of `OPERATIONS`; None for tokamax's best one: "mosaic_gpu" from compute capability 9.0 on, "triton" on
        older GPUs, "xla" on CPU. "xla" holds all scores in memory at once.

    Raises:
      NotImplementedError: tokamax is not installed, has no such kernel for this platform, or the kernel does not
        support the call, such as "mosaic_gpu" in float32. There is no fallback.
    """
    kernel = kernel or _best_kernel()
    operation, mask_type = _load(kernel)
    head_dim = q.shape[2]

    requests = None if q_request is None or k_request is None else (q_request, k_request)
    order = jnp.argsort(k_pos) if requests is None else jnp.lexsort((k_pos, requests[1]))
    k, v, k_pos = k[order], used_values(v, k_pos)[order], k_pos[order]
    if k_rotation is not None:
        k = rotate(k, k_rotation[order])
    if k_segment is not None:
        onehot = (k_segment[order][:, None] == jnp.arange(num_segments)[None, :]).astype(v.dtype)
        v = jnp.concatenate([v, jnp.broadcast_to(onehot[:, None, :], (*v.shape[:2], num_segments))], -1)
    if requests is None:
        k_start, last = jnp.zeros_like(q_pos), jnp.full_like(q_pos, k_pos.shape[0])
    else:
        k_start, last = (
            jnp.searchsorted(requests[1][order], requests[0], side=side).astype(jnp.int32) for side in ("left", "right")
        )
    k_end = _count_to(k_pos, q_pos, k_start, last)

    sees = (k_end > k_start)[:, None]
    width = columns = v.shape[2]
    if kernel != "xla":
        width = min(columns, _COLUMNS)
        block = _MOSAIC_QUERIES if kernel == "mosaic_gpu" else min(_TRITON_QUERIES, power_of_two(q.shape[0], 16))
        q, k_start, k_end = (padded(rows, block, None) for rows in (q, k_start, k_end))
    mask = mask_type(k_start=None if requests is None else k_start[None], k_end=k_end[None])
    passes = [
        _call(operation, kernel, q, k, v[:, :, start : start + width], mask, scale)
        for start in range(0, columns, width)
    ]
    out = jnp.concatenate([values for values, _ in passes], -1)[: sees.shape[0]]
    top, total = (residual.T[: sees.shape[0]] for residual in passes[0][1])
    # For a row that sees no slot, tokamax distributes the softmax over the masked slots.
    out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
    lse = jnp.where(sees, top + jnp.log(total), -jnp.inf)
    mass = out[..., head_dim:].astype(jnp.float32) if num_segments else None
    return AttentionOutput(out[..., :head_dim], mass, lse)


def _count_to(positions: Array, q_pos: Array, first: Array, last: Array) -> Array:
    """The end of the slots that each query sees, by binary search: `positions` ascend within its [first, last)."""

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_seen = (low < high) & (positions[middle] <= q_pos)
        return jnp.where(is_seen, middle + 1, low), jnp.where(is_seen, high, middle)

    return lax.fori_loop(0, positions.shape[0].bit_length(), halve, (first, last))[0]


def _call(operation: Any, kernel: str, q: Array, k: Array, v: Array, mask: Any, scale: float) -> Any:
    """Output [N, Q, columns of v] and residuals (top, sum), [Q, N] each."""
    columns = v.shape[2]
    if kernel == "triton":  # it loads a power of two of columns, past the end of an array that has fewer
        v = jnp.pad(v, [(0, 0), (0, 0), (0, power_of_two(columns, 16) - columns)])
    if kernel == "xla":
        v = v.astype(jnp.float32)  # the dtype of its weights; a product of two dtypes fails if promotion is forbidden
    # Otherwise a GPU would round float32 products to TF32.
    precision = tuple(lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT for x in (q, v))
    # tokamax needs both promotions, which the caller may have forbidden.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            out, residuals = operation(
                q, k, v, mask=mask, logits_scale=scale, precision=precision, return_residuals=True
            )
        except NotImplementedError as error:
            raise NotImplementedError(
                f"tokamax's {kernel!r} kernel on platform {jax.default_backend()!r} in {q.dtype}: {error}; "
                "another implementation has to be named"
            ) from error
    return out[..., :columns], residuals


def _best_kernel() -> str:
    platform = jax.default_backend()
    if platform == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", None)
        return "mosaic_gpu" if capability is not None and float(capability) >= 9.0 else "triton"
    if platform == "cpu":
        return "xla"
    raise NotImplementedError(
        f"tokamax on platform {platform!r}: wanted 'gpu' or 'cpu'; its TPU kernel knows no range of slots per query"
    )


def _load(kernel: str) -> tuple[Any, Any]:
    """tokamax's operation, ready to call, and its mask type."""
    module, name = OPERATIONS[kernel]
    package = "tokamax._src.ops.attention"
    try:
        flags = importlib.import_module("absl.flags").FLAGS
        mask_type = importlib.import_module(f"{package}.base").Mask
        operation = getattr(importlib.import_module(f"{package}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"tokamax's {kernel!r} kernel: wanted its pinned version (pip install -e .[tokamax]), got: {error}"
        ) from error
    # Otherwise tokamax 0.0.12 parses the program's own arguments and fails on unknown ones.
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return operation(), mask_type

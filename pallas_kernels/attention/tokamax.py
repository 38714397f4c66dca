"""Attention through tokamax, Google's kernel library: chosen by name only.

tokamax masks by slot index, with a range [k_start, k_end) for each query; `attention` masks by position and request,
over slots in any order. So the slots are sorted by (request, position) first: then what a query sees is one range. That
costs a sort of S integers and one more pass over keys and values per call, which the mass needs for the values anyway:
it is extra columns of them, V' = [V | onehot(segment)]. The log of the sum comes from the softmax residuals.

The operation with ranges, residuals and wider values is private to tokamax: the extra `tokamax` pins exact versions.
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
"""Kernel -> module and class within tokamax. Its chunked XLA form has no residuals, its TPU kernel no ranges."""
_MOSAIC_QUERIES, _TRITON_QUERIES = 128, 64
"""Queries are padded to a program's. The Mosaic kernel reduces ranges over two warpgroups' and fails on a rest."""
_COLUMNS = 256
"""Widest product of a warpgroup, and so columns of V' in one launch; more take further launches."""


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
      kernel: of `OPERATIONS`; None for what tokamax does best here: "mosaic_gpu" from compute capability 9.0 on,
        "triton" on older GPUs, "xla" on CPU. "xla" holds all scores at once.

    Raises:
      NotImplementedError: tokamax is not installed, has no such kernel for this platform, or the kernel cannot do this,
        such as "mosaic_gpu" in float32. No other kernel takes its place.
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
    # tokamax spreads the softmax of a row that sees nothing over what it has masked.
    out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
    lse = jnp.where(sees, top + jnp.log(total), -jnp.inf)
    mass = out[..., head_dim:].astype(jnp.float32) if num_segments else None
    return AttentionOutput(out[..., :head_dim], mass, lse)


def _count_to(positions: Array, q_pos: Array, first: Array, last: Array) -> Array:
    """For each query the end of the slots it sees: `positions` ascend within its [first, last). Binary search."""

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_seen = (low < high) & (positions[middle] <= q_pos)
        return jnp.where(is_seen, middle + 1, low), jnp.where(is_seen, high, middle)

    return lax.fori_loop(0, positions.shape[0].bit_length(), halve, (first, last))[0]


def _call(operation: Any, kernel: str, q: Array, k: Array, v: Array, mask: Any, scale: float) -> Any:
    """Output [N, Q, columns of v] and residuals (top, sum), [Q, N] each."""
    columns = v.shape[2]
    if kernel == "triton":  # it loads whole powers of two, past the end of an array that has fewer columns
        v = jnp.pad(v, [(0, 0), (0, 0), (0, power_of_two(columns, 16) - columns)])
    if kernel == "xla":
        v = v.astype(jnp.float32)  # as its weights are; the product of two dtypes fails where promotion is forbidden
    # Without the request float32 products are rounded to TF32 on a GPU.
    precision = tuple(lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT for x in (q, v))
    # tokamax relies on both promotions, which the caller may have forbidden.
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
    # Otherwise tokamax 0.0.12 parses the program's own arguments, and fails on those it does not know.
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return operation(), mask_type

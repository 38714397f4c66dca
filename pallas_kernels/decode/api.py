"""Public decode attention: selects an implementation and never falls back silently."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ccjax.kernels.decode.blocks import MOSAIC_TPU, TRITON
from ccjax.kernels.decode.mosaic_tpu import mosaic_tpu_decode
from ccjax.kernels.decode.output import DecodeOutput
from ccjax.kernels.decode.pages import PageRotation
from ccjax.kernels.decode.pages import page_rotation as rotation_of
from ccjax.kernels.decode.reference import reference_decode
from ccjax.kernels.decode.triton import triton_decode
from ccjax.kernels.decode.xla import blocked_decode
from ccjax.kernels.dispatch import implementation as implementation_of

PLAIN = {"reference": reference_decode, "xla": blocked_decode}
KERNELS = {"triton": (triton_decode, TRITON), "mosaic_tpu": (mosaic_tpu_decode, MOSAIC_TPU)}


def check_implementation(
    name: str | None, *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> None:
    """Checks that `decode_attention` supports these heads and pages, with keys to rotate; computes nothing.

    Raises:
      NotImplementedError: the implementation does not exist, or does not support this platform, chip, heads or pages.
    """
    array = jax.ShapeDtypeStruct
    pool = array((num_kv_heads, 1, page_size, head_dim), dtype)
    table = array((1, 1), jnp.int32)
    jax.eval_shape(
        functools.partial(decode_attention, scale=1.0, implementation=name),
        array((1, num_heads, head_dim), dtype),
        pool,
        pool,
        page_table=table,
        page_length=table,
        page_start=table,
        k_frequencies=array((head_dim // 2,), jnp.float32),
    )


def decode_attention(
    q: Float[Array, "B Q H"],
    k_pages: Float[Array, "K P T H"],
    v_pages: Float[Array, "K P T H"],
    *,
    page_table: Int[Array, "B M"],
    page_length: Int[Array, "B M"],
    scale: float,
    page_start: Int[Array, "B M"] | None = None,
    k_frequencies: Float[Array, "half"] | np.ndarray | None = None,
    page_rotation: Float[Array, "B M H"] | None = None,
    implementation: str | None = None,
) -> DecodeOutput:
    """Attention of one new token per request over the pages of its context, including its own key and value.

    A page of the pool may be in several tables: requests share the pages of a chunk that they use unchanged, at any
    position. A chunk seldom fills its last page, so every entry has its own number of used slots; library kernels for
    paged attention have one length per request and cannot express that.

    Args:
      q: rotated queries; query head `q` reads kv head `q // (Q / K)`.
      k_pages, v_pages: the pool of one layer: P pages of T tokens; rotated keys, or with `k_frequencies` keys before
        RoPE. Unused slots may contain anything, including NaN.
      page_table: pages of each request, in any order.
      page_length: number of used slots of each entry, from the page's first slot; 0 for an unused entry, whose page may
        be any number.
      scale: factor on the dot products, usually H ** -0.5; deliberately without a default.
      page_start: position of each entry's first slot; given if and only if `k_frequencies` is.
      k_frequencies: inverse RoPE frequencies [H / 2]: keys are rotated in float32 when read, and rounded to their dtype
        as in `apply_rope`.
      page_rotation: `ccjax.kernels.decode.page_rotation` of these two, to be shared by many layers; computed if None.
      implementation: as in `ccjax.kernels.attention.attention`, without tokamax.

    Returns:
      DecodeOutput; a request without any slot gets 0 with lse = -inf.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the implementation does not exist or does not support this call; there is no fallback.
    """
    if q.shape[1] % k_pages.shape[0]:
        raise ValueError(f"q: wanted a multiple of {k_pages.shape[0]} kv heads, got {q.shape[1]} query heads")
    if (page_start is None) != (k_frequencies is None):
        raise ValueError("page_start and k_frequencies: wanted both or neither")
    if k_frequencies is not None and k_frequencies.shape != (q.shape[2] // 2,):
        raise ValueError(f"k_frequencies: wanted shape ({q.shape[2] // 2},), got {k_frequencies.shape}")
    rotation = None
    if page_start is not None and k_frequencies is not None:
        frequencies, shape = jnp.asarray(k_frequencies, jnp.float32), (*page_start.shape, q.shape[2])
        rows = rotation_of(page_start, frequencies) if page_rotation is None else page_rotation
        if rows.shape != shape:
            raise ValueError(f"page_rotation: wanted shape {shape}, got {rows.shape}")
        rotation = PageRotation(page_start, frequencies, rows)
    elif page_rotation is not None:
        raise ValueError(f"page_rotation: wanted None without page_start, got an array of {page_rotation.shape}")
    return implementation_of(implementation, PLAIN, KERNELS)(
        q,
        k_pages,
        v_pages,
        page_table=page_table,
        page_length=page_length,
        scale=scale,
        rotation=rotation,
    )

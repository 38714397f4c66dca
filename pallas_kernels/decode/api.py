"""Public decode attention: selects an implementation and never falls back silently."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from ccjax.kernels.decode.blocks import MOSAIC_TPU, TRITON
from ccjax.kernels.decode.mosaic_tpu import mosaic_tpu_decode
from ccjax.kernels.decode.output import DecodeOutput
from ccjax.kernels.decode.reference import reference_decode
from ccjax.kernels.decode.triton import triton_decode
from ccjax.kernels.decode.xla import blocked_decode
from ccjax.kernels.dispatch import implementation as implementation_of
from ccjax.kernels.inputs import KVPages, PageTables, check_shapes

PLAIN = {"reference": reference_decode, "xla": blocked_decode}
KERNELS = {"triton": (triton_decode, TRITON), "mosaic_tpu": (mosaic_tpu_decode, MOSAIC_TPU)}


def check_implementation(
    name: str | None, *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> None:
    """Checks that `decode_attention` supports these heads and pages; computes nothing.

    Raises:
      NotImplementedError: the implementation does not exist, or does not support this platform, chip, heads or pages.
    """
    array = jax.ShapeDtypeStruct
    pool = array((num_kv_heads, 1, page_size, head_dim), dtype)
    table, rotation = array((1, 1), jnp.int32), array((1, 1, head_dim), jnp.float32)
    jax.eval_shape(
        functools.partial(decode_attention, scale=1.0, implementation=name),
        array((1, num_heads, head_dim), dtype),
        KVPages(pool, pool),  # pyright: ignore[reportArgumentType]
        PageTables(page_table=table, page_length=table, page_rotation=rotation),  # pyright: ignore[reportArgumentType]
        k_frequencies=array((head_dim // 2,), jnp.float32),
    )


def decode_attention(
    q: Float[Array, "B Q H"],
    pages: KVPages,
    tables: PageTables,
    *,
    k_frequencies: Float[Array, "half"] | np.ndarray,
    scale: float,
    implementation: str | None = None,
) -> DecodeOutput:
    """Attention of one new token per request over the pages of its context, including its own key and value.

    A page of the pool may be in several tables: requests share the pages of a chunk that they use unchanged, at any
    position. A chunk seldom fills its last page, so every entry has its own number of used slots; library kernels for
    paged attention have one length per request and cannot express that.

    Args:
      q: rotated queries; query head `q` reads kv head `q // (Q / K)`.
      k_frequencies: inverse RoPE frequencies [H / 2].
      scale: factor on the dot products, usually H ** -0.5; deliberately without a default.
      implementation: as in `ccjax.kernels.attention.attention`.

    Returns:
      DecodeOutput; a request without any slot gets 0 with lse = -inf.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the implementation does not exist or does not support this call; there is no fallback.
    """
    num_kv_heads = pages.k.shape[0]
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"q: wanted a multiple of {num_kv_heads} kv heads, got {q.shape[1]} query heads")
    if k_frequencies.shape != (q.shape[2] // 2,):
        raise ValueError(f"k_frequencies: wanted shape ({q.shape[2] // 2},), got {k_frequencies.shape}")
    shape = q.shape[0], tables.page_table.shape[1]
    rotation = (*shape, q.shape[2])
    check_shapes(tables, {"page_table": shape, "page_length": shape, "page_rotation": rotation})
    decode = implementation_of(implementation, PLAIN, KERNELS)
    return decode(q, pages, tables, k_frequencies=k_frequencies, scale=scale)

"""Movement of keys for NVIDIA GPUs in Pallas-Triton.

One program moves all heads of some tokens, so that it computes their cosines and sines once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

from ccjax.kernels.rope.blocks import TritonMoveBlocks


class _MoveTritonInputs(NamedTuple):
    """The whole arrays; refs inside the kernel: k [S, K, H], shift [S], frequencies [H / 2] float32."""

    k: Any
    shift: Any
    frequencies: Any


def _kernel(inputs: _MoveTritonInputs, moved: Any, *, tokens: int) -> None:
    num_tokens, num_heads, head_dim = inputs.k.shape
    half = head_dim // 2
    here = pl.ds(pl.program_id(0) * tokens, tokens)
    is_token = pl.program_id(0) * tokens + jnp.arange(tokens, dtype=jnp.int32) < num_tokens
    shift = plt.load(inputs.shift.at[here], mask=is_token, other=0)
    angles = shift.astype(jnp.float32)[:, None] * inputs.frequencies[...][None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    mask = jnp.broadcast_to(is_token[:, None], (tokens, half))

    def move(head: Array, _: None) -> None:
        # Triton can neither slice nor join values, so the halves of a head stay separate.
        parts = [(here, head, pl.ds(0, half)), (here, head, pl.ds(half, half))]
        first, second = (plt.load(inputs.k.at[part], mask=mask, other=0.0).astype(jnp.float32) for part in parts)
        for part, value in zip(parts, (first * cos - second * sin, first * sin + second * cos), strict=True):
            plt.store(moved.at[part], value.astype(moved.dtype), mask=mask)

    lax.fori_loop(0, num_heads, move, None)


def triton_move(
    k: Float[Array, "S K H"],
    shift: Int[Array, "S"],
    frequencies: Float[Array, "half"] | np.ndarray,
    *,
    blocks: TritonMoveBlocks,
    interpret: bool = False,
) -> Float[Array, "S K H"]:
    """See `ccjax.kernels.rope.move_keys`.

    Args:
      shift: difference of the positions.
      blocks: sizes for the chip, from `ccjax.kernels.rope.blocks`.
      interpret: run the kernel as XLA operations, on any platform.

    Raises:
      NotImplementedError: the head dimension is not a power of two from 16 to 256.
    """
    if k.shape[2] not in (16, 32, 64, 128, 256):
        raise NotImplementedError(f"triton: wanted a head dimension of 16, 32, 64, 128 or 256, got {k.shape[2]}")
    tokens = blocks.tokens * 128 // max(k.shape[2], 128)
    return pl.pallas_call(
        functools.partial(_kernel, tokens=tokens),
        grid=(pl.cdiv(k.shape[0], tokens),),
        out_shape=jax.ShapeDtypeStruct(k.shape, k.dtype),
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name="move_keys",
    )(_MoveTritonInputs(k, shift, jnp.asarray(frequencies, jnp.float32)))

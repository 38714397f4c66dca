"""Rotation of keys inside a TPU kernel, and the kernel that only moves keys.

With heads of 128, the halves of a key are 64 lanes of one register each. Splitting and joining them took 3,500 shuffles
per 1,024 keys on v5e; swapping them with a roll, and widening cosine and sine to all lanes with another, takes 1,260.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from ccjax.kernels.rope.blocks import MosaicMoveBlocks

_LANES = 128


def turns(rows: Float[Array, "T H"]) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """[cos | cos] and [-sin | sin] of `rotation_rows`, to be shared by all heads."""
    swapped = _swapped(rows)
    is_first = lax.broadcasted_iota(jnp.int32, rows.shape, 1) < rows.shape[1] // 2
    return jnp.where(is_first, rows, swapped), jnp.where(is_first, -swapped, rows)


def sums_of_turns(first: Float[Array, "N H"], second: Float[Array, "T H"]) -> tuple[Array, Array]:
    """`turns` [N * T, H] of the sum of each angle of `first` and each of `second`, which are `rotation_rows`; T is a
    multiple of 8. Cosines and sines of N page starts and T slots within a page give those of all N * T slots."""
    (first_cos, first_sin), (second_cos, second_sin) = turns(first), turns(second)
    rows = [(first_cos[row : row + 1], first_sin[row : row + 1]) for row in range(first.shape[0])]
    # All sines in a lane have the same sign: it cancels in products of two sines, and stays in sine times cosine.
    cos = [one_cos * second_cos - one_sin * second_sin for one_cos, one_sin in rows]
    sin = [one_sin * second_cos + one_cos * second_sin for one_cos, one_sin in rows]
    return jnp.concatenate(cos), jnp.concatenate(sin)


def turned(keys: Float[Array, "*T H"], cos: Float[Array, "*#T H"], sin: Float[Array, "*#T H"]) -> Float[Array, "*T H"]:
    """The keys rotated as by `apply_rope`, with `cos` and `sin` from `turns`; keeps the dtype."""
    wide = keys.astype(jnp.float32)
    return (wide * cos + _swapped(wide) * sin).astype(keys.dtype)


def _swapped(x: Float[Array, "*T H"]) -> Float[Array, "*T H"]:
    """Swaps the halves of each row."""
    half = x.shape[-1] // 2
    if x.shape[-1] % _LANES == 0:
        return pltpu.roll(x, half, x.ndim - 1)
    return jnp.concatenate([x[..., half:], x[..., :half]], -1)


class _MoveTpuInputs(NamedTuple):
    """Blocks of T tokens; refs inside the kernel: k [T, K, H], shift [1, T], frequencies [1, H] float32, once for each
    half."""

    k: Any
    shift: Any
    frequencies: Any


def _kernel(inputs: _MoveTpuInputs, moved: Any) -> None:
    num_tokens, _, head_dim = inputs.k.shape
    # A column of shifts would take as much memory as [T, 128].
    shift = jnp.broadcast_to(inputs.shift[...].astype(jnp.float32), (head_dim, num_tokens)).T
    angles = shift * inputs.frequencies[...]
    sin = jnp.sin(angles)
    is_first = lax.broadcasted_iota(jnp.int32, sin.shape, 1) < head_dim // 2
    moved[...] = turned(inputs.k[...], jnp.cos(angles)[:, None], jnp.where(is_first, -sin, sin)[:, None])


def mosaic_tpu_move(
    k: Float[Array, "S K H"],
    shift: Int[Array, "S"],
    frequencies: Float[Array, "half"] | np.ndarray,
    *,
    blocks: MosaicMoveBlocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "S K H"]:
    """See `ccjax.kernels.rope.move_keys`.

    Args:
      shift: difference of the positions.
      blocks: sizes for the chip, from `ccjax.kernels.rope.blocks`.
      interpret: run the kernel as XLA operations, on any platform; `pltpu.InterpretParams` simulates the memories too.
    """
    num_tokens, num_heads, head_dim = k.shape
    tiles = pl.cdiv(num_heads, 8) * pl.cdiv(head_dim, _LANES)
    tokens = max(blocks.rows // (8 * tiles) // _LANES, 1) * _LANES
    keys = pl.BlockSpec((tokens, num_heads, head_dim), lambda i: (i, 0, 0))
    specs = _MoveTpuInputs(
        keys, pl.BlockSpec((1, tokens), lambda i: (0, i)), pl.BlockSpec((1, head_dim), lambda i: (0, 0))
    )
    return pl.pallas_call(
        _kernel,
        grid=(pl.cdiv(num_tokens, tokens),),
        in_specs=[specs],
        out_specs=keys,
        out_shape=jax.ShapeDtypeStruct(k.shape, k.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="move_keys",
    )(_MoveTpuInputs(k, shift[None], jnp.tile(jnp.asarray(frequencies, jnp.float32), 2)[None]))

"""Rotation of keys inside a TPU kernel. Knows no grid and no memory: arrays in, arrays out.

A key's halves are 64 lanes of one register when heads are 128 wide; taking them apart and together again cost v5e 3,500
shuffles per 1,024 keys; swapped by a roll, and cosine and sine widened to all lanes by another, they cost 1,260.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

_LANES = 128


def lane_table(positions: Int[Array, "N"], frequencies: Float[Array, "half"]) -> Float[Array, "N H"]:
    """[cos | sin] of every position's angles, float32, for `turns`: what a kernel reads of each slot.

    Made in one piece: half as wide, cosines and sines would fill as many lanes each, and be copied once more.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.concatenate([frequencies, frequencies])[None]
    is_first = lax.broadcasted_iota(jnp.int32, angles.shape, 1) < frequencies.shape[0]
    return jnp.where(is_first, jnp.cos(angles), jnp.sin(angles))


def turns(table: Float[Array, "T H"]) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """[cos | cos] and [-sin | sin] of a `lane_table`, to be shared by all heads."""
    swapped = _swapped(table)
    is_first = lax.broadcasted_iota(jnp.int32, table.shape, 1) < table.shape[1] // 2
    return jnp.where(is_first, table, swapped), jnp.where(is_first, -swapped, table)


def turned(keys: Float[Array, "T H"], cos: Float[Array, "T H"], sin: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """The keys rotated as `apply_rope` does; dtype kept, `cos` and `sin` from `turns`."""
    wide = keys.astype(jnp.float32)
    return (wide * cos + _swapped(wide) * sin).astype(keys.dtype)


def _swapped(x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """The second half of each row before the first."""
    half = x.shape[1] // 2
    if x.shape[1] % _LANES == 0:
        return pltpu.roll(x, half, 1)
    return jnp.concatenate([x[:, half:], x[:, :half]], -1)

"""Rotation of keys inside a TPU kernel.

A key's halves are 64 lanes of one register when heads are 128 wide; taking them apart and together again cost v5e 3,500
shuffles per 1,024 keys; swapped by a roll, and cosine and sine widened to all lanes by another, they cost 1,260.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

_LANES = 128


def turns(rows: Float[Array, "T H"]) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """[cos | cos] and [-sin | sin] of `rotation_rows`, to be shared by all heads."""
    swapped = _swapped(rows)
    is_first = lax.broadcasted_iota(jnp.int32, rows.shape, 1) < rows.shape[1] // 2
    return jnp.where(is_first, rows, swapped), jnp.where(is_first, -swapped, rows)


def sums_of_turns(first: Float[Array, "N H"], second: Float[Array, "T H"]) -> tuple[Array, Array]:
    """`turns` [N * T, H] of the sum of each angle of `first` and each of `second`, which are `rotation_rows`; T is a
    multiple of 8. Cosines and sines of N pages' starts and of T slots within a page do for all N * T slots."""
    (first_cos, first_sin), (second_cos, second_sin) = turns(first), turns(second)
    rows = [(first_cos[row : row + 1], first_sin[row : row + 1]) for row in range(first.shape[0])]
    # All sines of a lane have one sign: products of two of them have none, those with a cosine keep it.
    cos = [one_cos * second_cos - one_sin * second_sin for one_cos, one_sin in rows]
    sin = [one_sin * second_cos + one_cos * second_sin for one_cos, one_sin in rows]
    return jnp.concatenate(cos), jnp.concatenate(sin)


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

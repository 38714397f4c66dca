"""Rotation of keys inside a TPU kernel.

With heads of 128, the halves of a key are 64 lanes of one register each. Splitting and joining them took 3,500 shuffles
per 1,024 keys on v5e; swapping them with a roll, and widening cosine and sine to all lanes with another, takes 1,260.
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
    multiple of 8. Cosines and sines of N page starts and T slots within a page give those of all N * T slots."""
    (first_cos, first_sin), (second_cos, second_sin) = turns(first), turns(second)
    rows = [(first_cos[row : row + 1], first_sin[row : row + 1]) for row in range(first.shape[0])]
    # All sines in a lane have the same sign: it cancels in products of two sines, and stays in sine times cosine.
    cos = [one_cos * second_cos - one_sin * second_sin for one_cos, one_sin in rows]
    sin = [one_sin * second_cos + one_cos * second_sin for one_cos, one_sin in rows]
    return jnp.concatenate(cos), jnp.concatenate(sin)


def turned(keys: Float[Array, "T H"], cos: Float[Array, "T H"], sin: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """The keys rotated as by `apply_rope`, with `cos` and `sin` from `turns`; keeps the dtype."""
    wide = keys.astype(jnp.float32)
    return (wide * cos + _swapped(wide) * sin).astype(keys.dtype)


def _swapped(x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Swaps the halves of each row."""
    half = x.shape[1] // 2
    if x.shape[1] % _LANES == 0:
        return pltpu.roll(x, half, 1)
    return jnp.concatenate([x[:, half:], x[:, :half]], -1)

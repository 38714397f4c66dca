"""Rotary position embedding in Llama's half-split layout, with float32 angles.

The inverse in CacheCraft sec. 4 is wrong; the correct pair, with x and y the two halves of a head, is
  apply:  x' = x cos - y sin,  y' = x sin + y cos
  remove: x  = x' cos + y' sin,  y = -x' sin + y' cos
XLA fuses these elementwise operations with adjacent ones.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int


def llama3_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float | None = None,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> np.ndarray:
    """Inverse frequencies [head_dim / 2], float32, in radians per position.

    With `factor`, Llama 3.1's scaling: wavelengths above `original / low_freq_factor` are stretched by `factor`, those
    below `original / high_freq_factor` are kept, and the band between is blended linearly in 1/wavelength.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if factor is not None:
        turns = original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
        frequencies = kept * frequencies + (1 - kept) * frequencies / factor
    return frequencies.astype(np.float32)


def rotate_by(
    x: Float[Array, "*A H"], cos: Float[Array, "*#A half"], sin: Float[Array, "*#A half"]
) -> Float[Array, "*A H"]:
    """`x` rotated by angles with the given cosines and sines, in float32; keeps the dtype."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1).astype(x.dtype)


def _angles(positions: Array, frequencies: Array | np.ndarray) -> Array:
    frequencies = jnp.expand_dims(jnp.asarray(frequencies, jnp.float32), range(positions.ndim + 1))
    return positions.astype(jnp.float32)[..., None, None] * frequencies


def rotation_rows(positions: Int[Array, "*N"], frequencies: Float[Array, "half"] | np.ndarray) -> Float[Array, "*N H"]:
    """[cos | sin] of every position's angles, float32, for `rotate` and for kernels that rotate keys.

    Computed as one array: on a TPU, cosines and sines of half the width would take as many lanes each, and joining them
    would need another copy.
    """
    frequencies = jnp.asarray(frequencies, jnp.float32)
    angles = positions.astype(jnp.float32).reshape(-1, 1) * jnp.concatenate([frequencies, frequencies])[None]
    is_first = lax.broadcasted_iota(jnp.int32, angles.shape, 1) < frequencies.shape[0]
    return jnp.where(is_first, jnp.cos(angles), jnp.sin(angles)).reshape(*positions.shape, -1)


def rotate(x: Float[Array, "N A H"], rows: Float[Array, "N H"]) -> Float[Array, "N A H"]:
    """`apply_rope` with precomputed `rotation_rows`. If these are computed in the same program, XLA on a CPU recomputes
    cosines and sines for every head, which took 9.4 ms instead of 0.6 for 2,048 rows of 16 heads."""
    half = x.shape[-1] // 2
    return rotate_by(x, rows[:, None, :half], rows[:, None, half:])


def apply_rope(
    x: Float[Array, "*B N A H"], positions: Int[Array, "*B N"], frequencies: Float[Array, "half"] | np.ndarray
) -> Float[Array, "*B N A H"]:
    """`x` rotated to `positions`; any number of heads A, angles in float32; keeps the dtype."""
    angles = _angles(positions, frequencies)
    return rotate_by(x, jnp.cos(angles), jnp.sin(angles))


def remove_rope(
    x: Float[Array, "*B N A H"], positions: Int[Array, "*B N"], frequencies: Float[Array, "half"] | np.ndarray
) -> Float[Array, "*B N A H"]:
    """The inverse of `apply_rope` at the same positions."""
    angles = _angles(positions, frequencies)
    return rotate_by(x, jnp.cos(angles), -jnp.sin(angles))

"""Slot-by-slot views of the page tables of a call."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from ccjax.kernels.rope import rotation_rows


def valid_pages(page_table: Int[Array, "B M"], page_length: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The table with unused entries pointing at page 0: they may be read, and are masked."""
    return jnp.where(page_length > 0, page_table, 0)


def num_entries(page_length: Int[Array, "B M"]) -> Int[Array, "B"]:
    """Number of entries of each request up to its last one in use."""
    index = jnp.arange(1, page_length.shape[1] + 1, dtype=jnp.int32)[None, :]
    return jnp.where(page_length > 0, index, 0).max(1)


def used_slots(page_length: Int[Array, "B M"], page_size: int) -> Bool[Array, "B M_T"]:
    """Which of the M * T slots of each request hold a token."""
    used = jnp.arange(page_size, dtype=jnp.int32)[None, None, :] < page_length[..., None]
    return used.reshape(page_length.shape[0], -1)


def slot_positions(page_start: Int[Array, "*B M"], page_size: int) -> Int[Array, "*B M_T"]:
    """Position of every slot, whether it is in use or not."""
    within = jnp.arange(page_size, dtype=jnp.int32)
    positions = page_start[..., None] + jnp.expand_dims(within, range(page_start.ndim))
    return positions.reshape(*page_start.shape[:-1], -1)


class PageRotation(NamedTuple):
    """What keys before RoPE are rotated by.

    Attributes:
      start: [B, M] int32, position of each entry's first slot.
      frequencies: [H / 2] float32, inverse frequencies.
      rows: [B, M, H] float32, `page_rotation` of these two. A slot's angle is its page's and that of the slot within a
        page (`page_rows`), so these four cosines and sines give its own: few have to be computed and read.
    """

    start: Int[Array, "B M"]
    frequencies: Float[Array, "half"]
    rows: Float[Array, "B M H"]


def page_rotation(
    page_start: Int[Array, "B M"], frequencies: Float[Array, "half"] | np.ndarray
) -> Float[Array, "B M H"]:
    """`rotation_rows` of every entry's first position."""
    return rotation_rows(page_start.reshape(-1), frequencies).reshape(*page_start.shape, -1)


def page_rows(frequencies: Float[Array, "half"], page_size: int) -> Float[Array, "T H"]:
    """`rotation_rows` of the slots within a page."""
    return rotation_rows(jnp.arange(page_size, dtype=jnp.int32), frequencies)

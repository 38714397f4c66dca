"""Entries, slots and positions of the page tables of a call."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from ccjax.kernels.rope import rotation_rows


def valid_pages(page_table: Int[Array, "B M"], page_length: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The table with unused entries set to page 0, which can be read and is masked."""
    return jnp.where(page_length > 0, page_table, 0)


def num_entries(page_length: Int[Array, "B M"]) -> Int[Array, "B"]:
    """Number of entries of each request up to the last used one."""
    index = jnp.arange(1, page_length.shape[1] + 1, dtype=jnp.int32)[None, :]
    return jnp.where(page_length > 0, index, 0).max(1)


def used_slots(page_length: Int[Array, "B M"], page_size: int) -> Bool[Array, "B M_T"]:
    """Which of the M * T slots of each request hold a token."""
    used = jnp.arange(page_size, dtype=jnp.int32)[None, None, :] < page_length[..., None]
    return used.reshape(page_length.shape[0], -1)


def slot_positions(page_start: Int[Array, "*B M"], page_size: int) -> Int[Array, "*B M_T"]:
    """Position of every slot, used or not."""
    within = jnp.arange(page_size, dtype=jnp.int32)
    positions = page_start[..., None] + jnp.expand_dims(within, range(page_start.ndim))
    return positions.reshape(*page_start.shape[:-1], -1)


class PageRotation(NamedTuple):
    """The rotation of keys stored before RoPE.

    Attributes:
      start: [B, M] int32, position of each entry's first slot.
      frequencies: [H / 2] float32, inverse frequencies.
      rows: [B, M, H] float32, `page_rotation` of these two. A slot's angle is the sum of its page's angle and of the
        slot's angle within a page (`page_rows`), so few cosines and sines have to be computed and read.
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

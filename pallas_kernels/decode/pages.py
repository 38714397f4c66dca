"""Entries, slots and positions of the page tables of a call."""

from __future__ import annotations

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


def page_rows(frequencies: Float[Array, "half"] | np.ndarray, page_size: int) -> Float[Array, "T H"]:
    """`rotation_rows` of the slots within a page."""
    return rotation_rows(jnp.arange(page_size, dtype=jnp.int32), frequencies)

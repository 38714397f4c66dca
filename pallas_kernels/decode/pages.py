"""Entries, slots and positions of the page tables of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from ccjax.kernels.inputs import PageTables
from ccjax.kernels.rope import rotation_rows


def padded_tables(tables: PageTables, multiple: int) -> PageTables:
    """The tables with unused entries at the end, up to a multiple."""
    extra = -tables.page_table.shape[1] % multiple

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2))

    return jax.tree.map(padded, PageTables(tables.page_table, tables.page_length, tables.page_rotation))


def valid_pages(tables: PageTables) -> Int[Array, "B M"]:
    """The table with unused entries set to page 0, which can be read and is masked."""
    return jnp.where(tables.page_length > 0, tables.page_table, 0)


def num_entries(tables: PageTables) -> Int[Array, "B"]:
    """Number of entries of each request up to the last used one."""
    index = jnp.arange(1, tables.page_length.shape[1] + 1, dtype=jnp.int32)[None, :]
    return jnp.where(tables.page_length > 0, index, 0).max(1)


def used_slots(tables: PageTables, page_size: int) -> Bool[Array, "B M_T"]:
    """Which of the M * T slots of each request hold a token."""
    used = jnp.arange(page_size, dtype=jnp.int32)[None, None, :] < tables.page_length[..., None]
    return used.reshape(tables.page_length.shape[0], -1)


def page_rows(frequencies: Float[Array, "half"] | np.ndarray, page_size: int) -> Float[Array, "T H"]:
    """`rotation_rows` of the slots within a page."""
    return rotation_rows(jnp.arange(page_size, dtype=jnp.int32), frequencies)

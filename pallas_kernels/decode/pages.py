"""What the page tables of a call say, slot by slot. Knows no kernel and no platform."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from pallas_kernels.rope import rotation_table


def valid_pages(page_table: Int[Array, "B M"], page_length: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The table with entries that hold nothing pointing at page 0: they may be read, and are masked."""
    return jnp.where(page_length > 0, page_table, 0)


def num_entries(page_length: Int[Array, "B M"]) -> Int[Array, "B"]:
    """Entries of each request up to its last one that holds anything."""
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


def slot_rotations(
    page_start: Int[Array, "B M"], page_size: int, frequencies: Float[Array, "half"]
) -> tuple[Float[Array, "B M_T half"], Float[Array, "B M_T half"]]:
    """Cosine and sine of every slot's angles, float32."""
    positions = slot_positions(page_start, page_size)
    cos, sin = rotation_table(positions.reshape(-1), frequencies)
    shape = (page_start.shape[0], -1, frequencies.shape[0])
    return cos.reshape(shape), sin.reshape(shape)

"""Reads and writes token rows in the pages of one layer, by slot.

A slot is page * T + offset; slots past the end of the pages are ignored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from ccjax.kernels.inputs import KVPages
from ccjax.models.llama3.sharding import EVERYWHERE, KV_ROWS, PAGES, over_heads


def read_slots(pages: Float[Array, "K P T H"], slots: Int[Array, "S"]) -> Float[Array, "S K H"]:
    """The rows in `slots`; zeros for slots past the end."""
    flat = pages.reshape(pages.shape[0], -1, pages.shape[-1])
    return jnp.swapaxes(jnp.take(flat, slots, axis=1, mode="fill", fill_value=0), 0, 1)


def write_slots(
    pages: Float[Array, "K P T H"], slots: Int[Array, "N"], rows: Float[Array, "N K H"], mesh: Mesh | None
) -> Float[Array, "K P T H"]:
    """The pages with `rows` written to `slots`; rows whose slot is past the end are dropped. Each device of the mesh
    writes to its own heads."""

    def write(*operands: Array) -> Array:
        return jax.lax.platform_dependent(*operands, tpu=write_by_head, default=write_by_slot)

    return over_heads(write, mesh, (PAGES, EVERYWHERE, KV_ROWS), PAGES)(pages, slots, rows)


def write_rows(
    pages: KVPages, slots: Int[Array, "N"], k: Float[Array, "N K H"], v: Float[Array, "N K H"], mesh: Mesh | None
) -> KVPages:
    """The pages with the rows of keys and values written to `slots`, as by `write_slots`."""
    return KVPages(write_slots(pages.k, slots, k, mesh), write_slots(pages.v, slots, v, mesh))


def write_by_slot(pages: Array, slots: Array, rows: Array) -> Array:
    """`write_slots` for all heads of a slot at once: on CPUs up to three times as fast as head by head."""
    flat = pages.reshape(pages.shape[0], -1, pages.shape[-1])
    return flat.at[:, slots].set(jnp.swapaxes(rows, 0, 1), mode="drop").reshape(pages.shape)


def write_by_head(pages: Array, slots: Array, rows: Array) -> Array:
    """`write_slots` head by head: otherwise the TPU compiler copies all pages to a layout with adjacent heads of a
    slot, and back."""
    num_heads, num_slots = pages.shape[0], pages.shape[1] * pages.shape[2]
    first = jnp.arange(num_heads, dtype=slots.dtype) * num_slots
    places = jnp.where((slots < num_slots)[:, None], slots[:, None] + first[None], num_heads * num_slots)
    flat = pages.reshape(num_heads * num_slots, -1)
    return flat.at[places.reshape(-1)].set(rows.reshape(-1, rows.shape[-1]), mode="drop").reshape(pages.shape)

"""Reads and writes token rows in the pages of one layer, by slot. Knows no request, no table and no jit.

A slot is page * T + offset; a slot past the end of the pages is none.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def read_slots(pages: Float[Array, "K P T H"], slots: Int[Array, "S"]) -> Float[Array, "S K H"]:
    """The rows in `slots`, zeros for slots past the end."""
    flat = pages.reshape(pages.shape[0], -1, pages.shape[-1])
    return jnp.swapaxes(jnp.take(flat, slots, axis=1, mode="fill", fill_value=0), 0, 1)


def write_slots(
    pages: Float[Array, "K P T H"], slots: Int[Array, "N"], rows: Float[Array, "N K H"]
) -> Float[Array, "K P T H"]:
    """The pages with `rows` written to `slots`; rows whose slot is past the end are dropped."""
    flat = pages.reshape(pages.shape[0], -1, pages.shape[-1])
    return flat.at[:, slots].set(jnp.swapaxes(rows, 0, 1), mode="drop").reshape(pages.shape)

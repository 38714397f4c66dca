"""Which key blocks a query block has to visit, and which of them need no mask.

Bounds are computed from the smallest and largest position (and request id) of each block, so they hold for slots in any
order; they are tight if positions ascend, as in a merged prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

UNUSED = jnp.iinfo(jnp.int32).max
"""Position of an unused slot."""
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of an invisible slot: low enough to vanish, but finite, so that the difference of two is defined."""
LOG2_E = 1.4426950408889634


class BlockBounds(NamedTuple):
    """Ranges of key blocks per query block, all int32.

    Attributes:
      first, last: only key blocks in [first, last) have a slot that a query of the block may see.
      full_first, full_last: every query sees all slots of the blocks in [full_first, full_last), a part of that range.
    """

    first: Int[Array, "blocks"]
    full_first: Int[Array, "blocks"]
    full_last: Int[Array, "blocks"]
    last: Int[Array, "blocks"]


def padded(x: Shaped[Array, "N *rest"], multiple: int, fill: int | None = 0) -> Shaped[Array, "M *rest"]:
    """`x` padded to a multiple of rows with `fill`, or with copies of its last row if that is None."""
    extra = -x.shape[0] % multiple
    if not extra:
        return x
    widths = [(0, extra)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, mode="edge") if fill is None else jnp.pad(x, widths, constant_values=fill)


def power_of_two(size: int, at_least: int) -> int:
    """The smallest power of two that is at least `size`, and at least `at_least`, a power of two."""
    return max(at_least, 1 << max(size - 1, 0).bit_length())


def used_values(v: Float[Array, "S K H"], k_pos: Int[Array, "S"]) -> Float[Array, "S K H"]:
    """Values with zeros in the unused slots: a weight of 0 would not remove a NaN there."""
    return jnp.where((k_pos != UNUSED)[:, None, None], v, jnp.zeros((), v.dtype))


def block_bounds(
    q_pos: Int[Array, "N"],
    k_pos: Int[Array, "S"],
    q_request: Int[Array, "N"] | None,
    k_request: Int[Array, "S"] | None,
    *,
    q_block: int,
    k_block: int,
) -> BlockBounds:
    """The bounds for blocks of `q_block` queries and `k_block` slots; these must divide N and S."""
    q, k = q_pos.reshape(-1, q_block), k_pos.reshape(-1, k_block)
    reachable = k.min(-1)[None, :] <= q.max(-1)[:, None]
    full = k.max(-1)[None, :] <= q.min(-1)[:, None]
    if q_request is not None and k_request is not None:
        q, k = q_request.reshape(-1, q_block), k_request.reshape(-1, k_block)
        k_least, k_most = k.min(-1)[None, :], k.max(-1)[None, :]
        q_least, q_most = q.min(-1)[:, None], q.max(-1)[:, None]
        reachable &= (k_least <= q_most) & (q_least <= k_most)
        full &= (k_least == q_most) & (q_least == k_most)
    num_blocks = reachable.shape[1]
    index = jnp.arange(num_blocks, dtype=jnp.int32)[None, :]
    last = jnp.where(reachable, index + 1, 0).max(-1)
    first = jnp.minimum(jnp.where(reachable, index, num_blocks).min(-1), last)
    full_first = jnp.minimum(jnp.where(full, index, num_blocks).min(-1), last)
    ends_full = jnp.where(~full & (index >= full_first[:, None]), index, num_blocks)
    return BlockBounds(first, full_first, jnp.minimum(ends_full.min(-1), last), last)

"""Which key blocks a query block has to visit, and which of them need no mask.

Bounds are computed from the smallest and largest position (and request id) of each block, so they hold for slots in any
order; they are tight if positions ascend, as in a merged prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from ccjax.kernels.inputs import AttentionInputs

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


def padded_inputs(inputs: AttentionInputs, *, q_block: int, k_block: int) -> AttentionInputs:
    """The inputs padded to whole blocks, without `k_rotation`. Queries get copies of the last row, which do not lower a
    block's smallest position, so it keeps the key blocks without a mask; slots get unused ones."""

    def of(x: Array | None, multiple: int, fill: int | None = None) -> Array | None:
        return None if x is None else padded(x, multiple, fill)

    return AttentionInputs(
        q_pos=padded(inputs.q_pos, q_block, None),
        k_pos=padded(inputs.k_pos, k_block, UNUSED),
        q_request=of(inputs.q_request, q_block),
        k_request=of(inputs.k_request, k_block),
        k_segment=of(inputs.k_segment, k_block, -1),
        num_segments=inputs.num_segments,
    )


def block_specs(inputs: AttentionInputs, **specs: Any) -> AttentionInputs:
    """The inputs with a block spec in place of each array."""
    given = {name: spec for name, spec in specs.items() if getattr(inputs, name) is not None}
    return AttentionInputs(**given, num_segments=inputs.num_segments)


def block_bounds(inputs: AttentionInputs, *, q_block: int, k_block: int) -> BlockBounds:
    """The bounds for blocks of `q_block` queries and `k_block` slots; these must divide N and S."""
    q, k = inputs.q_pos.reshape(-1, q_block), inputs.k_pos.reshape(-1, k_block)
    reachable = k.min(-1)[None, :] <= q.max(-1)[:, None]
    full = k.max(-1)[None, :] <= q.min(-1)[:, None]
    if inputs.q_request is not None and inputs.k_request is not None:
        q, k = inputs.q_request.reshape(-1, q_block), inputs.k_request.reshape(-1, k_block)
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

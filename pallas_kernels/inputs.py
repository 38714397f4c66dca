"""The pytrees that kernels take besides queries, keys and values. Models extend them by the inputs of their steps."""

from __future__ import annotations

from collections.abc import Mapping

from flax import struct
from jax import Array
from jaxtyping import Float, Int


@struct.dataclass
class KVPages:
    """The pool of one layer: P pages of T tokens, keys before RoPE. Unused slots may contain anything, including NaN.

    A slot is page * T + offset.
    """

    k: Float[Array, "K P T H"]
    v: Float[Array, "K P T H"]

    @property
    def num_slots(self) -> int:
        """P * T, the first number that is no slot."""
        return self.k.shape[1] * self.k.shape[2]


@struct.dataclass(kw_only=True)
class AttentionInputs:
    """Where the queries and the context slots of a call of `attention` stand.

    Attributes:
      q_pos: positions, in any order; repeat the last one for padding rows. If they ascend, and requests are in the same
        order in queries and slots, key blocks that no query of a block sees are skipped.
      k_pos: positions of the context slots, in any order; INT32_MAX marks an unused slot, whose key and value may be
        anything, including NaN. A used slot must have finite values even if no query sees it.
      q_request, k_request: request ids of a packed batch; both or neither.
      k_rotation: `ccjax.kernels.rope.rotation_rows` of `k_pos`, any finite rows for unused slots: the call rotates the
        keys in float32 and rounds them to their dtype, as `apply_rope` does. None for rotated keys.
      k_segment: segment (chunk) of each slot in [0, num_segments); other values belong to no segment. None to omit the
        mass.
      num_segments: static; 0 to omit the mass.
    """

    q_pos: Int[Array, "N"]
    k_pos: Int[Array, "S"]
    q_request: Int[Array, "N"] | None = None
    k_request: Int[Array, "S"] | None = None
    k_rotation: Float[Array, "S H"] | None = None
    k_segment: Int[Array, "S"] | None = None
    num_segments: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class PageTables:
    """The pages of each request of a call of `decode_attention`.

    Attributes:
      page_table: pages of each request, in any order.
      page_length: number of used slots of each entry, from the page's first slot; 0 for an unused entry, whose page may
        be any number.
      page_rotation: `ccjax.kernels.rope.rotation_rows` of the position of each entry's first slot, the same for all
        layers. A slot's angle is the sum of its page's angle and of the slot's angle within a page, so few cosines and
        sines have to be computed and read. Keys are rotated in float32 when read, and rounded to their dtype.
    """

    page_table: Int[Array, "B M"]
    page_length: Int[Array, "B M"]
    page_rotation: Float[Array, "B M H"]


def check_shapes(inputs: AttentionInputs | PageTables, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks the fields that are not None.

    Raises:
      ValueError: a field has another shape.
    """
    for name, shape in shapes.items():
        value = getattr(inputs, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{name}: wanted shape {shape}, got {value.shape}")

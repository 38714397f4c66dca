"""Movement of keys for XLA, which fuses it with what surrounds it."""

from __future__ import annotations

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ccjax.kernels.rope.rotation import apply_rope


def xla_move(
    k: Float[Array, "S K H"], shift: Int[Array, "S"], frequencies: Float[Array, "half"] | np.ndarray
) -> Float[Array, "S K H"]:
    """See `ccjax.kernels.rope.move_keys`; `shift` is the difference of the positions."""
    return apply_rope(k, shift, frequencies)

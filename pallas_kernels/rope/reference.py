"""The definition of moving keys in plain jnp: the halves of a head are the parts of complex numbers, float32.

k'[s, h] + i k'[s, h + H / 2] = (k[s, h] + i k[s, h + H / 2]) exp(i shift[s] frequencies[h])
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int


def reference_move(
    k: Float[Array, "S K H"], shift: Int[Array, "S"], frequencies: Float[Array, "half"] | np.ndarray
) -> Float[Array, "S K H"]:
    """See `ccjax.kernels.rope.move_keys`; `shift` is the difference of the positions."""
    angles = jnp.outer(shift.astype(jnp.float32), jnp.asarray(frequencies, jnp.float32))
    pairs = lax.complex(*jnp.split(k.astype(jnp.float32), 2, -1))
    moved = pairs * lax.complex(jnp.cos(angles), jnp.sin(angles))[:, None]
    return jnp.concatenate([moved.real, moved.imag], -1).astype(k.dtype)

"""Matrix products in the precision of their operands."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def precision_of(*operands: Array) -> lax.Precision | None:
    """Precision to request for a product: by default, JAX multiplies float32 as TF32 on GPUs, as bfloat16 on TPUs."""
    return lax.Precision.HIGHEST if all(x.dtype == jnp.float32 for x in operands) else None


def einsum(subscripts: str, x: Array, y: Array, preferred_element_type: Any = None) -> Array:
    """`jnp.einsum` of two operands; float32 is multiplied as float32 on every platform."""
    return jnp.einsum(subscripts, x, y, precision=precision_of(x, y), preferred_element_type=preferred_element_type)

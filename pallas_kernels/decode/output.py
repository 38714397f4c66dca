"""The value that every decode implementation returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float


class DecodeOutput(NamedTuple):
    """Result of one decode step's attention.

    Attributes:
      out: [B, Q, H], dtype of the queries.
      lse: [B, Q] float32, natural log of the sum of exponentiated scores.
    """

    out: Float[Array, "B Q H"]
    lse: Float[Array, "B Q"]


class DecodeParts(NamedTuple):
    """The same fields for a kernel: block specs, shapes or refs."""

    out: Any
    lse: Any

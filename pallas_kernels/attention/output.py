"""The value that every attention implementation returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float


class AttentionOutput(NamedTuple):
    """Result of one attention call.

    Attributes:
      out: [N, Q, H], dtype of the queries.
      mass: [N, Q, C] float32, softmax mass of each query head on each segment; None if not requested.
      lse: [N, Q] float32, natural log of the sum of exponentiated scores.
    """

    out: Float[Array, "N Q H"]
    mass: Float[Array, "N Q C"] | None
    lse: Float[Array, "N Q"]


class OutputParts(NamedTuple):
    """The same fields for a kernel: block specs, shapes or refs; `mass` may be None."""

    out: Any
    mass: Any
    lse: Any

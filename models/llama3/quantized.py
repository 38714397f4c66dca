"""Weights in 8 bits with a float32 scale per output channel, and a product that takes quantised and plain weights.

A weight is `values * scales`; values are exact in bfloat16, so that activations keep their dtype and only the weight's
rounding is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jaxtyping import Float

from ccjax.models.llama3.products import einsum


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """`dtype` of the values, and the largest of them, which the largest weight of a channel gets."""

    dtype: Any
    largest: float


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(np.dtype(np.int8), 127.0),
    "fp8": WeightFormat(np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}
"""vLLM's names."""

_BLOCK = 1 << 21


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight in 8 bits.

    Attributes:
      values: int8 or float8_e4m3fn, in the shape of the weight.
      scales: float32, in that shape without the axes that products sum over.
    """

    values: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Dtype of the weight that it represents."""
        return self.values.shape


Weight = Array | QuantizedWeight


def project(subscripts: str, x: Float[Array, "..."], weight: Weight) -> Float[Array, "..."]:
    """`jnp.einsum(subscripts, x, weight)` in the dtype of `x`.

    The scales of a quantised weight are applied to the sums, in float32, before these are rounded.

    Args:
      subscripts: of two operands; the axes of `weight` that stay are the last ones of the result, in their order.
    """
    if not isinstance(weight, QuantizedWeight):
        return einsum(subscripts, x, weight)
    sums = einsum(subscripts, x, weight.values.astype(x.dtype), preferred_element_type=jnp.float32)
    scales = jnp.expand_dims(weight.scales, range(sums.ndim - weight.scales.ndim))
    return (sums * scales).astype(x.dtype)


def quantize(weight: Float[Array, "..."], input_axes: tuple[int, ...], name: str) -> QuantizedWeight:
    """The nearest weight in that format, on the device of `weight`; see `quantize_on_host`."""
    wide = weight.astype(jnp.float32)
    largest = jnp.abs(wide).max(input_axes, keepdims=True)
    scales, inverse = _scales(largest, name, jnp)
    values = wide * inverse
    if name == "int8":
        values = jnp.round(values)
    return QuantizedWeight(values.astype(WEIGHT_FORMATS[name].dtype), scales.squeeze(input_axes))


def quantize_on_host(weight: np.ndarray, input_axes: tuple[int, ...], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of the nearest weight in a format: the largest of each channel becomes the largest value.

    Memory beside the result: some blocks of 8 MiB.

    Args:
      weight: of any float dtype.
      input_axes: axes that products sum over, neighbours.
      name: of `WEIGHT_FORMATS`.

    Raises:
      ValueError: a weight is infinite or not a number.
    """
    first, behind = input_axes[0], input_axes[-1] + 1
    shape = weight.shape
    flat = weight.reshape(math.prod(shape[:first]), math.prod(shape[first:behind]), math.prod(shape[behind:]))
    values = np.empty(flat.shape, WEIGHT_FORMATS[name].dtype)
    scales = np.empty((flat.shape[0], flat.shape[2]), np.float32)
    for stack, into, scale in zip(flat, values, scales, strict=True):
        largest = np.zeros(stack.shape[1], np.float32)
        for rows in _blocks(stack.shape):
            np.maximum(largest, np.abs(stack[rows].astype(np.float32)).max(0), out=largest)  # NaN stays
        if not np.isfinite(largest).all():
            raise ValueError("wanted finite weights, got infinity or NaN")
        scale[:], inverse = _scales(largest, name, np)
        for rows in _blocks(stack.shape):
            block = stack[rows].astype(np.float32) * inverse
            into[rows] = np.rint(block, out=block) if name == "int8" else block
    return values.reshape(shape), scales.reshape(shape[:first] + shape[behind:])


def _scales(largest: Any, name: str, xp: Any) -> tuple[Any, Any]:
    """Scales and the factors that weights are multiplied with; both 1 for a channel of zeros. Weights are not divided
    by scales: XLA turns some divisions into products, and the last bits would differ from NumPy's."""
    most = WEIGHT_FORMATS[name].largest
    nonzero = xp.where(largest > 0, largest, xp.float32(most))
    return nonzero * xp.float32(1 / most), xp.float32(most) / nonzero


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows = max(1, _BLOCK // shape[1])
    return (slice(start, start + rows) for start in range(0, shape[0], rows))

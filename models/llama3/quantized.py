"""Weights in 8 bits with a float32 scale per output channel, and a product for quantised and plain weights.

A weight is `values * scales`; bfloat16 represents the values exactly, so activations keep their dtype and the rounding
of the weight is the only loss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float

from ccjax.models.llama3.products import einsum


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """`dtype` of the values, and the largest value, to which the largest weight of a channel is mapped."""

    dtype: Any
    largest: float


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(np.dtype(np.int8), 127.0),
    "fp8": WeightFormat(np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}
"""Formats by vLLM's names."""

_BLOCK = 1 << 21
_LEAST_ROWS, _FINE = 8, 254.0


@struct.dataclass
class QuantizedWeight:
    """A weight in 8 bits.

    Attributes:
      values: int8 or float8_e4m3fn, in the shape of the weight.
      scales: float32, in the same shape without the axes that products sum over.
    """

    values: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape


Weight = Array | QuantizedWeight


def project(subscripts: str, x: Float[Array, "..."], weight: Weight, dtype: Any = None) -> Float[Array, "..."]:
    """`jnp.einsum(subscripts, x, weight)` in `dtype`, by default that of `x`.

    The scales of a quantised weight are applied to the sums in float32, before rounding. On CPUs, beside a weight in
    int8, `x` is two int8 as well, which are exact to a 65,000th of its largest value.

    Args:
      subscripts: for two operands; the axes summed over are the last of `x` and the first of `weight`, and the result
        has the other axes of both, in the same order.
    """
    if not isinstance(weight, QuantizedWeight):
        return _product(subscripts, x, weight, dtype)
    dtype = x.dtype if dtype is None else dtype

    def widened(x: Array, weight: QuantizedWeight) -> Array:
        sums = _product(subscripts, x, weight.values.astype(x.dtype), jnp.float32)
        scales = jnp.expand_dims(weight.scales, range(sums.ndim - weight.scales.ndim))
        return (sums * scales).astype(dtype)

    if weight.values.dtype != jnp.int8:
        return widened(x, weight)
    return lax.platform_dependent(x, weight, cpu=functools.partial(_int8_product, dtype=dtype), default=widened)


def _int8_product(x: Array, weight: QuantizedWeight, dtype: Any) -> Array:
    """The product of a weight in int8 with `x` as two int8: each row rounded in steps of its largest value / 127, and
    what is left in steps of a 254th of these. CPUs multiply int8 four to five times as fast as float32, but a few rows
    in a slow loop."""
    width = weight.scales.size
    rows = x.reshape(-1, weight.values.size // width).astype(jnp.float32)
    steps = jnp.maximum(jnp.abs(rows).max(1, keepdims=True), jnp.finfo(jnp.float32).tiny) / 127.0
    coarse = jnp.round(rows / steps)
    parts = jnp.concatenate([coarse, jnp.round((rows / steps - coarse) * _FINE)]).astype(jnp.int8)
    values = jnp.pad(parts, ((0, max(0, _LEAST_ROWS - len(parts))), (0, 0)))
    sums = jnp.dot(values, weight.values.reshape(-1, width), preferred_element_type=jnp.int32).astype(jnp.float32)
    product = (sums[: len(rows)] + sums[len(rows) : len(parts)] / _FINE) * steps * weight.scales.reshape(1, width)
    num_summed = weight.values.ndim - weight.scales.ndim
    return product.reshape(*x.shape[:-num_summed], *weight.scales.shape).astype(dtype)


def _product(subscripts: str, x: Array, weight: Array, kind: Any = None) -> Array:
    """`einsum`. On CPUs a sum over two axes is one over both as one: XLA would copy the weight at each call, so that
    the products of a decode step of SmolLM2 took 106 ms instead of 65 (processor time). On TPUs the reshaped weight
    would be the copy."""
    inputs, axes = subscripts.partition("->")[0].split(",")
    summed = sum(axis in inputs for axis in axes)

    def as_given(x: Array, weight: Array) -> Array:
        return einsum(subscripts, x, weight, kind)

    def flat(x: Array, weight: Array) -> Array:
        inner = math.prod(weight.shape[:summed])
        x, weight = x.reshape(*x.shape[:-summed], inner), weight.reshape(inner, *weight.shape[summed:])
        return einsum(f"...{axes[0]},{axes[0]}{axes[summed:]}->...{axes[summed:]}", x, weight, kind)

    return as_given(x, weight) if summed == 1 else lax.platform_dependent(x, weight, cpu=flat, default=as_given)


def quantize(weight: Float[Array, "..."], input_axes: tuple[int, ...], name: str) -> QuantizedWeight:
    """Rounds a weight to a format, on the device of `weight`; see `quantize_on_host`."""
    wide = weight.astype(jnp.float32)
    largest = jnp.abs(wide).max(input_axes, keepdims=True)
    scales, inverse = _scales(largest, name, jnp)
    values = wide * inverse
    if name == "int8":
        values = jnp.round(values)
    return QuantizedWeight(values.astype(WEIGHT_FORMATS[name].dtype), scales.squeeze(input_axes))


def quantize_on_host(weight: np.ndarray, input_axes: tuple[int, ...], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of a weight rounded to a format; the largest weight of each channel becomes the largest value.

    Memory besides the result: some blocks of 8 MiB.

    Args:
      weight: the weight, in any float dtype.
      input_axes: adjacent axes that products sum over.
      name: key of `WEIGHT_FORMATS`.

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
    """Scales and their inverses, by which weights are multiplied; both 1 for a channel of zeros. Weights are not
    divided by scales, because XLA turns some divisions into products, whose last bits would differ from NumPy's."""
    most = WEIGHT_FORMATS[name].largest
    nonzero = xp.where(largest > 0, largest, xp.float32(most))
    return nonzero * xp.float32(1 / most), xp.float32(most) / nonzero


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows = max(1, _BLOCK // shape[1])
    return (slice(start, start + rows) for start in range(0, shape[0], rows))

"""Weights in 8 bits with a float32 scale per output channel, and a product for weights in every form.

A quantised weight is `values * scales`; bfloat16 represents the values exactly, so activations keep their dtype and the
rounding of the weight is the only loss. CPUs round activations beside int8 as well, see `project`.
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
_FINE = 254.0


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


@struct.dataclass
class LinearWeight:
    """A weight as one row for each output: CPUs multiply a few rows of activations faster with these than with columns.

    Attributes:
      rows: [O, I], in a float dtype or in 8 bits.
      scales: [O] float32 beside 8 bits; else None.
      shape: shape of the weight: the axes of its inputs, then those of its outputs.
    """

    rows: Array
    scales: Array | None
    shape: tuple[int, ...] = struct.field(pytree_node=False)


PackedWeight = QuantizedWeight | LinearWeight
Weight = Array | PackedWeight


def project(subscripts: str, x: Float[Array, "..."], weight: Weight, dtype: Any = None) -> Float[Array, "..."]:
    """`jnp.einsum(subscripts, x, weight)` in `dtype`, by default that of `x`.

    The scales of a quantised weight are applied to the sums in float32, before rounding. On CPUs, beside a weight in
    int8, `x` is two int8 as well, which are exact to a 65,000th of its largest value.

    Args:
      subscripts: for two operands; the axes summed over are the last of `x` and the first of `weight`, and the result
        has the other axes of both, in the same order.
    """
    if isinstance(weight, LinearWeight):
        num_summed = _num_summed(subscripts)
        flat = x.reshape(*x.shape[:-num_summed], weight.rows.shape[1])
        product = _scaled_product("...i,oi->...o", flat, weight.rows, weight.scales, dtype)
        return product.reshape(*flat.shape[:-1], *weight.shape[num_summed:])
    if isinstance(weight, QuantizedWeight):
        return _scaled_product(subscripts, x, weight.values, weight.scales, dtype)
    return _product(subscripts, x, weight, dtype)


def _scaled_product(subscripts: str, x: Array, values: Array, scales: Array | None, dtype: Any) -> Array:
    if scales is None:
        return _product(subscripts, x, values, dtype)

    widened, in_int8 = (functools.partial(one, subscripts) for one in (_widened_product, _int8_product))
    if values.dtype == jnp.int8:
        sums = lax.platform_dependent(x, values, cpu=in_int8, default=widened)
    else:
        sums = widened(x, values)
    scales = jnp.expand_dims(scales, range(sums.ndim - scales.ndim))
    return (sums * scales).astype(x.dtype if dtype is None else dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _int8_product(subscripts: str, x: Array, values: Array) -> Array:
    """The product, float32, of values in int8 with `x` as two int8: each row rounded in steps of its largest value /
    127, and what is left in steps of a 254th of these. CPUs multiply int8 four to five times as fast as float32. Its
    derivative is that without the rounding of `x`."""
    num_summed = _num_summed(subscripts)
    rows = x.reshape(-1, *x.shape[-num_summed:]).astype(jnp.float32)
    steps = jnp.abs(rows).max(range(1, rows.ndim), keepdims=True)
    steps = jnp.maximum(steps, jnp.finfo(jnp.float32).tiny) / 127.0
    coarse = jnp.round(rows / steps)
    parts = jnp.concatenate([coarse, jnp.round((rows / steps - coarse) * _FINE)]).astype(jnp.int8)
    coarse, fine = jnp.split(_product(subscripts, parts, values, jnp.int32).astype(jnp.float32), 2)
    product = (coarse + fine / _FINE) * steps.reshape(-1, *(1 for _ in coarse.shape[1:]))
    return product.reshape(*x.shape[:-num_summed], *product.shape[1:])


@_int8_product.defjvp
def _(subscripts: str, primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    (x, values), (change, _) = primals, tangents
    return _int8_product(subscripts, x, values), _widened_product(subscripts, change, values)


def _widened_product(subscripts: str, x: Array, values: Array) -> Array:
    return _product(subscripts, x, values.astype(x.dtype), jnp.float32)


def _num_summed(subscripts: str) -> int:
    inputs, axes = subscripts.partition("->")[0].split(",")
    return sum(axis in inputs for axis in axes)


def _product(subscripts: str, x: Array, weight: Array, kind: Any = None) -> Array:
    """`einsum`. On CPUs a sum over two axes is one over both as one: XLA would copy the weight at each call, so that
    the products of a decode step of SmolLM2 took 106 ms instead of 65 (processor time). On TPUs the reshaped weight
    would be the copy."""
    axes, summed = subscripts.partition("->")[0].split(",")[1], _num_summed(subscripts)

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

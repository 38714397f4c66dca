"""Reads parts of weights from a checkpoint's tensors without reading the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ccjax.models.llama3.params import ParamSpec
from ccjax.models.llama3.sources import Source


def read_part(
    tensors: Sequence[Any], parts: Sequence[Source], spec: ParamSpec, index: tuple[slice, ...] | None, dtype: Any
) -> np.ndarray:
    """A part of a weight, in our layout and in `dtype` (None for the stored one); `index` slices our axes without
    steps, None for the whole weight.

    Hugging Face stores a linear weight as a matrix [out, in]; our layout has the input axes first. Of our axes that are
    merged into one there, only the first may be cut, as it is for heads.

    Args:
      tensors: sliceable tensors, such as safetensors'; one per expert.
      parts: the location of the weight in each tensor.

    Raises:
      ValueError: another axis is cut.
    """
    index = tuple(slice(None) for _ in spec.shape) if index is None else index
    ranges = [range(*cut.indices(length)) for cut, length in zip(index, spec.shape, strict=True)]
    if spec.layout == "as_is":
        return np.ascontiguousarray(
            tensors[0][tuple(slice(bounds.start, bounds.stop) for bounds in ranges)], dtype=dtype
        )
    if spec.layout == "flat":
        part = tensors[0][parts[0].place(_flat(ranges, spec.shape))].reshape(tuple(map(len, ranges)))
        return np.ascontiguousarray(part, dtype=dtype)
    lengths = spec.shape
    if spec.num_experts:
        experts, *ranges = ranges
        lengths = lengths[1:]
    else:
        experts = range(1)
    num_input_axes = len(spec.input_axes)
    rows, columns = (
        _flat(ranges[axes], lengths[axes]) for axes in (slice(num_input_axes, None), slice(num_input_axes))
    )
    shape = tuple(map(len, ranges))
    if not spec.num_experts:
        return np.ascontiguousarray(tensors[0][parts[0].place(rows, columns)].T.reshape(shape), dtype=dtype)
    leaf = None
    for place, expert in enumerate(experts):
        part = tensors[expert][parts[expert].place(rows, columns)].T.reshape(shape)
        leaf = np.empty((len(experts), *shape), part.dtype if dtype is None else dtype) if leaf is None else leaf
        leaf[place] = part
    assert leaf is not None
    return leaf


def _flat(ranges: Sequence[range], shape: Sequence[int]) -> slice:
    """The range of a part of some axes after these are merged into one."""
    if any(len(part) < length for part, length in zip(ranges[1:], shape[1:], strict=True)):
        raise ValueError(f"sharding: wanted the first of the axes {tuple(shape)} cut, got {ranges}")
    inner = math.prod(shape[1:])
    return slice(ranges[0].start * inner, ranges[0].stop * inner)

"""Builds a parameter tree from the tensors of a checkpoint, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import Params, ParamSpec, build_params
from ccjax.models.llama3.quantized import QuantizedWeight, quantize_on_host
from ccjax.models.llama3.sources import Source
from ccjax.models.llama3.tensor_parts import read_part

Placing = Callable[[ParamSpec], jax.sharding.Sharding]


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message names the file, the tensor, and the expected and the actual value."""


class StoredTensor(NamedTuple):
    """A tensor in its file, checked.

    Attributes:
      values: reads a part of the tensor when sliced like an array.
      num_bytes: size in the file of the part that the `Source` selects.
    """

    path: Path
    values: Any
    num_bytes: int


def load_leaves(
    config: LlamaConfig,
    sources: Mapping[str, Sequence[Source]],
    stored: Callable[[Source], StoredTensor],
    *,
    total_bytes: int,
    dtype: Any,
    quantization: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    sharding: Placing | None = None,
) -> Params:
    """The parameter tree, cast to `dtype`. See `ccjax.models.llama3.convert.load_params` for memory use and the other
    arguments.

    Args:
      sources: sources of each leaf, by its Hugging Face name.
      stored: returns the tensor of a source; its exceptions are passed on.
      total_bytes: size of all tensors, for `progress`.

    Raises:
      CheckpointError: a weight to be quantised is infinite or not a number.
    """
    num_bytes = 0

    def make(name: str, spec: ParamSpec) -> Any:
        nonlocal num_bytes
        found = [stored(part) for part in sources[name]]
        tensors = [tensor.values for tensor in found]

        def read(index: tuple[slice, ...] | None, kind: Any = dtype) -> np.ndarray:
            return read_part(tensors, sources[name], spec, index, kind)

        if quantization is not None and spec.scales is not None:
            try:
                values, scales = quantize_on_host(read(None, None), spec.input_axes, quantization)
            except ValueError as error:
                raise CheckpointError(f"{found[0].path}: tensor {name!r}: {error}") from error
            made = QuantizedWeight(_placed(spec, values, sharding), _placed(spec.scales, scales, sharding))
        elif sharding is None:
            made = _placed(spec, read(None), None)
        else:
            made = jax.make_array_from_callback(spec.shape, sharding(spec), read)
        num_bytes += sum(tensor.num_bytes for tensor in found)
        if progress is not None:
            progress(num_bytes, total_bytes)
        return made

    params = build_params(config, make)
    if progress is not None:
        progress(total_bytes, total_bytes)
    return params


def _placed(spec: ParamSpec, host: np.ndarray, sharding: Placing | None) -> jax.Array:
    return jax.device_put(host, None if sharding is None else sharding(spec))


def listed(names: Sequence[str]) -> str:
    """The first names of a list of tensors, for a message."""
    shown = ", ".join(repr(name) for name in names[:8])
    return f"tensor {shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")

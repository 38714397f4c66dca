"""Weights of a GGUF file: checked, dequantised tensor by tensor, with rows in the model's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf.gguf_reader import ReaderTensor

from ccjax.loading.gguf.reader import GgufFile
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.gguf_names import ROPE_FACTORS, gguf_sources, row_order
from ccjax.models.llama3.leaves import CheckpointError, Placing, StoredTensor, listed, load_leaves
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sources import Source, specs_of

_NO_WEIGHTS = frozenset({ROPE_FACTORS})


def load_gguf(
    file: GgufFile,
    config: LlamaConfig,
    *,
    dtype: Any,
    quantization: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    sharding: Placing | None = None,
) -> Params:
    """Loads the weights of a GGUF file, dequantised to float32 and cast to `dtype`.

    Besides the finished leaves, one tensor at a time is in memory, or one of a layer's experts; with `sharding` only
    the rows that one device needs. The arguments are those of `ccjax.models.llama3.convert.load_params`.

    Raises:
      CheckpointError: a tensor is missing, unknown or of another shape; the message names it and its file.
    """
    sources = {name: gguf_sources(name, spec) for name, spec in specs_of(config).items()}
    wanted = {part.tensor for parts in sources.values() for part in parts}
    missing = sorted(wanted - set(file.tensors))
    if missing:
        others = len(file.tensors)
        raise CheckpointError(f"{file.path}: wanted {listed(missing)}, got no such tensor ({others} others)")
    unknown = sorted(set(file.tensors) - wanted - _NO_WEIGHTS)
    if unknown:
        raise CheckpointError(
            f"{file.path}: wanted only tensors of {config.num_layers} llama layers, got {listed(unknown)}"
        )

    def stored(part: Source) -> StoredTensor:
        path, tensor = file.tensors[part.tensor]
        shape = tuple(reversed(tensor.shape.tolist()))
        if shape != part.shape:
            raise CheckpointError(f"{path}: tensor {part.tensor!r}: wanted shape {list(part.shape)}, got {list(shape)}")
        num_parts = 1 if part.expert is None else shape[0]
        return StoredTensor(path, _Dequantised(tensor, row_order(part.tensor, config)), tensor.n_bytes // num_parts)

    return load_leaves(
        config,
        sources,
        stored,
        total_bytes=sum(file.tensors[name][1].n_bytes for name in wanted),
        dtype=dtype,
        quantization=quantization,
        progress=progress,
        sharding=sharding,
    )


class _Dequantised:
    """A tensor that is dequantised when it is sliced.

    Rows are selected and reordered before dequantisation, columns after it, because quantised blocks span columns.
    """

    def __init__(self, tensor: ReaderTensor, order: np.ndarray | None):
        self._tensor = tensor
        self._order = order

    def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
        *rows, columns = index
        if self._order is not None:
            rows = [self._order[rows[0]]]
        kept = self._tensor.data[tuple(rows)]
        if kept.dtype == np.float32:
            return kept[..., columns].copy()  # a JAX array may share NumPy's memory, which here is the mapped file
        return gguf.dequantize(kept, self._tensor.tensor_type)[..., columns]

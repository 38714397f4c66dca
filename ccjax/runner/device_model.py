"""The model on its devices: weights, configuration, and the implementation and sizes of its steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.inputs import StepSettings
from ccjax.models.llama3.paged_steps import rotation_step
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.quantized import Weight
from ccjax.models.llama3.sharding import EVERYWHERE, KV_ROWS, mesh_of, placement
from ccjax.models.llama3.steps import int8_head_step, rotate_step
from ccjax.runner.compiled_sizes import CompiledSizes


class DeviceModel:
    """A model whose weights are on one device, or on a mesh of several.

    Attributes:
      top: the weights outside the layers, kept separately because a jitted call flattens every leaf passed to it. On
        CPUs the head is in int8 if the layers are: for one row it takes a tenth of a decode step less.
      mesh: the mesh of the weights; None for a single device.
      rows_placement: the placement of a layer's loaded keys or values [N, K, H], for `jax.device_put`.
      settings: what its steps are compiled for.
      sizes: the sizes that steps are padded to.
    """

    def __init__(
        self,
        params: Params,
        config: LlamaConfig,
        *,
        implementation: str | None = None,
        sizes: CompiledSizes | None = None,
    ) -> None:
        self.params = params
        self.top = dataclasses.replace(params, layers=(), lm_head=_head(params))
        self.config = config
        self.dtype = np.dtype(params.embedding.dtype)
        self.mesh = mesh_of(params)
        self.rows_placement = placement(self.mesh, KV_ROWS)
        self.settings = StepSettings(config, implementation, self.mesh)
        self.sizes = CompiledSizes() if sizes is None else sizes

    def put(self, values: Any) -> Any:
        """Copies host arrays to every device of the model."""
        return jax.device_put(values, placement(self.mesh, EVERYWHERE))

    def rotation(self, positions: jax.Array) -> jax.Array:
        """Cosines and sines of positions, for the steps of all layers."""
        return rotation_step(positions, settings=self.settings)

    def turned(self, k: np.ndarray, shift: int) -> np.ndarray:
        """Rotates keys before RoPE [T, K, H] by `shift` positions, which may be negative."""
        return np.asarray(rotate_step(k, np.full(len(k), shift, np.int32), config=self.config))


def _head(params: Params) -> Weight | None:
    values = jax.tree.leaves(params.layers[0].wq)[0]
    if jax.default_backend() != "cpu" or values.dtype != np.int8:
        return params.lm_head
    return int8_head_step(dataclasses.replace(params, layers=()))

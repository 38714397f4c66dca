"""The model on its devices: weights, configuration, and which implementation and sizes its steps run with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sharding import EVERYWHERE, KV_ROWS, mesh_of, placement
from ccjax.models.llama3.steps import rotate_step
from ccjax.models.lockstep import put
from ccjax.runner.buckets import slot_bucket
from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.runner.kernels import decode_implementation
from ccjax.types import PrefillPlan


class DeviceModel:
    """A model whose weights are on the device, or on a mesh of several.

    Attributes:
      top: the weights outside the layers: a call flattens every leaf that it is given.
      mesh: what the weights lie on; None for a single device.
      context_placement: of a layer's context [S, K, H], for `ccjax.models.lockstep.put`.
      sizes: what steps are padded to.
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
        self.top = dataclasses.replace(params, layers=())
        self.config = config
        self.dtype = np.dtype(params.embedding.dtype)
        self.implementation = implementation
        self.decode_implementation = decode_implementation(implementation)
        self.mesh = mesh_of(params)
        self.context_placement = placement(self.mesh, KV_ROWS)
        self.sizes = CompiledSizes() if sizes is None else sizes

    def put(self, values: Any) -> Any:
        """Copies host arrays to every device that the model is on."""
        return put(values, placement(self.mesh, EVERYWHERE))

    def context_shape(self, plan: PrefillPlan) -> tuple[int, int, int]:
        """[S, K, H] of a layer's context, padded."""
        return slot_bucket(plan.num_tokens), self.config.num_kv_heads, self.config.head_dim

    def turned(self, k: np.ndarray, shift: int) -> np.ndarray:
        """Keys before RoPE [T, K, H], rotated by `shift` positions, which may be negative."""
        return np.asarray(rotate_step(k, np.full(len(k), shift, np.int32), config=self.config))

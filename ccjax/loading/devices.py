"""The devices that a model is sharded over, and the dtype that suits them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.fused import unfuse
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sharding import make_mesh, mesh_of, shard_params

logger = logging.getLogger(__name__)


def with_dtype(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `EngineConfig` with dtype "auto", the default, replaced by float32 on CPU, bfloat16 elsewhere."""
    wanted, is_cpu = {"dtype": "auto", **settings}, jax.default_backend() == "cpu"
    if wanted["dtype"] == "auto":
        wanted["dtype"] = "float32" if is_cpu else "bfloat16"
    elif is_cpu and wanted["dtype"] == "bfloat16":
        logger.warning("dtype: bfloat16, which CPUs compute many times slower than float32")
    return wanted


def mesh_for(config: LlamaConfig, tensor_parallel_size: int) -> Mesh | None:
    """A mesh of the first `tensor_parallel_size` devices, None for a single one.

    Raises:
      ConfigError: the number of devices does not match, or the model cannot be sharded that way.
    """
    if tensor_parallel_size == 1:
        return None
    devices = jax.devices()
    if len(devices) < tensor_parallel_size:
        kind = devices[0].platform
        raise ConfigError(
            f"tensor_parallel_size: wanted at most {len(devices)}, the {kind} devices here, got {tensor_parallel_size}"
        )
    try:
        return make_mesh(config, devices[:tensor_parallel_size])
    except ValueError as error:
        raise ConfigError(str(error)) from error


def split_params(params: Params, config: LlamaConfig, tensor_parallel_size: int) -> Params:
    """The weights sharded over `tensor_parallel_size` devices; unchanged if they are already.

    Raises:
      ConfigError: as `mesh_for`; or they are sharded over another number of devices.
    """
    mesh = mesh_of(params)
    size = 1 if mesh is None else mesh.size
    if size == tensor_parallel_size:
        return params
    if size > 1:
        raise ConfigError(f"tensor_parallel_size: wanted {size}, as the model was loaded, got {tensor_parallel_size}")
    mesh = mesh_for(config, tensor_parallel_size)
    assert mesh is not None
    return shard_params(unfuse(params), config, mesh)

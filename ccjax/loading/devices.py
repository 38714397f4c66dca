"""Which devices a model is on."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.params import Params
from ccjax.models.llama3.sharding import make_mesh, mesh_of, shard_params


def mesh_for(config: LlamaConfig, tensor_parallel_size: int) -> Mesh | None:
    """The first so many devices, all of them where they are of several hosts; None for a single one.

    Raises:
      ConfigError: there are fewer, or the model cannot be split so.
    """
    if tensor_parallel_size == 1 and jax.process_count() == 1:
        return None
    devices = jax.devices()
    if jax.process_count() > 1 and len(devices) != tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size: wanted {len(devices)}, the devices of all {jax.process_count()} processes, got "
            f"{tensor_parallel_size}"
        )
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
    """The weights on so many devices; the same ones where they are.

    Raises:
      ConfigError: as `mesh_for`; or it is split over another number of them.
    """
    mesh = mesh_of(params)
    size = 1 if mesh is None else mesh.size
    if size == tensor_parallel_size:
        return params
    if size > 1 or jax.process_count() > 1:
        raise ConfigError(f"tensor_parallel_size: wanted {size}, as the model was loaded, got {tensor_parallel_size}")
    mesh = mesh_for(config, tensor_parallel_size)
    assert mesh is not None
    return shard_params(params, config, mesh)

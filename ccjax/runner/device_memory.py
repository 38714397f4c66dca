"""The memory plan of an engine's settings on the devices that are here. Reads sizes from devices and system."""

from __future__ import annotations

import dataclasses

import jax

from ccjax.config import EngineConfig
from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.budgets import host_cache_bytes, memory_bytes, usual_pool_bytes
from ccjax.runner.memory import MemoryPlan, ServedShapes, check_fits, in_8_bits, kv_shards, plain, plan_memory

_LONGEST_DEFAULT = 8192


def longest(model: LlamaConfig, config: EngineConfig) -> int:
    """Tokens of the longest prompt plus answer.

    Raises:
      ConfigError: more are asked for than the model has positions for.
    """
    limit = config.max_model_len or min(model.max_position_embeddings, _LONGEST_DEFAULT)
    if limit > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: wanted at most {model.max_position_embeddings} (the model's own limit), got {limit}"
        )
    return limit


def sizes_of(model: LlamaConfig, config: EngineConfig) -> BatchSizes:
    """What an engine of this model compiles its steps for.

    Raises:
      ConfigError: as `longest`.
    """
    return BatchSizes(
        longest(model, config),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        with_mass=config.strategy != "full",
    )


def memory_plan(model: LlamaConfig, config: EngineConfig) -> MemoryPlan:
    """What an engine of this model will take of each device, whether that is there or not.

    Raises:
      ConfigError: the model cannot be split so, or its memory is not known.
    """
    weight_bytes = (plain if config.quantization is None else in_8_bits)(config.dtype)
    shapes = ServedShapes(model, config.dtype, sizes_of(model, config), weight_bytes, config.tensor_parallel_size)
    total, source = _device_bytes(config)
    fraction = config.gpu_memory_utilization
    plan = plan_memory(shapes, total, source=source, fraction=fraction or 1.0)
    if config.device_cache_bytes:
        pool = config.device_cache_bytes // kv_shards(shapes)
    elif fraction is not None:
        return plan
    else:
        pool = usual_pool_bytes(plan.least_pool, max(0, total - plan.weights))
    return dataclasses.replace(plan, pool=pool)


def with_pool(model: LlamaConfig, config: EngineConfig) -> EngineConfig:
    """The settings with the pool's size in `device_cache_bytes`, where `gpu_memory_utilization` asks for one.

    Where it does, and where devices have memory of their own, it is also said here that a model does not fit, before
    it is loaded.

    Raises:
      ConfigError: it does not fit, with what would; or as `memory_plan`.
    """
    is_asked = config.gpu_memory_utilization is not None
    if not is_asked and config.device_memory_bytes is None and _own_bytes() is None:
        return config
    plan = memory_plan(model, config)
    check_fits(plan)
    if not is_asked or config.device_cache_bytes:
        return config
    return config.replace(device_cache_bytes=plan.pool * kv_shards(plan.shapes))


def _device_bytes(config: EngineConfig) -> tuple[int, str]:
    """Memory of each device, and where that figure is from."""
    if config.device_memory_bytes is not None:
        return config.device_memory_bytes, "as given"
    own = _own_bytes()
    if own is not None:
        return own, f"what JAX may take of a {jax.local_devices()[0].device_kind}"
    machine = memory_bytes()
    if machine is None:
        raise ConfigError("device_memory_bytes: wanted a size, for neither device nor system says one, got None")
    left = max(0, machine - host_cache_bytes(config)) // config.tensor_parallel_size
    return left, "the machine's memory without host_cache_bytes, for a CPU has none of its own"


def _own_bytes() -> int | None:
    """Memory of the first device, None where it has none of its own or does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None

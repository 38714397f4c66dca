"""The memory plan for an engine's settings on the devices of this machine."""

from __future__ import annotations

import dataclasses

import jax

from ccjax.config import EngineConfig
from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.policy.strategies import get_strategy
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.budgets import host_cache_bytes, memory_bytes, usual_pool_bytes
from ccjax.runner.memory import MemoryPlan, ServedShapes, check_fits, in_8_bits, kv_shards, plain, plan_memory

_LONGEST_DEFAULT = 8192
_USUAL_SHARE = 0.9
"""Of an accelerator's memory, as in vLLM."""

_CPU_ROWS, _DEVICE_ROWS = SchedulerSettings(num_pages=1).max_num_batched_tokens, 8192
"""Tokens of a full pack."""
_STEPS_SHARE = 1 / 16
"""Of an accelerator's memory, for what steps take besides weights and pages: larger packs would take it from the KV."""


def longest(model: LlamaConfig, config: EngineConfig) -> int:
    """Most tokens of prompt plus answer.

    Raises:
      ConfigError: `max_model_len` exceeds the number of positions of the model.
    """
    limit = config.max_model_len or min(model.max_position_embeddings, _LONGEST_DEFAULT)
    if limit > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: wanted at most {model.max_position_embeddings} (the model's own limit), got {limit}"
        )
    return limit


def sizes_of(model: LlamaConfig, config: EngineConfig) -> BatchSizes:
    """The sizes that an engine of this model compiles its steps for: packs as configured or, on devices with memory of
    their own, of as many tokens as leave most of it to KV.

    Raises:
      ConfigError: as `longest` and `memory_plan`.
    """
    if config.max_num_batched_tokens is not None:
        return _sizes(model, config, config.max_num_batched_tokens)
    most = _CPU_ROWS if _own_bytes() is None else _DEVICE_ROWS
    while most > _CPU_ROWS:
        plan = _plan(model, config, _sizes(model, config, most))
        if plan.besides_pool - plan.weights <= _STEPS_SHARE * plan.total:
            break
        most //= 2
    return _sizes(model, config, most)


def _sizes(model: LlamaConfig, config: EngineConfig, batched_tokens: int) -> BatchSizes:
    return BatchSizes(
        longest(model, config),
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=config.max_num_seqs,
        with_mass="mass" in get_strategy(config.strategy).needs,
    )


def memory_plan(model: LlamaConfig, config: EngineConfig) -> MemoryPlan:
    """Plans the memory that an engine of this model takes on each device, without checking that it fits.

    Raises:
      ConfigError: the model cannot be split this way, or the memory of the devices is unknown.
    """
    plan = _plan(model, config, sizes_of(model, config))
    if config.device_cache_bytes:
        pool = config.device_cache_bytes // kv_shards(plan.shapes)
    elif _share(config) is not None:
        return plan
    else:
        pool = usual_pool_bytes(plan.least_pool, max(0, plan.total - plan.weights))
    return dataclasses.replace(plan, pool=pool)


def _plan(model: LlamaConfig, config: EngineConfig, sizes: BatchSizes) -> MemoryPlan:
    """The plan for these sizes, with all that they leave as pool."""
    weight_bytes = plain(config.dtype)
    if config.quantization is not None:
        weight_bytes = in_8_bits(config.dtype, config.quantization)
    shapes = ServedShapes(model, config.dtype, sizes, weight_bytes, config.tensor_parallel_size)
    total, source = _device_bytes(config)
    return plan_memory(shapes, total, source=source, fraction=_share(config) or 1.0)


def with_pool(model: LlamaConfig, config: EngineConfig) -> EngineConfig:
    """Returns the settings with `device_cache_bytes` set to the size of the pool, unless it is given, if the devices
    report memory of their own or `gpu_memory_utilization` is set; else to 0.

    If it is set, or the memory of the devices is given or reported, also checks that the model fits before it is
    loaded.

    Raises:
      ConfigError: the model does not fit; says what would. Or as `memory_plan`.
    """
    is_asked = _share(config) is not None
    if is_asked or config.device_memory_bytes is not None or _own_bytes() is not None:
        plan = memory_plan(model, config)
        check_fits(plan)
        if is_asked and not config.device_cache_bytes:
            return config.replace(device_cache_bytes=plan.pool * kv_shards(plan.shapes))
    return config if config.device_cache_bytes is not None else config.replace(device_cache_bytes=0)


def _share(config: EngineConfig) -> float | None:
    """Share of the memory of each device that the model may take; None if its memory is not divided."""
    if config.gpu_memory_utilization is None and config.device_cache_bytes is None and _own_bytes() is not None:
        return _USUAL_SHARE
    return config.gpu_memory_utilization


def _device_bytes(config: EngineConfig) -> tuple[int, str]:
    """Memory of each device, and the origin of that figure."""
    if config.device_memory_bytes is not None:
        return config.device_memory_bytes, "as given"
    own = _own_bytes()
    if own is not None:
        return own, f"what JAX may take of a {jax.local_devices()[0].device_kind}"
    machine = memory_bytes()
    if machine is None:
        raise ConfigError("device_memory_bytes: wanted a size, as neither device nor system reports one, got None")
    left = max(0, machine - host_cache_bytes(config)) // config.tensor_parallel_size
    return left, "the machine's memory without host_cache_bytes, for a CPU has none of its own"


def _own_bytes() -> int | None:
    """Memory of the first device; None if it has none of its own or does not report it."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None

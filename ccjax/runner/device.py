"""A model on its devices: weights, pages of KV, and the compiled steps."""

from __future__ import annotations

import dataclasses

from ccjax.config import EngineConfig
from ccjax.loading.devices import split_params
from ccjax.loading.model import LoadedModel, Progress
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.sharding import num_kv_shards
from ccjax.policy.strategies import get_strategy
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.budgets import check_budgets, pool_bytes
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.runner.device_memory import longest, memory_plan, sizes_of
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.kernels import check_kernels
from ccjax.runner.memory import MemoryPlan, kv_shards
from ccjax.runner.pool import DevicePool
from ccjax.runner.warmup import BackgroundCompiler, StepCompiler
from ccjax.store.spec import KVSpec


def kv_spec_of(config: LlamaConfig, dtype: str) -> KVSpec:
    """Shape and dtype of the KV that a model of this configuration computes."""
    return KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype)


@dataclasses.dataclass(frozen=True)
class Device:
    """The devices that a model is split over, as one.

    Attributes:
      pool: pages for the KV of running requests and for the device tier.
      sizes: the sizes that steps are compiled for; `compiled` says which are.
      has_tier: chunks are cached in the pool.
    """

    model: DeviceModel
    pool: DevicePool
    sizes: BatchSizes
    compiled: CompiledSizes
    steps: StepCompiler
    compiler: BackgroundCompiler
    has_tier: bool

    @classmethod
    def open(cls, loaded: LoadedModel, config: EngineConfig) -> Device:
        """Splits the weights over the devices and allocates the pool.

        Raises:
          ConfigError: a kernel does not support the model, or a budget does not fit.
        """
        check_kernels(config.attention, loaded.config, config.dtype)
        params = split_params(loaded.params, loaded.config, config.tensor_parallel_size)
        compiled = CompiledSizes()
        model = DeviceModel(params, loaded.config, implementation=config.attention, sizes=compiled)
        num_shards = 1 if model.mesh is None else num_kv_shards(model.mesh)
        check_budgets(config, num_shards)
        kv_spec = kv_spec_of(loaded.config, config.dtype)
        num_bytes = pool_bytes(config, kv_spec, longest(loaded.config, config), num_shards)
        pool = DevicePool(kv_spec, num_bytes, model.mesh, compiled)
        sizes = sizes_of(loaded.config, config)
        strategy = get_strategy(config.strategy)
        is_framed = strategy.prepares_behind_frame and config.frame != "none" and loaded.tokenizer is not None
        stores_chunks = config.stores_chunks and not is_framed
        steps = StepCompiler(
            model,
            pool,
            sizes,
            with_deviation="prefill_deviations" in strategy.needs,
            with_question="question" in strategy.needs,
            with_tier=bool(config.device_cache_bytes),
            with_live_mass=stores_chunks or config.focus_window is not None,
        )
        compiler = BackgroundCompiler(model, steps)
        return cls(model, pool, sizes, compiled, steps, compiler, bool(config.device_cache_bytes))

    def warm_up(self, progress: Progress | None, *, only_first: bool) -> None:
        """See `Engine.warmup`; no request may run."""
        is_apart = self.steps.is_apart
        self.steps.warm_up(self.steps.first() if only_first and is_apart else self.steps.all(), progress)
        self.compiled.substitute(self.steps.all() if is_apart else (), notes_wanted=is_apart)

    def compile_one(self, is_cancelled: IsCancelled | None) -> bool:
        """See `Engine.compile_one`."""
        return self.compiler.compile_next(is_cancelled)

    def memory_plan(self, config: EngineConfig) -> MemoryPlan:
        """How the memory of each device is divided."""
        plan = memory_plan(self.model.config, config)
        return dataclasses.replace(plan, pool=self.pool.num_pages * self.pool.page_bytes // kv_shards(plan.shapes))

"""The public engine: takes requests and returns answers with reuse reports. Combines loading, runner, cache and batch
loop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.documents.document_cache import DocumentCache
from ccjax.cache.documents.frame import PassageFrame, frame_documents
from ccjax.cache.documents.pins import DocumentPins
from ccjax.cache.documents.warming import PassageWarmer
from ccjax.cache.prefill_capture import PrefillCapture
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.queue_preload import Preload, Preloader
from ccjax.cache.rates import Rates
from ccjax.cache.shared.index_updater import VariantIndexUpdater
from ccjax.cache.snapshot import ChunkCache
from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.cache.variants import VariantIndex
from ccjax.config import EngineConfig
from ccjax.engine.background import BackgroundPrefills
from ccjax.engine.batch.loop import BatchCounts, BatchLoop
from ccjax.engine.batch.sequence import Emit
from ccjax.engine.engine_cache import EngineCache
from ccjax.engine.engine_documents import EngineDocuments
from ccjax.engine.maintenance import Maintenance
from ccjax.engine.prefill_orders import PrefillOrders
from ccjax.engine.shadow import ShadowChecks
from ccjax.engine.submission import RequestSubmission
from ccjax.errors import ConfigError, RequestError
from ccjax.loading.calibration import calibration_of
from ccjax.loading.devices import split_params
from ccjax.loading.model import LoadedModel, Progress, load_model, model_config, prompt_builder
from ccjax.loading.prefill_profile import profile_of
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.sharding import num_kv_shards
from ccjax.policy.contract import reuse_contract
from ccjax.policy.strategies import expected_share, get_strategy
from ccjax.prompts import Prompt, assemble
from ccjax.requests import Delta, Request, Response, SamplingParams, documents_from, stops_from
from ccjax.runner.budgets import check_budgets, host_cache_bytes, pool_bytes
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.runner.device_memory import longest, memory_plan, sizes_of, with_pool
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.kernels import check_kernels
from ccjax.runner.memory import MemoryPlan, kv_shards
from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.runner.warmup import BackgroundCompiler, StepCompiler
from ccjax.store.spec import StoreIdentity
from ccjax.store.throttle import ThrottledLink
from ccjax.store.tiered import TieredStore
from ccjax.text import PromptBuilder, Tokenizer
from ccjax.types import Document, ReuseMode


class Engine:
    """A loaded model with its chunk-caches. Thread-safe; requests run together, in one batch.

    Use as a context manager or call `close`, which completes pending writes to the disk tier. `disk_link` throttles
    reads from the disk tier, for tests and benchmarks of slow disks.

    Attributes:
      documents: operations on cached documents: warm, pin, invalidate, erase, list.
      cache: operations on the whole cache: usage, maintenance, snapshots.
      orders: prefills that engines on one store order from each other.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, *, disk_link: ThrottledLink | None = None) -> None:
        config = with_pool(model.config, config)
        self.config = config
        self.rates = Rates()
        self.model_name = model.name
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.model_config: LlamaConfig = model.config
        limit = longest(model.config, config)
        self.max_model_len = limit
        self._builder: PromptBuilder | None = None
        if model.tokenizer is not None and model.template is not None:
            self._builder = prompt_builder(model.tokenizer, model.template, config.system_prompt)
        strategy = get_strategy(config.strategy)
        frame = frame_documents(config.frame) if strategy.prepares_behind_frame else ()
        check_kernels(config.attention, model.config, config.dtype)
        if max(config.ranking_layers or (0,)) >= model.config.num_layers:
            wanted = f"layers below {model.config.num_layers}, the model's number"
            raise ConfigError(f"ranking_layers: wanted {wanted}, got {config.ranking_layers}")
        params = split_params(model.params, model.config, config.tensor_parallel_size)
        self._compiled = CompiledSizes()
        self._model = DeviceModel(params, model.config, implementation=config.attention, sizes=self._compiled)
        self._settings = config.planner_settings(model.config.num_layers)
        self.calibration = calibration_of(model.fingerprint, model.directory, config.calibration)
        self._expected = reuse_contract("bounded", None, self._settings, self.calibration).settings
        profile = profile_of(model.fingerprint, model.directory, config.prefill_profile)
        self._costs = MeasuredCosts(self.rates, None if profile is None else profile.grid)
        mesh = self._model.mesh
        num_shards = 1 if mesh is None else num_kv_shards(mesh)
        check_budgets(config, num_shards)
        identity = StoreIdentity(model.fingerprint, config.tenant_salt)
        kv_spec = kv_spec_of(model.config, config.dtype)
        self._pool = DevicePool(kv_spec, pool_bytes(config, kv_spec, limit, num_shards), mesh, self._compiled)
        self._store = TieredStore.open(
            config.store,
            kv_spec=kv_spec,
            identity=identity,
            host_bytes=host_cache_bytes(config),
            disk_bytes=config.disk_cache_bytes,
            device=self._pool if config.device_cache_bytes else None,
            kv_dtype=config.disk_kv_dtype,
            on_read=self.rates.on_disk_read(disk_link),
            index=config.store_index,
        )
        self._variants = VariantIndex(
            self._store,
            self._costs,
            policy=config.eviction_policy,
            max_variants=config.max_variants,
            expected_share=lambda cci: expected_share(self._expected, cci),
        )
        self._planner = PrefillPlanner(self._model, self._store, self._variants, self.rates, config, self._pool)
        self._capture = PrefillCapture(self._model, self._store, self._variants, self._planner, config)
        self._preloader = Preloader(
            self._store, budget_bytes=config.preload_bytes, must_wait=lambda: self._planner.is_reading
        )
        self._sizes = sizes_of(model.config, config)
        self._steps = StepCompiler(
            self._model,
            self._pool,
            self._sizes,
            with_deviation="prefill_deviations" in strategy.needs,
            with_question="question" in strategy.needs,
            with_tier=bool(config.device_cache_bytes),
        )
        self._compiler = BackgroundCompiler(self._model, self._steps)
        self._loop = BatchLoop(
            self._model,
            self._variants,
            self._store,
            self._pool,
            self.rates,
            config.scheduler_settings(self._pool.num_pages, PAGE_TOKENS, self._sizes.context_tokens),
            max_retries=config.max_retries,
            with_mass=self._sizes.with_mass,
            apply_changes=lambda: self._watcher.apply(),
        )
        self._background = background = BackgroundPrefills(
            self._loop,
            self._planner,
            lambda prefilled, mode: self._submission.background_report(prefilled, mode),
        )
        maintenance = Maintenance(self._capture, background, self._variants, self._exclusive, max_model_len=limit)
        self._shadow = ShadowChecks(background, model.eos_ids, ratio=config.shadow_ratio, target=config.shadow_target)
        passage_frame = PassageFrame(frame, self._builder)
        self._submission = RequestSubmission(
            model,
            self._planner,
            self._capture,
            self._variants,
            self._costs,
            self._loop,
            self._shadow,
            self._settings,
            self.calibration,
            passage_frame.variant_ids,
            is_shared=config.shares_computation,
        )
        documents = DocumentCache(self._capture.unprepared, self._variants, self._store)
        warmer = PassageWarmer(
            self._capture,
            background.run,
            self._variants,
            passage_frame,
            self._exclusive,
            max_model_len=limit,
        )
        pins = DocumentPins(self._variants, self._store, max_variants=config.max_variants, share=config.pin_share)
        self._variants.spare(pins)
        if not config.read_only:
            documents.tend_erasures()
        self.documents = EngineDocuments(
            config,
            documents,
            warmer,
            pins,
            self._variants,
            self._store,
            self.rates,
            self._builder,
            lambda request: self.assemble(request, answer=False),
            self._exclusive,
            max_model_len=limit,
        )
        self.cache = EngineCache(
            config,
            self.rates,
            self._variants,
            self._store,
            documents,
            warmer,
            maintenance,
            self._shadow,
            ChunkCache(self._store, self._variants, identity, model.name, config.max_variants, self._exclusive),
            self._loop,
            self._exclusive,
        )
        self.orders = PrefillOrders(
            config,
            self.rates,
            self._store,
            self._variants,
            self._planner,
            warmer,
            self._loop,
            self._exclusive,
            max_model_len=limit,
            vocab_size=model.config.vocab_size,
        )
        self._watcher = VariantIndexUpdater(
            self._store.change_feed, maintenance.apply_changes, self._exclusive, self.cache.refresh
        )
        self._closed = False
        self._watcher.start()

    @classmethod
    def from_pretrained(cls, model: str | Path, *, progress: Progress | None = None, **settings: Any) -> Engine:
        """Creates an engine from a Hugging Face model directory, the embedded model ("demo") or random weights
        ("random:NAME"); see `ccjax.loading.model.load_model`.

        Args:
          progress: called with (stage, done, total) while weights load.
          settings: fields of `EngineConfig`.

        Raises:
          ConfigError: a setting is unknown or out of range, the directory or preset does not exist, or the model does
            not fit into device memory.
          CheckpointError: model files are missing, damaged or inconsistent.
          StoreIdentityError, StoreUnavailableError: the store has another format version, or cannot be opened.
        """
        config = EngineConfig(**settings)
        with_pool(model_config(model, tokenizer=config.tokenizer), config)  # raises if the model does not fit
        loaded = load_model(
            model,
            dtype=config.dtype,
            quantization=config.quantization,
            tokenizer=config.tokenizer,
            tensor_parallel_size=config.tensor_parallel_size,
            progress=progress,
        )
        return cls(loaded, config)

    def generate(
        self,
        question: str,
        documents: Sequence[Document | Mapping[str, Any]] = (),
        *,
        max_new_tokens: int | None = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        reuse: ReuseMode = "bounded",
        quality_target: float | None = None,
        truncate: bool = False,
    ) -> Response:
        """Answers `question` over `documents` (`Document`s or mappings with "text", "id", "title", "version").

        Raises:
          RequestError: an argument is empty, of the wrong type or out of range; the message names it.
          ContextLengthError: prompt and answer do not fit and `truncate` is off.
        """
        if not isinstance(question, str) or not question.strip():
            raise RequestError("question", f"wanted a non-empty string, got {question!r}")
        request = Request(
            messages=[{"role": "user", "content": question}],
            documents=documents_from(documents),
            sampling=SamplingParams(max_new_tokens, temperature, top_p, stops_from(stop), seed),
            reuse=reuse,
            quality_target=quality_target,
            truncate=truncate,
        )
        return self.run(request)

    def generate_from_tokens(
        self,
        segments: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        reuse: ReuseMode = "bounded",
        truncate: bool = False,
    ) -> Response:
        """Answers a prompt that the caller tokenized: the first segment is the system prompt (may be empty), the last
        one the question, each one between them a passage.

        Raises:
          RequestError, ContextLengthError: as `generate`.
        """
        sampling = SamplingParams(max_new_tokens, temperature, top_p, (), seed)
        return self.run(Request(segments=segments, sampling=sampling, reuse=reuse, truncate=truncate))

    def run(self, request: Request) -> Response:
        """Runs a request and returns its complete response."""
        response = None
        for delta in self.stream(request):
            response = delta.response
        assert response is not None
        return response

    def check_queue_limit(self, flow: str) -> None:
        """Raises OverloadError if `submit` would for a request of this flow."""
        self._loop.check_queue_limit(flow)

    def validate(self, request: Request) -> int:
        """Checks a request without running it and returns its number of prompt tokens.

        Raises:
          RequestError, ContextLengthError: as `run`.
        """
        return self.assemble(request).num_tokens

    def assemble(self, request: Request, *, answer: bool = True) -> Prompt:
        """Checks a request without running it and returns its tokenized prompt, for `submit`.

        Args:
          answer: the prompt must leave room for an answer.

        Raises:
          RequestError, ContextLengthError: as `run`.
        """
        return assemble(
            request,
            self._builder,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            answer=answer,
        )

    def preload(self, request: Request) -> Preload:
        """Starts reading what the request will probably reuse from disk, while other requests run; returns at once.
        Close the returned object once the request has its first token or is abandoned."""
        contract = self._submission.contract(request)
        return self._preloader.add(
            lambda: self._planner.would_load(self.assemble(request), contract.mode, contract.settings)
        )

    def stream(self, request: Request, *, is_cancelled: IsCancelled | None = None) -> Iterator[Delta]:
        """Streams the answer as deltas; the last one carries the `Response`. Closing the iterator cancels the request.

        Args:
          is_cancelled: called between the layers of the prefill, before the first delta, when the iterator cannot be
            closed yet. Once it returns True, the stream ends without a delta, and nothing that was computed is kept.

        Raises:
          RequestError, ContextLengthError: immediately.
          OverloadError: when the iterator is first advanced.
        """
        started = time.perf_counter()
        prompt = self.assemble(request)
        return self._submission.stream(request, prompt, time.perf_counter() - started, is_cancelled)

    def submit(
        self,
        request: Request,
        emit: Emit,
        *,
        on_start: Callable[[], None] = lambda: None,
        is_cancelled: IsCancelled = lambda: False,
        prompt: Prompt | None = None,
    ) -> Callable[[], None]:
        """Queues a request and returns a function that cancels it at any time, from any thread.

        Args:
          emit: receives the deltas in order, the last one with the response, or the exception that ends the answer
            (CancelledError if it was cancelled). Called on the engine's thread; must return at once.
          on_start: called on that thread when the request leaves the queue.
          is_cancelled: called on that thread between the layers of a prefill and between decode steps.
          prompt: the result of `assemble` for this request, if it was called.

        Raises:
          RequestError, ContextLengthError, OverloadError: immediately.
          RuntimeError: the engine is closed.
        """
        started = time.perf_counter()
        prompt = prompt or self.assemble(request)
        return self._submission.submit(request, prompt, time.perf_counter() - started, emit, on_start, is_cancelled)

    @contextlib.contextmanager
    def _exclusive(self, *, wait: bool = True) -> Iterator[bool]:
        """Gives exclusive access: no prefill runs meanwhile. Without `wait`, yields False instead of waiting for a
        request or another thread."""
        with self._loop.paused(wait=wait) as is_ours:
            if is_ours:
                self._watcher.apply()
            yield is_ours

    def prefill_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Computes the logits [num_tokens, vocab], float32, of a full prefill; the chunk-cache is not read or written.

        Raises:
          RequestError: no tokens, or an id outside the vocabulary.
          ContextLengthError: more tokens than `max_model_len`.
        """
        if len(token_ids) == 0:
            raise RequestError("token_ids", "wanted at least one token")
        sampling = SamplingParams(max_new_tokens=None)
        prompt = self.assemble(Request(segments=[(), token_ids], sampling=sampling), answer=False)
        prompt = dataclasses.replace(prompt, max_new_tokens=1)
        logits = self._background.run(prompt, "off", num_logits=len(token_ids), is_urgent=True).prompt_logits
        assert logits is not None
        return logits

    @property
    def batch_counts(self) -> BatchCounts:
        """Pages of device memory; numbers of running and waiting requests, preemptions and retries."""
        return self._loop.counts

    def warmup(self, progress: Progress | None = None, *, only_first: bool = False) -> None:
        """Compiles the steps for all sizes up to `max_model_len`, so that no request has to wait for a compilation.

        Args:
          only_first: compile only a few sizes that cover all others; requests are padded to these until `compile_one`
            has compiled theirs. Ignored for a model over several devices, which cannot compile while requests run.
        """
        with self._exclusive():
            is_all = not only_first or not self._steps.is_apart
            self._steps.warm_up(self._steps.all() if is_all else self._steps.first(), progress)
            if not is_all:
                self._compiled.substitute(self._steps.all())

    def compile_one(self, *, is_cancelled: IsCancelled | None = None) -> bool:
        """Compiles, in idle time, one size that `warmup` left out, first those that requests were padded for. Requests
        can run meanwhile. Returns False if none was left.

        Args:
          is_cancelled: polled; once it returns True, the call returns and the compilation goes on in the background.

        Raises:
          RuntimeError: a size is left, but the engine is closed.
        """
        return self._compiler.compile_next(is_cancelled)

    @property
    def num_sizes_left(self) -> int:
        """Sizes that `compile_one` still has to compile."""
        return self._compiled.num_left

    def memory_plan(self) -> MemoryPlan:
        """How a device's memory is divided, computed from the shapes of model and steps."""
        plan = memory_plan(self.model_config, self.config)
        return dataclasses.replace(plan, pool=self._pool.num_pages * self._pool.page_bytes // kv_shards(plan.shapes))

    def close(self) -> None:
        """Waits for the submitted requests, completes pending writes, closes the store and frees all KV memory. May be
        called twice."""
        if self._closed:
            return
        self._closed = True
        self._watcher.close()
        self._loop.close()
        self._compiler.close()
        self._preloader.close()
        self._store.close()
        self.cache.save_hints()
        self.cache.tidy()
        self._pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

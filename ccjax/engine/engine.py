"""The public engine: takes requests and returns answers with reuse reports. Combines loading, runner, cache and batch
loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.assembly import assemble
from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.documents.frame import PassageFrame, frame_documents
from ccjax.cache.queue_preload import Preload
from ccjax.cache.warming.passages import PassageWarmer
from ccjax.config import EngineConfig
from ccjax.engine.background import BackgroundPrefills
from ccjax.engine.batch.group import Caller, Emit, GroupParts
from ccjax.engine.batch.loop import BatchCounts, BatchLoop
from ccjax.engine.coarse_profile import CoarseProfile
from ccjax.engine.contracts import ReuseContracts
from ccjax.engine.engine_cache import EngineCache
from ccjax.engine.engine_documents import EngineDocuments
from ccjax.engine.maintenance import Maintenance
from ccjax.engine.prefill_orders import PrefillOrders
from ccjax.engine.shadow import ShadowChecks
from ccjax.engine.submission import RequestSubmission
from ccjax.errors import ConfigError, RequestError
from ccjax.loading.calibration import calibration_of
from ccjax.loading.devices import with_dtype
from ccjax.loading.model import LoadedModel, Progress, load_model, model_config, prompt_builder
from ccjax.loading.prefill_profile import KeptProfile
from ccjax.models.llama3.config import LlamaConfig
from ccjax.policy.strategies import expected_share, get_strategy
from ccjax.prompts import Prompt
from ccjax.requests import Delta, Request, Response, documents_from, stops_from
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.device import Device
from ccjax.runner.device_memory import longest, with_pool
from ccjax.runner.memory import MemoryPlan
from ccjax.sampling import Constraint, SamplingParams
from ccjax.store.objects import open_root
from ccjax.store.throttle import ThrottledLink
from ccjax.text import CallForm, Grammars, PromptBuilder, Tokenizer
from ccjax.types import Document, ReuseMode


class Engine:
    """A loaded model with its chunk-caches. Thread-safe; requests run together, in one batch.

    Use as a context manager or call `close`, which completes pending writes to the disk tier. `disk_link` throttles
    reads from the disk tier, `device_link` copies of stored KV to the device, for tests and benchmarks of slow ones.

    Attributes:
      documents: operations on cached documents: warm, pin, invalidate, erase, list.
      cache: operations on the whole cache: usage, maintenance, snapshots.
      orders: prefills that engines on one store order from each other.
      call_form: the form in which the model is expected to call tools.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        disk_link: ThrottledLink | None = None,
        device_link: ThrottledLink | None = None,
    ) -> None:
        self.config = config = with_pool(model.config, config)
        self.model_name = model.name
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.model_config: LlamaConfig = model.config
        self.max_model_len = limit = longest(model.config, config)
        if max(config.ranking_layers or (0,)) >= model.config.num_layers:
            wanted = f"layers below {model.config.num_layers}, the model's number"
            raise ConfigError(f"ranking_layers: wanted {wanted}, got {config.ranking_layers}")
        self._builder: PromptBuilder | None = None
        if model.tokenizer is not None and model.template is not None:
            self._builder = prompt_builder(model.tokenizer, model.template, config.system_prompt)
        is_framed = get_strategy(config.strategy).prepares_behind_frame
        frame = PassageFrame(frame_documents(config.frame) if is_framed else (), self._builder)
        calibration = calibration_of(model.fingerprint, model.directory, config.calibration)
        contracts = ReuseContracts(config.planner_settings(model.config.num_layers), calibration, frame)
        self.calibration = calibration
        expected = contracts.contract("bounded").settings

        self._device = Device.open(model, config)
        self._chunks = chunks = ChunkCache.open(
            model,
            self._device,
            config,
            frame,
            lambda cci: expected_share(expected, cci),
            disk_link=disk_link,
            device_link=device_link,
        )
        self.rates = chunks.rates
        self._loop = loop = BatchLoop(self._device, chunks, config)
        self._grammars: Grammars | None = None
        if model.tokenizer is not None:
            self._grammars = Grammars(model.tokenizer, model.eos_ids, model.config.vocab_size)
        eos_ids, vocab_size = model.eos_ids, model.config.vocab_size
        parts = GroupParts(
            chunks, contracts, model.tokenizer, self._grammars, eos_ids, vocab_size, config.shares_computation
        )
        self._background = background = BackgroundPrefills(parts, loop)
        self._shadow = ShadowChecks(background, model.eos_ids, ratio=config.shadow_ratio, target=config.shadow_target)
        self._submission = RequestSubmission(parts, loop, self._shadow)
        warmer = PassageWarmer(
            chunks.capture, background.run, chunks.variants, frame, loop.exclusive, max_model_len=limit
        )
        maintenance = Maintenance(chunks, background, loop.exclusive, max_model_len=limit)
        without_answer = functools.partial(self.assemble, answer=False)
        self.documents = EngineDocuments(
            config, chunks, warmer, self._builder, without_answer, loop.exclusive, max_model_len=limit
        )
        self.cache = EngineCache(config, model.name, chunks, warmer, maintenance, self._shadow, loop)
        self.orders = PrefillOrders(
            config, chunks, warmer, loop, max_model_len=limit, vocab_size=model.config.vocab_size
        )
        self.call_form: CallForm = "hermes" if self._builder is None else self._builder.call_form
        kept = KeptProfile(model.fingerprint, config.tensor_parallel_size)
        self._profile = CoarseProfile(
            config, chunks.costs, kept, background, max_model_len=limit, vocab_size=model.config.vocab_size
        )
        self._closed = False
        chunks.updater.start(loop.exclusive, self.cache.refresh)

    @classmethod
    def from_pretrained(cls, model: str | Path, *, progress: Progress | None = None, **settings: Any) -> Engine:
        """Creates an engine from a Hugging Face model directory, the embedded model ("demo") or random weights
        ("random:NAME"); see `ccjax.loading.model.load_model`.

        Args:
          progress: called with (stage, done, total) while weights load.
          settings: fields of `EngineConfig`; dtype "auto", the default, is float32 on CPU, bfloat16 elsewhere.

        Raises:
          ConfigError: a setting is unknown or out of range, the directory or preset does not exist, or the model does
            not fit into device memory.
          CheckpointError: model files are missing, damaged or inconsistent.
          StoreIdentityError, StoreUnavailableError: the store has another format version, or cannot be opened.
        """
        config = EngineConfig(**with_dtype(settings))
        with_pool(model_config(model, tokenizer=config.tokenizer), config)  # raises if the model does not fit
        if config.store is not None:
            open_root(
                config.store, read_only=config.read_only, is_optional=config.store_optional
            )  # or cannot be stored
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
        constraint: Constraint | None = None,
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
            sampling=SamplingParams(max_new_tokens, temperature, top_p, stops_from(stop), seed, constraint=constraint),
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
        if answer:
            self._check_sampling(request.sampling)
        return assemble(
            request,
            self._builder,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            answer=answer,
            find_known=self._chunks.variants.known.find,
        )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if self._grammars is None:
            for name in ("constraint", "bad_words"):
                if getattr(sampling, name):
                    raise RequestError(name, "wanted none: this model has no tokenizer")
        elif sampling.constraint is not None:
            self._grammars.matcher(sampling.constraint.grammar)  # compiles it
        size = self.model_config.vocab_size
        for name, tokens in sampling.named_tokens().items():
            outside = next((token for token in tokens if token >= size), None)
            if outside is not None:
                raise RequestError(name, f"wanted token ids from 0 to {size - 1}, got {outside}")

    def preload(self, request: Request) -> Preload:
        """Starts reading what the request will probably reuse from disk, while other requests run; returns at once.
        Close the returned object once the request has its first token or is abandoned."""
        contract = self._submission.contract(request)
        return self._chunks.preloader.add(
            lambda: self._chunks.planner.would_load(self.assemble(request), contract.mode, contract.settings)
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
        return self._submission.start(
            request, prompt, time.perf_counter() - started, Caller(emit, on_start, is_cancelled)
        )

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
        with self._loop.exclusive():
            self._device.warm_up(progress, only_first=only_first)

    def compile_one(self, *, is_cancelled: IsCancelled | None = None) -> bool:
        """Compiles, in idle time, one size that `warmup` left out, first those that requests were padded for. Requests
        can run meanwhile. Returns False if none was left.

        Args:
          is_cancelled: polled; once it returns True, the call returns and the compilation goes on in the background.

        Raises:
          RuntimeError: a size is left, but the engine is closed.
        """
        return self._device.compile_one(is_cancelled)

    def profile_one(self, *, is_cancelled: IsCancelled | None = None) -> bool:
        """Measures, in idle time, one of the prefills by which PGDSF values chunks, if no profile was given or kept.
        Returns False if none was left, or if `is_cancelled`, which is polled, returned True."""
        return self._profile.measure_one(is_cancelled)

    @property
    def num_sizes_left(self) -> int:
        """Sizes that `compile_one` still has to compile."""
        return self._device.compiled.num_left

    def memory_plan(self) -> MemoryPlan:
        """How a device's memory is divided, computed from the shapes of model and steps."""
        return self._device.memory_plan(self.config)

    def close(self) -> None:
        """Waits for the submitted requests, completes pending writes, closes the store and frees all KV memory. May be
        called twice."""
        if self._closed:
            return
        self._closed = True
        self._chunks.updater.close()
        self._loop.close()
        if self._grammars is not None:
            self._grammars.close()
        self._device.compiler.close()
        self._chunks.preloader.close()
        if self._chunks.device_preloader is not None:
            self._chunks.device_preloader.close()
        self._chunks.store.close()
        self.cache.save_hints()
        self.cache.tidy()
        self._device.pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

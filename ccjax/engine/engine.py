"""The public engine: one request in, an answer and a reuse report out.

The only place where policy, store and models meet. Runs one request at a time; knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.engine.answer import Answer
from ccjax.engine.capture import capture_variants
from ccjax.engine.config import EngineConfig
from ccjax.engine.decode import Decoder
from ccjax.engine.loading import LoadedModel, Progress, load_model
from ccjax.engine.prefill import Prefiller, PrefillResult, ReadLayers
from ccjax.engine.prompts import Prompt, assemble
from ccjax.engine.report import build_report
from ccjax.engine.requests import Delta, Request, Response, SamplingParams, documents_from, stops_from
from ccjax.engine.variants import VariantIndex
from ccjax.engine.warmup import shapes, warm_up
from ccjax.errors import ConfigError, RequestError
from ccjax.policy.planner import plan_prefill
from ccjax.text import PromptBuilder, Tokenizer
from ccjax.types import Document, PrefillPlan, ReuseMode, ReuseReport, VariantId
from models.llama3.config import LlamaConfig
from store.errors import ShardCorruptError, ShardNotFoundError, StoreError
from store.spec import KVSpec, StoreIdentity
from store.tickets import LoadTicket
from store.tiered import TieredStore, TierUsage

logger = logging.getLogger(__name__)

_LONGEST_DEFAULT = 8192


class _LoadFailedError(Exception):
    """A planned variant could not be read; the prefill must be planned anew without it."""

    def __init__(self, variant_id: VariantId, cause: StoreError) -> None:
        super().__init__(f"variant {variant_id}: {cause}")
        self.variant_id = variant_id
        self.cause = cause


class Engine:
    """A loaded model with its chunk-caches. Thread-safe; requests run one after another.

    Use as a context manager or call `close`, which writes out what the disk tier has not taken yet.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self.model_name = model.name
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.model_config: LlamaConfig = model.config
        limit = config.max_model_len or min(model.config.max_position_embeddings, _LONGEST_DEFAULT)
        if limit > model.config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len: wanted at most {model.config.max_position_embeddings} (the model's own limit), "
                f"got {limit}"
            )
        self.max_model_len = limit
        self._eos_ids = model.eos_ids
        self._builder: PromptBuilder | None = None
        if model.tokenizer is not None and model.template is not None:
            wording = {} if config.system_prompt is None else {"system_prompt": config.system_prompt}
            self._builder = PromptBuilder(model.tokenizer, model.template, **wording)
        self._prefiller = Prefiller(model.params, model.config)
        self._settings = config.planner_settings()
        self._store = TieredStore.open(
            config.store,
            kv_spec=KVSpec(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim, config.dtype),
            identity=StoreIdentity(model.fingerprint, config.tenant_salt),
            host_bytes=config.host_cache_bytes,
            disk_bytes=config.disk_cache_bytes,
        )
        self._variants = VariantIndex(self._store, max_variants=config.max_variants)
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._closed = False

    @classmethod
    def from_pretrained(cls, model: str | Path, *, progress: Progress | None = None, **settings: Any) -> Engine:
        """The engine of a Hugging Face model directory, or of the embedded model for "demo".

        Args:
          progress: called with (stage, done, total) while weights load.
          settings: fields of `EngineConfig`.

        Raises:
          ConfigError: a setting is unknown or out of range, or the directory does not exist.
          CheckpointError: model files are missing, damaged or do not fit together.
          StoreIdentityError, StoreUnavailableError: the store belongs to another model, or cannot be opened.
        """
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(f"{unknown[0]}: no such setting; wanted one of {sorted(known)}")
        config = EngineConfig(**settings)
        return cls(load_model(model, dtype=config.dtype, progress=progress), config)

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
        truncate: bool = False,
    ) -> Response:
        """The answer to `question` behind `documents` (`Document`s or mappings with "text", "id", "title", "version").

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
        """The answer for callers that tokenize themselves: the first segment is the system prompt (may be empty), the
        last the question, each one between a passage.

        Raises:
          RequestError, ContextLengthError: as `generate`.
        """
        sampling = SamplingParams(max_new_tokens, temperature, top_p, (), seed)
        return self.run(Request(segments=segments, sampling=sampling, reuse=reuse, truncate=truncate))

    def run(self, request: Request) -> Response:
        """The whole answer to a request."""
        response = None
        for delta in self.stream(request):
            response = delta.response
        assert response is not None
        return response

    def validate(self, request: Request) -> int:
        """Number of prompt tokens of a request that could run; raises what `run` would raise before its first step."""
        return self._assemble(request).num_tokens

    def stream(self, request: Request) -> Iterator[Delta]:
        """The answer piece by piece; the last delta carries the `Response`. Closing the iterator cancels the request.

        Waits while another request runs, and holds the engine until it is exhausted or closed.

        Raises:
          RequestError, ContextLengthError: at once.
          RuntimeError: this thread has another stream that it neither exhausted nor closed.
        """
        started = time.perf_counter()
        prompt = self._assemble(request)
        return self._serialized(request, prompt, time.perf_counter() - started)

    def _serialized(self, request: Request, prompt: Prompt, assemble_s: float) -> Iterator[Delta]:
        with self._exclusive():
            yield from self._answer(request, prompt, assemble_s)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One user of the device at a time. A thread that still holds it is told so: waiting would be for ever."""
        if self._holder == threading.get_ident():
            raise RuntimeError("engine: this thread has an unfinished stream; exhaust or close it first")
        with self._lock:
            if self._closed:
                raise RuntimeError("engine: closed already")
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def prefill_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits [num_tokens, vocab], float32, of a plain full prefill; no chunk-cache is read or written.

        Raises:
          RequestError: no tokens, or an id outside the vocabulary.
          ContextLengthError: more tokens than `max_model_len`.
        """
        if len(token_ids) == 0:
            raise RequestError("token_ids", "wanted at least one token")
        sampling = SamplingParams(max_new_tokens=None)
        prompt = self._assemble(Request(segments=[(), token_ids], sampling=sampling), answer=False)
        with self._exclusive():
            result = self._prefiller.run(prompt.token_ids, self._plan(prompt, "off", {}))
            return self._prefiller.all_logits(result)

    def warmup(self, progress: Progress | None = None) -> None:
        """Compiles the steps for all sizes up to `max_model_len`, so that no request pays for it."""
        with self._exclusive():
            warm_up(self._prefiller, shapes(self.max_model_len), progress)

    def store_usage(self) -> dict[str, TierUsage]:
        """Bytes, variants and counters of every tier."""
        return self._store.usage()

    @property
    def num_variants(self) -> int:
        """Chunk variants that can be reused now."""
        return len(self._variants)

    def flush(self) -> None:
        """Waits until the disk tier has taken everything."""
        self._store.flush()

    def close(self) -> None:
        """Waits for a running request, writes out what is pending and lets go of the store. May be called twice.

        Raises:
          RuntimeError: this thread has a stream that it neither exhausted nor closed.
        """
        if self._closed:
            return
        with self._exclusive():
            self._closed = True
            self._store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assemble(self, request: Request, *, answer: bool = True) -> Prompt:
        return assemble(
            request,
            self._builder,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            answer=answer,
        )

    def _answer(self, request: Request, prompt: Prompt, assemble_s: float) -> Iterator[Delta]:
        started = time.perf_counter() - assemble_s
        mode: ReuseMode = "off" if self._settings.strategy == "full" else request.reuse
        prefilled = self._prefill(prompt, mode)
        try:
            result = prefilled.result
            answer = Answer(request.sampling, self.tokenizer, self._eos_ids, prompt.question)
            delta = answer.push(self._prefiller.last_logits(result))
            ttft_s = time.perf_counter() - started
            report = self._report(prefilled, prompt, mode, request.reuse)
            decoder = Decoder(
                self._prefiller,
                result,
                num_prompt_tokens=prompt.num_tokens,
                max_new_tokens=prompt.max_new_tokens,
            )
            while answer.finish_reason is None:
                if delta.token_ids:
                    yield delta
                if answer.num_tokens == prompt.max_new_tokens:
                    break
                delta = answer.push(decoder.step(answer.last_token))
            del decoder
            yield answer.finish(
                delta,
                reuse=report,
                num_prompt_tokens=prompt.num_tokens,
                ttft_s=ttft_s,
                total_s=time.perf_counter() - started,
            )
        finally:
            # Also when the client went away: what was computed serves the next request.
            if prefilled.ticket is not None:
                self._capture(prefilled, prompt)
                self._store.complete_load(prefilled.ticket)

    def _plan(self, prompt: Prompt, mode: ReuseMode, candidates: Mapping[Any, Any]) -> PrefillPlan:
        return plan_prefill(
            "", prompt.planned_chunks, len(prompt.question), candidates, mode=mode, settings=self._settings
        )

    def _prefill(self, prompt: Prompt, mode: ReuseMode) -> _Prefilled:
        """Plan, load and compute; a variant that cannot be read is dropped and the prompt planned again without it."""
        started = time.perf_counter()
        if mode == "off":
            plan = self._plan(prompt, mode, {})
            planned = time.perf_counter()
            result = self._prefiller.run(prompt.token_ids, plan)
            return _Prefilled(plan, result, None, None, planned - started, planned, 0)
        failed: set[VariantId] = set()
        while True:
            known = self._variants.of_chunks({chunk.chunk_id for chunk in prompt.chunks})
            usable = {
                chunk: tuple(meta for meta in metas if meta.variant_id not in failed) for chunk, metas in known.items()
            }
            plan = self._plan(prompt, mode, usable)
            planned = time.perf_counter()
            ticket = self._store.prepare_load(plan.pin)
            read_layers = _reader(ticket)
            try:
                for variant_id in sorted(ticket.missing):
                    raise _LoadFailedError(VariantId(variant_id), ShardNotFoundError(variant_id))
                for variant_id in ticket.tiers:
                    ticket.prefetch(variant_id, 0, self.model_config.num_layers)
                result = self._prefiller.run(
                    prompt.token_ids, plan, read_layers=read_layers, collect=not self.config.read_only
                )
            except _LoadFailedError as error:
                self._store.complete_load(ticket)  # those that were read whole and sound may stay in host memory
                failed.add(error.variant_id)
                logger.warning("%s; its chunk is computed instead", error)
                if isinstance(error.cause, ShardCorruptError):
                    self._variants.discard(error.variant_id)
                elif isinstance(error.cause, ShardNotFoundError):
                    self._variants.forget(error.variant_id)
                continue
            except BaseException:
                self._store.complete_load(ticket, ok=False)
                raise
            return _Prefilled(plan, result, ticket, read_layers, planned - started, planned, len(failed))

    def _report(self, prefilled: _Prefilled, prompt: Prompt, mode: ReuseMode, wanted: ReuseMode) -> ReuseReport:
        return build_report(
            prefilled.plan,
            prompt,
            prefilled.result,
            mode=wanted,
            strategy="full" if mode == "off" else self._settings.strategy,
            num_layers=self.model_config.num_layers,
            tiers=prefilled.ticket.tiers if prefilled.ticket is not None else {},
            plan_s=prefilled.plan_s,
            prefill_s=time.perf_counter() - prefilled.planned_at,
            failed_loads=prefilled.failed_loads,
        )

    def _capture(self, prefilled: _Prefilled, prompt: Prompt) -> None:
        """Credits the used variants and stores the new ones; a failure costs later reuse, never the answer."""
        plan = prefilled.plan
        try:
            for segment in plan.segments:
                if segment.variant_id is not None:
                    self._variants.credit(segment.variant_id, segment.cfo or 0.0)
            if self.config.read_only:
                return
            known = self._variants.of_chunks({chunk.chunk_id for chunk in prompt.chunks})
            kept = set(plan.pin)  # nor do the new variants of one prompt push each other out
            for meta, kv in capture_variants(plan, prefilled.result, known, prefilled.read_layers):
                if self._variants.add(meta, kv, pinned=kept):
                    kept.add(meta.variant_id)
        except Exception:
            logger.exception("the chunk-caches of a prompt could not be stored")


@dataclasses.dataclass(frozen=True)
class _Prefilled:
    """A finished prefill with what its report and capture need; `ticket` is None where reuse was off."""

    plan: PrefillPlan
    result: PrefillResult
    ticket: LoadTicket | None
    read_layers: ReadLayers | None
    plan_s: float
    planned_at: float
    failed_loads: int


def _reader(ticket: LoadTicket) -> ReadLayers:
    def read(variant_id: VariantId, first: int, last: int) -> np.ndarray:
        try:
            return ticket.read_layers(variant_id, first, last)
        except StoreError as error:
            raise _LoadFailedError(variant_id, error) from error

    return read

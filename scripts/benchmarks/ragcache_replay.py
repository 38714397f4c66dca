"""Shared by the parts of the RAGCache benchmark: real engines over a real retrieval trace, with requests one after the
other, at given times, or with a fixed number in progress."""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.prefill_measurement import measure_prefills
from ccjax.loading.model import LoadedModel
from ccjax.loading.prefill_profile import PrefillProfile
from ccjax.requests import Delta, Request, Response, SamplingParams
from ccjax.text import PromptBuilder
from ccjax.types import Document, ReuseReport
from scripts.benchmarks.common import BenchmarkError
from scripts.benchmarks.serve_workload import WorkloadPassage, WorkloadQuestion

PROFILED_CACHED = (0, 128, 256, 512)
PROFILED_NEW = (16, 64, 128, 256, 384, 512)
PROFILE_REPETITIONS = 5
RECOMPUTE_RATIO = 0.3
"""Of `cachecraft`, for passages reused behind another prefix, as in `bench.py serve`."""
BATCHED_TOKENS = 512
"""Tokens of a pack: on a CPU larger ones save nothing, and every size is compiled."""
_PROFILE_BYTES = 1 << 28
_ANSWER = SamplingParams(max_new_tokens=1, ignore_eos=True)
_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Served:
    """One answered request.

    Attributes:
      ttft_s: time to first token, from the planned arrival if there is one, else from the start of its work.
      num_hits, num_documents: reused passages of the prompt, and all of them.
      computed_share: of the prompt's token-layers.
    """

    ttft_s: float
    num_hits: int
    num_documents: int
    computed_share: float


@dataclasses.dataclass(frozen=True)
class ReplayBench:
    """Shared by all parts.

    Attributes:
      past, measured: the first half of the requests, which fills a tier, and the second.
      profile: file with T(cached, new) of the model on this machine.
      distinct_bytes: KV of all passages in requests, each counted once.
    """

    options: argparse.Namespace
    model: LoadedModel
    past: Sequence[WorkloadQuestion]
    measured: Sequence[WorkloadQuestion]
    profile: Path | None
    distinct_bytes: int
    progress: Progress

    def engine(self, strategy: str, *, policy: str, share: float, **settings: Any) -> Engine:
        """A fresh engine whose host tier has space for that share of `distinct_bytes`."""
        config = EngineConfig(
            strategy=strategy,
            eviction_policy=policy,
            host_cache_bytes=self.budget_bytes(share),
            prefill_profile=None if self.profile is None else str(self.profile),
            recompute_ratio=RECOMPUTE_RATIO,
            focus_window=None,
            max_model_len=self.options.max_model_len,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=self.options.seats,
            **settings,
        )
        return Engine(self.model, config)

    def budget_bytes(self, share: float) -> int:
        """Bytes of that share of `distinct_bytes`."""
        return max(1, round(share * self.distinct_bytes))


def documents_of(passages: Sequence[WorkloadPassage]) -> tuple[Document, ...]:
    """Passages as the engine's documents."""
    return tuple(Document(passage.text, str(passage.id), passage.title) for passage in passages)


def request_of(text: str, documents: Sequence[Document]) -> Request:
    """A question with its passages, answered with one token."""
    return Request(
        messages=[{"role": "user", "content": text}], documents=tuple(documents), sampling=_ANSWER, truncate=True
    )


def distinct_bytes(model: LoadedModel, questions: Sequence[WorkloadQuestion]) -> int:
    """Bytes of the KV of all passages in questions, each counted once."""
    assert model.tokenizer is not None and model.template is not None
    builder = PromptBuilder(model.tokenizer, model.template)
    passages = {passage.id: passage for question in questions for passage in question.passages}
    num_tokens = sum(len(builder.document_ids(document)) for document in documents_of(list(passages.values())))
    return kv_spec_of(model.config, "float32").num_bytes(num_tokens)


def count_hits(report: ReuseReport) -> tuple[int, int]:
    """Passages of a prompt that were reused, and all of them (RAGCache sec. 7.4: "the ratio of hit documents to
    retrieved ones"). A partly recomputed passage is a hit; the system prompt is no passage."""
    documents = [document for document in report.per_document if document.role == "document"]
    return sum(document.computed_tokens == 0 for document in documents), len(documents)


def measure_profile(bench: ReplayBench) -> PrefillProfile:
    """T(cached, new) of the model on this machine, by the library's own profiler."""
    import jax

    longest = (bench.options.max_model_len - 1) // 2
    cached, new = (tuple(count for count in counts if count <= longest) for counts in (PROFILED_CACHED, PROFILED_NEW))
    task = bench.progress.add_task("profile of prefills")
    share = _PROFILE_BYTES / bench.distinct_bytes
    with bench.engine("prefix", policy="pgdsf", share=share) as engine:
        grid = measure_prefills(
            engine,
            cached,
            new,
            repetitions=2 if bench.options.quick else PROFILE_REPETITIONS,
            progress=lambda done, total: bench.progress.update(task, completed=done, total=total),
        )
    bench.progress.remove_task(task)
    return PrefillProfile(bench.model.fingerprint, jax.devices()[0].device_kind, grid)


def ask(engine: Engine, question: WorkloadQuestion) -> Served:
    """Answers one question on an otherwise idle engine."""
    response = engine.run(request_of(question.text, documents_of(question.passages)))
    return Served(response.ttft_s, *count_hits(response.reuse), response.reuse.computed_share)


def ask_all(engine: Engine, questions: Sequence[WorkloadQuestion], advance: Callable[[], None]) -> list[Served]:
    """Answers questions one after the other."""
    served = []
    for question in questions:
        served.append(ask(engine, question))
        advance()
    return served


def closed_loop(
    engine: Engine, questions: Sequence[WorkloadQuestion], concurrency: int, advance: Callable[[], None]
) -> float:
    """Answers per second with a constant number of requests in progress."""
    free = threading.Semaphore(concurrency)

    def answered() -> None:
        free.release()
        advance()

    started_s = time.perf_counter()
    line = _Line(engine, answered)
    for question in questions:
        if not free.acquire(timeout=_TIMEOUT_S):
            raise BenchmarkError(f"an answer took more than {_TIMEOUT_S:g} s")
        line.submit(question, time.perf_counter())
    line.served()
    return len(questions) / (time.perf_counter() - started_s)


def open_loop(
    engine: Engine,
    questions: Sequence[WorkloadQuestion],
    times_s: Sequence[float],
    advance: Callable[[], None],
    *,
    on_traced: Callable[[Response, Served], None] | None = None,
) -> list[Served]:
    """Answers to requests that arrive at these times, however busy the engine is; TTFT counts from the planned arrival.
    With `on_traced`, requests have a trace, and it is called with every answer on the engine's thread."""
    line = _Line(engine, advance, on_traced)
    started_s = time.perf_counter()
    for question, at_s in zip(questions, times_s, strict=True):
        time.sleep(max(0.0, started_s + at_s - time.perf_counter()))
        line.submit(question, started_s + at_s)
    return line.served()


class _Line:
    """Submitted requests and their results."""

    def __init__(
        self, engine: Engine, advance: Callable[[], None], on_traced: Callable[[Response, Served], None] | None = None
    ) -> None:
        self._engine = engine
        self._advance = advance
        self._on_traced = on_traced
        self._changed = threading.Condition()
        self._served: dict[int, Served | Exception] = {}
        self._num_submitted = 0

    def submit(self, question: WorkloadQuestion, arrived_s: float) -> None:
        number = self._num_submitted
        self._num_submitted += 1

        def emit(event: Delta | Exception) -> None:
            """On the engine's thread. An answer has one token, so its only delta is the last one."""
            if isinstance(event, Exception):
                self._take(number, event)
            elif event.response is not None:
                report = event.response.reuse
                served = Served(time.perf_counter() - arrived_s, *count_hits(report), report.computed_share)
                if self._on_traced is not None:
                    self._on_traced(event.response, served)
                self._take(number, served)

        request = request_of(question.text, documents_of(question.passages))
        self._engine.submit(dataclasses.replace(request, trace=self._on_traced is not None), emit)

    def _take(self, number: int, event: Served | Exception) -> None:
        with self._changed:
            self._served[number] = event
            self._changed.notify_all()
        self._advance()

    def served(self) -> list[Served]:
        """Waits for all results; returns them in the order of submission."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._served) == self._num_submitted, timeout=_TIMEOUT_S):
                raise BenchmarkError(f"{self._num_submitted - len(self._served)} answers took over {_TIMEOUT_S:g} s")
        return list(_whole(self._served[number] for number in range(self._num_submitted)))


def _whole(events: Iterator[Served | Exception]) -> Iterator[Served]:
    for event in events:
        if isinstance(event, Exception):
            raise BenchmarkError(f"a request failed: {type(event).__name__}: {event}")
        yield event

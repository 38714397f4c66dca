"""Shared by the parts of the RAGCache benchmark: real engines over a real retrieval trace, with requests one after the
other, at given times, or with a fixed number in progress."""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.prefill_measurement import measure_prefills
from ccjax.loading.model import LoadedModel
from ccjax.loading.prefill_profile import PrefillProfile
from ccjax.requests import Delta, Request, SamplingParams
from ccjax.text import PromptBuilder
from ccjax.types import Document, ReuseReport
from scripts.benchmarks.common import BenchmarkError, Say
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
    say: Say

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
    documents = [document for document in report.per_document if document.role == "passage"]
    return sum(document.computed_tokens == 0 for document in documents), len(documents)


def reuse_figures(served: Sequence[Served]) -> dict[str, Any]:
    """Passages reused, all of them, their ratio, and the mean share of token-layers computed."""
    hits, documents = sum(answer.num_hits for answer in served), sum(answer.num_documents for answer in served)
    share = sum(answer.computed_share for answer in served) / len(served)
    return {"hits": hits, "documents": documents, "hit_ratio": hits / documents, "computed_share": share}


def measure_profile(bench: ReplayBench) -> PrefillProfile:
    """T(cached, new) of the model on this machine, by the library's own profiler."""
    import jax

    longest = (bench.options.max_model_len - 1) // 2
    cached, new = (tuple(count for count in counts if count <= longest) for counts in (PROFILED_CACHED, PROFILED_NEW))
    bench.say("profile of prefills")
    share = _PROFILE_BYTES / bench.distinct_bytes
    with bench.engine("prefix", policy="pgdsf", share=share) as engine:
        repetitions = 2 if bench.options.quick else PROFILE_REPETITIONS
        grid = measure_prefills(engine, cached, new, repetitions=repetitions)
    return PrefillProfile(bench.model.fingerprint, jax.devices()[0].device_kind, grid)


def ask(engine: Engine, question: WorkloadQuestion) -> Served:
    """Answers one question on an otherwise idle engine."""
    response = engine.run(request_of(question.text, documents_of(question.passages)))
    return _served(response.reuse, response.ttft_s)


def closed_loop(engine: Engine, questions: Sequence[WorkloadQuestion], concurrency: int) -> float:
    """Answers per second with a constant number of requests in progress."""
    free = threading.Semaphore(concurrency)
    started_s = time.perf_counter()
    answers = []
    for question in questions:
        if not free.acquire(timeout=_TIMEOUT_S):
            raise BenchmarkError(f"an answer took more than {_TIMEOUT_S:g} s")
        answers.append(_submit(engine, question, time.perf_counter()))
        answers[-1].add_done_callback(lambda _: free.release())
    for answer in answers:
        answer.result(_TIMEOUT_S)
    return len(questions) / (time.perf_counter() - started_s)


def open_loop(engine: Engine, questions: Sequence[WorkloadQuestion], times_s: Sequence[float]) -> list[Served]:
    """Answers to requests that arrive at these times, however busy the engine is; TTFT counts from the planned
    arrival."""
    started_s = time.perf_counter()
    answers = []
    for question, at_s in zip(questions, times_s, strict=True):
        time.sleep(max(0.0, started_s + at_s - time.perf_counter()))
        answers.append(_submit(engine, question, started_s + at_s))
    return [answer.result(_TIMEOUT_S) for answer in answers]


def _submit(engine: Engine, question: WorkloadQuestion, arrived_s: float) -> Future[Served]:
    """Queues a request."""
    answer: Future[Served] = Future()

    def emit(event: Delta | Exception) -> None:
        """On the engine's thread. An answer has one token, so its only delta is the last one."""
        if isinstance(event, Exception):
            answer.set_exception(BenchmarkError(f"a request failed: {type(event).__name__}: {event}"))
        elif event.response is not None:
            answer.set_result(_served(event.response.reuse, time.perf_counter() - arrived_s))

    engine.submit(request_of(question.text, documents_of(question.passages)), emit)
    return answer


def _served(report: ReuseReport, ttft_s: float) -> Served:
    return Served(ttft_s, *count_hits(report), report.computed_share)

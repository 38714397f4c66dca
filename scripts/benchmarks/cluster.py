"""Shared RAG-DCache: replicas without sharing, on one store, and with a generator for waiting requests (figs. 10, 11,
table V); and the overhead of front and Ray per request.

Real SQuAD questions arrive at a retrieving cluster of `scripts/serve.py --cluster ray` faster than it can answer them;
each pass has the same questions in another order. As in the paper only the first token is requested and memory keeps no
KV, so all reuse comes from the store.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks import cluster_report
from scripts.benchmarks.common import (
    BenchmarkError,
    Say,
    check_markers,
    data_folder,
    environment,
    fill_in,
    rows_of,
    spread,
    stages,
)
from scripts.benchmarks.serve_client import RequestRecord, closed_loop, open_loop
from scripts.benchmarks.serve_model import BenchModel, bench_model, cache_folder
from scripts.benchmarks.serve_server import scrape, serving
from scripts.benchmarks.serve_workload import arrival_times, poisson_gaps

SYSTEMS = ("none", "shared", "generator")
TIMEOUT_S = 1800.0
_PASSAGE_TOKENS = 480
"""Longer than almost every paragraph: a paragraph is a document, as in the paper."""
_OVERHEAD_REQUESTS = 100
QUICK = {"layers": 1, "width": 64, "requests": 8, "passes": 1, "documents": [2]}
QUICK |= {"no_overhead": True, "systems": ["none", "generator"]}
_SHOWN = ("layers", "width", "replicas", "requests", "passes", "load", "order_after_s", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with qa/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    add("--layers", type=int, default=8, help="of the model with random weights (%(default)s)")
    add("--width", type=int, default=1024, help="of that model, a multiple of 64 (%(default)s)")
    add("--replicas", type=int, default=2, help="(%(default)s, as in the paper)")
    add("--requests", type=int, default=100, help="different questions of a pass (%(default)s; the paper asks 1,000)")
    add("--passes", type=int, default=3, help="(%(default)s)")
    add("--documents", type=int, nargs="+", default=[1, 2], help="retrieved for a question (%(default)s)")
    add("--load", type=float, default=1.67, help="arrivals, in multiples of what the baseline can answer (%(default)s)")
    add("--order-after-s", type=float, default=0.5, help="requests that wait longer are ordered (%(default)s)")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(default: all)")
    add("--no-overhead", action="store_true", help="do not measure the overhead of front and Ray")
    add("--seed", type=int, default=0, help="of order and arrivals (default 0)")
    add("--markdown", type=Path, metavar="FILE", help="put the tables into that page")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints tables, and returns the raw figures."""
    data = data_folder(options.data)
    if options.markdown is not None:
        check_markers(options.markdown, [cluster_report.PART])
    model = bench_model(None, data, options.layers, options.width)
    cases, overhead = [], None
    with tempfile.TemporaryDirectory() as scratch, stages() as say:
        questions, paragraphs = _workload(data, options.requests, Path(scratch))
        if not options.no_overhead:
            overhead = _overhead(options, model, say)
        for num_documents in options.documents:
            cases += _passes(options, model, questions, paragraphs, num_documents, say)
    figures = {
        "environment": environment(),
        "options": {name: getattr(options, name) for name in _SHOWN},
        "overhead": overhead,
        "cases": cases,
    }
    cluster_report.show(figures)
    if options.markdown is not None:
        fill_in(options.markdown, {cluster_report.PART: cluster_report.page_part(figures)})
    return figures


def _workload(data: Path, count: int, folder: Path) -> tuple[list[str], Path]:
    """Questions, and a folder with the paragraphs that answer them."""
    rows = rows_of(data / "qa" / "squad_xquad_en.jsonl")
    if count > len(rows):
        raise BenchmarkError(f"--requests: wanted at most {len(rows)}, got {count}")
    collection = folder / "documents" / "squad.jsonl"
    collection.parent.mkdir()
    paragraphs = {doc["text"]: doc["title"] for row in rows for doc in row["docs"]}
    lines = (
        json.dumps({"_id": f"p{number}", "title": title, "text": text})
        for number, (text, title) in enumerate(paragraphs.items())
    )
    collection.write_text("\n".join(lines), encoding="utf-8")
    # Rows at regular distances: they are sorted by article, and a pass should contain all articles.
    step = len(rows) / count
    return [rows[int(number * step)]["question"] for number in range(count)], collection.parent


def _body(question: str, num_documents: int, *, reuse: str = "exact") -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "retrieval": {"top_k": num_documents},
        "reuse": reuse,
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _flags(options: argparse.Namespace, model: BenchModel, documents: Path | None, store: Path | None) -> list[str]:
    flags = [*model.flags, "--compile-cache-dir", str(cache_folder() / "compile")]
    flags += "--max-model-len 1024 --max-num-batched-tokens 512 --max-num-seqs 4 --max-queue 4096".split()
    flags += ["--no-repair", "--no-prepare", "--strategy", "prefix", "--host-cache-bytes", "1", "--preload-bytes", "0"]
    if documents is None:
        flags += ["--no-docs"]
    else:
        flags += ["--docs", str(documents), "--index-dir", str(documents.parent / "index")]
        flags += ["--chunk-tokens", str(_PASSAGE_TOKENS)]
    return flags if store is None else [*flags, "--store", f"file://{store}"]


def _passes(
    options: argparse.Namespace,
    model: BenchModel,
    questions: list[str],
    paragraphs: Path,
    num_documents: int,
    say: Say,
) -> Iterator[dict[str, Any]]:
    """A case for each pass of each system, over the same questions in the same orders at the same times."""
    rate = 0.0
    for system in options.systems:
        store = None if system == "none" else paragraphs.parent / f"store-{num_documents}-{system}"
        flags = _flags(options, model, paragraphs, store)
        flags += ["--cluster", "ray", "--replicas", str(options.replicas), "--log-level", "error"]
        if system == "shared":
            flags += ["--generators", "0"]
        elif system == "generator":
            flags += ["--generators", "1", "--order-after-s", str(options.order_after_s)]
        reuse = "off" if system == "none" else "exact"
        with serving(flags, say) as url:
            _warm_up(url, 4 * options.replicas, num_documents, reuse)
            rate = rate or options.load * _capacity(url, questions, num_documents, 4 * options.replicas)
            times_s = arrival_times(poisson_gaps(options.requests, options.seed), rate)
            for number in range(options.passes):
                say(f"k = {num_documents}, {system}: pass {number + 1}")
                order = random.Random(options.seed * 1000 + number).sample(questions, len(questions))
                before = scrape(url)
                bodies = [_body(question, num_documents, reuse=reuse) for question in order]
                records = open_loop(url, bodies, list(times_s), TIMEOUT_S)
                case = _figures(records, before, scrape(url))
                yield {"documents": num_documents, "system": system, "pass": number + 1, "rate": rate, **case}


def _warm_up(url: str, concurrency: int, num_documents: int, reuse: str) -> None:
    """Requests over artificial passages, so that every path has run once before anything is timed."""
    words = random.Random(0).choices(("river", "stone", "engine", "paper", "winter", "market", "signal"), k=4000)
    for round in range(3):
        bodies = []
        for number in range(2 * concurrency):
            body = _body(f"What is number {number}?", num_documents, reuse=reuse)
            del body["retrieval"]
            starts = [150 * ((number + place) % 20) for place in range(num_documents)]
            body["documents"] = [{"id": f"made-up-{at}", "text": " ".join(words[at : at + 130])} for at in starts]
            bodies.append(body)
        _check(closed_loop(url, bodies, concurrency if round else 1, TIMEOUT_S))


def _capacity(url: str, questions: list[str], num_documents: int, concurrency: int) -> float:
    """Answers a second without any cache, in closed loop."""
    bodies = [_body(question, num_documents, reuse="off") for question in questions[: max(8, len(questions) // 2)]]
    records = closed_loop(url, bodies, concurrency, TIMEOUT_S)
    _check(records)
    return len(records) / max(record.end_s for record in records)


def _figures(records: Sequence[RequestRecord], before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """The figures of one pass. Latency is from arrival to the end of the answer, which is its first token."""
    _check(records)
    span_s = max(record.end_s for record in records) - min(record.scheduled_s for record in records)
    grown = {
        name: after.get(f"ccjax_{name}_total", 0.0) - before.get(f"ccjax_{name}_total", 0.0)
        for name in ("compilations", "orders_placed", "preemptions", "variants_adopted", "store_index_changes")
    }
    return {
        "requests": len(records),
        "throughput": len(records) / span_s,
        "latency_ms": spread([record.end_s - record.scheduled_s for record in records]),
        "computed_share": sum(r.computed_tokens or 0.0 for r in records) / sum(r.prompt_tokens for r in records),
        "counters": grown,
    }


def _check(records: Sequence[RequestRecord]) -> None:
    failed = [record for record in records if record.status != "ok"]
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(records)} requests failed, the first: {failed[0].error}")


def _overhead(options: argparse.Namespace, model: BenchModel, say: Say) -> dict[str, Any]:
    """Latency of a short prompt, one at a time: of one server, and of one replica behind the front."""
    body = {**_body("What is it?", 1, reuse="off"), "retrieval": False}
    found: dict[str, Any] = {}
    for name, more in (("single", []), ("cluster", ["--cluster", "ray", "--replicas", "1"])):
        flags = [*_flags(options, model, None, None), *more, "--log-level", "error"]
        with serving(flags, say) as url:
            say(f"overhead, {name}")
            closed_loop(url, [body] * 20, 1, TIMEOUT_S)
            records = closed_loop(url, [body] * _OVERHEAD_REQUESTS, 1, TIMEOUT_S)
            _check(records)
            found[name] = spread([record.end_s - record.scheduled_s for record in records])
    return {**found, "median_ms": found["cluster"]["p50"] - found["single"]["p50"], "requests": _OVERHEAD_REQUESTS}

"""RAGCache's components: eviction policies, cache-aware order, answers that begin during the search, and the time for
decisions. Four tables compared with the paper's, from one run.

Weights are random: time and reuse are measured, not answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ccjax.cli.progress import bars
from scripts.benchmarks import ragcache_order, ragcache_policies, ragcache_report, ragcache_scheduling
from scripts.benchmarks.common import check, check_markers, data_folder, environment, fill_in, filled_in
from scripts.benchmarks.ragcache_replay import (
    BATCHED_TOKENS,
    RECOMPUTE_RATIO,
    ReplayBench,
    distinct_bytes,
    measure_profile,
)
from scripts.benchmarks.serve_model import bench_model, cache_folder
from scripts.benchmarks.serve_workload import WorkloadQuestion, load_trace, recorded_gaps

PARTS = ("policies", "order", "speculation", "scheduling")
STRATEGIES = ("prefix", "cachecraft")
HEAD_DIM = 64
"""Head dimension of the model with random weights, as in the small Llama-3.2 models."""
_USUAL = {"layers": 2, "width": 256, "requests": 1000, "budgets": [0.025, 0.05, 0.1, 0.2, 0.4], "order_requests": 500}
_USUAL |= {"order_budgets": [0.05, 0.1, 0.4], "vectors": 3_000_000, "clusters": 1024, "embedded": 1000}
_USUAL |= {"order_rounds": 3, "ratios": [0.125, 0.25, 0.5, 1.0], "searches": 60, "nodes": 100_000, "decisions": 1000}
_QUICK = {"layers": 2, "width": 64, "requests": 8, "budgets": [0.4], "order_requests": 4, "order_budgets": [0.4]}
_QUICK |= {"vectors": 4000, "clusters": 16, "embedded": 24, "ratios": [0.5, 1.0], "searches": 4}
_QUICK |= {"nodes": 300, "decisions": 30, "order_rounds": 2}
_COUNTS = ("passages", "seats", "max_model_len", "order_requests", "vectors", "clusters", "embedded", "stages")
_COUNTS += ("nodes", "decisions", "order_rounds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark. Defaults that --quick changes are set by `resolve`."""
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add("--data", type=Path, help="folder with rag_trace/, arrivals/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: random weights)")
    add("--layers", type=int, help="of the model with random weights (default 2)")
    add("--width", type=int, help=f"of that model, a multiple of {HEAD_DIM} (default 256)")
    add("--max-model-len", type=int, default=1024, help="longest prompt; passages are dropped beyond it (default 1024)")
    add("--passages", type=int, default=2, help="of a request, the best (default 2, as in the paper)")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="ways to reuse (default: both)")
    add("--requests", type=int, help="of the trace: half fill the tier, half are measured (default 1000)")
    add("--budgets", type=float, nargs="+", help="host memory, as shares of all passages' KV (default .025 to .4)")
    add("--order-budgets", type=float, nargs="+", help="the same, for the order (default 0.05 0.1 0.4)")
    add("--order-requests", type=int, help="of the measured half, at most (default 500)")
    kinds = ragcache_order.WORKLOADS
    text = "requests for the order: as recorded, or with the paper's popularity (default: both)"
    add("--order-workloads", nargs="+", choices=kinds, default=kinds, help=text)
    text = "each with its own saturation, the median counts (default 3)"
    add("--order-rounds", type=int, metavar="N", help=text)
    add("--load", type=float, default=1.1, help="arrival rate, as a multiple of the closed loop's (default 1.1)")
    add("--seats", type=int, default=4, help="requests that run at once (default 4, as in the paper)")
    add("--arrival-start", type=int, default=0, help="first recorded arrival that is used (default 0)")
    add("--vectors", type=int, help="in the index, 1.5 KB each (default 3,000,000)")
    add("--clusters", type=int, help="of the index (default 1024, as in the paper)")
    add("--embedded", type=int, help="real passages in the index (default 1000)")
    add("--ratios", type=float, nargs="+", help="shares of the clusters to search (default 0.125 0.25 0.5 1)")
    add("--searches", type=int, help="for each of them (default 60)")
    add("--stages", type=int, default=16, help="of a search (default 16)")
    add("--nodes", type=int, help="of the knowledge tree (default 100,000)")
    add("--decisions", type=int, help="requests planned over it (default 1000)")
    add("--seed", type=int, default=0, help="of the random vectors (default 0)")
    add("--markdown", type=Path, metavar="FILE", help="put the tables into that page")


def resolve(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with every default in place.

    Raises:
      BenchmarkError: one is out of range.
    """
    options = filled_in(arguments, _USUAL, _QUICK)
    options.data = data_folder(options.data)
    for name in _COUNTS:
        check(name, getattr(options, name) >= 1, "a positive number", getattr(options, name))
    for name, least in (("requests", 4), ("searches", 2), ("arrival_start", 0)):
        check(name, getattr(options, name) >= least, f"at least {least}", getattr(options, name))
    for name in ("budgets", "order_budgets", "ratios"):
        values = getattr(options, name)
        check(name, all(0.0 < value <= 1.0 for value in values), "shares above 0, at most 1", values)
        setattr(options, name, sorted(set(values)))
    shape = f"{options.layers} x {options.width}"
    is_shape = options.layers >= 1 and options.width >= HEAD_DIM and options.width % HEAD_DIM == 0
    check("width", is_shape, f"at least one layer and a positive multiple of {HEAD_DIM}", shape)
    check("load", options.load > 0.0, "a positive number", options.load)
    check("clusters", options.clusters <= options.vectors, "at most as many as --vectors", options.clusters)
    if options.markdown is not None:
        check_markers(options.markdown, map(ragcache_report.part, options.only))
    return options


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the parts, prints a table of each, writes the page.

    Raises:
      BenchmarkError: an option or the data is invalid.
    """
    options = resolve(arguments)
    questions = _questions(options)
    with bars() as progress:
        found = _measure(options, questions, progress)
    result = {"benchmark": "ragcache", **environment(), **found}
    ragcache_report.show(result)
    if options.markdown is not None:
        fill_in(options.markdown, ragcache_report.page_parts(result))
    return result


def _questions(options: argparse.Namespace) -> Sequence[WorkloadQuestion]:
    """The requests of the trace; none if no part needs them. Raises BenchmarkError if data is missing."""
    if set(options.only) == {"scheduling"}:
        return ()
    questions = load_trace(options.data, options.passages)[: options.requests]
    if "order" in options.only:
        num_measured = len(questions) - len(questions) // 2
        recorded_gaps(options.data, "azure", min(options.order_requests, num_measured), options.arrival_start)
    return questions


def _measure(options: argparse.Namespace, questions: Sequence[WorkloadQuestion], progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = {"shapes": {}}
    if questions:
        with tempfile.TemporaryDirectory() as folder:
            found |= _measure_engines(options, questions, progress, Path(folder))
    if "scheduling" in options.only:
        found["scheduling"] = ragcache_scheduling.measure(options, progress)
    return found


def _measure_engines(
    options: argparse.Namespace, questions: Sequence[WorkloadQuestion], progress: Progress, folder: Path
) -> dict[str, Any]:
    """The parts that run a model."""
    from ccjax.loading.model import load_model
    from ccjax.loading.prefill_profile import PROFILE_FILE, write_profile
    from ccjax.server.loading import use_compile_cache

    past, measured = questions[: len(questions) // 2], questions[len(questions) // 2 :]
    use_compile_cache(cache_folder() / "compile")
    # Heads of a usual size: sixteen small ones would dominate the cost.
    asked = bench_model(options.model, options.data, options.layers, options.width, max(1, options.width // HEAD_DIM))
    model = load_model(asked.name, dtype="float32", tokenizer=asked.tokenizer)
    bench = ReplayBench(options, model, past, measured, None, distinct_bytes(model, questions), progress)
    if not options.quick:
        _warm_up(bench)
    profile = measure_profile(bench)
    path = folder / PROFILE_FILE
    write_profile(path, profile)
    bench = dataclasses.replace(bench, profile=path)
    found: dict[str, Any] = {"shapes": _shapes(bench), "profile": profile.grid.to_json()}
    if "policies" in options.only:
        found["policies"] = ragcache_policies.measure(bench)
    if "order" in options.only:
        found["order"] = ragcache_order.measure(bench)
    if "speculation" in options.only:
        from scripts.benchmarks import ragcache_speculation  # only this part needs faiss

        found["speculation"] = ragcache_speculation.measure(bench)
    return found


def _warm_up(bench: ReplayBench) -> None:
    """Compiles every step once, for all engines."""
    task = bench.progress.add_task("compile")

    def show(stage: str, done: int, total: int) -> None:
        bench.progress.update(task, description=f"compile: {stage}", completed=done, total=total)

    with bench.engine("prefix", policy="pgdsf", share=1.0) as engine:
        engine.warmup(show)
    bench.progress.remove_task(task)


def _shapes(bench: ReplayBench) -> dict[str, Any]:
    config, options = bench.model.config, bench.options
    return {
        "model": bench.model.name,
        "num_layers": config.num_layers,
        "width": config.d_model,
        "dtype": "float32",
        "requests": len(bench.past) + len(bench.measured),
        "measured": len(bench.measured),
        "passages": options.passages,
        "distinct_bytes": bench.distinct_bytes,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "recompute_ratio": RECOMPUTE_RATIO,
        "arrivals": "azure_2023_conv.csv",
        "arrival_start": options.arrival_start,
        "seed": options.seed,
    }

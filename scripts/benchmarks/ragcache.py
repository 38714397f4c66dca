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

from ccjax.cli.values import positive_int
from scripts.benchmarks import ragcache_order, ragcache_policies, ragcache_report, ragcache_scheduling
from scripts.benchmarks.common import Say, check_markers, data_folder, environment, fill_in, stages
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
QUICK = {"layers": 2, "width": 64, "requests": 8, "budgets": [0.4], "order_requests": 4, "order_budgets": [0.4]}
QUICK |= {"vectors": 4000, "clusters": 16, "embedded": 24, "ratios": [0.5, 1.0], "searches": 4}
QUICK |= {"nodes": 300, "decisions": 30, "order_rounds": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add, count, shares = parser.add_argument, positive_int, {"type": float, "nargs": "+"}
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add("--data", type=Path, help="folder with rag_trace/, arrivals/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: random weights)")
    add("--layers", type=count, default=2, help="of the model with random weights (%(default)s)")
    add("--width", type=count, default=256, help=f"of that model, a multiple of {HEAD_DIM} (%(default)s)")
    add("--max-model-len", type=count, default=1024, help="longest prompt; passages are dropped beyond it")
    add("--passages", type=count, default=2, help="of a request, the best (%(default)s, as in the paper)")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="ways to reuse (default: both)")
    add("--requests", type=count, default=1000, help="of the trace: half to fill, half to measure (%(default)s)")
    text = "host memory, as shares of all passages' KV (%(default)s)"
    add("--budgets", **shares, default=[0.025, 0.05, 0.1, 0.2, 0.4], help=text)
    add("--order-budgets", **shares, default=[0.05, 0.1, 0.4], help="the same, for the order (%(default)s)")
    add("--order-requests", type=count, default=500, help="of the measured half, at most (%(default)s)")
    kinds = ragcache_order.WORKLOADS
    text = "requests for the order: as recorded, or with the paper's popularity (default: both)"
    add("--order-workloads", nargs="+", choices=kinds, default=kinds, help=text)
    text = "each with its own saturation, the median counts (%(default)s)"
    add("--order-rounds", type=count, default=3, metavar="N", help=text)
    add("--load", type=float, default=1.1, help="arrival rate, as a multiple of the closed loop's (%(default)s)")
    add("--seats", type=count, default=4, help="requests that run at once (%(default)s, as in the paper)")
    add("--arrival-start", type=int, default=0, help="first recorded arrival that is used (%(default)s)")
    add("--vectors", type=count, default=3_000_000, help="in the index, 1.5 KB each (%(default)s)")
    add("--clusters", type=count, default=1024, help="of the index (%(default)s, as in the paper)")
    add("--embedded", type=count, default=1000, help="real passages in the index (%(default)s)")
    add("--ratios", **shares, default=[0.125, 0.25, 0.5, 1.0], help="shares of the clusters to search (%(default)s)")
    add("--searches", type=count, default=60, help="for each of them (%(default)s)")
    add("--stages", type=count, default=16, help="of a search (%(default)s)")
    add("--nodes", type=count, default=100_000, help="of the knowledge tree (%(default)s)")
    add("--decisions", type=count, default=1000, help="requests planned over it (%(default)s)")
    add("--seed", type=int, default=0, help="of the random vectors (%(default)s)")
    add("--markdown", type=Path, metavar="FILE", help="put the tables into that page")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the parts, prints a table of each, writes the page.

    Raises:
      BenchmarkError: the data or the page is invalid.
    """
    options.data = data_folder(options.data)
    if options.markdown is not None:
        check_markers(options.markdown, map(ragcache_report.part, options.only))
    questions = _questions(options)
    with stages() as say:
        found = _measure(options, questions, say)
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


def _measure(options: argparse.Namespace, questions: Sequence[WorkloadQuestion], say: Say) -> dict[str, Any]:
    found: dict[str, Any] = {"shapes": {}}
    if questions:
        with tempfile.TemporaryDirectory() as folder:
            found |= _measure_engines(options, questions, say, Path(folder))
    if "scheduling" in options.only:
        found["scheduling"] = ragcache_scheduling.measure(options, say)
    return found


def _measure_engines(
    options: argparse.Namespace, questions: Sequence[WorkloadQuestion], say: Say, folder: Path
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
    bench = ReplayBench(options, model, past, measured, None, distinct_bytes(model, questions), say)
    if not options.quick:
        with bench.engine("prefix", policy="pgdsf", share=1.0) as engine:
            engine.warmup(lambda stage, done, total: say(f"compile: {stage}"))  # once for all engines
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

"""The serving benchmark's command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.benchmarks.common import check, filled_in
from scripts.benchmarks.serve_workload import RECORDINGS

STRATEGIES = ("prefix", "cachecraft", "full")
_QUICK = {"requests": 4, "history": 4, "passages": 2, "max_tokens": 4, "max_model_len": 512}
_QUICK |= {
    "layers": 2,
    "width": 256,
    "slo_s": 5.0,
    "rates": [2.0],
    "strategies": ["prefix", "cachecraft"],
    "serve_args": "--no-warmup",
}
# slo_s 0: from the first strategy's TTFT without load. No rates: from its throughput.
_USUAL = {"requests": 60, "history": 150, "passages": 5, "max_tokens": 16, "max_model_len": 1024}
_USUAL |= {"layers": 16, "width": 1024, "slo_s": 0.0, "rates": None, "strategies": list(STRATEGIES), "serve_args": ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark. Defaults that --quick changes are set by `resolve`."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with rag_trace/, arrivals/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: random weights)")
    add("--layers", type=int, help="of the model with random weights (default 16)")
    add("--width", type=int, help="of that model, a multiple of 32 (default 1024)")
    add("--strategies", nargs="+", help=f"the first one sets rates and bound (default {' '.join(STRATEGIES)})")
    add("--recompute-ratio", type=float, default=0.3, help="share of each reused passage to recompute (default 0.3)")
    add("--serve-args", help="more flags for ccjax serve, as one string")
    add("--host-cache-bytes", default="4GiB", help="memory for chunk-caches (default 4GiB)")
    add("--max-model-len", type=int, help="longest prompt; passages are dropped beyond it (default 1024)")
    add("--passages", type=int, help="passages of a request, best first (default 5)")
    add("--history", type=int, help="earlier requests of the trace sent beforehand, at most (default 150)")
    text = "instead: a request beforehand for every passage of the runs by itself, as in a precomputed corpus"
    add("--precompute", action="store_true", help=text)
    add("--max-tokens", type=int, help="tokens of every answer (default 16)")
    add("--requests", type=int, help="requests of one run; with --soak of all (default 60, with --soak no limit)")
    add(
        "--rates",
        type=float,
        nargs="+",
        help="mean arrivals a second (default: 0.7, 1, 1.4 times the closed loop's)",
    )
    add("--arrivals", choices=("poisson", *RECORDINGS), default="poisson", help="(default poisson)")
    add("--arrival-start", type=int, default=0, help="first recorded arrival that is used (default 0)")
    add("--concurrency", type=int, default=8, help="requests in progress in closed loop (default 8)")
    add("--slo-s", type=float, help="bound on TTFT (default: 5 times the first strategy's without load)")
    add("--timeout-s", type=float, default=600.0, help="seconds until an answer is abandoned (default 600)")
    add("--seed", type=int, default=0, help="of Poisson arrivals (default 0)")
    add(
        "--soak",
        type=float,
        metavar="SECONDS",
        help="instead: closed loop of one strategy for this long; inf: --requests",
    )


def resolve(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options with every default in place.

    Raises:
      BenchmarkError: one is out of range.
    """
    options = filled_in(arguments, _USUAL, _QUICK)
    options.requests_given = arguments.requests
    for name in ("requests", "passages", "max_tokens", "max_model_len", "concurrency"):
        check(name, getattr(options, name) >= 1, "a positive number", getattr(options, name))
    is_shape = options.layers >= 1 and options.width >= 32 and options.width % 32 == 0
    shape = f"{options.layers} x {options.width}"
    check("width", is_shape, "at least one layer and a positive multiple of 32", shape)
    for name in ("history", "arrival_start", "slo_s"):
        check(name, getattr(options, name) >= 0, "0 or more", getattr(options, name))
    if options.rates is not None:
        options.rates = sorted(set(options.rates))
        check("rates", options.rates[0] > 0.0, "positive numbers", options.rates[0])
    if options.soak is not None:
        check("soak", options.soak > 0.0, "a positive number of seconds", options.soak)
        is_ending = options.soak < float("inf") or options.requests_given is not None
        check("soak", is_ending, "seconds, or inf together with --requests", options.soak)
    return options

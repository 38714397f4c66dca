"""The serving benchmark's command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from ccjax.cli.values import positive_int
from scripts.benchmarks.serve_workload import RECORDINGS

STRATEGIES = ["prefix", "cachecraft", "full"]
QUICK = {"history": 4, "passages": 2, "max_tokens": 4, "max_model_len": 512, "layers": 2, "width": 256, "slo_s": 5.0}
QUICK |= {"rates": [2.0], "strategies": STRATEGIES[:2], "serve_args": "--no-warmup"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with rag_trace/, arrivals/ and tokenizer_llama3/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: random weights)")
    add("--layers", type=positive_int, default=16, help="of the model with random weights (%(default)s)")
    add("--width", type=positive_int, default=1024, help="of that model, a multiple of 32 (%(default)s)")
    add("--strategies", nargs="+", default=STRATEGIES, help="the first one sets rates and bound (%(default)s)")
    add("--recompute-ratio", type=float, default=0.3, help="share of each reused passage to recompute (%(default)s)")
    add("--serve-args", default="", help="more flags for ccjax serve, as one string")
    add("--host-cache-bytes", default="4GiB", help="memory for chunk-caches (%(default)s)")
    add("--max-model-len", type=positive_int, default=1024, help="longest prompt; passages are dropped beyond it")
    add("--passages", type=positive_int, default=5, help="passages of a request, best first (%(default)s)")
    add("--history", type=int, default=150, help="earlier requests of the trace sent beforehand, at most (%(default)s)")
    text = "instead: a request beforehand for every passage of the runs by itself, as in a precomputed corpus"
    add("--precompute", action="store_true", help=text)
    add("--max-tokens", type=positive_int, default=16, help="tokens of every answer (%(default)s)")
    add("--requests", type=positive_int, help="of one run; with --soak of all (default 60, with --soak no limit)")
    text = "mean arrivals a second (default: 0.7, 1, 1.4 times the closed loop's)"
    add("--rates", type=float, nargs="+", help=text)
    add("--arrivals", choices=("poisson", *RECORDINGS), default="poisson", help="(%(default)s)")
    add("--arrival-start", type=int, default=0, help="first recorded arrival that is used (%(default)s)")
    add("--concurrency", type=positive_int, default=8, help="requests in progress in closed loop (%(default)s)")
    text = "bound on TTFT (default: 5 times the first strategy's without load)"
    add("--slo-s", type=float, default=0.0, help=text)
    add("--timeout-s", type=float, default=600.0, help="seconds until an answer is abandoned (%(default)s)")
    add("--seed", type=int, default=0, help="of Poisson arrivals (%(default)s)")
    text = "instead: closed loop of one strategy for this long; inf: --requests"
    add("--soak", type=float, metavar="SECONDS", help=text)

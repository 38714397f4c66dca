"""Serving under load: a `ccjax serve` process with the default options, then other strategies, at equal load.

Every strategy has its own process and store, one after the other, and answers the same requests at the same times over
the OpenAI API; times are measured at the socket. Requests are questions with the passages of MuSiQue's retrieval trace
(`--data` or $CCJAX_TEST_DATA), or, without it, of the shipped corpus, drawn by Zipf's law. Before the runs, earlier
requests that share passages with theirs are sent one by one. Loads: `--concurrency` requests in progress; then Poisson
arrivals at each of `--rates`, however fast the server is. Before the runs a server compiles, and prepares the passages
of these requests, in idle time, `--idle-s` at most.
With `--mixed` the first strategy answers one short prompt every 5 s beside a stream of long ones, each alone and
both at once, and /health beside a body of 9.9 MB.
With `--sustained` all passages of the measured requests are known, each time in another order and selection, and only
the closed loop runs: what reuse and what storing cost a busy server, beside none of both (`full`).

Keys of --json, besides those of every benchmark (`bench.py --help`):
  trace (musique, drawn), model (null: the server's default), passages, requests, max_tokens, serve_args, sustained;
    slo_s (bound on TTFT), rates
  cases[]: `strategy` (default first); `load` (closed, open); `concurrency`, `rate` (requests a second); and of each run
    completed, refused, failed, errors: complete answers; 429s; all else, also interrupted or short ones; some reasons
    duration_s, request_throughput, output_throughput: first arrival to last answer; answers, tokens per second of it
    request_goodput: answers per second whose TTFT was within slo_s
    bounded: whether the server kept up: every request was answered, and p99 of TTFT stays within slo_s
    ttft_ms, tpot_ms, itl_ms, e2el_ms: `mean`, `p50`, `p90`, `p99`, as in vLLM's benchmark_serving: first text, from the
      planned arrival; time per token after it; between two pieces of text; whole answer
    computed_share: of the prompts' token-layers, those that ran through the model, from the reuse reports
    send_lag_ms: delay of the client: if large, the machine is too busy and the figures are not valid
    compilations, rss_bytes: steps compiled during the run; the server's memory afterwards
  With --mixed instead: interval_s (between short prompts), health (idle_max_ms, beside_max_ms: slowest answers of
    /health; status: of the large body), and in cases[]: prompts (short or long, alone or beside the others), requests,
    prompt_tokens (median), ttft_p50_ms, ttft_p95_ms, of_alone (p95 as a multiple of that alone)
"""

from __future__ import annotations

import argparse
import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show, text
from ccjax.loading.model import DEMO_CORPUS
from scripts.benchmarks import mixed
from scripts.benchmarks.client import (
    Body,
    chat,
    check_answered,
    closed_loop,
    figures,
    open_loop,
    poisson_times,
    scrape,
    serving,
    ttft_s,
    wait_for_idle_time,
)
from scripts.benchmarks.common import BenchmarkError, data_folder, environment, median, rows_of, stages

QUICK = {"requests": 4, "history": 4, "passages": 2, "max_tokens": 4, "rates": [2.0], "idle_s": 0.0}
QUICK |= {"strategies": ["default", "full"]}
RATE_MULTIPLES = (0.7, 1.0, 1.4)
SLO_MULTIPLE = 5.0
NUM_KNOWN = 12
"""Requests whose passages those of `--sustained` have."""
NUM_WARM = 8
"""Requests with answers of full length before the measured ones: decode is warm, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with rag_trace/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: its default)")
    add("--strategies", nargs="+", default=["default", "full", "prefix"], help="the first one sets rates and bound")
    add("--serve-args", default="", help="more flags for ccjax serve, as one string")
    add("--sustained", action="store_true", help="known passages in ever new orders, closed loop only")
    add("--mixed", action="store_true", help="short prompts beside long ones, and /health beside a large body, only")
    add("--passages", type=positive_int, default=5, help="passages of a request, best first (%(default)s)")
    add("--history", type=int, default=100, help="earlier requests sent beforehand, at most (%(default)s)")
    add("--max-tokens", type=positive_int, default=16, help="tokens of every answer (%(default)s)")
    add("--requests", type=positive_int, default=60, help="of one run (%(default)s)")
    add("--rates", type=float, nargs="+", help="a second (default: 0.7, 1, 1.4 times the first one's closed loop)")
    add("--concurrency", type=positive_int, default=8, help="requests in progress in closed loop (%(default)s)")
    add("--slo-s", type=float, help="bound on TTFT (default: 5 times the first strategy's without load)")
    add("--idle-s", type=float, default=300.0, help="most time to compile and prepare in before the runs (%(default)s)")
    add("--timeout-s", type=float, default=600.0, help="seconds of silence until an answer is abandoned (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every strategy at every load and prints the tables.

    Raises:
      BenchmarkError: the trace is too short, or a server does not start or answer without any load.
    """
    if options.mixed:
        return _mixed(options)
    data = data_folder(options.data)
    is_real = options.data is not None or (data / "rag_trace").is_dir()
    questions = load_questions(data if is_real else None, options.passages)
    if options.sustained:
        questions = [*questions[:NUM_KNOWN], *new_orders(questions[:NUM_KNOWN], options.requests)]
    num_runs = 1 if options.sustained else 1 + len(options.rates or RATE_MULTIPLES)
    start = len(questions) - num_runs * options.requests
    if start < 0:
        most = len(questions) // num_runs
        raise BenchmarkError(f"--requests: wanted at most {most} for {num_runs} runs, got {options.requests}")
    cases: list[dict[str, Any]] = []
    bodies = [chat(*question, options.max_tokens) for question in questions[start:]]
    windows = [bodies[n * options.requests : (n + 1) * options.requests] for n in range(num_runs)]
    past = history(questions, start, options.history)
    last = questions[max(0, start - NUM_WARM) : start] or questions[:NUM_WARM]
    warm = [chat(*question, options.max_tokens) for question in last]
    timeout_s = options.timeout_s
    with stages() as say:
        for strategy in options.strategies:
            say(f"{strategy}: start the server")
            with serving(_flags(options, strategy)) as url:
                say(f"{strategy}: earlier requests")
                check_answered(closed_loop(url, [chat(*question, 1) for question in past], 1, timeout_s))
                records = closed_loop(url, warm, 1, timeout_s)
                check_answered(records)
                options.slo_s = options.slo_s or SLO_MULTIPLE * median(map(ttft_s, records))
                say(f"{strategy}: what idle time compiles and prepares")
                wait_for_idle_time(url, options.idle_s)
                for number, window in enumerate(windows):
                    rate = options.rates[number - 1] if number else None
                    say(f"{strategy}: {rate:.3g} a second" if rate else f"{strategy}: {options.concurrency} at a time")
                    before = scrape(url)
                    if rate is None:
                        records = closed_loop(url, window, options.concurrency, timeout_s)
                        load: dict[str, Any] = {"load": "closed", "concurrency": options.concurrency, "rate": None}
                    else:
                        records = open_loop(url, window, poisson_times(len(window), rate), timeout_s)
                        load = {"load": "open", "concurrency": None, "rate": rate}
                    cases.append({"strategy": strategy, **load, **figures(records, options.slo_s, before, scrape(url))})
                    throughput = cases[-1]["request_throughput"]
                    if not options.sustained:
                        options.rates = options.rates or [float(f"{m * throughput:.2g}") for m in RATE_MULTIPLES]
    _print(cases, options.slo_s)
    names = ("model", "passages", "requests", "max_tokens", "serve_args", "sustained", "slo_s", "rates")
    about = {"trace": "musique" if is_real else "drawn", **{name: getattr(options, name) for name in names}}
    return {"benchmark": "serve", **environment(), **about, "cases": cases}


def _mixed(options: argparse.Namespace) -> dict[str, Any]:
    strategy = options.strategies[0]
    with stages() as say:
        say(f"{strategy}: start the server")
        with serving(_flags(options, strategy)) as url:
            say(f"{strategy}: what idle time compiles")
            wait_for_idle_time(url, options.idle_s)
            found = mixed.measure(url, options, say)
    about = {name: getattr(options, name) for name in ("model", "max_tokens", "serve_args", "mixed")}
    return {"benchmark": "serve", **environment(), **about, **found}


def _flags(options: argparse.Namespace, strategy: str) -> list[str]:
    flags = [] if options.model is None else ["--model", options.model]
    flags += [] if strategy == "default" else ["--strategy", strategy]
    return [*flags, *(["--no-warmup"] if options.quick else []), *shlex.split(options.serve_args)]


def load_questions(data: Path | None, num_passages: int) -> list[tuple[str, list[Body]]]:
    """Questions with their passages, best first, in order of time: of the trace in `data`, or drawn."""
    if data is not None:
        texts = {row["id"]: row for row in rows_of(data / "rag_trace/musique_docs.jsonl")}
        found = [[texts[number] for number in row["docs"]] for row in rows_of(data / "rag_trace/musique_trace.jsonl")]
    else:
        files = sorted(DEMO_CORPUS.iterdir())
        texts = [{"id": path.stem, "title": path.stem[4:], "text": path.read_text("utf-8")} for path in files]
        draw = random.Random(0)
        odds = [1 / (place + 1) for place in range(len(texts))]
        found = [list({t["id"]: t for t in draw.choices(texts, odds, k=20)}.values()) for _ in range(1000)]
    passages: list[list[Any]] = [
        [{"id": str(t["id"]), "title": t["title"], "text": t["text"]} for t in row] for row in found
    ]
    return [(f"What do the passages say about {row[0]['title']}?", row[:num_passages]) for row in passages]


def new_orders(questions: Sequence[tuple[str, list[Body]]], count: int) -> list[tuple[str, list[Body]]]:
    """`count` questions, each with as many passages as the given ones have, drawn from all of theirs."""
    known = list({passage["id"]: passage for _, passages in questions for passage in passages}.values())
    draw = random.Random(0)
    drawn = [draw.sample(known, len(questions[0][1])) for _ in range(count)]
    return [(f"What do the passages say about {passages[0]['title']}?", passages) for passages in drawn]


def history(questions: Sequence[tuple[str, list[Body]]], start: int, most: int) -> list[tuple[str, list[Body]]]:
    """The latest `most` requests before number `start`, in order, that share a passage with one from there on."""
    wanted = {passage["id"] for _, passages in questions[start:] for passage in passages}
    useful = [question for question in questions[:start] if any(p["id"] in wanted for p in question[1])]
    return useful[max(0, len(useful) - most) :]


def _print(cases: Sequence[dict[str, Any]], slo_s: float) -> None:
    rows, latencies = [], []
    for case in cases:
        load = f"{case['concurrency']} at a time" if case["rate"] is None else f"{case['rate']:.3g}/s"
        counts = (str(case[key]) for key in ("completed", "refused", "failed"))
        rates = (f"{case[key]:.3g}" for key in ("request_throughput", "request_goodput", "output_throughput"))
        share, memory = text(case["computed_share"], ".0%"), text(case["rss_bytes"] and case["rss_bytes"] / 1e9, ".2f")
        keeps_up = "yes" if case["bounded"] else "no"
        rows.append((case["strategy"], load, *counts, *rates, share, keeps_up, text(case["compilations"]), memory))
        times = (case[key] for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"))
        cells = (" / ".join(text(found[at]) for at in ("mean", "p50", "p90", "p99")) for found in times)
        latencies.append((case["strategy"], load, *cells))
    head = ("strategy", "load", "whole", "429", "failed", "requests/s", f"within {slo_s:.3g} s", "tokens/s", "computed")
    show((*head, "keeps up", "compiled", "memory GB"), rows, "throughput")
    show(("strategy", "load", "TTFT", "TPOT", "ITL", "E2E"), latencies, "latency in ms: mean / p50 / p90 / p99")

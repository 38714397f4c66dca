"""Serving under load: the real HTTP server, the passages of a real retrieval trace, strategies at equal load.

Every strategy has its own server and store and gets the same requests at the same times, over the OpenAI API. Times are
measured at the socket, so they include everything the server does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks import serve_report, serve_soak
from scripts.benchmarks import serve_workload as workload
from scripts.benchmarks.common import BenchmarkError, Say, data_folder, environment, stages
from scripts.benchmarks.serve_client import RequestRecord, closed_loop, open_loop
from scripts.benchmarks.serve_figures import figures, is_bounded, ttft_s
from scripts.benchmarks.serve_model import BenchModel, bench_model, cache_folder
from scripts.benchmarks.serve_options import QUICK, add_arguments
from scripts.benchmarks.serve_server import scrape, serving

__all__ = ["QUICK", "add_arguments", "run"]

RATE_MULTIPLES = (0.7, 1.0, 1.4)
"""Default rates, as multiples of the first strategy's closed-loop rate."""
SLO_MULTIPLE = 5.0
"""Default bound on TTFT, as a multiple of the first strategy's TTFT without load."""
NUM_WARM = 8
"""Least number of requests before the measured ones."""


@dataclasses.dataclass
class ServeBench:
    """Shared by all strategies; `rates` and `slo_s` are set by the first strategy unless the user did."""

    options: argparse.Namespace
    questions: Sequence[workload.WorkloadQuestion]
    gaps: np.ndarray
    windows: Sequence[range]
    rates: Sequence[float]
    slo_s: float
    say: Say

    def bodies(
        self, questions: Sequence[workload.WorkloadQuestion], max_tokens: int | None = None
    ) -> list[dict[str, Any]]:
        """Bodies of the requests, with the answers' usual length by default."""
        return [q.body(max_tokens=max_tokens or self.options.max_tokens) for q in questions]


class StrategyRun:
    """One strategy on one server: each run takes the next requests of the trace and continues with the same store."""

    def __init__(self, bench: ServeBench, strategy: str, url: str) -> None:
        self.cases: list[dict[str, Any]] = []
        self._bench, self.strategy, self._url = bench, strategy, url

    def warm_up(self) -> float:
        """Sends, one by one, the relevant earlier requests of the trace, or each passage by itself; returns the median
        TTFT in seconds without load."""
        bench, options = self._bench, self._bench.options
        start, stop = bench.windows[0].start, bench.windows[-1].stop
        most = 0 if self.strategy == "full" else max(options.history, options.precompute)
        past = workload.history(bench.questions, start, stop, most, is_prefix=self.strategy == "prefix")
        if options.precompute:
            past = workload.one_by_one(bench.questions, start, stop) if most else []
        # The last ones have answers of full length: decode is warm, too, and TTFT is that of a store in use.
        last = bench.questions[max(0, start - NUM_WARM) : start] or bench.questions[:NUM_WARM]
        timeout_s = options.timeout_s
        filled = closed_loop(self._url, bench.bodies(past, 1), 1, timeout_s)
        records = closed_loop(self._url, bench.bodies(last), 1, timeout_s)
        broken = [record.error for record in filled + records if record.status != "ok"]
        if broken:
            raise BenchmarkError(
                f"{self.strategy}: {len(broken)} requests failed before any load; the first: {broken[0]}"
            )
        return statistics.median(map(ttft_s, records))

    def closed(self, window: range, concurrency: int) -> dict[str, Any]:
        """Keeps a constant number of requests in progress."""
        bodies = self._bodies(window)
        before = scrape(self._url)
        records = closed_loop(self._url, bodies, concurrency, self._bench.options.timeout_s)
        return self._keep({"load": "closed", "concurrency": concurrency, "rate": None}, records, before)

    def open(self, window: range, rate: float) -> dict[str, Any]:
        """Sends requests at a mean rate, however fast the server is."""
        times = workload.arrival_times(self._bench.gaps, rate)
        before = scrape(self._url)
        records = open_loop(self._url, self._bodies(window), list(times), self._bench.options.timeout_s)
        return self._keep({"load": "open", "concurrency": None, "rate": rate}, records, before)

    def _bodies(self, window: range) -> list[dict[str, Any]]:
        return self._bench.bodies(self._bench.questions[window.start : window.stop])

    def _keep(self, load: dict[str, Any], records: list[RequestRecord], before: dict[str, float]) -> dict[str, Any]:
        row = {"strategy": self.strategy, **load}
        row |= figures(records, self._bench.slo_s, before, scrape(self._url))
        row["bounded"] = is_bounded(row, self._bench.slo_s)
        self.cases.append(row)
        return row


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every strategy at every rate and prints the tables.

    Raises:
      BenchmarkError: a trace is too short, or a server does not start or answer without any load.
    """
    data = data_folder(options.data)
    questions = workload.load_trace(data, options.passages)
    model = bench_model(options.model, data, options.layers, options.width)
    with stages() as say:
        if options.soak is not None:
            found = serve_soak.soak(questions, lambda s: _flags(options, s, model), options, say)
            return {"benchmark": "serve", **environment(), "shapes": _shapes(options, model), **found}
        options.requests = options.requests or (4 if options.quick else 60)
        windows = workload.windows(len(questions), 1 + len(options.rates or RATE_MULTIPLES), options.requests)
        bench = ServeBench(options, questions, _gaps(options, data), windows, options.rates or (), options.slo_s, say)
        cases = _measure(bench, model)
    comparison = serve_report.compare(cases)
    serve_report.show(cases, comparison, bench.slo_s, options)
    return {
        "benchmark": "serve",
        **environment(),
        "shapes": _shapes(options, model) | {"slo_s": bench.slo_s, "rates": list(bench.rates)},
        "cases": cases,
        "comparison": comparison,
    }


def _measure(bench: ServeBench, model: BenchModel) -> list[dict[str, Any]]:
    """All runs of all strategies, each with its own server and store. They alternate at every load, so that a busy
    machine slows all of them; the other servers are idle."""
    options, say = bench.options, bench.say
    with contextlib.ExitStack() as stack:
        runs: list[StrategyRun] = []
        for strategy in options.strategies:
            say(f"{strategy}: start the server")
            url = stack.enter_context(serving(_flags(options, strategy, model), say))
            runs.append(StrategyRun(bench, strategy, url))
        for strategy_run in runs:
            say(f"{strategy_run.strategy}: earlier requests")
            unloaded_s = strategy_run.warm_up()
            bench.slo_s = bench.slo_s or SLO_MULTIPLE * unloaded_s
        for strategy_run in runs:
            say(f"{strategy_run.strategy}: {options.concurrency} at a time")
            throughput = strategy_run.closed(bench.windows[0], options.concurrency)["request_throughput"]
            bench.rates = bench.rates or [float(f"{multiple * throughput:.2g}") for multiple in RATE_MULTIPLES]
        for rate, window in zip(bench.rates, bench.windows[1:], strict=False):
            for strategy_run in runs:
                say(f"{strategy_run.strategy}: {rate:.3g} a second")
                strategy_run.open(window, rate)
    return [case for strategy_run in runs for case in strategy_run.cases]


def _flags(options: argparse.Namespace, strategy: str, model: BenchModel) -> list[str]:
    """Flags of `scripts/serve.py`. Idle repair is off, so that reuse depends on the requests alone; no compilation is
    left to idle time."""
    flags = [*model.flags, "--no-docs", "--max-model-len", str(options.max_model_len)]
    flags += ["--host-cache-bytes", options.host_cache_bytes, "--store-refresh-interval-s", "0"]
    flags += ["--no-repair", "--no-prepare"]
    flags += ["--strategy", strategy]
    if strategy not in ("full", "prefix", "reuse"):
        flags += ["--recompute-ratio", str(options.recompute_ratio)]
    flags += ["--compile-cache-dir", str(cache_folder() / "compile")]
    more = shlex.split(options.serve_args)
    return flags + more if "--no-warmup" in more else [*flags, "--warmup-all", *more]


def _gaps(options: argparse.Namespace, data: Path) -> np.ndarray:
    if options.arrivals == "poisson":
        return workload.poisson_gaps(options.requests, options.seed)
    return workload.recorded_gaps(data, options.arrivals, options.requests, options.arrival_start)


def _shapes(options: argparse.Namespace, model: BenchModel) -> dict[str, Any]:
    names = ("passages", "arrivals", "requests", "max_tokens", "max_model_len", "history", "recompute_ratio")
    names += ("precompute",)
    return {"model": model.name, **{name: getattr(options, name) for name in (*names, "serve_args", "seed")}}

"""The effect of cache-aware order on TTFT if more requests arrive than can be served (RAGCache fig. 21).

Workloads: `trace` combines the requests of a real retrieval trace with recorded arrivals of another one, since no
public trace has both; its requests hardly repeat each other. `drawn` has the paper's popularity and arrivals: the
trace's questions drawn by Zipf's law, and a Poisson process (RAGCache sec. 3.2, 7.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ccjax.engine import Engine
from scripts.benchmarks.common import spread
from scripts.benchmarks.ragcache_replay import ReplayBench, Served, ask, closed_loop, open_loop, reuse_figures
from scripts.benchmarks.serve_workload import WorkloadQuestion, arrival_times, recorded_gaps

WORKLOADS = ("trace", "drawn")
ZIPF = 0.8
"""Exponent of `drawn`: depending on the budget, a third to three quarters of the passages are hits, as in the paper."""
WINDOWS = {"off": 1, "on": 32}
POLICY = "pgdsf"
WAITING_PER_RUNNING = 3
"""Requests in progress in the closed loop per running one: the rest wait, so that their order matters."""


def measure(bench: ReplayBench) -> dict[str, Any]:
    """TTFT with the order on and off: the same requests at the same times, over stores filled by the same requests.
    Each round measures the saturation rate anew; the round with the median gain counts."""
    cases = [case for workload in bench.options.order_workloads for case in _measure(bench, workload)]
    about = {"load": bench.options.load, "seats": bench.options.seats, "policy": POLICY, "zipf": ZIPF}
    return {"windows": WINDOWS, **about, "rounds": bench.options.order_rounds, "cases": cases}


def drawn(questions: Sequence[WorkloadQuestion], count: int, seed: int) -> list[WorkloadQuestion]:
    """This many of the questions, drawn with odds `rank ** -ZIPF`; ranks are random, too."""
    rng = np.random.default_rng(seed)
    odds = np.arange(1, len(questions) + 1, dtype=np.float64) ** -ZIPF
    chosen = rng.choice(rng.permutation(len(questions)), count, p=odds / odds.sum())
    return [questions[index] for index in chosen]


def _requests(
    bench: ReplayBench, workload: str, number: int
) -> tuple[Sequence[WorkloadQuestion], Sequence[WorkloadQuestion], np.ndarray]:
    """Requests that fill the store, measured requests, and gaps between the latter (1 on average) for one round."""
    options = bench.options
    past, questions = bench.past, bench.measured[: options.order_requests]
    if workload == "trace":
        return past, questions, recorded_gaps(options.data, "azure", len(questions), options.arrival_start)
    every = drawn([*bench.past, *bench.measured], len(past) + len(questions), options.seed + number)
    gaps = np.random.default_rng(options.seed + number).exponential(size=len(questions))
    return every[: len(past)], every[len(past) :], gaps / gaps.mean()


def _measure(bench: ReplayBench, workload: str) -> list[dict[str, Any]]:
    options = bench.options

    def filled(strategy: str, share: float, window: int, past: Sequence[WorkloadQuestion]) -> Engine:
        engine = bench.engine(strategy, policy=POLICY, share=share, reorder_window=window)
        for question in past:
            ask(engine, question)
        return engine

    def one_round(strategy: str, share: float, number: int) -> dict[str, Any]:
        past, questions, gaps = _requests(bench, workload, number)
        where = f"order, {workload}: {strategy}, {share:.1%}, round {number + 1}"
        bench.say(f"{where}, saturation")
        with filled(strategy, share, WINDOWS["off"], past) as engine:
            saturation = closed_loop(engine, questions, WAITING_PER_RUNNING * options.seats)
        rate = options.load * saturation
        times_s = list(arrival_times(gaps, rate))
        runs = {}
        for name in list(WINDOWS)[:: 1 if number % 2 else -1]:
            bench.say(f"{where}, {name}")
            with filled(strategy, share, WINDOWS[name], past) as engine:
                runs[name] = figures(open_loop(engine, questions, times_s))
        return {"saturation": saturation, "rate": rate, **runs, **gains(runs["off"], runs["on"])}

    cases = []
    for strategy in options.strategies:
        for share in options.order_budgets:
            about = {
                "workload": workload,
                "strategy": strategy,
                "budget_share": share,
                "budget_bytes": bench.budget_bytes(share),
            }
            rounds = [one_round(strategy, share, number) for number in range(options.order_rounds)]
            cases.append({**about, **median_round(rounds), "mean_gains": [result["mean_gain"] for result in rounds]})
    return cases


def median_round(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round with the median gain in mean TTFT; of an even number the lower of the middle two."""
    return sorted(rounds, key=lambda result: result["mean_gain"])[(len(rounds) - 1) // 2]


def figures(served: Sequence[Served]) -> dict[str, Any]:
    """Figures of one run, without intervals: requests of one queue wait for each other, so they are not independent."""
    return {"ttft_ms": spread([answer.ttft_s for answer in served]), **reuse_figures(served)}


def gains(off: dict[str, Any], on: dict[str, Any]) -> dict[str, float]:
    """TTFT with the order off over TTFT with it on."""
    return {f"{name}_gain": off["ttft_ms"][name] / on["ttft_ms"][name] for name in ("mean", "p99")}

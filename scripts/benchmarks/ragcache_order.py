"""What cache-aware order does to TTFT where more requests come than can be served (RAGCache fig. 21).

The passages are a real retrieval trace's and the arrivals a real recording's, but no public trace has both: their
combination is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ccjax.engine import Engine
from scripts.benchmarks.ragcache_replay import Bench, Served, ask_all, closed_loop, open_loop
from scripts.benchmarks.serve_figures import spread
from scripts.benchmarks.serve_workload import arrival_times, recorded_gaps

WINDOWS = {"off": 1, "on": 32}
POLICY = "pgdsf"
WAITING_PER_SEAT = 3
"""Requests under way in the closed loop, by seat: one that runs, and others for which the order counts."""


def measure(bench: Bench) -> dict[str, Any]:
    """TTFT with the order on and off: the same requests at the same times, over stores that the same ones filled."""
    options = bench.options
    questions = bench.measured[: options.order_requests]
    gaps = recorded_gaps(bench.options.data, "azure", len(questions), options.arrival_start)
    num_runs = len(options.strategies) * len(options.order_budgets) * (1 + len(WINDOWS))
    task = bench.progress.add_task("", total=num_runs * (len(bench.past) + len(questions)))

    def advance() -> None:
        bench.progress.advance(task)

    def filled(strategy: str, share: float, window: int) -> Engine:
        engine = bench.engine(strategy, policy=POLICY, share=share, reorder_window=window)
        ask_all(engine, bench.past, advance)
        return engine

    cases = []
    for strategy in options.strategies:
        for share in options.order_budgets:
            about = {"strategy": strategy, "budget_share": share, "budget_bytes": bench.budget_bytes(share)}
            bench.progress.update(task, description=f"order: {strategy}, {share:.1%}, saturation")
            with filled(strategy, share, WINDOWS["off"]) as engine:
                saturation = closed_loop(engine, questions, WAITING_PER_SEAT * options.seats, advance)
            rate = options.load * saturation
            times_s = list(arrival_times(gaps, rate))
            runs = {}
            for name, window in WINDOWS.items():
                bench.progress.update(task, description=f"order: {strategy}, {share:.1%}, {name}")
                with filled(strategy, share, window) as engine:
                    runs[name] = figures(open_loop(engine, questions, times_s, advance))
            cases.append({**about, "saturation": saturation, "rate": rate, **runs, **gains(runs["off"], runs["on"])})
    bench.progress.remove_task(task)
    return {"windows": WINDOWS, "load": options.load, "seats": options.seats, "policy": POLICY, "cases": cases}


def figures(served: Sequence[Served]) -> dict[str, Any]:
    """Figures of one run. No interval: requests in one line wait for each other, so they are no sample."""
    num_hits, num_documents = (sum(getattr(one, name) for one in served) for name in ("num_hits", "num_documents"))
    return {
        "ttft_ms": spread([one.ttft_s for one in served]),
        "hit_ratio": num_hits / num_documents,
        "computed_share": sum(one.computed_share for one in served) / len(served),
    }


def gains(off: dict[str, Any], on: dict[str, Any]) -> dict[str, float]:
    """How many times lower TTFT is with the order on."""
    return {f"{name}_gain": off["ttft_ms"][name] / on["ttft_ms"][name] for name in ("mean", "p99")}

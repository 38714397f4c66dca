"""Which passages each eviction policy keeps, and the effect on TTFT (RAGCache fig. 20, table 2)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ccjax.engine import Engine
from ccjax.evaluation.scores import mean_interval, ratio_interval
from scripts.benchmarks.ragcache_replay import ReplayBench, Served, ask, reuse_figures
from scripts.benchmarks.serve_workload import WorkloadQuestion

POLICIES = ("pgdsf", "gdsf", "lru", "lfu", "saved_seconds")
REFERENCE = POLICIES[0]


def measure(bench: ReplayBench) -> dict[str, Any]:
    """Hit rate and TTFT of the second half of the requests under every policy, at every budget, by strategy.

    At each budget the policies alternate at every request, each on its own engine, so that a busy machine slows all of
    them.
    """
    options = bench.options
    cases = []
    for strategy in options.strategies:
        for share in options.budgets:
            bench.say(f"policies: {strategy}, {share:.1%}")
            with contextlib.ExitStack() as stack:
                engines = {
                    policy: stack.enter_context(bench.engine(strategy, policy=policy, share=share))
                    for policy in POLICIES
                }
                in_turns(engines, bench.past)
                served = in_turns(engines, bench.measured)
            about = {"strategy": strategy, "budget_share": share, "budget_bytes": bench.budget_bytes(share)}
            cases += [{**about, "policy": policy, **found} for policy, found in figures(served).items()]
    return {"cases": cases}


def in_turns(engines: Mapping[str, Engine], questions: Sequence[WorkloadQuestion]) -> dict[str, list[Served]]:
    """Each engine's results for all questions. The first engine changes, since it has colder processor caches."""
    names = list(engines)
    served: dict[str, list[Served]] = {name: [] for name in names}
    for number, question in enumerate(questions):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            served[name].append(ask(engines[name], question))
    return served


def figures(served: Mapping[str, Sequence[Served]]) -> dict[str, dict[str, Any]]:
    """Figures by policy; intervals are bootstraps over requests, in pairs with the reference."""
    reference = [1e3 * answer.ttft_s for answer in served[REFERENCE]]
    rows = {}
    for policy, answers in served.items():
        ttft_ms = [1e3 * answer.ttft_s for answer in answers]
        ratio = None if policy == REFERENCE else ratio_interval(ttft_ms, reference)
        rows[policy] = reuse_figures(answers) | {
            "ttft_ms": dataclasses.asdict(mean_interval(ttft_ms)),
            "ttft_over_pgdsf": None if ratio is None else dataclasses.asdict(ratio),
        }
    return rows

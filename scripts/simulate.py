"""Serves in virtual time: python scripts/simulate.py --model llama3-8b --hardware h100 --rate 20

Runs the engine's own planner, scheduler, index, eviction and routing over a cost model instead of a device: computes
the TTFT, throughput and hit rates of a corpus, a load and a budget on hardware that is not present. --size-for searches
budgets and replicas. What is modelled: docs/simulation.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ccjax.cli.progress import bars
from scripts.benchmarks.common import BenchmarkError, check_markers, fill_in
from scripts.simulation.options import deployment_of, make_parser, workload_of
from scripts.simulation.report import print_figures, print_sizes
from scripts.simulation.sizing import DeploymentSize


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = make_parser(__doc__ or "").parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError, BenchmarkError) as error:
        print(f"simulate.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.paper is not None:
        found = _paper(args)
    elif args.size_for is not None:
        found = _size(args)
    else:
        found = _simulate(args)
    if args.json:
        print(json.dumps(found))
    return 0


def _simulate(args: argparse.Namespace) -> dict:
    from scripts.simulation.run import Simulation

    workload = workload_of(args)
    deployment = deployment_of(args, workload)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    with _progress(args) as progress:
        task = progress.add_task("requests", total=len(workload))
        simulation = Simulation(deployment, workload, seed=args.seed)
        outcome = simulation.run(lambda done: progress.advance(task, done))
    figures = outcome.figures(workload, warmup=args.warmup)
    took = {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}
    print_figures(figures, took)
    return {"settings": _settings(args), "figures": figures, "took": took}


def _size(args: argparse.Namespace) -> dict:
    import dataclasses

    from scripts.simulation.run import Simulation
    from scripts.simulation.sizing import parse_goal, search

    goal = parse_goal(args.size_for)
    args.rate = goal.rate
    workload = workload_of(args)
    workload = workload.at_rate(goal.rate)
    deployment = deployment_of(args, workload)
    distinct_bytes = workload.distinct_tokens * deployment.kv_spec.num_bytes(1)
    budgets = args.budgets or [max(1, round(share * distinct_bytes)) for share in (0.05, 0.2, 0.5, 1.0)]
    with _progress(args) as progress:

        def simulate(size: DeploymentSize) -> dict:
            task = progress.add_task(f"{size.host_cache_bytes / 1e9:.1f} GB x {size.replicas}", total=len(workload))
            cache = dataclasses.replace(deployment.cache, host_cache_bytes=size.host_cache_bytes)
            candidate = dataclasses.replace(deployment, cache=cache, replicas=size.replicas)
            outcome = Simulation(candidate, workload, seed=args.seed).run(lambda done: progress.advance(task, done))
            progress.remove_task(task)
            return outcome.figures(workload, warmup=args.warmup)

        needed, tried = search(goal, budgets, args.most_replicas, simulate)
    print_sizes(args.size_for, needed, tried, distinct_bytes)
    return {
        "settings": _settings(args),
        "goal": dataclasses.asdict(goal),
        "needed": [dataclasses.asdict(size) for size in needed.values()],
        "tried": [
            {**dataclasses.asdict(trial.size), "is_met": trial.is_met, "figures": trial.figures} for trial in tried
        ],
    }


def _paper(args: argparse.Namespace) -> dict:
    from scripts.simulation import paper, paper_page

    check_markers(args.paper, map(paper_page.part, ("run", *paper.FIGURES)))
    size = paper.RunSize(30, 20) if args.quick else paper.RunSize(200, 400)
    started_s = time.perf_counter()
    found = {}
    with _progress(args) as progress:
        task = progress.add_task("figures", total=len(paper.FIGURES))
        for name, make in paper.FIGURES.items():
            progress.update(task, description=name)
            found[name] = make(size)
            progress.advance(task)
    about = f"{size.measured} requests of each case after {size.warmup} that fill the caches"
    took_s = time.perf_counter() - started_s
    fill_in(args.paper, paper_page.page_parts(found, f"`make simulate-paper`, {about}, {took_s:.0f} s on a CPU."))
    Console(stderr=True).print(f"written to {args.paper}")
    return found


def _progress(args: argparse.Namespace) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return bars(*columns, is_quiet=args.quiet)


def _settings(args: argparse.Namespace) -> dict:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


if __name__ == "__main__":
    sys.exit(main())

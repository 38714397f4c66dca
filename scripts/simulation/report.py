"""Tables of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ccjax.evaluation.pages import show, text
from scripts.simulation.sizing import DeploymentSize, Tried


def print_figures(figures: Mapping[str, Any], took: Mapping[str, float]) -> None:
    """Prints the figures of one run."""
    parts = ("mean", "p50", "p90", "p99")
    times = (("TTFT", figures["ttft_s"]), ("whole answer", figures["latency_s"]))
    rows = [(name, *("" if found is None else f"{found[part]:.4f}" for part in parts)) for name, found in times]
    show(("", *parts), rows, "seconds")
    shares = figures["tier_share"]
    counts = (
        ("requests", f"{figures['requests']:,} ({figures['answered']:,} answered, {figures['refused']:,} refused)"),
        ("arrivals, answers a second", f"{text(figures['rate'], '.2f')}, {text(figures['throughput'], '.2f')}"),
        ("passages reused", text(figures["hit_ratio"], ".1%")),
        ("tokens computed", text(figures["computed_share"], ".1%")),
        ("tokens from tiers", ", ".join(f"{tier} {text(share, '.1%')}" for tier, share in shares.items())),
        ("replicas busy", f"{text(figures['busy_share'], '.2f')} of them on average"),
        ("preemptions", f"{figures['preempted']:,}"),
        ("virtual time", f"{figures['virtual_s']:,.1f} s"),
        ("took", f"{took['wall_s']:.1f} s, {took['cpu_s']:.1f} s of processor time"),
    )
    show(("", ""), counts, "run")


def print_sizes(goal: str, needed: Mapping[int, DeploymentSize], tried: Sequence[Tried], distinct_bytes: int) -> None:
    """Prints the result of a search."""
    rows = [
        (
            f"{trial.size.host_cache_bytes / 1e9:.1f} GB",
            f"{trial.size.host_cache_bytes / distinct_bytes:.0%}",
            str(trial.size.replicas),
            f"{trial.value:.3f} s",
            text(trial.figures["computed_share"], ".1%"),
            text(trial.figures["busy_share"], ".2f"),
            "fewest" if needed.get(trial.size.host_cache_bytes) == trial.size else "met" if trial.is_met else "",
        )
        for trial in sorted(tried, key=lambda trial: (trial.size.host_cache_bytes, trial.size.replicas))
    ]
    head = ("host budget", "of all passages", "replicas", "value", "tokens computed", "busy", "")
    show(head, rows, goal, () if needed else ["no size that was tried meets the goal"])

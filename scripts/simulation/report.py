"""Tables of the simulator."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ccjax.simulation.sizing import DeploymentSize, Tried


def console() -> Console:
    """Where tables go."""
    return Console(width=None if sys.stdout.isatty() else 120)


def print_figures(figures: Mapping[str, Any], took: Mapping[str, float]) -> None:
    """One run."""
    table = Table("", "mean", "p50", "p90", "p99", title="seconds")
    for name, key in (("TTFT", "ttft_s"), ("whole answer", "latency_s")):
        times = figures[key]
        table.add_row(name, *("" if times is None else f"{times[one]:.4f}" for one in ("mean", "p50", "p90", "p99")))
    counts = Table("", "", title="run", show_header=False)
    shares = figures["tier_share"]
    for name, value in (
        ("requests", f"{figures['requests']:,} ({figures['answered']:,} answered, {figures['refused']:,} refused)"),
        ("arrivals, answers a second", f"{_number(figures['rate'])}, {_number(figures['throughput'])}"),
        ("passages reused", _percent(figures["hit_ratio"])),
        ("tokens computed", _percent(figures["computed_share"])),
        ("tokens from tiers", ", ".join(f"{tier} {_percent(share)}" for tier, share in shares.items())),
        ("replicas busy", f"{_number(figures['busy_share'])} of them on average"),
        ("preemptions", f"{figures['preempted']:,}"),
        ("virtual time", f"{figures['virtual_s']:,.1f} s"),
        ("took", f"{took['wall_s']:.1f} s, of the processor {took['cpu_s']:.1f} s"),
    ):
        counts.add_row(name, value)
    console().print(table, counts)


def print_sizes(goal: str, needed: Mapping[int, DeploymentSize], tried: Sequence[Tried], distinct_bytes: int) -> None:
    """What a search found."""
    table = Table("host budget", "of all passages", "replicas", "value", "tokens computed", "busy", "", title=goal)
    for one in sorted(tried, key=lambda one: (one.size.host_cache_bytes, one.size.replicas)):
        is_least = needed.get(one.size.host_cache_bytes) == one.size
        table.add_row(
            f"{one.size.host_cache_bytes / 1e9:.1f} GB",
            f"{one.size.host_cache_bytes / distinct_bytes:.0%}",
            str(one.size.replicas),
            f"{one.value:.3f} s",
            _percent(one.figures["computed_share"]),
            _number(one.figures["busy_share"]),
            "fewest" if is_least else "met" if one.is_met else "",
        )
    console().print(table)
    if not needed:
        console().print("no size that was tried meets it")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

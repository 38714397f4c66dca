"""Tables of the serving benchmark, and the line that puts two strategies beside the paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.serve_figures import Saturation

BASE, OTHER = "prefix", "cachecraft"
PAPER = {"throughput": 1.6, "latency": 2.1, "p99_ttft": 3.0}
"""CacheCraft sec. 5.3, 30 % recomputed, continuous batching, LLaMA-3-8B, against prefix caching."""


def compare(rows: Sequence[Mapping[str, Any]], saturated: Mapping[str, Saturation]) -> dict[str, Any] | None:
    """`OTHER` against `BASE` at the lowest of the common rates that `BASE` no longer keeps up with; None where there is
    none, or one of the two was not measured.

    `throughput`, `latency`, `p99_ttft` are ratios above 1 where `OTHER` is better; so is `saturation`, of the largest
    rates that stayed bounded.
    """
    at = {(row["strategy"], row["rate"]): row for row in rows if row["load"] == "open"}
    rates = sorted(r for (name, r), row in at.items() if name == BASE and not row["bounded"] and (OTHER, r) in at)
    for rate in rates:
        base, other = at[BASE, rate], at[OTHER, rate]
        if base["completed"] and other["completed"]:
            limits = [saturated[name].bounded for name in (BASE, OTHER)]
            return {
                "rate": rate,
                "throughput": other["request_throughput"] / base["request_throughput"],
                "latency": base["e2el_ms"]["mean"] / other["e2el_ms"]["mean"],
                "p99_ttft": base["ttft_ms"]["p99"] / other["ttft_ms"]["p99"],
                "saturation": limits[1] / limits[0] if limits[0] and limits[1] else None,
            }
    return None


def show(
    rows: Sequence[Mapping[str, Any]],
    saturated: Mapping[str, Saturation],
    comparison: Mapping[str, Any] | None,
    slo_s: float,
    options: argparse.Namespace,
) -> None:
    """Prints the tables and the line."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_throughput(rows, slo_s))
    console.print(_latencies(rows))
    for strategy, found in saturated.items():
        bounded = "no rate tried" if found.bounded is None else f"{found.bounded:.3g} requests a second"
        above = "" if found.unbounded is None else f", no longer at {found.unbounded:.3g}"
        console.print(f"{strategy}: p99 TTFT stays within {slo_s:.3g} s at {bounded}{above}")
    console.print(line(comparison))
    if options.arrivals != "poisson":
        trace = f"{options.arrivals} arrivals, rescaled, with {options.trace} passages"
        console.print(f"{trace}: no public trace has both; the combination is this benchmark's own")


def line(found: Mapping[str, Any] | None) -> str:
    """The comparison in one line, the paper's figures beside it."""
    if found is None:
        return f"{BASE} kept up at every common rate, or {OTHER} was not measured: nothing to compare; raise --rates"
    limits = "" if found["saturation"] is None else f"; saturates at {found['saturation']:.2f}x the rate"
    return (
        f"at {found['rate']:.3g} requests a second, where {BASE} saturates, {OTHER} has "
        f"{found['throughput']:.2f}x the throughput (paper {PAPER['throughput']}x), {found['latency']:.2f}x lower mean "
        f"latency (paper {PAPER['latency']}x), {found['p99_ttft']:.2f}x lower p99 TTFT (paper {PAPER['p99_ttft']:g}x)"
        f"{limits}"
    )


def load_of(row: Mapping[str, Any]) -> str:
    """The load of a run in words."""
    if row["rate"] is None:
        return f"{row['concurrency']} at a time"
    return f"{row['rate']:.3g}/s{' (probe)' if row['load'] == 'probe' else ''}"


def _throughput(rows: Sequence[Mapping[str, Any]], slo_s: float) -> Table:
    titles = (
        "strategy",
        "load",
        "whole",
        "429",
        "failed",
        "requests/s",
        f"within {slo_s:.3g} s",
        "tokens/s",
        "computed",
    )
    table = Table(*titles, "queue ms", "keeps up", "compiled", "memory GB", title="throughput")
    for row in rows:
        counts = (str(row[key]) for key in ("completed", "refused", "failed"))
        rates = (f"{row[key]:.3g}" for key in ("request_throughput", "request_goodput", "output_throughput"))
        computed = _text(row["computed_share"], "{:.0%}")
        memory = "" if row["rss_bytes"] is None else f"{row['rss_bytes'] / 1e9:.2f}"
        ends = (
            computed,
            _text(row["queue_ms"]),
            "yes" if row["bounded"] else "no",
            f"{row['compilations']:.0f}",
            memory,
        )
        table.add_row(row["strategy"], load_of(row), *counts, *rates, *ends)
    return table


def _latencies(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2el_ms": "E2E"}
    table = Table("strategy", "load", *names.values(), title="latency in ms: mean / p50 / p90 / p99")
    for row in rows:
        cells = (" / ".join(_text(row[key][at]) for at in ("mean", "p50", "p90", "p99")) for key in names)
        table.add_row(row["strategy"], load_of(row), *cells)
    return table


def _text(value: float | None, form: str = "{:.0f}") -> str:
    return "" if value is None else form.format(value)

"""Tables of the serving benchmark, and the line that compares two strategies with the paper."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ccjax.evaluation import pages
from ccjax.evaluation.pages import text

_LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2el_ms": "E2E"}
BASE, OTHER = "prefix", "cachecraft"
PAPER = {"throughput": 1.6, "latency": 2.1, "p99_ttft": 3.0}
"""CacheCraft sec. 5.3, 30 % recomputed, continuous batching, LLaMA-3-8B, against prefix caching."""


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """`OTHER` against `BASE` at the lowest common rate that `BASE` does not sustain; None if there is none, or one of
    the two was not measured.

    `throughput`, `latency` and `p99_ttft` are ratios, above 1 if `OTHER` is better.
    """
    at = {(row["strategy"], row["rate"]): row for row in rows if row["load"] == "open"}
    rates = sorted(r for (name, r), row in at.items() if name == BASE and not row["bounded"] and (OTHER, r) in at)
    for rate in rates:
        base, other = at[BASE, rate], at[OTHER, rate]
        if base["completed"] and other["completed"]:
            return {
                "rate": rate,
                "throughput": other["request_throughput"] / base["request_throughput"],
                "latency": base["e2el_ms"]["mean"] / other["e2el_ms"]["mean"],
                "p99_ttft": base["ttft_ms"]["p99"] / other["ttft_ms"]["p99"],
            }
    return None


def show(
    rows: Sequence[Mapping[str, Any]],
    comparison: Mapping[str, Any] | None,
    slo_s: float,
    options: argparse.Namespace,
) -> None:
    """Prints the tables and the line."""
    says = [line(comparison)]
    if options.arrivals != "poisson":
        trace = f"{options.arrivals} arrivals, rescaled, with MuSiQue's passages"
        says.append(f"{trace}: no public trace has both; the combination is this benchmark's own")
    head = ("strategy", "load", "whole", "429", "failed", "requests/s", f"within {slo_s:.3g} s", "tokens/s", "computed")
    pages.show((*head, "queue ms", "keeps up", "compiled", "memory GB"), map(_throughput, rows), "throughput")
    head = ("strategy", "load", *_LATENCIES.values())
    pages.show(head, map(_latencies, rows), "latency in ms: mean / p50 / p90 / p99", says)


def line(found: Mapping[str, Any] | None) -> str:
    """The comparison in one line, with the paper's figures."""
    if found is None:
        return f"{BASE} kept up at every common rate, or {OTHER} was not measured: nothing to compare; raise --rates"
    return (
        f"at {found['rate']:.3g} requests a second, where {BASE} saturates, {OTHER} has "
        f"{found['throughput']:.2f}x the throughput (paper {PAPER['throughput']}x), {found['latency']:.2f}x lower mean "
        f"latency (paper {PAPER['latency']}x), {found['p99_ttft']:.2f}x lower p99 TTFT (paper {PAPER['p99_ttft']:g}x)"
    )


def load_of(row: Mapping[str, Any]) -> str:
    """The load of a run in words."""
    if row["rate"] is None:
        return f"{row['concurrency']} at a time"
    return f"{row['rate']:.3g}/s"


def _throughput(row: Mapping[str, Any]) -> list[str]:
    return [
        row["strategy"],
        load_of(row),
        *(str(row[key]) for key in ("completed", "refused", "failed")),
        *(f"{row[key]:.3g}" for key in ("request_throughput", "request_goodput", "output_throughput")),
        text(row["computed_share"], ".0%"),
        text(row["queue_ms"]),
        "yes" if row["bounded"] else "no",
        text(row["compilations"]),
        "" if row["rss_bytes"] is None else f"{row['rss_bytes'] / 1e9:.2f}",
    ]


def _latencies(row: Mapping[str, Any]) -> list[str]:
    cells = (" / ".join(text(row[key][at]) for at in ("mean", "p50", "p90", "p99")) for key in _LATENCIES)
    return [row["strategy"], load_of(row), *cells]

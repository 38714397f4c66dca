"""Report of the cluster benchmark: tables for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ccjax.evaluation.pages import markdown_table, text
from ccjax.evaluation.pages import show as show_table
from scripts.benchmarks.common import source

Figures = Mapping[str, Any]
PART = "bench.py cluster"
"""In the page's markers."""

HEAD = ("documents", "system", "pass", "answers/s", "gain", "mean latency, s", "less", "p99, s", "computed", "orders")
PAPERS = {1: (1.168, 0.368), 2: (1.252, 0.298)}
"""k -> throughput and latency of configuration B relative to the baseline (table V)."""
THROUGHPUT_TARGET, LATENCY_TARGET = 1.28, 0.29
"""For configuration B at k = 2 by the third pass."""
_LABELS = {"none": "no sharing", "shared": "shared store", "generator": "shared store, generator"}


def rows(figures: Figures) -> list[list[str]]:
    """A row for each pass; its gains are over the baseline's same pass."""
    found = []
    for case in figures["cases"]:
        gain, less = gains(figures, case)
        found.append(
            [
                str(case["documents"]),
                _LABELS[case["system"]],
                str(case["pass"]),
                f"{case['throughput']:.2f}",
                text(gain, ".2f"),
                f"{case['latency_ms']['mean'] / 1e3:.2f}",
                text(less, ".0%"),
                f"{case['latency_ms']['p99'] / 1e3:.2f}",
                f"{case['computed_share']:.0%}",
                f"{case['counters']['orders_placed']:.0f}",
            ]
        )
    return found


def gains(figures: Figures, case: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Throughput over the baseline's same pass, and the share by which latency is lower; None without a baseline."""
    same = ("documents", "pass")
    base = [
        candidate
        for candidate in figures["cases"]
        if candidate["system"] == "none"
        and all(candidate[name] == case[name] for name in same)
        and case["system"] != "none"
    ]
    if not base:
        return None, None
    latency = case["latency_ms"]["mean"] / base[0]["latency_ms"]["mean"]
    return case["throughput"] / base[0]["throughput"], 1.0 - latency


def says(figures: Figures) -> list[str]:
    """Summaries of the figures compared with the paper and the targets."""
    lines = []
    for number in dict.fromkeys(case["documents"] for case in figures["cases"]):
        for system in ("shared", "generator"):
            cases = [case for case in figures["cases"] if case["documents"] == number and case["system"] == system]
            both = [gains(figures, case) for case in cases]
            if not both or both[0][0] is None or both[-1][0] is None or both[0][1] is None or both[-1][1] is None:
                continue
            paper = ""
            if system == "generator" and number in PAPERS:
                paper = f"; paper, mean of its passes: {PAPERS[number][0]:.2f} times, {PAPERS[number][1]:.0%} less"
            lines.append(
                f"k = {number}, {_LABELS[system]}: throughput {both[0][0]:.2f} times the baseline's in the first pass, "
                f"{both[-1][0]:.2f} in the last; mean latency {both[0][1]:.0%} less, then {both[-1][1]:.0%}{paper}."
            )
            if system == "generator" and number == 2:
                is_reached = both[-1][0] >= THROUGHPUT_TARGET and both[-1][1] >= LATENCY_TARGET
                verdict = "reached" if is_reached else "NOT reached"
                lines.append(
                    f"Target at k = 2, at least {THROUGHPUT_TARGET} times and {LATENCY_TARGET:.0%} less by the last "
                    f"pass: {verdict}; no worse than the baseline in the first: "
                    f"{'reached' if both[0][0] >= 1.0 and both[0][1] >= 0.0 else 'NOT reached'}."
                )
    overhead = figures["overhead"]
    if overhead is not None:
        single, cluster = overhead["single"], overhead["cluster"]
        lines.append(
            f"The front and Ray take {overhead['median_ms']:.1f} ms of a request: {cluster['p50']:.1f} ms with one "
            f"replica behind the front, {single['p50']:.1f} ms with a single server (medians of "
            f"{overhead['requests']}, one at a time; p99 {cluster['p99']:.1f} and {single['p99']:.1f} ms)."
        )
    return lines


def show(figures: Figures) -> None:
    """Prints the table and its summaries."""
    show_table(HEAD, rows(figures), says=says(figures))


def page_part(figures: Figures) -> str:
    """The same for docs/dcache.md."""
    rates = {f"rate_at_k_{case['documents']}": round(case["rate"], 1) for case in figures["cases"]}
    about = source(figures["environment"], figures["options"], rates)
    return "\n\n".join([about, markdown_table(HEAD, rows(figures)), "\n".join(f"- {line}" for line in says(figures))])

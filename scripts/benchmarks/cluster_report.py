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
    return [
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
        for case in figures["cases"]
        for gain, less in [gains(figures, case) or (None, None)]
    ]


def gains(figures: Figures, case: Mapping[str, Any]) -> tuple[float, float] | None:
    """Throughput over the baseline's same pass, and the share by which latency is lower; None without a baseline, and
    for itself."""
    for base in figures["cases"]:
        if (base["system"], base["documents"], base["pass"]) == ("none", case["documents"], case["pass"]):
            latency = case["latency_ms"]["mean"] / base["latency_ms"]["mean"]
            return None if base is case else (case["throughput"] / base["throughput"], 1.0 - latency)
    return None


def says(figures: Figures) -> list[str]:
    """Summaries of the figures compared with the paper and the targets."""
    lines = []
    for number in dict.fromkeys(case["documents"] for case in figures["cases"]):
        for system in ("shared", "generator"):
            cases = [case for case in figures["cases"] if case["documents"] == number and case["system"] == system]
            both = [found for case in cases if (found := gains(figures, case)) is not None]
            if not both:
                continue
            (first_gain, first_less), (last_gain, last_less) = both[0], both[-1]
            paper = ""
            if system == "generator" and number in PAPERS:
                paper = f"; paper, mean of its passes: {PAPERS[number][0]:.2f} times, {PAPERS[number][1]:.0%} less"
            lines.append(
                f"k = {number}, {_LABELS[system]}: throughput {first_gain:.2f} times the baseline's in the first pass, "
                f"{last_gain:.2f} in the last; mean latency {first_less:.0%} less, then {last_less:.0%}{paper}."
            )
            if system == "generator" and number == 2:
                is_reached = last_gain >= THROUGHPUT_TARGET and last_less >= LATENCY_TARGET
                is_no_worse = first_gain >= 1.0 and first_less >= 0.0
                lines.append(
                    f"Target at k = 2, at least {THROUGHPUT_TARGET} times and {LATENCY_TARGET:.0%} less by the last "
                    f"pass: {_verdict(is_reached)}; no worse than the baseline in the first: {_verdict(is_no_worse)}."
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


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "NOT reached"


def show(figures: Figures) -> None:
    """Prints the table and its summaries."""
    show_table(HEAD, rows(figures), says=says(figures))


def page_part(figures: Figures) -> str:
    """The same for docs/dcache.md."""
    rates = {f"rate_at_k_{case['documents']}": round(case["rate"], 1) for case in figures["cases"]}
    about = source(figures["environment"], figures["options"], rates)
    return "\n\n".join([about, markdown_table(HEAD, rows(figures)), "\n".join(f"- {line}" for line in says(figures))])

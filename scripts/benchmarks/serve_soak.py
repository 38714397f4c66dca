"""A long closed loop on one server: every answer complete, no page lost, constant memory, no late compilation."""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ccjax.evaluation.pages import show
from scripts.benchmarks.common import Say
from scripts.benchmarks.serve_client import RequestRecord, closed_loop
from scripts.benchmarks.serve_figures import figures
from scripts.benchmarks.serve_server import Watch, scrape, serving
from scripts.benchmarks.serve_workload import WorkloadQuestion

NUM_QUESTIONS = 100
"""Different requests of a soak, repeated: soon the store has seen all of them, and further growth is a leak."""
_SCRAPE_S = 5.0
_LONGEST_END_S = 30.0


def soak(
    questions: Sequence[WorkloadQuestion],
    flags_of: Callable[[str], list[str]],
    options: argparse.Namespace,
    say: Say,
) -> dict[str, Any]:
    """Runs it and prints the results; `failures` of the result is not empty if an answer was incomplete."""
    strategy = "cachecraft" if "cachecraft" in options.strategies else options.strategies[0]
    bodies = [q.body(max_tokens=options.max_tokens) for q in questions[-NUM_QUESTIONS:]]
    with serving(flags_of(strategy), say) as url:
        say(f"{strategy}: {options.concurrency} at a time")
        before = scrape(url)
        with Watch(url, _SCRAPE_S) as watch:
            records = closed_loop(
                url,
                itertools.islice(itertools.cycle(bodies), options.requests),
                options.concurrency,
                options.timeout_s,
                stop_after_s=options.soak,
            )
        after = settled(url)
    row = {"strategy": strategy, "load": "soak", "concurrency": options.concurrency, "rate": None}
    row |= figures(records, options.slo_s or math.inf, before, after)
    row |= trend(watch.samples) | {"changed_answers": changed_answers(records, len(bodies))}
    row["page_usage"] = [scraped["ccjax_kv_cache_usage_perc"] for scraped in (before, after)]
    _print(row)
    broken = [record for record in records if record.status != "ok"]
    failures = [f"{len(broken)} of {len(records)} answers were incomplete: {broken[0].error}"] if broken else []
    if "--device-cache-bytes" not in options.serve_args:  # else cached chunks take pages
        failures += lost_pages(before, after)
    return {"cases": [row], "samples": watch.samples, "failures": failures}


def settled(url: str) -> dict[str, float]:
    """The metrics once the server has released its last request, which is after the client has its answer, or after a
    time limit."""
    deadline = time.monotonic() + _LONGEST_END_S
    while True:
        scraped = scrape(url)
        is_idle = not scraped["ccjax_num_requests_running"] and not scraped["ccjax_num_requests_waiting"]
        if is_idle or time.monotonic() > deadline:
            return scraped
        time.sleep(0.05)


def lost_pages(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Failures of a pool in which no chunk is cached: as many pages should be free as before."""
    name = "ccjax_kv_cache_usage_perc"
    if after[name] == before[name]:
        return []
    return [f"{name}: wanted {before[name]:g} as before the first request, got {after[name]:g}"]


def trend(samples: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Figures of memory and compilations from samples (seconds, resident bytes, compilations) in order of time.

    `rss_growth_bytes` is the median of the last quarter less that of the quarter before it: 0 up to noise if memory is
    flat once the store is full. `late_compilations` came in the second half.
    """
    quarter = len(samples) // 4
    if quarter == 0:
        return {"rss_growth_bytes": None, "rss_max_bytes": None, "late_compilations": None}
    resident = [memory for _, memory, _ in samples]
    growth = statistics.median(resident[-quarter:]) - statistics.median(resident[-2 * quarter : -quarter])
    late = samples[-1][2] - samples[len(samples) // 2][2]
    return {"rss_growth_bytes": growth, "rss_max_bytes": max(resident), "late_compilations": late}


def changed_answers(records: Sequence[RequestRecord], num_questions: int) -> int:
    """Questions whose answers differed: 0 if reuse is exact."""
    texts: dict[int, set[str]] = collections.defaultdict(set)
    for record in records:
        if record.status == "ok":
            texts[record.number % num_questions].add(record.text)
    return sum(len(found) > 1 for found in texts.values())


def _print(row: dict[str, Any]) -> None:
    rows = (
        ("answers complete / refused / failed", f"{row['completed']} / {row['refused']} / {row['failed']}"),
        ("requests a second", f"{row['request_throughput']:.2f}"),
        ("TTFT p50, p99", " ".join(f"{row['ttft_ms'][key] or 0:.0f} ms" for key in ("p50", "p99"))),
        ("ITL p50, p99", " ".join(f"{row['itl_ms'][key] or 0:.0f} ms" for key in ("p50", "p99"))),
        ("compilations, of them in the second half", f"{row['compilations']:.0f}, {row['late_compilations']}"),
        ("server memory, largest", _mb(row["rss_max_bytes"])),
        ("growth from the third to the last quarter", _mb(row["rss_growth_bytes"])),
        ("questions answered in more than one way", str(row["changed_answers"])),
    )
    show(("", row["strategy"]), rows)


def _mb(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:,.0f} MB"

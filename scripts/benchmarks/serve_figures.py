"""Figures of one run under load, in the field's terms (TTFT, TPOT, ITL, E2E latency).

Names and definitions are those of vLLM's `benchmark_serving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks.common import spread
from scripts.benchmarks.serve_client import RequestRecord

Counters = Mapping[str, float]
"""Sample name -> value of a server's /metrics, labels summed up."""


def ttft_s(record: RequestRecord) -> float:
    """Seconds to the first text."""
    return record.text_s[0] - record.scheduled_s


def itl_s(record: RequestRecord) -> list[float]:
    """Seconds between one piece of text and the next."""
    return [after - before for before, after in zip(record.text_s, record.text_s[1:], strict=False)]


def tpot_s(record: RequestRecord) -> float | None:
    """Seconds per token after the first one; None for an answer of one token."""
    if record.completion_tokens < 2:
        return None
    return (record.text_s[-1] - record.text_s[0]) / (record.completion_tokens - 1)


def figures(records: Sequence[RequestRecord], slo_s: float, before: Counters, after: Counters) -> dict[str, Any]:
    """All figures of one run; except for `refused` and `failed`, only complete answers count.

    Args:
      slo_s: bound on TTFT; goodput counts the answers within it.
      before, after: /metrics around the run.
    """
    good = [record for record in records if record.status == "ok"]
    duration_s = max((record.end_s for record in records), default=0.0) - min(
        (record.scheduled_s for record in records), default=0.0
    )
    per_second = 1.0 / duration_s if duration_s > 0 else 0.0
    ttfts = [ttft_s(record) for record in good]
    num_within = sum(value <= slo_s for value in ttfts)
    known = [record for record in good if record.computed_tokens is not None]
    prompt_tokens = sum(record.prompt_tokens for record in known)
    num_queued = _grown(before, after, "ccjax_request_queue_time_seconds_count")
    return {
        "completed": len(good),
        "refused": sum(record.status == "refused" for record in records),
        "failed": sum(record.status == "failed" for record in records),
        "duration_s": duration_s,
        "request_throughput": len(good) * per_second,
        "output_throughput": sum(record.completion_tokens for record in good) * per_second,
        "request_goodput": num_within * per_second,
        "ttft_ms": spread(ttfts),
        "tpot_ms": spread([value for value in map(tpot_s, good) if value is not None]),
        "itl_ms": spread([value for record in good for value in itl_s(record)]),
        "e2el_ms": spread([record.end_s - record.scheduled_s for record in good]),
        "queue_ms": 1e3 * _grown(before, after, "ccjax_request_queue_time_seconds_sum") / num_queued
        if num_queued
        else None,
        "computed_share": sum(record.computed_tokens or 0.0 for record in known) / prompt_tokens
        if prompt_tokens
        else None,
        "send_lag_ms": spread([record.sent_s - record.scheduled_s for record in records]),
        "compilations": _grown(before, after, "ccjax_compilations_total"),
        "rss_bytes": after.get("process_resident_memory_bytes"),
        "errors": sorted({record.error for record in records if record.error})[:5],
    }


def _grown(before: Counters, after: Counters, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def is_bounded(row: Mapping[str, Any], slo_s: float) -> bool:
    """Whether a server kept up: every request was answered, and p99 of TTFT stays within `slo_s`.

    A growing queue makes TTFT grow, so a long enough run exceeds the bound: at a rate r above the capacity c after
    about `slo_s / (1/c - 1/r)` requests.
    """
    p99 = row["ttft_ms"]["p99"]
    return not row["refused"] and not row["failed"] and p99 is not None and p99 <= slo_s * 1e3

"""Times attention against library kernels in one run.

A rate counts only the products of visible pairs, 4 * H * heads * pairs, without masked pairs and the mass. The
candidates of a context alternate, so that their ratios do not depend on the clock of the chip.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from scripts.gpucheck.attention_candidates import COMPUTED, FULL, Candidate, candidates
from scripts.gpucheck.attention_numerics import available
from scripts.gpucheck.ceilings import ceiling
from scripts.gpucheck.record import CheckRecord, table
from scripts.gpucheck.timing import Timed, calls_per_sample, interleaved, ratio

SUITE, AGREEMENT, TARGET = "attention_timing", "attention_agreement", "attention_target"
"""Suites of rows: timings; whether candidates compute the same; whether the target is met."""

CONTEXTS = (16384, 8192, 32768, 4096, 2048)
"""In order of interest: if time runs out, the last are left out."""
TARGET_CONTEXT, TARGET_COMPUTED, TARGET_RATIO = 16384, "15 %", 0.6
"""Rate of a partial prefill over that of the best library kernel computing all of the same context."""
SAME = 2e-2
"""Largest relative difference of two kernels' outputs on sampled rows; rounding to bfloat16 alone is 0.004."""
_TFLOPS = {"xla": 5.0}
"""Expected rates, to choose how many calls make a sample; 400 for all others."""


def run(record: CheckRecord) -> None:
    """Times every candidate at every context, then judges the target."""
    names = available()
    for context in CONTEXTS[3:4] if record.is_quick else CONTEXTS:
        if record.seconds_left() <= 0:
            record.say(f"attention at {context} tokens is not timed: out of time")
            record.add(SUITE, context=context, note="out of time")
            continue
        measure(record, candidates(context, names, is_quick=record.is_quick))
    judge(record)


def measure(record: CheckRecord, competing: Sequence[Candidate]) -> None:
    """Builds the candidates of one context, compares their results, and times them in turn."""
    building: list[tuple[Candidate, Callable[[], Timed]]] = []
    built: list[tuple[Candidate, Timed]] = []
    wanted: dict[str, np.ndarray] = {}
    record.say(f"attention: building {len(competing)} candidates, {competing[0].work.context} tokens")
    with ThreadPoolExecutor(8) as pool:
        for candidate in competing:
            with _noted(record, candidate):
                expected_s = candidate.work.flops / (1e12 * _TFLOPS.get(candidate.name, 400.0))
                build = candidate.lower(calls_per_sample(expected_s))
                building.append((candidate, pool.submit(build).result if candidate.in_threads else build))
    for candidate, build in building:
        with _noted(record, candidate):
            if not candidate.in_threads:
                if record.seconds_left() <= 0:
                    raise TimeoutError("out of time")
                record.say(f"building {_label(candidate)}")
            timed = build()
            got = candidate.rows_of(timed.result, sampled_rows(candidate.work.num_queries))
            first = wanted.setdefault(candidate.work.computed, got)
            if first is not got:
                distance = np.linalg.norm(got - first, axis=(1, 2)) / np.linalg.norm(first, axis=(1, 2))
                record.compare(
                    AGREEMENT, float(np.nan_to_num(distance, nan=np.inf).max()), SAME, candidate=_label(candidate)
                )
            built.append((candidate, Timed(timed.sample, None, timed.method)))
    record.say(f"attention: timing {len(built)}")
    seconds = interleaved({str(number): timed for number, (_, timed) in enumerate(built)}, 3 if record.is_quick else 7)
    for (candidate, timed), samples in zip(built, seconds.values(), strict=True):
        median = statistics.median(samples)
        tflops = candidate.work.flops / median / 1e12
        if tflops > 1.05 * (ceiling(record, "matmul_tflops") or float("inf")):
            record.fail(
                f"{SUITE}: {candidate.name}: {tflops:.0f} TFLOP/s, more than products alone reach: the timing is wrong"
            )
        record.add(
            SUITE,
            **_identity(candidate),
            flops=candidate.work.flops,
            ms=1e3 * median,
            tflops=tflops,
            samples_ms=[1e3 * sample for sample in samples],
            method=timed.method,
        )


def sampled_rows(num_rows: int) -> np.ndarray:
    """The first 32, which see few slots and so show a wrong mask, and 32 others."""
    others = np.random.default_rng(0).choice(num_rows, min(32, num_rows), replace=False)
    return np.union1d(np.arange(min(32, num_rows)), others)


def judge(record: CheckRecord) -> None:
    """Adds a row per own kernel: its rate at the target's size over the best library's on the whole context."""
    timed = [row for row in record.rows.get(SUITE, []) if "ms" in row and row["context"] == TARGET_CONTEXT]
    best = best_full(timed)
    for row in timed:
        if best and row["computed"] == TARGET_COMPUTED and not row["is_library"] and row["name"] != "xla":
            share = ratio(best["samples_ms"], row["samples_ms"]) * row["flops"] / best["flops"]
            verdict = {"ratio": share, "wanted": TARGET_RATIO, "passed": share >= TARGET_RATIO}
            record.add(TARGET, name=row["name"], with_mass=row["with_mass"], best_library=best["name"], **verdict)


def best_full(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest library kernel that computes a whole context, without mass."""
    full = [row for row in rows if row["is_library"] and row["computed"] == FULL and not row["with_mass"]]
    return max(full, key=lambda row: row["tflops"], default=None)


def _identity(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "context": candidate.work.context,
        "computed": candidate.work.computed,
        "num_queries": candidate.work.num_queries,
        "with_mass": candidate.with_mass,
        "is_library": candidate.is_library,
    }


def _label(candidate: Candidate) -> str:
    return (
        f"{candidate.name}{' with mass' * candidate.with_mass}, {candidate.work.computed} of {candidate.work.context}"
    )


@contextlib.contextmanager
def _noted(record: CheckRecord, candidate: Candidate) -> Iterator[None]:
    """Turns an exception of a kernel into a row, so that the others are still timed."""
    try:
        yield
    except Exception as error:
        note = " ".join(f"{type(error).__name__}: {str(error)[:300]}".split())
        record.say(f"{_label(candidate)}: {note}")
        record.add(SUITE, **_identity(candidate), note=note)
        if not candidate.is_library and not isinstance(error, TimeoutError):
            record.fail(f"{SUITE}: {_label(candidate)}: {note}")


def tables(record: CheckRecord) -> list[str]:
    """Times and rates, one row per context and share, one column per kernel; then the target."""
    timed = [row for row in record.rows.get(SUITE, []) if "ms" in row]
    if not timed:
        return []
    best = ceiling(record, "matmul_tflops")

    shown = [
        _pivot("Attention, ms per call", timed, lambda row: row["ms"]),
        _pivot("Attention, TFLOP/s on visible pairs", timed, lambda row: row["tflops"]),
        _pivot("Rate, % of the matrix product's", timed, lambda row: 100 * row["tflops"] / best if best else None),
    ]
    verdicts = [
        (_column(row), row["best_library"], 100 * row["ratio"], "PASS" if row["passed"] else "FAIL")
        for row in record.rows.get(TARGET, [])
    ] or [("not measured", None, None, None)]
    title = (
        f"Target: {TARGET_COMPUTED} of {TARGET_CONTEXT:,} computed, "
        f"at least {TARGET_RATIO:.0%} of the rate of the best library kernel on all of it"
    )
    notes = {(row.get("name", "every kernel"), row["note"]): row for row in record.rows[SUITE] if "note" in row}
    untimed = [(name, f"{row.get('computed', 'all')} of {row['context']}", note) for (name, note), row in notes.items()]
    if untimed:
        shown.append(table("Not timed", ("kernel", "at first", "why"), untimed))
    return [*shown, table(title, ("kernel", "best library", "%", "verdict"), verdicts)]


def _column(row: dict[str, Any]) -> str:
    return row["name"] + " + mass" * row["with_mass"]


def _pivot(title: str, rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> str:
    columns = list(dict.fromkeys(map(_column, rows)))
    cells = {(row["context"], row["computed"], _column(row)): value(row) for row in rows}
    order = sorted({(row["context"], list(COMPUTED).index(row["computed"]), row["computed"]) for row in rows})
    lines = [
        (f"{computed} of {context:,}", *(cells.get((context, computed, column)) for column in columns))
        for context, _, computed in order
    ]
    return table(title, ("computed", *columns), lines)

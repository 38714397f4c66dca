"""Targets, tables and the section of docs/measured.md, from the results of `bench.py gpu`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpucheck.record import table

PART = "bench.py gpu"
"""The section in the markers of its page."""
NO_RESULTS = "Nothing has been measured on an accelerator yet: `benchmarks/results/` has no results."


@dataclasses.dataclass(frozen=True)
class SpeedTarget:
    """A wanted and a measured figure; `got` is None if one of its cases was not measured."""

    name: str
    wanted: float
    got: float | None

    @property
    def verdict(self) -> str:
        """Whether it is reached, in words."""
        if self.got is None:
            return "not measured"
        return "reached" if self.got >= self.wanted else "NOT reached"


def targets(results: dict[str, Any]) -> list[SpeedTarget]:
    """Every target with the figures of one run."""
    short, long = results["shapes"]["short"], results["shapes"]["long"]

    def figure(name: str, kind: str, context: int, ratio: float | None = None, tier: str | None = None) -> float | None:
        return _figure(results, name, kind, context, 1, ratio, tier)

    def speed_up(context: int) -> float | None:
        part, full = figure("ttft_s", "reuse", context, 0.15, "device"), figure("ttft_s", "full", context)
        return full / part if part and full else None

    def host_speed(context: int) -> float | None:
        host, device = (figure("ttft_s", "reuse", context, 0.15, tier) for tier in ("host", "device"))
        return device / host if host and device else None

    decode = figure("share_of_copy", "decode", short)
    return [
        SpeedTarget(
            f"full prefill of {short:,}, of the matmul ceiling", 0.60, figure("share_of_matmul", "full", short)
        ),
        SpeedTarget(f"15 % on the device against own full prefill, {short:,}", 5.0, speed_up(short)),
        SpeedTarget(f"15 % on the device against own full prefill, {long:,}", 5.5, speed_up(long)),
        SpeedTarget(f"15 % from the host, device's time over its own, {short:,}", 1 / 1.1, host_speed(short)),
        SpeedTarget(f"15 % from the host, device's time over its own, {long:,}", 1 / 1.1, host_speed(long)),
        SpeedTarget(f"decode step behind {short:,}, of the copy ceiling", 0.70, decode),
    ]


def tables(results: dict[str, Any]) -> list[str]:
    """Ceilings, one row per context and batch, targets, and unmeasured cases, as Markdown."""
    rows = results["suites"].get("cases", [])
    places = sorted({(row["batch"], row["context"]) for row in rows})
    shown = [table(f"{results['device']}, {results['date']}: ceilings", ("measured", "value"), _ceilings(results))]
    columns = ("tokens x batch", "full ms", "% of matmul", "PyTorch ms", "15% device ms", "full / 15%", "15% host ms")
    columns += ("15% disk ms", "30% device ms", "30% host ms", "30% disk ms")
    lines = []
    for batch, context in places:
        figure = functools.partial(_figure, results, context=context, batch=batch)
        ttft = functools.partial(figure, "ttft_s")
        full, part, share = ttft("full"), ttft("reuse", ratio=0.15, tier="device"), figure("share_of_matmul", "full")
        speed_up = full / part if full and part else None
        rest = [ttft("reuse", ratio=0.15, tier=tier) for tier in ("host", "disk")]
        rest += [ttft("reuse", ratio=0.30, tier=tier) for tier in ("device", "host", "disk")]
        line = [_times(1e3, full), _times(100, share), _times(1e3, ttft("torch")), _times(1e3, part), speed_up]
        line += [_times(1e3, seconds) for seconds in rest]
        if any(value is not None for value in line):
            lines.append((f"{context:,} x {batch}", *line))
    if lines:
        shown.append(table("Time to first token", columns, lines))
    decoded = [row for row in rows if row["kind"] == "decode" and "step_s" in row]
    if decoded:
        steps = [
            (f"{row['context']:,} x {row['batch']}", 1e3 * row["step_s"], row["gbps"], 100 * row["share_of_copy"])
            for row in sorted(decoded, key=lambda row: (row["batch"], row["context"]))
        ]
        shown.append(table("Decode", ("tokens x batch", "ms a step", "GB/s", "% of copy"), steps))
    verdicts = [(target.name, target.wanted, target.got, target.verdict) for target in targets(results)]
    shown.append(table("Targets", ("what", "wanted", "got", "verdict"), verdicts))
    return shown


def notes(results: dict[str, Any]) -> list[str]:
    """Unmeasured cases, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for row in results["suites"].get("cases", []):
        if "note" in row:
            by_reason.setdefault(row["note"].split(":")[0], []).append(row["case"])
    return [f"{reason}: {'; '.join(names)}" for reason, names in by_reason.items()]


def section(folder: Path) -> str:
    """The section of docs/measured.md: tables of every committed run, the latest of each device."""
    found = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text("utf-8"))
        if results.get("benchmark") == "gpu" and not results["is_quick"]:
            found.append(results)
    if not found:
        return NO_RESULTS
    return "\n\n".join(part for results in found for part in [*tables(results), _source(results)])


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _figure(
    results: dict[str, Any],
    name: str,
    kind: str,
    context: int,
    batch: int = 1,
    ratio: float | None = None,
    tier: str | None = None,
) -> float | None:
    """A figure of the only such case; None if it was not measured, or did not do what its name says."""
    wanted = (kind, context, batch, ratio, tier)
    for row in results["suites"].get("cases", []):
        if tuple(row[key] for key in ("kind", "context", "batch", "ratio", "tier")) == wanted:
            return row.get(name) if row.get("as_named", True) else None
    return None


def _ceilings(results: dict[str, Any]) -> Sequence[tuple[str, float]]:
    labels = {
        "matmul_tflops": "bfloat16 product of large matrices, TFLOP/s",
        "copy_gbps": "copy on the device, read plus written, GB/s",
        "transfer_pinned_host_gbps": "pinned host memory to device, GB/s",
        "transfer_unpinned_host_gbps": "NumPy array to device, GB/s",
    }
    rows = results["suites"].get("ceilings", [])
    return [(labels[row["name"]], row["value"]) for row in rows if row["name"] in labels]


def _source(results: dict[str, Any]) -> str:
    versions = results["versions"]
    parts = [f"jax {versions.get('jax', '?')}", f"torch {versions['torch']}" if "torch" in versions else "no torch"]
    parts += [f"commit {results['commit']}", f"{results['elapsed_s']:.0f} s"]
    line = f"`scripts/bench.py gpu`, {results['shapes']['model']}, bfloat16, random weights; {', '.join(parts)}."
    missing = [row for row in results["suites"].get("cases", []) if "note" in row]
    if missing:
        line += f" {len(missing)} cases have no figure; the results file says why."
    return line if results["is_complete"] else f"{line} The run was interrupted."

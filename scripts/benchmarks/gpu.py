"""Llama-3-8B's shapes on an accelerator: TTFT by share recomputed and tier, decode, all against measured ceilings.

Random weights generated on the device, prompts through the public engine, compared with PyTorch's prefill of the same
weights. Results are written after every case, the most important first; the file notes cases that were not run.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import fill_in
from scripts.gpucheck.needs import missing_packages

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark; `--quick` is a tiny model on any device, through every code path."""
    parser.add_argument("--output", type=Path, metavar="DIR", help="for DEVICE.json (default benchmarks/results)")
    parser.add_argument("--time-limit-s", type=float, default=480.0, help="start no case after this time")
    parser.add_argument("--only", default="", metavar="PART", help="cases with this part in their name")
    parser.add_argument("--store", type=Path, metavar="DIR", help="where the disk tier goes (default: temporary files)")
    parser.add_argument("--compile-cache", type=Path, default=ROOT / "build" / "jax-cache", metavar="DIR")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="measure nothing: put the results into this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the tables, and returns the results; without an accelerator prints only a line."""
    missing = missing_packages()
    if missing:
        sys.exit(f"bench.py gpu: not installed: {', '.join(missing)}")
    # Here and not above: without those packages the modules cannot even be imported.
    from scripts.benchmarks import gpu_report as report

    if arguments.readme is not None:
        changed = fill_in(arguments.readme, {report.PART: report.section(arguments.output or RESULTS)})
        print(f"{arguments.readme}: {'changed' if changed else 'unchanged'}")
        return {}
    import jax

    platform = jax.default_backend()
    if platform == "cpu" and not arguments.quick:
        print("bench.py gpu: skipped, jax sees no accelerator; --quick runs every code path here with a tiny model")
        return {}
    from scripts.benchmarks import gpu_cases as measure
    from scripts.benchmarks import gpu_plan as plan
    from scripts.gpucheck.machine import machine
    from scripts.gpucheck.record import CheckRecord

    measure.keep_executables(arguments.compile_cache)
    scale = plan.QUICK_SCALE if arguments.quick else plan.LLAMA3_8B_SCALE
    header = {"benchmark": "gpu", **machine(), "shapes": measure.shapes(scale)}
    output = arguments.output or (Path(tempfile.mkdtemp(prefix="ccjax-bench-gpu-")) if arguments.quick else RESULTS)
    name = re.sub("[^a-z0-9]+", "-", header["device"].lower()).strip("-")
    path = output / f"{name}{'-quick' * arguments.quick}.json"
    record = CheckRecord(path, header, is_quick=arguments.quick, limit_s=arguments.time_limit_s)
    measure.run(record, scale, folder=arguments.store, only=arguments.only)
    for target in report.targets(record.results()):
        record.add("targets", name=target.name, wanted=target.wanted, got=target.got, verdict=target.verdict)
    record.write(is_complete=True)
    results = record.results()
    print("\n\n".join([*report.tables(results), *report.notes(results), str(path)]))
    return results

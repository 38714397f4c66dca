"""Checks and times the kernels on this machine's NVIDIA GPU: `python scripts/gpu_check.py [--quick] [--out DIR]`.

Needs jax with its CUDA plugin, numpy and jaxtyping; PyTorch with CUDA joins the comparison if it is installed. Writes
`<device>-<date>.json` as results come and `<device>-<date>.md`, the tables, at the end. Exit status: 0 if every number
is right, 1 if one is not, 2 without such a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SUITES = (
    "attention_numerics",
    "rope_numerics",
    "decode_numerics",
    "ceilings",
    "rope_timing",
    "decode_timing",
    "attention_timing",
)
"""Modules of scripts/gpucheck in the order they run: a kernel's checks belong before the ceilings, its timings behind
them. Each has `run(record)`, which adds rows, and `tables(record)`, which shows them."""
PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "triton")
LIMIT_S = {"full": 420.0, "quick": 50.0}


def device_kind() -> str:
    """Name of the GPU that JAX sees.

    Raises:
      RuntimeError: none of NVIDIA's.
    """
    import jax

    try:
        device = jax.devices()[0]
    except RuntimeError as error:  # a platform was asked for that is not there
        raise RuntimeError(f"jax finds no device: {error}") from error
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        raise RuntimeError(
            f"wanted an NVIDIA GPU, but jax {jax.__version__} runs on {device.platform!r} ({device.device_kind}); "
            "is its CUDA plugin installed (pip install 'jax[cuda13]'), and does nvidia-smi show a GPU?"
        )
    return device.device_kind


def header() -> dict[str, Any]:
    """Machine, versions and state of the GPU."""
    from scripts.benchmarks.common import environment

    found = environment()
    for package in PACKAGES:
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    fields = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        gpu = dict(zip(fields.split(","), answer.split(", "), strict=True))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        gpu = {}
    return {"benchmark": "gpu_check", **found, "gpu": gpu}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every suite; the exit status is in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes, under a minute: does everything run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no further measurement after so long")
    options = parser.parse_args(arguments)
    # JAX would take three quarters of the memory at once, and PyTorch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        kind = device_kind()
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2

    from scripts.gpucheck.record import Record

    found = header()
    name = f"{re.sub('[^a-z0-9]+', '-', kind.lower())}-{found['date']}{'-quick' * options.quick}"
    limit_s = options.limit or LIMIT_S["quick" if options.quick else "full"]
    record = Record(options.out / f"{name}.json", found, is_quick=options.quick, limit_s=limit_s)
    shown = []
    for suite in SUITES:
        module = importlib.import_module(f"scripts.gpucheck.{suite}")
        try:
            module.run(record)
        except Exception as error:  # the other suites still have something to say
            traceback.print_exc()
            record.fail(f"{suite}: {type(error).__name__}: {error!s:.300}")
        shown += module.tables(record)
    record.write(is_complete=True)
    failures = "\n".join(f"- FAILED {failure}" for failure in record.failures) or "Every number is right."
    text = "\n\n".join([f"{kind}, {found['date']}, {found['commit']}", *shown, failures])
    record.path.with_suffix(".md").write_text(text + "\n")
    print(f"\n{text}\n\n{record.path}")
    return 1 if record.failures else 0


if __name__ == "__main__":
    sys.exit(main())

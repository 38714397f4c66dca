"""Checks and times the kernels on this machine's NVIDIA GPU: `python scripts/gpu_check.py [--quick] [--out DIR]`.

Needs jax with its CUDA plugin and the packages of scripts/gpucheck/needs.py; PyTorch with CUDA joins the comparison if
it is installed. Writes `<device>-<date>.json` as results come and `<device>-<date>.md`, the tables, at the end. Exit
status: 0 if every number is right, 1 if one is not or packages are missing, 77 (skipped) without such a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.gpucheck.needs import missing_packages  # noqa: E402

SUITES = ("attention_numerics", "rope_numerics", "decode_numerics", "engine_identities", "ceilings", "rope_timing")
SUITES += ("decode_timing", "attention_timing")
"""Modules of scripts/gpucheck in the order they run: checks of kernels, ceilings, timings. Each has `run(record)`,
which adds rows, and `tables(record)`, which shows them."""
SKIPPED = 77
LIMIT_S = {"full": 420.0, "quick": 50.0}


def device_kind() -> str:
    """Name of the GPU that JAX uses.

    Raises:
      RuntimeError: it is not an NVIDIA GPU.
    """
    import jax

    try:
        device = jax.devices()[0]
    except RuntimeError as error:  # a platform was requested that is not available
        raise RuntimeError(f"jax finds no device: {error}") from error
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        raise RuntimeError(
            f"wanted an NVIDIA GPU, but jax {jax.__version__} runs on {device.platform!r} ({device.device_kind}); "
            "is its CUDA plugin installed (pip install 'jax[cuda13]'), and does nvidia-smi show a GPU?"
        )
    return device.device_kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every suite; the exit status is in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes, under a minute, to see that everything runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no further measurement after this time")
    options = parser.parse_args(arguments)
    missing = missing_packages()
    if missing:
        print(f"gpu_check: not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    # JAX would reserve three quarters of the memory at once, and PyTorch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        kind = device_kind()
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return SKIPPED

    from scripts.gpucheck.machine import machine
    from scripts.gpucheck.record import CheckRecord

    found = {"benchmark": "gpu_check", **machine()}
    name = f"{re.sub('[^a-z0-9]+', '-', kind.lower())}-{found['date']}{'-quick' * options.quick}"
    limit_s = options.limit or LIMIT_S["quick" if options.quick else "full"]
    record = CheckRecord(options.out / f"{name}.json", found, is_quick=options.quick, limit_s=limit_s)
    shown = []
    for suite in SUITES:
        module = importlib.import_module(f"scripts.gpucheck.{suite}")
        try:
            module.run(record)
        except Exception as error:  # the other suites are still useful
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

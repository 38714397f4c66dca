"""Environment recorded with a measurement on an accelerator: machine, versions, state of the GPU."""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

from scripts.benchmarks.common import environment

PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
PACKAGES += ("triton",)


def machine() -> dict[str, Any]:
    """Machine and versions as in every benchmark, versions of the device's packages, and nvidia-smi's data of the GPU,
    if there is one."""
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
    return {**found, "gpu": gpu}

"""The machine and versions that produced a table of figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("ccjax", "jax", "jaxlib", "numpy", "torch", "transformers")
_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Date, commit, machine and versions of a run; call it once jax is initialised, so that the device is known."""
    import jax

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": versions,
    }


def _commit() -> str:
    """The commit of the checkout; an installed package may be inside another project's repository."""
    if not (_ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""The rates of this machine's CPU in float32, measured in a second: products and copies of memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from scripts.simulation.hardware import Hardware

_WIDTH = 1536
_COPY_BYTES = 1 << 28
_REPETITIONS = 4


def measure_cpu() -> Hardware:
    """The rates of this machine now, including the effect of other work. Ratios are 1, since the rates are measured.

    The disk is not measured (`bench.py store_io` does that) but assumed to read 1 GB/s.
    """
    left = np.full((_WIDTH, _WIDTH), 0.5, np.float32)
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    product_s = _best_s(lambda: left @ left)
    copy_s = _best_s(lambda: np.copyto(target, source))
    rate = _COPY_BYTES / copy_s
    return Hardware(
        name="cpu",
        flops_per_s=2 * _WIDTH**3 / product_s,
        memory_bytes=1 << 40,  # the machine's own memory: budgets bound it
        memory_bytes_per_s=2 * rate,  # read and written
        host_bytes_per_s=rate,
        disk_bytes_per_s=1e9,
        compute_ratio=1.0,
        memory_ratio=1.0,
        layer_s=2e-4,
        value_bytes=4,
    )


def _best_s(run: Callable[[], object]) -> float:
    run()  # the first run touches the memory
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)

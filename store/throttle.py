"""Simulates a link of limited bandwidth and fixed latency for a tier's reads, for tests and benchmarks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

DONE: Future[None] = Future()
"""A read to pass a link for what is there already."""
DONE.set_result(None)


class ThrottledLink:
    """Delays reads as one shared wire would: they complete in the order of their start, in total at `bytes_per_s`.

    A `store.arrays.OnRead`. A read completes at least `latency_s` after its start and not before the real read;
    latencies of several reads overlap.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Raises:
        ValueError: the bandwidth is not positive and finite, or the latency is negative or infinite.
        """
        if not 0.0 < bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s: wanted a positive, finite number, got {bytes_per_s!r}")
        if not 0.0 <= latency_s < math.inf:
            raise ValueError(f"latency_s: wanted a finite number of at least 0, got {latency_s!r}")
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = -math.inf
        self._lock = threading.Lock()
        self._wire = ThreadPoolExecutor(1, thread_name_prefix="store-link")

    def __call__(self, read: Any, num_bytes: int) -> Future[Any]:
        """A future with the outcome of `read`, done once its bytes have passed the wire."""
        with self._lock:
            self._free_at = max(self._free_at, self._clock() + self._latency_s) + num_bytes / self._bytes_per_s
            return self._wire.submit(self._carry, read, self._free_at)

    def _carry(self, read: Any, there_at: float) -> Any:
        left_s = there_at - self._clock()
        if left_s > 0.0:
            self._sleep(left_s)
        return read.result()

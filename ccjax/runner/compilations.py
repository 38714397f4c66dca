"""Counts XLA compilations in this process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Recorded once per executable, even if it is read from the persistent compilation cache."""


class Compilations:
    """Counts the executables created in this process; lives as long as the process.

    JAX does not guarantee the names of its events, so a test compiles a function and checks the count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the warm-up compiles on several threads
        self._count = self._background_count = 0
        self._thread = threading.local()
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def count(self) -> int:
        """Number of executables so far, without those of `in_background`."""
        return self._count

    @property
    def background_count(self) -> int:
        """Number of executables of `in_background` so far."""
        return self._background_count

    @property
    def seconds(self) -> float:
        """Seconds spent creating all of them, summed over threads; short for those from the persistent cache."""
        return self._seconds

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Counts compilations of this thread separately meanwhile, because no request waits for them."""
        self._thread.is_background = True
        try:
            yield
        finally:
            self._thread.is_background = False

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                if getattr(self._thread, "is_background", False):
                    self._background_count += 1
                else:
                    self._count += 1
                self._seconds += duration_secs


@functools.cache
def compilations() -> Compilations:
    """The counter of this process; shared by all engines, like JAX's own caches of compiled functions."""
    return Compilations()

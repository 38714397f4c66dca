"""Counts what XLA compiles in this process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Recorded once per executable, also where it comes out of the persistent compilation cache."""


class Compilations:
    """The number of executables made since this object was; lives as long as the process.

    JAX names its events but does not promise their names: a test compiles a function and looks at the count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the warm-up compiles on several threads
        self._count = self._background_count = 0
        self._thread = threading.local()
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def count(self) -> int:
        """Executables so far, without those of `in_background`."""
        return self._count

    @property
    def background_count(self) -> int:
        """Executables of `in_background` so far."""
        return self._background_count

    @property
    def seconds(self) -> float:
        """Seconds that making them took, of all threads together; less where the persistent cache had them."""
        return self._seconds

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Counts apart what this thread compiles meanwhile: no request waits for it."""
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
    """The counter of this process; one for all, as JAX's own caches of compiled functions are."""
    return Compilations()

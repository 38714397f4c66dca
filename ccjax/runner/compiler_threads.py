"""Priorities of the threads that compile, so that requests have the cores first (Linux, where each thread has one)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import jax
import numpy as np

_NICE = 15
"""The lowest priority is 19; on idle cores none of them slows anything down."""


_found: frozenset[int] = frozenset()


def find_compilers() -> None:
    """Starts XLA's threads that compile for a CPU, for `lower_compilers`. They start with the first compilation of a
    process and have no names, so call this before anything else is compiled. Does nothing for other devices."""
    global _found
    if sys.platform != "linux" or jax.default_backend() != "cpu" or _found:
        return
    before = _threads()
    jax.jit(_never_in_the_cache).lower().compile()
    _found = frozenset(_threads() - before - {thread.native_id or 0 for thread in threading.enumerate()})


def lower_compilers() -> None:
    """Lowers the priority of this thread and of the found ones, for good; threads that they start inherit it. So what a
    request later waits for is compiled at that priority, too, which matters only while the cores are busy."""
    if sys.platform != "linux":
        return
    for thread in (threading.get_native_id(), *_found):
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def _threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def _never_in_the_cache() -> jax.Array:
    """JAX caches no executable that calls the host."""
    return jax.pure_callback(lambda: np.float32(0.0), jax.ShapeDtypeStruct((), np.float32))

"""Speeds up creating objects by the hundred thousand."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses Python's garbage collector: while many long-lived objects are created, it scans them repeatedly, which
    takes a third of the time for 100,000 variants."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

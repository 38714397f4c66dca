"""Making objects by the hundred thousand."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the collector of reference cycles: while many objects that stay are made, it looks through all of them
    again and again, a third of the time at 100,000 variants."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Waiting for something that another thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    """Returns when `condition` holds; fails the test if it does not in time."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.02)  # a condition may cost more than what is waited for

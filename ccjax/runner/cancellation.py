"""Cancellation of work whose result is no longer wanted."""

from __future__ import annotations

from collections.abc import Callable

IsCancelled = Callable[[], bool]
"""Returns True once the result is no longer wanted; called often, on the thread that does the work."""


class PrefillCancelledError(Exception):
    """`is_cancelled` returned True during a prefill; nothing of the prefill is kept."""

"""How work that nobody wants any more is broken off."""

from __future__ import annotations

from collections.abc import Callable

IsCancelled = Callable[[], bool]
"""True once nobody wants the result any more; called often, from the thread that does the work."""


class PrefillCancelledError(Exception):
    """`is_cancelled` returned True during a prefill; nothing of it is kept."""

"""How work is broken off that is not wanted any more."""

from __future__ import annotations

from collections.abc import Callable

IsCancelled = Callable[[], bool]
"""True once the result is not wanted any more; called often, from the thread that does the work."""


class PrefillCancelledError(Exception):
    """`is_cancelled` returned True during a prefill; nothing of it is kept."""

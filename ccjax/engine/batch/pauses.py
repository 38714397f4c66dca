"""Lets other threads use what the batch loop's thread uses, one after the other, while no prefill is in progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ccjax.engine.batch.locked_scheduler import LockedScheduler


class Pauses:
    """Turns of other threads between the loop's steps; `changed` guards the attributes.

    Attributes:
      num_pausing: threads that wait for their turn or have it.
      is_possible: set by the loop's thread: it is between two steps, and no prefill is in progress.
    """

    def __init__(self, changed: threading.Condition, scheduler: LockedScheduler) -> None:
        self._changed = changed
        self._scheduler = scheduler
        self.num_pausing = 0
        self.is_possible = True
        self._is_paused = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until the calling thread has its turn, which ends with the context."""
        with self._changed:
            self._count(1)
            self._changed.wait_for(lambda: self.is_possible and not self._is_paused)
            self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._count(-1)
                self._changed.notify_all()

    def _count(self, change: int) -> None:
        # Prompts are still admitted while the first of these threads waits for a prefill, which may take minutes; but
        # not so many that it waits forever.
        if 0 in (self.num_pausing, self.num_pausing + change):
            self._scheduler.limit_admission(change > 0)
        self.num_pausing += change

"""A thread-safe scheduler.

Whether the queue is full is checked where requests arrive, on threads that must not wait for a step of the model: the
server checks on its event loop. The scheduler's methods take microseconds, so all threads share one scheduler behind a
lock, instead of separate counts that could disagree with it.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from ccjax.engine.batch.sequence import TokenSequence
from ccjax.policy.scheduling import Scheduler, SchedulerSettings


class LockedScheduler(Scheduler):
    """A `Scheduler` whose public methods and properties hold `lock`, which must be reentrant."""

    def __init__(self, settings: SchedulerSettings, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        super().__init__(settings)

    def clear(self) -> None:
        """Forgets all sequences and the running pack or step."""
        with self._lock:
            super().__init__(self.settings)


def _holding_lock(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def locked(self: LockedScheduler, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


for _name, _member in vars(Scheduler).items():
    if isinstance(_member, property) and _member.fget is not None:
        setattr(LockedScheduler, _name, property(_holding_lock(_member.fget)))
    elif callable(_member) and (_name == "__contains__" or not _name.startswith("_")):
        setattr(LockedScheduler, _name, _holding_lock(_member))


def planning_order(waiting: Iterable[TokenSequence]) -> list[TokenSequence]:
    """Estimates the order in which waiting sequences will start: by priority, then round-robin over flows. The real
    order also depends on how much each one has to compute."""
    num_of_flow: collections.Counter[tuple[int, str]] = collections.Counter()
    turns = []
    for sequence in waiting:
        key = (sequence.group.priority, sequence.group.flow)
        turns.append((sequence.group.priority, num_of_flow[key], sequence))
        num_of_flow[key] += 1
    return [sequence for _, _, sequence in sorted(turns, key=lambda turn: turn[:2])]

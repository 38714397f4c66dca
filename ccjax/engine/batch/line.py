"""The line of requests as any thread may ask for it: a scheduler behind a lock. Decides nothing.

Whether there is a place in line is asked where requests come in, on a thread that must not wait for a step of the
model: the server asks on its event loop. The scheduler's verbs take microseconds, so all threads share the one that
decides, and no second count can disagree with it.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from ccjax.engine.batch.serving import Serving
from ccjax.policy.scheduling import Scheduler, SchedulerSettings


class SharedScheduler(Scheduler):
    """`Scheduler`, of which any thread may call any verb; each holds `lock`, which must be reentrant."""

    def __init__(self, settings: SchedulerSettings, lock: AbstractContextManager[Any]) -> None:
        super().__init__(settings)
        self._lock = lock


def _locked(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(self: SharedScheduler, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return verb(self, *args, **kwargs)

    return call


for _name, _verb in vars(Scheduler).items():
    if inspect.isfunction(_verb) and not _name.startswith("_"):
        setattr(SharedScheduler, _name, _locked(_verb))


def likely_order(waiting: Iterable[Serving]) -> list[Serving]:
    """About the order in which those in line will start: by priority, then the flows in turn. The true one depends on
    what each still computes."""
    num_of_flow: collections.Counter[tuple[int, str]] = collections.Counter()
    turns = []
    for serving in waiting:
        key = (serving.siblings.priority, serving.siblings.flow)
        turns.append((serving.siblings.priority, num_of_flow[key], serving))
        num_of_flow[key] += 1
    return [serving for _, _, serving in sorted(turns, key=lambda turn: turn[:2])]

"""A thread-safe scheduler.

Whether the queue is full is checked where requests arrive, on threads that must not wait for a step of the model: the
server checks on its event loop. The scheduler's methods take microseconds, so all threads share one scheduler behind a
lock, instead of separate counts that could disagree with it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from ccjax.engine.batch.sequence import TokenSequence
from ccjax.policy.scheduling import DecodeStep, ScheduledPack, Scheduler, SchedulerSettings, SequenceWork, StepCosts


class LockedScheduler:
    """A `Scheduler` whose methods hold `lock`, which must be reentrant."""

    def __init__(self, settings: SchedulerSettings, lock: AbstractContextManager[Any]) -> None:
        self.settings = settings
        self._scheduler = Scheduler(settings)
        self._lock = lock

    def __contains__(self, sequence_id: object) -> bool:
        with self._lock:
            return sequence_id in self._scheduler

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        with self._lock:
            return self._scheduler.num_running

    @property
    def num_decoding(self) -> int:
        with self._lock:
            return self._scheduler.num_decoding

    @property
    def decoding_alone(self) -> tuple[str, ...]:
        with self._lock:
            return self._scheduler.decoding_alone

    def waiting_tokens(self) -> int:
        with self._lock:
            return self._scheduler.waiting_tokens()

    def check_queue_limit(self, flow: str) -> None:
        with self._lock:
            self._scheduler.check_queue_limit(flow)

    def retry_after_s(self, flow: str, costs: StepCosts) -> float:
        with self._lock:
            return self._scheduler.retry_after_s(flow, costs)

    def add(self, work: SequenceWork, *, after: str | None = None) -> None:
        with self._lock:
            self._scheduler.add(work, after=after)

    def remove(self, sequence_id: str) -> None:
        with self._lock:
            self._scheduler.remove(sequence_id)

    def replan(self, work: SequenceWork) -> None:
        with self._lock:
            self._scheduler.replan(work)

    def hold(self, sequence_id: str) -> None:
        with self._lock:
            self._scheduler.hold(sequence_id)

    def set_alone(self, sequence_id: str, is_alone: bool) -> None:
        with self._lock:
            self._scheduler.set_alone(sequence_id, is_alone)

    def share(self, work: SequenceWork) -> None:
        with self._lock:
            self._scheduler.share(work)

    def expire(self, now_s: float) -> tuple[str, ...]:
        with self._lock:
            return self._scheduler.expire(now_s)

    def next_pack(
        self, now_s: float, free_pages: int, costs: StepCosts, *, shared_pages: Callable[[str], int] | None = None
    ) -> ScheduledPack:
        with self._lock:
            return self._scheduler.next_pack(now_s, free_pages, costs, shared_pages=shared_pages)

    def pack_done(self, now_s: float) -> tuple[str, ...]:
        with self._lock:
            return self._scheduler.pack_done(now_s)

    def after_layer(self, now_s: float) -> bool:
        with self._lock:
            return self._scheduler.after_layer(now_s)

    def next_decode(self, free_pages: int, costs: StepCosts, *, alone: str | None = None) -> DecodeStep:
        with self._lock:
            return self._scheduler.next_decode(free_pages, costs, alone=alone)

    def decode_done(self, now_s: float) -> None:
        with self._lock:
            self._scheduler.decode_done(now_s)

    def clear(self) -> None:
        """Forgets all sequences and the running pack or step."""
        with self._lock:
            self._scheduler = Scheduler(self.settings)


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

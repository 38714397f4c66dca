"""Everybody who waits: the more important priority first, a fair line within each, and a limit on newcomers."""

from __future__ import annotations

import collections

from ccjax.policy.scheduling.fair import FairQueue
from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence
from ccjax.policy.scheduling.work import AdmissionQueueFullError


class WaitingQueue:
    """A `FairQueue` for each priority in use."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._queues: dict[int, FairQueue] = {}
        self._priorities: LeastFirst[int] = LeastFirst()

    def enqueue(self, sequence: ScheduledSequence) -> None:
        """See `FairQueue.enqueue`."""
        priority = sequence.work.priority
        if priority not in self._queues:
            self._queues[priority] = FairQueue(self._window)
        self._queues[priority].enqueue(sequence)
        self._update_head(priority)

    def head(self) -> ScheduledSequence | None:
        """The request that starts next."""
        least = self._priorities.least()
        if least is None:
            return None
        head = self._queues[least[1]].head()
        assert head is not None
        return head[1]

    def order(self, sequence: ScheduledSequence) -> tuple[int, float, int]:
        """The place of a started request, or of the head, among all that are not prefilled yet."""
        tag = sequence.tag
        if tag is None:
            head = self._queues[sequence.work.priority].head()
            assert head is not None and head[1] is sequence
            tag = head[0]
        return sequence.work.priority, tag, sequence.number

    def reorder(self, sequence: ScheduledSequence) -> None:
        """See `FairQueue.reorder`."""
        self._queues[sequence.work.priority].reorder(sequence)

    def dequeue(self, sequence: ScheduledSequence) -> None:
        """See `FairQueue.dequeue`."""
        self._queues[sequence.work.priority].dequeue(sequence)
        self._update_head(sequence.work.priority)

    def serve(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        """See `FairQueue.serve`."""
        self._queues[sequence.work.priority].serve(sequence, num_tokens)

    def discard(self, sequence: ScheduledSequence) -> None:
        """See `FairQueue.discard`."""
        self._queues[sequence.work.priority].discard(sequence)
        self._update_head(sequence.work.priority)

    def _update_head(self, priority: int) -> None:
        queue = self._queues[priority]
        if queue.head() is None:
            self._priorities.discard(priority)
        else:
            self._priorities.put(priority, priority)
        if queue.is_idle:  # the end of a busy period: who was served how much counts no more
            del self._queues[priority]


class QueueLimit:
    """The places in line of requests that were never admitted.

    Of `max_queue` places a flow may take up to `flow_share` times as many as are left free (dynamic thresholds,
    Choudhury, Hahne 1998). So there is room for a flow that comes new, and k greedy flows share all but one part in
    `1 + k flow_share` evenly.
    """

    def __init__(self, max_queue: int, flow_share: float) -> None:
        self._max_queue = max_queue
        self._flow_share = flow_share
        self._by_flow: collections.Counter[str] = collections.Counter()
        self.num_queued = 0
        self.num_tokens = 0
        """Computed tokens of all of them."""

    def check(self, flow: str) -> None:
        """Raises LineFullError where a request of that flow finds no place."""
        if self.num_queued >= self._max_queue:
            raise AdmissionQueueFullError(
                f"wanted at most {self._max_queue} requests in line (max_queue), and so many wait"
            )
        taken, most = self._by_flow[flow], self._flow_share * (self._max_queue - self.num_queued)
        if taken >= most:
            raise AdmissionQueueFullError(
                f"flow {flow!r}: {taken} of its requests wait, wanted fewer than {self._flow_share:g} times the "
                f"{self._max_queue - self.num_queued} places left (flow_share)"
            )

    def admissions_until_free(self, flow: str) -> int:
        """How many requests must be admitted before one of that flow finds a place; 0 where it finds one now. A flow
        over its share is taken to have one admitted in each round of all flows."""
        try:
            self.check(flow)
        except AdmissionQueueFullError:
            return 1 if self.num_queued >= self._max_queue else len(self._by_flow)
        return 0

    def take(self, sequence: ScheduledSequence) -> None:
        """Gives a request a place."""
        self._by_flow[sequence.work.flow] += 1
        self.num_queued += 1
        self.num_tokens += sequence.work.prefill_tokens

    def free(self, sequence: ScheduledSequence) -> None:
        """Takes it back."""
        flow = sequence.work.flow
        self._by_flow[flow] -= 1
        if not self._by_flow[flow]:
            del self._by_flow[flow]
        self.num_queued -= 1
        self.num_tokens -= sequence.work.prefill_tokens

"""The waiting sequences of all priorities (a fair queue for each), and the limit on queued requests."""

from __future__ import annotations

import collections

from ccjax.policy.scheduling.fair import FairQueue, FlowOrder
from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence
from ccjax.policy.scheduling.work import AdmissionQueueFullError


class WaitingQueue:
    """A `FairQueue` for each priority in use."""

    def __init__(self, order: FlowOrder) -> None:
        self._order = order
        self._queues: dict[int, FairQueue] = {}
        self._priorities: LeastFirst[int] = LeastFirst()

    def enqueue(self, sequence: ScheduledSequence) -> None:
        """See `FairQueue.enqueue`."""
        priority = sequence.work.priority
        if priority not in self._queues:
            self._queues[priority] = FairQueue(self._order)
        self._queues[priority].enqueue(sequence)
        self._update_head(priority)

    def head(self) -> ScheduledSequence | None:
        """The sequence to start next; None if nothing waits."""
        least = self._priorities.least()
        if least is None:
            return None
        head = self._queues[least[1]].head()
        assert head is not None
        return head[1]

    def order(self, sequence: ScheduledSequence) -> tuple[int, float, int]:
        """Sort key of a started sequence, or of the head of the queue, among all sequences that are not fully
        prefilled."""
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
        if queue.is_idle:  # end of a busy period: past service is forgotten
            del self._queues[priority]


class QueueLimit:
    """Limits how many never admitted sequences may be queued, in all and for each flow.

    A flow may use up to `flow_share` times as many of the `max_queue` slots as are left free (dynamic thresholds,
    Choudhury, Hahne 1998). So a new flow always finds a slot, and k greedy flows evenly share all but one part in `1 +
    k flow_share`.
    """

    def __init__(self, max_queue: int, flow_share: float) -> None:
        self._max_queue = max_queue
        self._flow_share = flow_share
        self._by_flow: collections.Counter[str] = collections.Counter()
        self.num_queued = 0
        self.num_tokens = 0
        """Tokens that all of them will compute."""

    def check(self, flow: str) -> None:
        """Raises AdmissionQueueFullError if a request of this flow finds no free slot."""
        if self.num_queued >= self._max_queue:
            raise AdmissionQueueFullError(
                f"wanted at most {self._max_queue} queued requests (max_queue), and the queue is full"
            )
        taken, most = self._by_flow[flow], self._flow_share * (self._max_queue - self.num_queued)
        if taken >= most:
            raise AdmissionQueueFullError(
                f"flow {flow!r}: {taken} of its requests wait, wanted fewer than {self._flow_share:g} times the "
                f"{self._max_queue - self.num_queued} free queue slots (flow_share)"
            )

    def admissions_until_free(self, flow: str) -> int:
        """How many admissions it takes until a request of this flow finds a free slot; 0 if there is one now. A flow
        over its share is assumed to have one sequence admitted per round over all flows."""
        try:
            self.check(flow)
        except AdmissionQueueFullError:
            return 1 if self.num_queued >= self._max_queue else len(self._by_flow)
        return 0

    def take(self, sequence: ScheduledSequence) -> None:
        """Assigns a slot to a sequence."""
        self._by_flow[sequence.work.flow] += 1
        self.num_queued += 1
        self.num_tokens += sequence.work.prefill_tokens

    def free(self, sequence: ScheduledSequence) -> None:
        """Frees the slot of a sequence."""
        flow = sequence.work.flow
        self._by_flow[flow] -= 1
        if not self._by_flow[flow]:
            del self._by_flow[flow]
        self.num_queued -= 1
        self.num_tokens -= sequence.work.prefill_tokens

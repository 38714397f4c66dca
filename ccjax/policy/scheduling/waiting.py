"""Everybody who waits: the more important priority first, a fair line within each, and a limit on newcomers."""

from __future__ import annotations

import collections

from ccjax.policy.scheduling.fair import FairLine
from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.record import Record
from ccjax.policy.scheduling.work import LineFullError


class WaitingQueue:
    """A `FairLine` for each priority in use."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._lines: dict[int, FairLine] = {}
        self._priorities: LeastFirst[int] = LeastFirst()

    def push(self, record: Record) -> None:
        """See `FairLine.push`."""
        priority = record.work.priority
        if priority not in self._lines:
            self._lines[priority] = FairLine(self._window)
        self._lines[priority].push(record)
        self._file(priority)

    def head(self) -> Record | None:
        """The request that starts next."""
        least = self._priorities.least()
        if least is None:
            return None
        head = self._lines[least[1]].head()
        assert head is not None
        return head[1]

    def order(self, record: Record) -> tuple[int, float, int]:
        """The place of a started request, or of the head, among all that are not prefilled yet."""
        tag = record.tag
        if tag is None:
            head = self._lines[record.work.priority].head()
            assert head is not None and head[1] is record
            tag = head[0]
        return record.work.priority, tag, record.number

    def refile(self, record: Record) -> None:
        """See `FairLine.refile`."""
        self._lines[record.work.priority].refile(record)

    def start(self, record: Record) -> None:
        """See `FairLine.start`."""
        self._lines[record.work.priority].start(record)
        self._file(record.work.priority)

    def serve(self, record: Record, num_tokens: int) -> None:
        """See `FairLine.serve`."""
        self._lines[record.work.priority].serve(record, num_tokens)

    def leave(self, record: Record) -> None:
        """See `FairLine.leave`."""
        self._lines[record.work.priority].leave(record)
        self._file(record.work.priority)

    def _file(self, priority: int) -> None:
        line = self._lines[priority]
        if line.head() is None:
            self._priorities.discard(priority)
        else:
            self._priorities.put(priority, priority)
        if line.is_idle:  # the end of a busy period: who was served how much counts no more
            del self._lines[priority]


class Places:
    """The places in line of requests that were never admitted.

    Of `max_queue` places a flow may take up to `flow_share` times as many as are left free (dynamic thresholds,
    Choudhury, Hahne 1998). So there is room for a flow that comes new, and k greedy flows share all but one part in
    `1 + k flow_share` evenly.
    """

    def __init__(self, max_queue: int, flow_share: float) -> None:
        self._max_queue = max_queue
        self._flow_share = flow_share
        self._by_flow: collections.Counter[str] = collections.Counter()
        self.num_taken = 0
        self.num_tokens = 0
        """Computed tokens of all of them."""

    def check(self, flow: str) -> None:
        """Raises LineFullError where a request of that flow finds no place."""
        if self.num_taken >= self._max_queue:
            raise LineFullError(f"wanted at most {self._max_queue} requests in line (max_queue), and so many wait")
        taken, most = self._by_flow[flow], self._flow_share * (self._max_queue - self.num_taken)
        if taken >= most:
            raise LineFullError(
                f"flow {flow!r}: {taken} of its requests wait, wanted fewer than {self._flow_share:g} times the "
                f"{self._max_queue - self.num_taken} places left (flow_share)"
            )

    def starts_until_free(self, flow: str) -> int:
        """How many requests must be admitted before one of that flow finds a place; 0 where it finds one now. A flow
        over its share is taken to have one admitted in each round of all flows."""
        try:
            self.check(flow)
        except LineFullError:
            return 1 if self.num_taken >= self._max_queue else len(self._by_flow)
        return 0

    def take(self, record: Record) -> None:
        """Gives a request a place."""
        self._by_flow[record.work.flow] += 1
        self.num_taken += 1
        self.num_tokens += record.work.prefill_tokens

    def free(self, record: Record) -> None:
        """Takes it back."""
        flow = record.work.flow
        self._by_flow[flow] -= 1
        if not self._by_flow[flow]:
            del self._by_flow[flow]
        self.num_taken -= 1
        self.num_tokens -= record.work.prefill_tokens

"""The requests of one priority in the order they start: fair between flows, by arrival or by what is cached within one.

Fair queueing by finish tags (Demers, Keshav, Shenker 1989; as PGPS in Parekh, Gallager 1993): every flow is thought to
be served at once, a token each in turn, and requests go in the order in which they would end that way. A request that
starts at virtual time S and computes n tokens has the tag S + n. Virtual time grows by n / B while n tokens are
computed for B backlogged flows; S is the tag of the flow's request before, or now where the flow comes back.

- Over any time in which two flows are backlogged, their computed tokens differ by at most two prompts, the longest of
  each: the bound of start-time fair queueing (Goyal, Vin, Cheng 1996). Its start tags tie all new flows; by finish tags
  the short of them go first, and what was begun goes on, where long prompts would take turns and all end late. (What a
  pack has left when an indivisible prompt does not fit goes to prompts that were begun, which adds a pack to that.)
- A flow gains nothing by having been idle, and whoever waits is overtaken by at most its tag's worth of each flow.
- RAGCache sec. 5.2 orders by cached / computed, so that what is in the cache is used before it goes. Reading of its
  window: a request goes ahead of at most the `window - 1` that came right before it.
"""

from __future__ import annotations

import collections
import dataclasses

from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence


@dataclasses.dataclass(slots=True)
class _Flow:
    """Requests of one client: never started ones by arrival, preempted ones by number."""

    name: str
    last_tag: float = 0.0
    num_arrived: int = 0
    num_unserved: int = 0
    waiting: collections.OrderedDict[int, ScheduledSequence] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    returned: dict[int, ScheduledSequence] = dataclasses.field(default_factory=dict)

    def tag_of(self, sequence: ScheduledSequence) -> float:
        return self.last_tag + sequence.work.prefill_tokens if sequence.tag is None else sequence.tag

    def head(self, window: int) -> ScheduledSequence | None:
        """Who goes next; O(returned + window)."""
        if self.returned:
            return self.returned[min(self.returned)]
        best: ScheduledSequence | None = None
        last_place = 0
        for sequence in self.waiting.values():
            if best is None:
                best, last_place = sequence, sequence.place + window - 1
            elif sequence.place > last_place:
                break
            elif _cached_share(sequence) > _cached_share(best):
                best = sequence
        return best


def _cached_share(sequence: ScheduledSequence) -> float:
    return sequence.work.cached_tokens / sequence.work.prefill_tokens


class FairQueue:
    """Who starts next; every call costs O(log flows), the search within a flow aside.

    A request counts as unserved from `enqueue` until `serve` had all its tokens, or `discard`.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._flows: dict[str, _Flow] = {}
        self._heads: LeastFirst[str] = LeastFirst()
        self._idle: LeastFirst[str] = LeastFirst()
        self._num_backlogged = 0
        self._virtual = 0.0

    @property
    def is_idle(self) -> bool:
        """True when nobody waits and nobody is in prefill."""
        return not self._num_backlogged

    def enqueue(self, sequence: ScheduledSequence) -> None:
        """Puts a request in line, or one that started before, as its tag shows, at the head of its flow."""
        name = sequence.work.flow
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(name, self._virtual)
        self._idle.discard(name)
        self._num_backlogged += not flow.num_unserved
        flow.num_unserved += 1
        if sequence.tag is not None:
            # Ahead of all that come now, also where the line was idle meanwhile and time began anew.
            sequence.tag = min(sequence.tag, self._virtual)
            flow.returned[sequence.number] = sequence
        else:
            if not flow.waiting:
                flow.last_tag = max(flow.last_tag, self._virtual)
            sequence.place = flow.num_arrived
            flow.num_arrived += 1
            flow.waiting[sequence.number] = sequence
        self._update_head(flow)

    def head(self) -> tuple[float, ScheduledSequence] | None:
        """The request that starts next, and its tag."""
        least = self._heads.least()
        if least is None:
            return None
        (tag, number), name = least
        flow = self._flows[name]
        return tag, flow.returned.get(number) or flow.waiting[number]

    def reorder(self, sequence: ScheduledSequence) -> None:
        """To be called when the tokens of a waiting request changed."""
        self._update_head(self._flows[sequence.work.flow])

    def dequeue(self, sequence: ScheduledSequence) -> None:
        """Takes a request out of line to be served; it stays unserved."""
        flow = self._flows[sequence.work.flow]
        if sequence.tag is None:
            sequence.tag = flow.last_tag = flow.tag_of(sequence)
        self._withdraw(flow, sequence)

    def serve(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        """Tokens of a started request that are computed; virtual time goes on."""
        num_tokens = min(num_tokens, sequence.unserved_tokens)
        sequence.unserved_tokens -= num_tokens
        self._virtual += num_tokens / self._num_backlogged
        while (idle := self._idle.least()) is not None and idle[0] <= self._virtual:  # where it was counts no more
            self._idle.discard(idle[1])
            del self._flows[idle[1]]

    def discard(self, sequence: ScheduledSequence) -> None:
        """The request is neither waiting nor in prefill any more."""
        flow = self._flows[sequence.work.flow]
        self._withdraw(flow, sequence)
        flow.num_unserved -= 1
        if not flow.num_unserved:
            self._num_backlogged -= 1
            self._idle.put(flow.name, flow.last_tag)

    def _withdraw(self, flow: _Flow, sequence: ScheduledSequence) -> None:
        flow.waiting.pop(sequence.number, None)
        flow.returned.pop(sequence.number, None)
        self._update_head(flow)

    def _update_head(self, flow: _Flow) -> None:
        head = flow.head(self._window)
        if head is None:
            self._heads.discard(flow.name)
        else:
            self._heads.put(flow.name, (flow.tag_of(head), head.number))

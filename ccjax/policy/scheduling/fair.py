"""Orders the sequences of one priority: fair between flows; by arrival or by cached share within a flow.

Fair queueing by finish tags (Demers, Keshav, Shenker 1989; PGPS in Parekh, Gallager 1993): all flows are modelled as
served at once, one token each in turn, and sequences are started in the order in which they would finish under that
model. A sequence that starts at virtual time S and computes n tokens has the tag S + n. Virtual time grows by n / B
while n tokens are computed for B backlogged flows. S is the tag of the flow's previous sequence, or the current virtual
time if the flow was idle.

- While two flows are backlogged, their computed tokens differ by at most two prompts, the longest of each: the bound of
  start-time fair queueing (Goyal, Vin, Cheng 1996). Under start tags all new flows tie; under finish tags short prompts
  go first and started ones continue, whereas with start tags long prompts would take turns and all finish late. (When
  an indivisible prompt does not fit into the rest of a pack, that rest goes to prompts already started, which adds one
  pack to the bound; one that is longer than a pack is served whole, which adds its length.)
- A flow gains nothing from having been idle, and a waiting sequence is overtaken by at most its tag's worth of tokens
  of each other flow.
- RAGCache sec. 5.2 orders by cached / computed tokens, so that cached KV is used before it is evicted. Our reading of
  its window: a sequence overtakes at most the `window - 1` sequences that arrived right before it.
- Before that, short sequences overtake longer ones of their flow and preparations for others, within the same window,
  and only while they are less than a pack ahead: what the others compute counts twice, so that these get a third of the
  flow's tokens.
"""

from __future__ import annotations

import collections
import dataclasses

from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence


@dataclasses.dataclass(frozen=True, slots=True)
class FlowOrder:
    """How a flow orders its sequences: those that overtake others (`window`), sequences of at most `short_tokens` first
    while they are less than `most_lead` tokens ahead."""

    window: int
    short_tokens: int = 0
    most_lead: int = 0

    def is_short(self, sequence: ScheduledSequence) -> bool:
        """Whether it may overtake longer ones."""
        return sequence.work.prefill_tokens <= self.short_tokens


@dataclasses.dataclass(slots=True)
class _Flow:
    """Sequences of one client: never started ones by arrival, preempted ones by number. `lead`: tokens by which short
    ones are ahead of others that came before them."""

    name: str
    last_tag: float = 0.0
    lead: float = 0.0
    num_arrived: int = 0
    num_unserved: int = 0
    waiting: collections.OrderedDict[int, ScheduledSequence] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    returned: dict[int, ScheduledSequence] = dataclasses.field(default_factory=dict)

    def tag_of(self, sequence: ScheduledSequence) -> float:
        return self.last_tag + sequence.work.prefill_tokens if sequence.tag is None else sequence.tag

    def head(self, order: FlowOrder) -> ScheduledSequence | None:
        """The sequence to start next; O(returned + window)."""
        returned = self.returned[min(self.returned)] if self.returned else None
        best: ScheduledSequence | None = None
        short: ScheduledSequence | None = None
        last_place = 0
        for number, sequence in enumerate(self.waiting.values()):
            if not number:
                last_place = sequence.place + order.window - 1
            elif sequence.place > last_place:
                break
            if order.is_short(sequence) and (short is None or _cached_share(sequence) > _cached_share(short)):
                short = sequence
            if best is None or _cached_share(sequence) > _cached_share(best):
                best = sequence
        if self.lead >= order.most_lead:
            short = None
        if returned is None:
            return short or best
        # What has run already goes on first; what only prepares for another waits for what is shorter.
        is_begun = returned.uncharged_tokens < returned.work.prefill_tokens
        if short is None or is_begun or order.window == 1:
            return returned
        return short if short.work.prefill_tokens < returned.work.prefill_tokens else returned


def _cached_share(sequence: ScheduledSequence) -> float:
    return sequence.work.cached_tokens / sequence.work.prefill_tokens


class FairQueue:
    """Queue of the sequences of one priority; every call costs O(log flows), plus the search within a flow.

    A sequence counts as unserved from `enqueue` until `serve` has been called for all its tokens, or until `discard`.
    """

    def __init__(self, order: FlowOrder) -> None:
        self._order = order
        self._flows: dict[str, _Flow] = {}
        self._heads: LeastFirst[str] = LeastFirst()
        self._idle: LeastFirst[str] = LeastFirst()
        self._num_backlogged = 0
        self._virtual = 0.0

    @property
    def is_idle(self) -> bool:
        """True when nothing waits and nothing is in prefill."""
        return not self._num_backlogged

    def enqueue(self, sequence: ScheduledSequence) -> None:
        """Adds a new sequence to its flow, or a preempted one (it has a tag) to the front of its flow."""
        name = sequence.work.flow
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(name, self._virtual)
        self._idle.discard(name)
        self._num_backlogged += not flow.num_unserved
        flow.num_unserved += 1
        if sequence.tag is not None:
            # Before all later arrivals, even if the queue was idle meanwhile and virtual time was reset.
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
        """The tag of the sequence to start next, and the sequence; None if the queue is empty."""
        least = self._heads.least()
        if least is None:
            return None
        (tag, number), name = least
        flow = self._flows[name]
        return tag, flow.returned.get(number) or flow.waiting[number]

    def reorder(self, sequence: ScheduledSequence) -> None:
        """Updates the order after the token counts of a waiting sequence changed."""
        self._update_head(self._flows[sequence.work.flow])

    def dequeue(self, sequence: ScheduledSequence) -> None:
        """Removes a sequence from the queue to be served; it stays unserved."""
        flow = self._flows[sequence.work.flow]
        if sequence.tag is None:
            sequence.tag = flow.last_tag = flow.tag_of(sequence)
            if self._order.is_short(sequence) and (flow.returned or sequence is not next(iter(flow.waiting.values()))):
                flow.lead += sequence.work.prefill_tokens
        self._withdraw(flow, sequence)

    def serve(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        """Records computed tokens of a started sequence and advances virtual time."""
        num_tokens = min(num_tokens, sequence.uncharged_tokens)
        sequence.uncharged_tokens -= num_tokens
        if not self._order.is_short(sequence):
            flow = self._flows[sequence.work.flow]
            flow.lead = max(0.0, flow.lead - 2 * num_tokens)
            self._update_head(flow)
        self._virtual += num_tokens / self._num_backlogged
        while (idle := self._idle.least()) is not None and idle[0] <= self._virtual:  # its tag has no effect any more
            self._idle.discard(idle[1])
            del self._flows[idle[1]]

    def discard(self, sequence: ScheduledSequence) -> None:
        """Removes a sequence that is neither waiting nor in prefill any more."""
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
        head = flow.head(self._order)
        if head is None:
            self._heads.discard(flow.name)
        else:
            self._heads.put(flow.name, (flow.tag_of(head), head.number))

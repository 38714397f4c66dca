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
from ccjax.policy.scheduling.record import Record


@dataclasses.dataclass(slots=True)
class _Flow:
    """Requests of one client: never started ones by arrival, preempted ones by number."""

    name: str
    last_tag: float = 0.0
    num_arrived: int = 0
    num_unserved: int = 0
    waiting: collections.OrderedDict[int, Record] = dataclasses.field(default_factory=collections.OrderedDict)
    returned: dict[int, Record] = dataclasses.field(default_factory=dict)

    def tag_of(self, record: Record) -> float:
        return self.last_tag + record.work.prefill_tokens if record.tag is None else record.tag

    def head(self, window: int) -> Record | None:
        """Who goes next; O(returned + window)."""
        if self.returned:
            return self.returned[min(self.returned)]
        best: Record | None = None
        last_place = 0
        for record in self.waiting.values():
            if best is None:
                best, last_place = record, record.place + window - 1
            elif record.place > last_place:
                break
            elif _cached_share(record) > _cached_share(best):
                best = record
        return best


def _cached_share(record: Record) -> float:
    return record.work.cached_tokens / record.work.prefill_tokens


class FairLine:
    """Who starts next; every call costs O(log flows), the search within a flow aside.

    A request counts as unserved from `push` until `serve` had all its tokens, or `leave`.
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

    def push(self, record: Record) -> None:
        """Puts a request in line, or one that started before, as its tag shows, at the head of its flow."""
        name = record.work.flow
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(name, self._virtual)
        self._idle.discard(name)
        self._num_backlogged += not flow.num_unserved
        flow.num_unserved += 1
        if record.tag is not None:
            # Ahead of all that come now, also where the line was idle meanwhile and time began anew.
            record.tag = min(record.tag, self._virtual)
            flow.returned[record.number] = record
        else:
            if not flow.waiting:
                flow.last_tag = max(flow.last_tag, self._virtual)
            record.place = flow.num_arrived
            flow.num_arrived += 1
            flow.waiting[record.number] = record
        self._file(flow)

    def head(self) -> tuple[float, Record] | None:
        """The request that starts next, and its tag."""
        least = self._heads.least()
        if least is None:
            return None
        (tag, number), name = least
        flow = self._flows[name]
        return tag, flow.returned.get(number) or flow.waiting[number]

    def refile(self, record: Record) -> None:
        """To be called when the tokens of a waiting request changed."""
        self._file(self._flows[record.work.flow])

    def start(self, record: Record) -> None:
        """Takes a request out of line to be served; it stays unserved."""
        flow = self._flows[record.work.flow]
        if record.tag is None:
            record.tag = flow.last_tag = flow.tag_of(record)
        self._withdraw(flow, record)

    def serve(self, record: Record, num_tokens: int) -> None:
        """Tokens of a started request that are computed; virtual time goes on."""
        num_tokens = min(num_tokens, record.unserved_tokens)
        record.unserved_tokens -= num_tokens
        self._virtual += num_tokens / self._num_backlogged
        while (idle := self._idle.least()) is not None and idle[0] <= self._virtual:  # where it was counts no more
            self._idle.discard(idle[1])
            del self._flows[idle[1]]

    def leave(self, record: Record) -> None:
        """The request is neither waiting nor in prefill any more."""
        flow = self._flows[record.work.flow]
        self._withdraw(flow, record)
        flow.num_unserved -= 1
        if not flow.num_unserved:
            self._num_backlogged -= 1
            self._idle.put(flow.name, flow.last_tag)

    def _withdraw(self, flow: _Flow, record: Record) -> None:
        flow.waiting.pop(record.number, None)
        flow.returned.pop(record.number, None)
        self._file(flow)

    def _file(self, flow: _Flow) -> None:
        head = flow.head(self._window)
        if head is None:
            self._heads.discard(flow.name)
        else:
            self._heads.put(flow.name, (flow.tag_of(head), head.number))

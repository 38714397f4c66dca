"""Who prefills and who decodes next, who is admitted, and who gives pages back."""

from __future__ import annotations

import collections
from collections.abc import Callable

from ccjax.policy._checks import check_count
from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence
from ccjax.policy.scheduling.waiting import QueueLimit, WaitingQueue
from ccjax.policy.scheduling.work import (
    DecodeStep,
    ScheduledPack,
    ScheduledPiece,
    SchedulerSettings,
    SequenceWork,
    StepCosts,
)


class Scheduler:
    """Continuous batching over one pool of pages. Not thread-safe.

    With n waiting and r admitted requests, `add`, `remove` and `replan` cost O(log n) amortised, and `expire` that for
    each it reports; `next_pack` O(r log r + log n) for each request that it touches, `next_decode` O(r log r).
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._sequences: dict[str, ScheduledSequence] = {}
        self._admitted: dict[str, ScheduledSequence] = {}
        self._queue = WaitingQueue(settings.reorder_window)
        self._queue_limit = QueueLimit(settings.max_queue, settings.flow_share)
        self._deadlines: LeastFirst[str] = LeastFirst()
        self._num_arrived = 0
        self._is_blocked = False
        self._pack: dict[str, ScheduledPiece] = {}
        self._step: dict[str, ScheduledSequence] | None = None
        self._step_s = 0.0
        self._mark_s = 0.0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._sequences

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages of the pool: new, preempted, or held."""
        return len(self._sequences) - len(self._admitted)

    @property
    def num_running(self) -> int:
        """Requests that hold pages of the pool: in prefill, or decoding."""
        return len(self._admitted)

    @property
    def num_decoding(self) -> int:
        """Requests that want a decode step together, 0 while the pack is one request's alone."""
        return len(self._sharing())

    @property
    def decoding_alone(self) -> tuple[str, ...]:
        """Requests that want a decode step of their own, most important first."""
        return tuple(one.request_id for one in sorted(self._decoding(), key=lambda one: one.rank) if one.is_alone)

    def unserved_tokens(self) -> int:
        """Tokens that prefills are still to compute, of all who have no first token yet."""
        return sum(sequence.tokens_left for sequence in self._sequences.values() if sequence.is_unserved)

    def check_queue_limit(self, flow: str) -> None:
        """Raises LineFullError where `add` would for a request of that flow."""
        self._queue_limit.check(flow)

    def add(self, work: SequenceWork, *, after: str | None = None) -> None:
        """Puts a request in line.

        Args:
          after: an admitted request of its flow and priority that it goes on from: it stands at the head of the flow.

        Raises:
          NeverFitsError: the pool is too small for it, even empty.
          LineFullError: no place in line; `retry_after_s` estimates when there is one.
          ValueError: its id is in use, or `tail_slots` makes more than a page.
        """
        if work.request_id in self._sequences:
            raise ValueError(f"request_id: wanted one that is not scheduled, got {work.request_id!r}")
        self.settings.check_fits(work)
        sequence = ScheduledSequence(work, self._num_arrived, self.settings.page_tokens)
        if after is None:
            self.check_queue_limit(work.flow)
            self._queue_limit.take(sequence)
        else:
            sequence.tag = self._admitted[after].tag
        self._num_arrived += 1
        self._sequences[work.request_id] = sequence
        self._queue.enqueue(sequence)
        self._set_deadline(sequence)

    def remove(self, request_id: str) -> None:
        """Forgets a request: its answer is complete, it was cancelled, or it failed. At any time, also while it runs.

        Raises:
          KeyError: it is not scheduled.
        """
        sequence = self._get(request_id)
        del self._sequences[request_id]
        self._deadlines.discard(request_id)
        if sequence.tag is None:
            self._queue_limit.free(sequence)
        self._withdraw(sequence)
        if sequence.is_unserved:
            self._queue.discard(sequence)

    def replan(self, work: SequenceWork) -> None:
        """The request of that id has another plan, say because a stored chunk could not be read. While it waits it
        keeps its place; once admitted it gives its pages back and starts over at the head of its flow.

        Raises:
          KeyError: it is not scheduled.
          ValueError: flow, priority or `max_new_tokens` differ.
          NeverFitsError: as for `add`; nothing has changed then.
        """
        sequence = self._get(work.request_id)
        sequence.work.check_change(work)
        self.settings.check_fits(work)
        if sequence.tag is None:
            self._queue_limit.free(sequence)
            sequence.start_over(work)
            self._queue_limit.take(sequence)
            self._queue.reorder(sequence)
        else:
            self._withdraw(sequence)
            if sequence.is_unserved:
                self._queue.discard(sequence)
            sequence.start_over(work)
            self._queue.enqueue(sequence)
        self._set_deadline(sequence)

    def hold(self, request_id: str) -> None:
        """Lets a request that was just admitted wait for something that no scheduling brings about: it gives seat and
        pages back, and is in no line until `replan`, which puts it at the head of its flow.

        Raises:
          KeyError: it is not scheduled.
          ValueError: it is not in prefill.
        """
        sequence = self._get(request_id)
        if sequence.state != "prefill":
            raise ValueError(f"request_id: wanted one in prefill, got {request_id!r}, state {sequence.state}")
        self._withdraw(sequence)
        self._queue.discard(sequence)
        sequence.state = "held"

    def set_alone(self, request_id: str, is_alone: bool) -> None:
        """Whether a request shares no step with others from the next one on: its pieces have packs to themselves, with
        no decode step between their layers, and it is in no decode step but those that are asked for it.

        Raises:
          KeyError: it is not scheduled.
        """
        self._get(request_id).is_alone = is_alone

    def share(self, work: SequenceWork) -> None:
        """The request of that id decodes on as `work` says: its prompt's pages are shared ones now. Raises ValueError
        where it does not decode, and what `replan` raises."""
        sequence = self._get(work.request_id)
        if sequence.state != "decode":
            raise ValueError(f"request_id: wanted one that decodes, got {work.request_id!r}, in {sequence.state}")
        sequence.work.check_change(work)
        self.settings.check_fits(work)
        sequence.work = work

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Removes the requests whose deadline has come and returns their ids, earliest deadline first."""
        late = []
        while (least := self._deadlines.least()) is not None and least[0][0] <= now_s:
            late.append(least[1])
            self.remove(least[1])
        return tuple(late)

    def next_pack(
        self,
        now_s: float,
        free_pages: int,
        costs: StepCosts,
        *,
        shared_pages: Callable[[str], int] | None = None,
    ) -> ScheduledPack:
        """What to prefill next, until `pack_done`.

        In the order of priority, fairness and arrival each request gets as many tokens as the pack still takes, so that
        a short one shares it with a piece of a long one. The first in line is admitted if there is a seat, and pages
        for its prompt and the reserve; for its sake, less important priorities are preempted, if that makes room. If it
        does not, nobody else is admitted before it, or small requests could keep out a large one for ever. Nor is
        anybody when a prompt that is not divisible finds too little of the pack left, or its context no room.

        Args:
          free_pages: of the pool, those of chunks that nobody reads included.
          shared_pages: how many of a request's shared pages would be taken out of the free ones now; without it, all.

        Raises:
          RuntimeError: the pack or the decode step before is not done.
        """
        check_count("free_pages", free_pages, least=0)
        if self._pack or self._step is not None:
            raise RuntimeError("next_pack: wanted pack_done or decode_done first")
        self._mark_s, self._step_s = now_s, costs.decode_step_s
        self._is_blocked = is_closed = False
        budget = self.settings.max_num_batched_tokens
        preempted: list[str] = []
        admitted: list[str] = []
        begun = collections.deque(
            sorted((r for r in self._admitted.values() if r.state == "prefill"), key=self._queue.order)
        )
        while budget:
            while begun and begun[0].state != "prefill":  # preempted just now
                begun.popleft()
            head = None if self._is_blocked or is_closed else self._queue.head()
            if begun and (head is None or self._queue.order(begun[0]) < self._queue.order(head)):
                num_tokens = self._put_in_pack(begun.popleft(), budget)
                budget -= num_tokens
                is_closed |= not num_tokens
                continue
            if head is None:
                break
            if not self._piece_tokens(head, budget):
                is_closed = True
                continue
            wanted = head.own_pages + (shared_pages(head.request_id) if shared_pages else head.work.shared_pages)
            victims = self._victims_for(head, wanted, free_pages)
            if victims is None or head.request_id in preempted:
                self._is_blocked = True
                continue
            for victim in victims:
                free_pages += victim.own_pages
                preempted.append(self._preempt(victim))
            free_pages -= wanted
            self._admit(head)
            admitted.append(head.request_id)
            budget -= self._put_in_pack(head, budget)
        return ScheduledPack(tuple(preempted), tuple(admitted), tuple(self._pack.values()))

    def pack_done(self, now_s: float) -> tuple[str, ...]:
        """The requests of the pack that have their next token now, in its order; they decode from now on."""
        done = []
        for piece in self._pack.values():
            sequence = self._sequences[piece.request_id]
            sequence.tokens_left -= piece.num_tokens
            if not sequence.tokens_left:
                self._queue.discard(sequence)
                sequence.state = "decode"
                sequence.num_answered += 1
                sequence.last_token_s = now_s
                done.append(piece.request_id)
        self._pack = {}
        return tuple(done)

    def after_layer(self, now_s: float) -> bool:
        """To be called once after each layer of a pack: True if a decode step should run before the next one.

        It should if some answer would otherwise wait for its next token for longer than the settings say, provided that
        the next layer takes as long as this one, and a decode step `StepCosts.decode_step_s`. One call, one answer:
        between two steps there is always a layer, however long they take. Where layers queue up on the device, `now_s`
        is when the last of them ends.
        """
        layer_s, self._mark_s = now_s - self._mark_s, now_s
        oldest_s = min((sequence.last_token_s for sequence in self._sharing()), default=None)
        if oldest_s is None:
            return False
        return now_s + layer_s + self._step_s > oldest_s + self.settings.decode_gap_s(self._step_s)

    def next_decode(self, free_pages: int, costs: StepCosts, *, alone: str | None = None) -> DecodeStep:
        """Who decodes next, until `decode_done`: all that have their first token and not their last, those left out
        that share no step; or such a one, `alone`, by itself.

        Pages are drawn by the most important first. Where none is free, the least important of all that are admitted
        is preempted, be it in the pack that runs (its rows are dropped), but only in favour of a more important one:
        who finds nobody less important sits out and keeps its pages, for to give them up would help nobody. An answer
        that lies in a shared prompt's last page has none of its own to give, but the prompt may then be dropped.

        Raises:
          RuntimeError: the decode step before is not done.
        """
        check_count("free_pages", free_pages, least=0)
        if self._step is not None:
            raise RuntimeError("next_decode: wanted decode_done first")
        self._step_s = costs.decode_step_s
        self._step = {}
        preempted: list[str] = []
        draws: list[str] = []
        ranked = sorted((r for r in self._admitted.values() if not r.is_complete), key=lambda r: r.rank)
        victims = list(ranked)
        for sequence in ranked:
            if sequence.state != "decode":  # in prefill, or preempted just now
                continue
            if sequence.request_id != alone if alone is not None else sequence.is_alone:
                continue
            if sequence.draws_page:
                while not free_pages and victims[-1] is not sequence:
                    victim = victims.pop()
                    free_pages += victim.own_pages
                    preempted.append(self._preempt(victim))
                if not free_pages:
                    continue
                free_pages -= 1
                draws.append(sequence.request_id)
            self._step[sequence.request_id] = sequence
        return DecodeStep(tuple(preempted), tuple(self._step), tuple(draws))

    def decode_done(self, now_s: float) -> None:
        """Every request of the step that was not removed meanwhile has one more token."""
        if self._step is None:
            raise RuntimeError("decode_done: wanted next_decode first")
        self._mark_s = now_s
        for sequence in self._step.values():
            sequence.num_answered += 1
        for sequence in self._decoding():  # no prefill is to blame for one that found no page
            sequence.last_token_s = now_s
        self._step = None

    def retry_after_s(self, flow: str, costs: StepCosts) -> float:
        """About how many seconds until a request of that flow finds a place in line; 0 where it finds one now.

        A place is free once the next one in line is admitted: when what was admitted is prefilled, and, if seats or
        pages keep it out, the first answer ends. A flow over its share waits for one more of its own, with what the
        other flows have admitted meanwhile.
        """
        num_starts = self._queue_limit.admissions_until_free(flow)
        if not num_starts:
            return 0.0
        wait_s = sum(sequence.tokens_left for sequence in self._admitted.values()) * costs.token_s
        if self._admitted and (self._is_blocked or len(self._admitted) >= self.settings.max_num_seqs):
            wait_s += min(sequence.steps_left(costs) for sequence in self._admitted.values()) * costs.decode_step_s
        mean_tokens = self._queue_limit.num_tokens / self._queue_limit.num_queued
        return wait_s + (num_starts - 1) * mean_tokens * costs.token_s

    def _get(self, request_id: str) -> ScheduledSequence:
        if request_id not in self._sequences:
            raise KeyError(f"request_id: wanted one that is scheduled, got {request_id!r}")
        return self._sequences[request_id]

    def _set_deadline(self, sequence: ScheduledSequence) -> None:
        if sequence.work.deadline_s is None:
            self._deadlines.discard(sequence.request_id)
        else:
            self._deadlines.put(sequence.request_id, (sequence.work.deadline_s, sequence.number))

    def _decoding(self) -> list[ScheduledSequence]:
        return [one for one in self._admitted.values() if one.state == "decode" and not one.is_complete]

    def _sharing(self) -> list[ScheduledSequence]:
        if any(self._sequences[name].is_alone for name in self._pack):
            return []
        return [sequence for sequence in self._decoding() if not sequence.is_alone]

    def _reserve(self, sequence: ScheduledSequence) -> int:
        return min(self.settings.reserve_pages, sequence.growth_pages)

    def _victims_for(self, head: ScheduledSequence, wanted: int, free_pages: int) -> list[ScheduledSequence] | None:
        """Whom to preempt so that `head` can be admitted, least important first; None where that makes no room."""
        wanted += self._reserve(head) + sum(self._reserve(sequence) for sequence in self._admitted.values())
        num_free_slots = self.settings.max_num_seqs - len(self._admitted)
        victims: list[ScheduledSequence] = []
        lesser = [r for r in self._admitted.values() if r.work.priority > head.work.priority and not r.is_complete]
        for victim in sorted(lesser, key=lambda r: r.rank, reverse=True):
            if wanted <= free_pages and num_free_slots:
                break
            victims.append(victim)
            free_pages += victim.own_pages
            wanted -= self._reserve(victim)
            num_free_slots += 1
        return victims if wanted <= free_pages and num_free_slots else None

    def _admit(self, sequence: ScheduledSequence) -> None:
        """Gives a waiting request its seat."""
        if sequence.tag is None:
            self._queue_limit.free(sequence)
        self._queue.dequeue(sequence)
        self._admitted[sequence.request_id] = sequence
        sequence.state = "prefill"

    def _piece_tokens(self, sequence: ScheduledSequence, budget: int) -> int:
        if self._pack and (sequence.is_alone or any(self._sequences[name].is_alone for name in self._pack)):
            return 0
        most = self.settings.max_num_context_tokens
        if most is not None and self._pack:
            context = sum(self._sequences[name].context_tokens for name in self._pack)
            if context + sequence.context_tokens > most:
                return 0
        wanted = min(sequence.tokens_left, self.settings.max_num_batched_tokens)
        return min(budget, wanted) if sequence.work.is_divisible or wanted <= budget else 0

    def _put_in_pack(self, sequence: ScheduledSequence, budget: int) -> int:
        num_tokens = self._piece_tokens(sequence, budget)
        if num_tokens:
            name, start = sequence.request_id, sequence.total_tokens - sequence.tokens_left
            self._pack[name] = ScheduledPiece(name, start, num_tokens, num_tokens == sequence.tokens_left)
            self._queue.serve(sequence, num_tokens)
        return num_tokens

    def _withdraw(self, sequence: ScheduledSequence) -> None:
        """Takes its seat and its part in what runs."""
        self._admitted.pop(sequence.request_id, None)
        self._pack.pop(sequence.request_id, None)
        if self._step is not None:
            self._step.pop(sequence.request_id, None)

    def _preempt(self, sequence: ScheduledSequence) -> str:
        self._withdraw(sequence)
        if sequence.state == "prefill":
            self._queue.discard(sequence)
        sequence.start_over(sequence.work)
        self._queue.enqueue(sequence)
        return sequence.request_id

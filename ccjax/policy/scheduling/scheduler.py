"""Decides which sequences prefill and decode next, which are admitted, and which are preempted."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

from ccjax.policy._checks import check_count
from ccjax.policy.scheduling.fair import FlowOrder
from ccjax.policy.scheduling.least import LeastFirst
from ccjax.policy.scheduling.sequence import ScheduledSequence
from ccjax.policy.scheduling.victims import victims_for
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
    """Continuous batching over one page pool. Not thread-safe.

    With n waiting and r admitted sequences, `add`, `remove` and `replan` cost O(log n) amortised, and `expire` that
    much per sequence it returns; `next_pack` costs O(r log r + log n) per sequence it touches, `next_decode` O(r log
    r).
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._sequences: dict[str, ScheduledSequence] = {}
        self._admitted: dict[str, ScheduledSequence] = {}
        most_lead = settings.max_num_batched_tokens
        self._queue = WaitingQueue(FlowOrder(settings.reorder_window, settings.short_tokens, most_lead))
        self._queue_limit = QueueLimit(settings.max_queue, settings.flow_share)
        self._deadlines: LeastFirst[str] = LeastFirst()
        self._num_arrived = 0
        self._is_blocked = False
        self._admissible_tokens = math.inf
        self._pack: dict[str, ScheduledPiece] = {}
        self._interrupted: dict[str, ScheduledPiece] = {}
        self._interrupted_s = self._interruption_s = 0.0
        self._resumed_s = -math.inf
        self._step: dict[str, ScheduledSequence] | None = None
        self._step_s = 0.0
        self._mark_s = 0.0
        self._most_together = math.inf

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._sequences

    @property
    def num_waiting(self) -> int:
        """Number of sequences that hold no pages: new, preempted or held."""
        return len(self._sequences) - len(self._admitted)

    @property
    def num_running(self) -> int:
        """Number of sequences that hold pages: in prefill or decoding."""
        return len(self._admitted)

    @property
    def num_decoding(self) -> int:
        """Number of sequences that decode together; 0 while the running pack belongs to a sequence that runs alone."""
        return len(self._sharing())

    @property
    def decoding_alone(self) -> tuple[str, ...]:
        """Ids of the sequences that need decode steps of their own, most important first."""
        return tuple(
            sequence.sequence_id
            for sequence in sorted(self._decoding(), key=lambda sequence: sequence.rank)
            if sequence.is_alone
        )

    def waiting_tokens(self) -> int:
        """Tokens still to be prefilled, over all sequences without a first token."""
        return sum(sequence.tokens_left for sequence in self._sequences.values() if sequence.is_unserved)

    def check_queue_limit(self, flow: str) -> None:
        """Raises AdmissionQueueFullError if `add` would for a request of this flow."""
        self._queue_limit.check(flow)

    def add(self, work: SequenceWork, *, after: str | None = None) -> None:
        """Adds a sequence to the queue.

        Args:
          after: an admitted sequence of the same flow and priority that this one continues: it is put at the front of
            the flow.

        Raises:
          NeverFitsError: the pool is too small for it even when empty.
          AdmissionQueueFullError: the queue is full; `retry_after_s` estimates when it is not.
          ValueError: its id is in use, or `tail_slots` is a page or more.
        """
        if work.sequence_id in self._sequences:
            raise ValueError(f"sequence_id: wanted one that is not scheduled, got {work.sequence_id!r}")
        self.settings.check_fits(work)
        sequence = ScheduledSequence(work, self._num_arrived, self.settings.page_tokens)
        if after is None:
            self.check_queue_limit(work.flow)
            self._queue_limit.take(sequence)
        else:
            sequence.tag = self._admitted[after].tag
        self._num_arrived += 1
        self._sequences[work.sequence_id] = sequence
        self._queue.enqueue(sequence)
        self._set_deadline(sequence)

    def remove(self, sequence_id: str) -> None:
        """Forgets a sequence that is complete, cancelled or failed. May be called at any time, even while it runs.

        Raises:
          KeyError: it is not scheduled.
        """
        sequence = self._get(sequence_id)
        del self._sequences[sequence_id]
        self._deadlines.discard(sequence_id)
        if sequence.tag is None:
            self._queue_limit.free(sequence)
        self._withdraw(sequence)
        if sequence.is_unserved:
            self._queue.discard(sequence)

    def replan(self, work: SequenceWork) -> None:
        """Replaces the plan of a sequence, for example because a stored chunk could not be read. A waiting sequence
        keeps its position; an admitted one frees its pages and starts over at the front of its flow.

        Raises:
          KeyError: it is not scheduled.
          ValueError: flow, priority or `max_new_tokens` differ.
          NeverFitsError: as for `add`; nothing has changed then.
        """
        sequence = self._get(work.sequence_id)
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

    def hold(self, sequence_id: str) -> None:
        """Suspends a sequence that was just admitted and must wait for something that the scheduler does not control:
        it frees its pages and leaves the queue until `replan` puts it back at the front of its flow.

        Raises:
          KeyError: it is not scheduled.
          ValueError: it is not in prefill.
        """
        sequence = self._get(sequence_id)
        if sequence.state != "prefill":
            raise ValueError(f"sequence_id: wanted one in prefill, got {sequence_id!r}, state {sequence.state}")
        self._withdraw(sequence)
        self._queue.discard(sequence)
        sequence.state = "held"

    def set_alone(self, sequence_id: str, is_alone: bool) -> None:
        """Sets whether a sequence shares steps with others, from the next step on. One that runs alone has packs of its
        own, without decode steps between their layers, and takes part only in decode steps requested for it.

        Raises:
          KeyError: it is not scheduled.
        """
        self._get(sequence_id).is_alone = is_alone

    def share(self, work: SequenceWork) -> None:
        """Replaces the work of a decoding sequence whose prompt pages are shared from now on. Raises ValueError if it
        is not decoding, and what `replan` raises."""
        sequence = self._get(work.sequence_id)
        if sequence.state != "decode":
            raise ValueError(f"sequence_id: wanted one that decodes, got {work.sequence_id!r}, in {sequence.state}")
        sequence.work.check_change(work)
        self.settings.check_fits(work)
        sequence.work = work

    def limit_admission(self, is_limited: bool) -> None:
        """Limits what is admitted from now on, so that what is in prefill ends: to as many tokens in all as that still
        lacks, besides short prompts that interrupt it. False lifts the limit."""
        left = sum(sequence.tokens_left for sequence in self._admitted.values() if sequence.state == "prefill")
        self._admissible_tokens = left if is_limited else math.inf

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Removes the sequences whose deadline has passed and returns their ids, earliest deadline first."""
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
        interrupts: bool = False,
    ) -> ScheduledPack:
        """Chooses what to prefill next, until `pack_done`.

        In order of priority, fairness and arrival, each sequence gets as many tokens as still fit into the pack, so
        that a short prompt shares it with a piece of a long one. But none joins others whose pack would then take
        longer than `work.PACK_S` by the time per computed token, since a slow device gains nothing from that, and all
        of a pack wait for the last. The head of the queue is admitted if a slot and enough pages for its prompt and the
        reserve are free; less important priorities are preempted for it if that frees enough. If not, nothing behind it
        is admitted, or small sequences could starve a large one. Nor is anything admitted once a prompt does not fit
        into the rest of the pack, or its context exceeds the limit.

        Args:
          free_pages: free pages of the pool, including those of chunks that no sequence reads.
          shared_pages: how many of a sequence's shared pages would be taken from the free ones now; without it, all.
          interrupts: choose only short prompts, to run through all layers before the next layer of the running pack,
            which goes on after `pack_done`. Nothing is preempted for them.

        Raises:
          RuntimeError: the previous pack or decode step is not done; or `interrupts` without `may_interrupt`.
        """
        check_count("free_pages", free_pages, least=0)
        if self._step is not None or (not self.may_interrupt(now_s) if interrupts else self._pack):
            raise RuntimeError("next_pack: wanted pack_done or decode_done first")
        self._mark_s, self._step_s = now_s, costs.decode_step_s
        if interrupts:
            self._interrupted, self._pack, self._interrupted_s = self._pack, {}, now_s
        self._is_blocked = is_closed = False
        budget = self.settings.pack_tokens(costs.token_s)
        self._most_together = self.settings.tokens_together(costs.token_s)
        preempted: list[str] = []
        admitted: list[str] = []
        begun = collections.deque(
            sorted((r for r in self._begun() if not interrupts or self._is_short(r)), key=self._queue.order)
        )
        while budget > 0:
            while begun and begun[0].state != "prefill":  # preempted just now
                begun.popleft()
            head = None if self._is_blocked or is_closed else self._queue.head()
            if head is not None and not self._is_admissible(head, interrupts):
                head = None
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
            wanted = head.own_pages + (shared_pages(head.sequence_id) if shared_pages else head.work.shared_pages)
            victims = victims_for(head, wanted, free_pages, self._admitted.values(), self.settings)
            if victims is None or head.sequence_id in preempted or (interrupts and victims):
                self._is_blocked = True
                continue
            for victim in victims:
                free_pages += victim.own_pages
                preempted.append(self._preempt(victim))
            free_pages -= wanted
            self._admit(head)
            self._admissible_tokens -= 0 if interrupts else head.tokens_left
            admitted.append(head.sequence_id)
            budget -= self._put_in_pack(head, budget)
        pieces = tuple(self._pack.values())
        if not pieces:
            self._resume(now_s)
        return ScheduledPack(tuple(preempted), tuple(admitted), pieces)

    def may_interrupt(self, now_s: float) -> bool:
        """True if `next_pack` may choose short prompts to run before the next layer of the running pack: one of twice
        as many tokens or more that interrupts none itself, half as long after the last interruption as that took. So
        long prompts keep a third of the time."""
        if not self._pack or self._interrupted or now_s - self._resumed_s < self._interruption_s / 2:
            return False
        if any(self._sequences[name].is_alone for name in self._pack):
            return False
        num_tokens = sum(piece.num_tokens for piece in self._pack.values())
        return num_tokens >= 2 * self.settings.short_tokens

    def pack_done(self, now_s: float) -> tuple[str, ...]:
        """Ends the pack; returns the sequences that have their next token now, in pack order. They decode from now
        on."""
        done = []
        for piece in self._pack.values():
            sequence = self._sequences[piece.sequence_id]
            sequence.tokens_left -= piece.num_tokens
            if not sequence.tokens_left:
                self._queue.discard(sequence)
                sequence.state = "decode"
                sequence.num_answered += 1
                sequence.last_token_s = now_s
                done.append(piece.sequence_id)
        self._pack = {}
        self._resume(now_s)
        return tuple(done)

    def after_layer(self, now_s: float) -> bool:
        """Called once after each layer of a pack: True if a decode step should run before the next layer.

        It should if some sequence would otherwise wait longer for its next token than the settings allow, assuming that
        the next layer takes as long as this one and a decode step takes `StepCosts.decode_step_s`. Each call answers
        once: there is always a layer between two decode steps, however long they take. Where layers queue up on the
        device, `now_s` is when the last of them ends.
        """
        layer_s, self._mark_s = now_s - self._mark_s, now_s
        oldest_s = min((sequence.last_token_s for sequence in self._sharing()), default=None)
        if oldest_s is None:
            return False
        return now_s + layer_s + self._step_s > oldest_s + self.settings.decode_gap_s(self._step_s)

    def next_decode(self, free_pages: int, costs: StepCosts, *, alone: str | None = None) -> DecodeStep:
        """Chooses the next decode step, until `decode_done`: all sequences with a first token and not their last,
        except those that run alone; or, with `alone`, just that one.

        Pages are allocated to the most important sequences first. If none is free, the least important admitted
        sequence is preempted, even from the running pack (its rows are dropped), but only in favour of a more important
        one. A sequence without a less important one skips this step and keeps its pages, since freeing them would help
        no other. A sequence whose tokens lie in the last page of a shared prompt has no pages of its own to free, but
        the prompt may be dropped once it is preempted.

        Raises:
          RuntimeError: the previous decode step is not done.
        """
        check_count("free_pages", free_pages, least=0)
        if self._step is not None:
            raise RuntimeError("next_decode: wanted decode_done first")
        self._step_s = costs.decode_step_s
        self._step = {}
        preempted: list[str] = []
        allocating: list[str] = []
        ranked = sorted((r for r in self._admitted.values() if not r.is_complete), key=lambda r: r.rank)
        victims = list(ranked)
        for sequence in ranked:
            if sequence.state != "decode":  # in prefill, or preempted just now
                continue
            if sequence.sequence_id != alone if alone is not None else sequence.is_alone:
                continue
            if sequence.allocates_page:
                while not free_pages and victims[-1] is not sequence:
                    victim = victims.pop()
                    free_pages += victim.own_pages
                    preempted.append(self._preempt(victim))
                if not free_pages:
                    continue
                free_pages -= 1
                allocating.append(sequence.sequence_id)
            self._step[sequence.sequence_id] = sequence
        return DecodeStep(tuple(preempted), tuple(self._step), tuple(allocating))

    def decode_done(self, now_s: float) -> None:
        """Ends the decode step: every sequence in it that was not removed meanwhile has one more token."""
        if self._step is None:
            raise RuntimeError("decode_done: wanted next_decode first")
        self._mark_s = now_s
        for sequence in self._step.values():
            sequence.num_answered += 1
        for sequence in self._decoding():  # a missing page is not the fault of a prefill
            sequence.last_token_s = now_s
        self._step = None

    def retry_after_s(self, flow: str, costs: StepCosts) -> float:
        """Estimated seconds until a request of this flow finds a free queue slot; 0 if there is one now.

        A slot becomes free once the head of the queue is admitted: when the admitted sequences are prefilled and, if
        slots or pages block it, the first of them finishes. A flow over its share waits for another admission of its
        own, during which other flows have theirs.
        """
        num_starts = self._queue_limit.admissions_until_free(flow)
        if not num_starts:
            return 0.0
        wait_s = sum(sequence.tokens_left for sequence in self._admitted.values()) * costs.token_s
        if self._admitted and (self._is_blocked or len(self._admitted) >= self.settings.max_num_seqs):
            wait_s += min(sequence.steps_left(costs) for sequence in self._admitted.values()) * costs.decode_step_s
        mean_tokens = self._queue_limit.num_tokens / self._queue_limit.num_queued
        return wait_s + (num_starts - 1) * mean_tokens * costs.token_s

    def _resume(self, now_s: float) -> None:
        """Continues the interrupted pack, if there is one."""
        if self._interrupted:
            self._interruption_s, self._resumed_s = now_s - self._interrupted_s, now_s
            self._pack, self._interrupted, self._mark_s = self._interrupted, {}, now_s

    def _begun(self) -> list[ScheduledSequence]:
        """Admitted sequences whose prompts are not complete, without those of the interrupted pack."""
        return [r for r in self._admitted.values() if r.state == "prefill" and r.sequence_id not in self._interrupted]

    def _is_admissible(self, head: ScheduledSequence, interrupts: bool) -> bool:
        return self._is_short(head) if interrupts else head.tokens_left <= self._admissible_tokens

    def _is_short(self, sequence: ScheduledSequence) -> bool:
        return sequence.tokens_left <= self.settings.short_tokens and not sequence.is_alone

    def _get(self, sequence_id: str) -> ScheduledSequence:
        if sequence_id not in self._sequences:
            raise KeyError(f"sequence_id: wanted one that is scheduled, got {sequence_id!r}")
        return self._sequences[sequence_id]

    def _set_deadline(self, sequence: ScheduledSequence) -> None:
        if sequence.work.deadline_s is None:
            self._deadlines.discard(sequence.sequence_id)
        else:
            self._deadlines.put(sequence.sequence_id, (sequence.work.deadline_s, sequence.number))

    def _decoding(self) -> list[ScheduledSequence]:
        return [
            sequence for sequence in self._admitted.values() if sequence.state == "decode" and not sequence.is_complete
        ]

    def _sharing(self) -> list[ScheduledSequence]:
        if any(self._sequences[name].is_alone for name in (*self._pack, *self._interrupted)):
            return []
        return [sequence for sequence in self._decoding() if not sequence.is_alone]

    def _admit(self, sequence: ScheduledSequence) -> None:
        """Admits a waiting sequence."""
        if sequence.tag is None:
            self._queue_limit.free(sequence)
        self._queue.dequeue(sequence)
        self._admitted[sequence.sequence_id] = sequence
        sequence.state = "prefill"

    def _piece_tokens(self, sequence: ScheduledSequence, budget: int) -> int:
        if self._pack and (sequence.is_alone or any(self._sequences[name].is_alone for name in self._pack)):
            return 0
        most = self.settings.max_num_context_tokens
        if most is not None and self._pack:
            context = sum(self._sequences[name].context_tokens for name in self._pack)
            if context + sequence.context_tokens > most:
                return 0
        num_tokens = min(budget, sequence.tokens_left) if sequence.work.is_divisible else sequence.tokens_left
        if self._pack:
            together = num_tokens + sum(piece.num_tokens for piece in self._pack.values())
            if num_tokens > budget or together > self._most_together:
                return 0
        return num_tokens

    def _put_in_pack(self, sequence: ScheduledSequence, budget: int) -> int:
        num_tokens = self._piece_tokens(sequence, budget)
        if num_tokens:
            name, start = sequence.sequence_id, sequence.total_tokens - sequence.tokens_left
            self._pack[name] = ScheduledPiece(name, start, num_tokens, num_tokens == sequence.tokens_left)
            self._queue.serve(sequence, num_tokens)
        return num_tokens

    def _withdraw(self, sequence: ScheduledSequence) -> None:
        """Removes a sequence from the admitted ones and from the running pack and step."""
        self._admitted.pop(sequence.sequence_id, None)
        self._pack.pop(sequence.sequence_id, None)
        self._interrupted.pop(sequence.sequence_id, None)
        if self._step is not None:
            self._step.pop(sequence.sequence_id, None)

    def _preempt(self, sequence: ScheduledSequence) -> str:
        self._withdraw(sequence)
        if sequence.state == "prefill":
            self._queue.discard(sequence)
        sequence.start_over(sequence.work)
        self._queue.enqueue(sequence)
        return sequence.sequence_id

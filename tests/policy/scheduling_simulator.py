"""A simulated engine with given step times that computes nothing: it executes a scheduler's decisions, keeps its own
ledger of pages, tokens and slots, and asserts at every step that the decision can be executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ccjax.policy.scheduling import ScheduledPack, Scheduler, SchedulerSettings, SequenceWork, StepCosts

CHUNK_NAMES = frozenset("abc")


@dataclasses.dataclass
class Job:
    """A request, its resources and its outcome."""

    work: SequenceWork
    number: int
    answer_tokens: int
    chunks: frozenset[str]
    submitted_s: float
    num_computed: int = 0
    num_slots: int = 0
    num_pages: int = 0
    is_admitted: bool = False
    is_decoding: bool = False
    num_preempted: int = 0
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    end: str | None = None
    num_answers: int = 1
    alone: SequenceWork | None = None
    """The request as work without its shared prompt."""

    @property
    def rank(self):
        return self.work.priority, self.number

    @property
    def total_tokens(self):
        return self.work.prefill_tokens + len(self.token_times_s)

    @property
    def context_tokens(self):
        return self.total_tokens + self.work.cached_tokens


class SimulatedEngine:
    """One step a `tick`. A layer takes `layer_s + token_s num_tokens` seconds, a decode step `decode_s`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        num_layers: int = 2,
        layer_s: float = 0.001,
        token_s: float = 0.0,
        decode_s: float = 0.001,
        chunk_pages: Mapping[str, int] | None = None,
    ) -> None:
        self.scheduler = Scheduler(settings)
        self.settings = settings
        self.num_layers, self.layer_s, self.token_s, self.decode_s = num_layers, layer_s, token_s, decode_s
        self.costs = StepCosts(token_s * num_layers, decode_s)
        self.chunk_pages = dict(chunk_pages or {})
        self.now_s = 0.0
        self.jobs: dict[str, Job] = {}
        self.held_elsewhere = 0
        self.pack: ScheduledPack | None = None
        self.next_layer = 0
        self.served_tokens: dict[str, int] = {}
        self.events: list[str] = []

    # The pool.

    def pinned(self):
        """Chunks that admitted requests read."""
        return {name for job in self.jobs.values() if job.is_admitted for name in job.chunks}

    @property
    def free_pages(self):
        own = sum(job.num_pages for job in self.jobs.values())
        shared = self._pages_of(self.pinned())
        return self.settings.num_pages - own - shared - self.held_elsewhere

    def shared_pages(self, sequence_id):
        return self._pages_of(self.jobs[sequence_id].chunks - self.pinned())

    def active(self):
        return [job for job in self.jobs.values() if job.is_admitted]

    # Requests.

    def submit(self, work, answer_tokens=None, chunks=(), num_answers=1):
        answer_tokens = work.max_new_tokens if answer_tokens is None else answer_tokens
        work = dataclasses.replace(work, shared_pages=sum(self.chunk_pages[name] for name in chunks))
        self.scheduler.add(work)
        job = Job(work, len(self.jobs), answer_tokens, frozenset(chunks), self.now_s, num_answers=num_answers)
        self.jobs[work.sequence_id] = job

    def _fork(self, sequence_id):
        """Adds the other answers to the prompt of a request that just got its first token, if they can fit at all."""
        first = self.jobs[sequence_id]
        count, first.num_answers = first.num_answers - 1, 1
        sibling = self._reading(first.work)
        all_pages = sibling.most_pages(self.settings.page_tokens) + first.work.shared_pages + first.work.prompt_pages
        if not count or all_pages > self.settings.num_pages:
            return
        prompt = f"prompt of {sequence_id}"
        first.alone = first.work
        self.chunk_pages[prompt] = first.work.prompt_pages
        first.chunks |= {prompt}
        first.num_pages -= first.work.prompt_pages
        shared_pages = first.work.shared_pages + first.work.prompt_pages
        first.work = dataclasses.replace(first.work, prompt_pages=0, shared_pages=shared_pages)
        self.scheduler.share(first.work)
        for number in range(count):
            name = f"{sequence_id}/{number}"
            work = dataclasses.replace(self._reading(first.work), sequence_id=name)
            self.scheduler.add(work, after=sequence_id)
            alone = dataclasses.replace(first.alone, sequence_id=name)
            self.jobs[name] = Job(work, len(self.jobs), first.answer_tokens, first.chunks, self.now_s, alone=alone)

    def _reading(self, work):
        """An answer that starts, or restarts, with the prompt of another one."""
        return dataclasses.replace(work, prefill_tokens=1, prompt_pages=1, tail_slots=self.settings.page_tokens - 1)

    def _drop_prompts(self):
        """Drops prompts that no admitted answer reads, as far as their pages are needed."""
        waiting = [job for job in self.jobs.values() if job.alone and job.end is None and not job.is_admitted]
        parked = {name for job in waiting for name in job.chunks if name not in CHUNK_NAMES} - self.pinned()
        for prompt in sorted(parked):
            if sum(self.chunk_pages[name] for name in parked) <= self.free_pages:
                return
            parked.discard(prompt)
            for job in waiting:
                if prompt in job.chunks:
                    job.chunks -= {prompt}
                    work, job.alone = job.alone, None
                    assert work is not None
                    self.replan(work)

    def end(self, sequence_id, how):
        job = self.jobs[sequence_id]
        assert job.end is None, f"{sequence_id} ended twice"
        job.end = how
        self._release(job)

    def cancel(self, sequence_id):
        self.scheduler.remove(sequence_id)
        self.end(sequence_id, "cancelled")

    def replan(self, work):
        job = self.jobs[work.sequence_id]
        self.scheduler.replan(work)
        job.work = work
        self._release(job)

    def hold(self, sequence_id):
        self.scheduler.hold(sequence_id)
        self._release(self.jobs[sequence_id])

    def _release(self, job):
        job.num_pages = job.num_computed = job.num_slots = 0
        job.is_admitted = job.is_decoding = False

    # Steps.

    def tick(self):
        """Runs a layer or a decode step; False if there is nothing to run."""
        for sequence_id in self.scheduler.expire(self.now_s):
            assert self.jobs[sequence_id].work.deadline_s <= self.now_s
            self.end(sequence_id, "expired")
        assert not any(
            job.end is None and job.work.deadline_s is not None and job.work.deadline_s <= self.now_s
            for job in self.jobs.values()
        )
        if self.pack is None:
            self._next_pack()
        if self.pack is not None:
            self._run_layer()
        elif self.scheduler.num_decoding:
            self.decode()
        else:
            return False
        self._check_counts()
        return True

    def run(self, max_ticks=100_000):
        """Runs until idle."""
        for _ in range(max_ticks):
            if not self.tick():
                return
        raise AssertionError(f"not idle after {max_ticks} steps: {self.unended()}")

    def unended(self):
        return [job.work.sequence_id for job in self.jobs.values() if job.end is None]

    def _pages_of(self, chunks):
        return sum(self.chunk_pages[name] for name in chunks)

    def _next_pack(self):
        pinned = self.pinned()
        pack = self.scheduler.next_pack(self.now_s, self.free_pages, self.costs, shared_pages=self.shared_pages)
        self._preempt(pack.preempted)
        priorities = [self.jobs[name].work.priority for name in pack.admitted]
        for one in pack.preempted:
            assert min(priorities) < self.jobs[one].work.priority, "preempted for nobody's sake"
        for name in pack.admitted:
            job = self.jobs[name]
            assert not job.is_admitted and not job.num_computed and job.end is None
            job.is_admitted = True
            job.num_pages = job.work.pages_with(len(job.token_times_s), self.settings.page_tokens)
        assert self.free_pages >= 0, "next_pack drew pages that are not free"
        self._drop_prompts()
        is_short = sum(piece.num_tokens for piece in pack.pieces) <= self.settings.max_num_batched_tokens
        assert is_short or [self.jobs[piece.sequence_id].work.is_divisible for piece in pack.pieces] == [False]
        contexts = [self.jobs[piece.sequence_id].context_tokens for piece in pack.pieces]
        assert sum(contexts) <= self._most_context or len(contexts) == 1
        assert len({piece.sequence_id for piece in pack.pieces}) == len(pack.pieces)
        for piece in pack.pieces:
            job = self.jobs[piece.sequence_id]
            assert job.is_admitted and not job.is_decoding and piece.num_tokens > 0
            assert piece.start == job.num_computed, "a piece was left out, or comes twice"
            assert piece.is_last == (piece.start + piece.num_tokens == job.total_tokens)
            flow = job.work.flow
            self.served_tokens[flow] = self.served_tokens.get(flow, 0) + piece.num_tokens
        self._check_order(pack, pinned)
        self.events += [f"admit {name}" for name in pack.admitted]
        self.pack, self.next_layer = (pack, 0) if pack.pieces else (None, 0)
        self._check_counts()

    def _check_order(self, pack, pinned):
        """Asserts that the pack has as much work as possible, in order of importance. `pinned` is the state before the
        pack: a chunk that several newly admitted requests read was counted for each."""
        spare = max(0, self.settings.max_num_batched_tokens - sum(piece.num_tokens for piece in pack.pieces))
        completed = {piece.sequence_id for piece in pack.pieces if piece.is_last}
        begun = [job for job in self.active() if not job.is_decoding and job.work.sequence_id not in completed]
        room = self._most_context - sum(self.jobs[piece.sequence_id].context_tokens for piece in pack.pieces)
        stuck = [
            job
            for job in begun
            if (not job.work.is_divisible and job.total_tokens - job.num_computed > spare)
            or (pack.pieces and job.context_tokens > room)
        ]
        begun = [job for job in begun if job not in stuck]
        assert not (spare and begun), "tokens of an admitted prompt were left out"
        for piece in pack.pieces:
            is_whole = piece.is_last and piece.start == 0
            assert is_whole or self.jobs[piece.sequence_id].work.is_divisible, "cut where it may not be"
        for piece in pack.pieces:
            priority = self.jobs[piece.sequence_id].work.priority
            assert all(priority <= job.work.priority for job in begun), "priority inversion in the pack"
        head = self.scheduler._queue.head()
        if head is None:
            return
        job = self.jobs[head.sequence_id]
        entered = [self.jobs[name].work.priority for name in pack.admitted]
        assert max(entered, default=job.work.priority) <= job.work.priority, "priority inversion at admission"
        fits_pack = job.work.is_divisible or job.total_tokens <= spare or not pack.pieces
        fits_pack = fits_pack and (not pack.pieces or job.context_tokens <= room)
        if spare and fits_pack and not stuck and head.sequence_id not in pack.preempted:
            others = [one for one in self.active() if one.work.priority <= job.work.priority]
            lesser = [one for one in self.active() if one.work.priority > job.work.priority]
            num_slots = len(job.token_times_s)
            num_pages = job.work.pages_with(num_slots, self.settings.page_tokens)
            wanted = num_pages + self._pages_of(job.chunks - pinned) + self._reserve(job, num_pages)
            wanted += sum(self._reserve(one, one.num_pages) for one in others)
            room = self.free_pages + sum(one.num_pages for one in lesser)
            room += self._pages_of(self.pinned() - pinned) - self._pages_of(pinned - self.pinned())
            room -= sum(self._pages_of(self.jobs[name].chunks - pinned) for name in pack.admitted)
            assert wanted > room or len(others) == self.settings.max_num_seqs, "the first in line was kept out"

    @property
    def _most_context(self):
        most = self.settings.max_num_context_tokens
        return float("inf") if most is None else most

    def _reserve(self, job, num_pages):
        return min(self.settings.reserve_pages, job.work.most_pages(self.settings.page_tokens) - num_pages)

    def _run_layer(self):
        assert self.pack is not None
        self.now_s += self.layer_s + self.token_s * sum(piece.num_tokens for piece in self.pack.pieces)
        self.next_layer += 1
        if self.scheduler.after_layer(self.now_s):
            self.decode()
        if self.next_layer == self.num_layers:
            self._pack_done()

    def _pack_done(self):
        assert self.pack is not None
        expected = []
        for piece in self.pack.pieces:
            job = self.jobs[piece.sequence_id]
            if not job.is_admitted:  # preempted, cancelled, replanned or late
                continue
            job.num_computed += piece.num_tokens
            if piece.is_last:
                expected.append(piece.sequence_id)
        done = self.scheduler.pack_done(self.now_s)
        assert list(done) == expected
        self.pack = None
        for name in done:
            job = self.jobs[name]
            job.is_decoding = True
            job.num_slots = len(job.token_times_s)
            self._fork(name)
            self._token(job)

    def decode(self):
        step = self.scheduler.next_decode(self.free_pages, self.costs)
        survivors = [job for job in self.active() if job.work.sequence_id not in step.preempted]
        for name in step.preempted:
            lost = self.jobs[name]
            assert all(job.rank < lost.rank for job in survivors), "a less important one was kept"
            is_reader = not lost.num_pages  # without it its prompt can be dropped to free space for the next step
            assert is_reader or any(self.jobs[name].rank < lost.rank for name in step.allocating), (
                "preempted for nobody's sake"
            )
        self._preempt(step.preempted)
        for name in step.allocating:
            assert name in step.sequence_ids
            self.jobs[name].num_pages += 1
        assert self.free_pages >= 0, "next_decode drew pages that are not free"
        self._drop_prompts()
        ranks = [self.jobs[name].rank for name in step.sequence_ids]
        assert ranks == sorted(set(ranks)) and len(ranks) <= self.settings.max_num_seqs
        self.now_s += self.decode_s
        self.scheduler.decode_done(self.now_s)
        for name in step.sequence_ids:
            job = self.jobs[name]
            assert job.is_decoding and job.end is None
            job.num_slots += 1
            most = job.work.tail_slots + (job.num_pages - job.work.prompt_pages) * self.settings.page_tokens
            assert job.num_slots <= most, "decoded without a page to write to"
            self._token(job)
        return step

    def _token(self, job):
        job.token_times_s.append(self.now_s)
        assert len(job.token_times_s) <= job.work.max_new_tokens
        if len(job.token_times_s) == job.answer_tokens:
            self.scheduler.remove(job.work.sequence_id)
            self.end(job.work.sequence_id, "complete")

    def _preempt(self, preempted: tuple[str, ...]):
        for name in preempted:
            job = self.jobs[name]
            assert job.is_admitted and job.end is None
            self.events.append(f"recompute {name}")
            self._release(job)
            job.num_preempted += 1
            if job.alone is not None:
                self.replan(self._reading(job.work))

    def _check_counts(self):
        assert len(self.active()) == self.scheduler.num_running <= self.settings.max_num_seqs
        assert len(self.unended()) == self.scheduler.num_running + self.scheduler.num_waiting

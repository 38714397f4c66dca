"""One replica in virtual time: the engine's scheduler over a cost model, called in the order of `ccjax.engine.batch`.

Differences: a pack starts and ends in one call, so a request that arrives meanwhile is queued from its end on; nothing
fails or is cancelled; one answer per request, one flow and one priority.
"""

from __future__ import annotations

import dataclasses

from ccjax.policy.scheduling import (
    AdmissionQueueFullError,
    ScheduledPack,
    Scheduler,
    SchedulerSettings,
    SequenceWork,
    StepCosts,
)
from ccjax.runner.pool import PAGE_TOKENS, num_pages
from ccjax.store.spec import KVSpec
from ccjax.store.tickets import LoadTicket
from ccjax.store.usage import DEVICE, DISK, HOST
from scripts.simulation.cache import Planned, ReplicaCache, SimulatedCacheSettings
from scripts.simulation.costs import CostModel, SimulatedPiece, overlapped_s
from scripts.simulation.outcome import SimulationResults
from scripts.simulation.workload import Passages, Workload

NUM_PREPLANNED = 8
"""Queued requests that are planned before each pack, as by the engine's batch loop."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The simulated deployment. Each replica has its own tiers: a shared store is not modelled.

    Attributes:
      cache, scheduler: of each replica.
      replicas: their number.
      loading: "layerwise" lets layers run while later ones load (CacheCraft alg. 2), "sync" loads all first.
      preloads: whether what waiting requests will reuse is read from disk (CacheCraft sec. 3.5).
    """

    costs: CostModel
    kv_spec: KVSpec
    cache: SimulatedCacheSettings
    scheduler: SchedulerSettings
    replicas: int = 1
    loading: str = "layerwise"
    preloads: bool = True


@dataclasses.dataclass(slots=True)
class SimulatedJob:
    """A request between arrival and its last token."""

    number: int
    sequence_id: str
    arrival_s: float
    passages: Passages
    answer_tokens: int
    planned: Planned | None = None
    work: SequenceWork | None = None
    ticket: LoadTicket | None = None
    own_pages: int = 0
    tail_slots: int = 0
    answered: int = 0
    context: int = 0
    loaded_at_s: float = 0.0
    disk_at_s: float | None = None
    is_prefilled: bool = False


class SimulatedReplica:
    """A simulated replica. `advance` runs it up to a time, `submit` adds a request that arrives then."""

    def __init__(self, deployment: Deployment, workload: Workload, outcome: SimulationResults, index: int) -> None:
        self._costs = deployment.costs
        self.cache = ReplicaCache(deployment.cache, self._costs, deployment.kv_spec)
        self.scheduler = Scheduler(deployment.scheduler)
        self.now_s = 0.0
        self._workload = workload
        self._outcome = outcome
        self._is_layerwise = deployment.loading == "layerwise"
        self._preloads = deployment.preloads and bool(deployment.cache.disk_cache_bytes)
        self._index = index
        self._jobs: dict[str, SimulatedJob] = {}
        self._waiting: dict[str, SimulatedJob] = {}
        self._free_pages = deployment.scheduler.num_pages
        self._link_free_s = {HOST: 0.0, DISK: 0.0}
        self._decode_step_s = 0.0
        self._answer_tokens: float | None = None
        self._token_s = self._costs.compute_s(1024, 0, 1024) / 1024
        self._scheduler_costs = StepCosts(self._token_s, 0.0)

    @property
    def num_under_way(self) -> int:
        """Requests without their last token."""
        return len(self._jobs)

    def submit(self, number: int, passages: Passages, arrival_s: float, answer_tokens: int) -> None:
        """Adds a request; call `advance` to its arrival first."""
        job = SimulatedJob(number, str(number), arrival_s, passages, answer_tokens)
        lengths = (self._workload.system_tokens, *passages.num_tokens, self._workload.question_tokens)
        job.tail_slots = -lengths[-1] % PAGE_TOKENS
        job.work = SequenceWork(
            job.sequence_id,
            prefill_tokens=sum(lengths),
            prompt_pages=sum(map(num_pages, lengths)),
            max_new_tokens=answer_tokens,
            tail_slots=job.tail_slots,
        )
        self._outcome.replica[number] = self._index
        try:
            self.scheduler.add(job.work)
        except AdmissionQueueFullError:
            self._outcome.num_refused += 1
            return
        self._jobs[job.sequence_id] = self._waiting[job.sequence_id] = job
        if self._preloads:
            planned = self.cache.plan(passages, self._workload.system_tokens, self._workload.question_tokens)
            num_bytes = sum(map(self.cache.store.unread_bytes, planned.plan.pin))
            if num_bytes:
                job.disk_at_s = self._on_link(DISK, num_bytes, arrival_s)

    def advance(self, until_s: float) -> None:
        """Runs packs and decode steps that start before then; the last one may end later."""
        while self._jobs and self.now_s < until_s:
            self._run_one()
        if not self._jobs and self.now_s < until_s:
            self.now_s = until_s

    def finish(self) -> None:
        """Runs until all requests have their answers."""
        while self._jobs:
            self._run_one()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _run_one(self) -> None:
        started_s = self.now_s
        if self._waiting:
            self._plan_first()
        pack = self.scheduler.next_pack(self.now_s, self._free_pages, self._as_costs(), shared_pages=_none_shared)
        self._carry_out(pack)
        pieces = [piece for piece in pack.pieces if self._jobs[piece.sequence_id].ticket is not None]
        if pieces:
            self._run_pack(pieces)
        elif pack.pieces:
            self.scheduler.pack_done(self.now_s)
        elif self.scheduler.num_decoding:
            self._decode()
        elif not pack.admitted:
            raise RuntimeError(f"{len(self._waiting)} requests wait and nothing runs")
        self._outcome.busy_s += self.now_s - started_s
        self._outcome.end_s = max(self._outcome.end_s, self.now_s)

    def _plan_first(self) -> None:
        """Plans the first queued requests, as the engine's batch loop does."""
        num_free_slots = self.scheduler.settings.max_num_seqs - self.scheduler.num_running
        num_planned = NUM_PREPLANNED if num_free_slots else 1
        if 0 < num_free_slots < len(self._waiting):
            num_planned = max(num_planned, self.scheduler.settings.reorder_window)
        first = []
        for job in self._waiting.values():
            first.append(job)
            if len(first) == num_planned:
                break
        for job in first:
            if job.planned is None or not self.cache.is_current(job.planned):
                self._plan(job)

    def _plan(self, job: SimulatedJob) -> None:
        """Plans a request without pages, and updates the scheduler."""
        workload = self._workload
        planned = job.planned = self.cache.plan(job.passages, workload.system_tokens, workload.question_tokens)
        shared: tuple[int, ...] = ()
        if self.cache.settings.device_cache_bytes:
            tier_of = self.cache.store.tier_of
            shared = tuple(
                segment.num_tokens
                for segment in planned.plan.segments
                if segment.variant_id is not None
                and not segment.recompute_offsets
                and tier_of(segment.variant_id) == DEVICE
            )
        pages = sum(num_pages(segment.num_tokens) for segment in planned.plan.segments) - sum(map(num_pages, shared))
        job.work = SequenceWork(
            job.sequence_id,
            prefill_tokens=planned.computed,
            prompt_pages=pages,
            max_new_tokens=job.answer_tokens,
            cached_tokens=planned.num_tokens - planned.computed,
            tail_slots=job.tail_slots,
            is_divisible=planned.plan.is_divisible,
        )
        self.scheduler.replan(job.work)

    def _carry_out(self, pack: ScheduledPack) -> None:
        for preempted in pack.preempted:
            self._preempt(preempted)
        for sequence_id in pack.admitted:
            self._admit(self._jobs[sequence_id])

    def _admit(self, job: SimulatedJob) -> None:
        """Pins, allocates pages and starts loading; a request whose plan had to change is queued again."""
        planned = job.planned
        ticket = None if planned is None else self.cache.pin(planned)
        if planned is None or ticket is None or ticket.missing:
            if ticket is not None:
                self.cache.store.complete_load(ticket, ok=False)
            job.planned = None
            self._plan(job)
            return
        assert job.work is not None
        del self._waiting[job.sequence_id]
        job.ticket = ticket
        job.own_pages = job.work.pages_with(job.answered, PAGE_TOKENS)
        self._free_pages -= job.own_pages
        job.context = planned.num_tokens + job.answered
        self._load(job, planned, ticket)

    def _load(self, job: SimulatedJob, planned: Planned, ticket: LoadTicket) -> None:
        """Starts the loads; sets the time at which the request's KV will be on the device."""
        host_tokens = disk_tokens = 0
        for segment in planned.plan.segments:
            tier = ticket.tiers.get(segment.variant_id) if segment.variant_id is not None else None
            if tier is not None and tier != DEVICE:
                host_tokens += segment.num_tokens
                disk_tokens += segment.num_tokens if tier == DISK else 0
        job.loaded_at_s = self.now_s
        if disk_tokens:
            if job.disk_at_s is None:
                job.disk_at_s = self._on_link(DISK, self.cache.kv_spec.num_bytes(disk_tokens), self.now_s)
            job.loaded_at_s = max(job.loaded_at_s, job.disk_at_s)
        if host_tokens:
            num_bytes = self.cache.kv_spec.num_bytes(host_tokens)
            job.loaded_at_s = max(job.loaded_at_s, self._on_link(HOST, num_bytes, self.now_s))

    def _on_link(self, tier: str, num_bytes: int, now_s: float) -> float:
        """Queues a transfer of this many bytes on a link; returns the time at which it ends."""
        free_s = max(now_s, self._link_free_s[tier]) + self._costs.link_s(tier, num_bytes)
        self._link_free_s[tier] = free_s
        return free_s

    def _run_pack(self, pieces: list) -> None:
        jobs = [self._jobs[piece.sequence_id] for piece in pieces]
        sizes: list[SimulatedPiece] = []
        load_s = 0.0
        for job, piece in zip(jobs, pieces, strict=True):
            assert job.planned is not None
            cached = job.planned.num_tokens - job.planned.computed
            sizes.append(SimulatedPiece(piece.num_tokens, cached + piece.start + piece.num_tokens, piece.is_last))
            if not piece.start:
                load_s = max(load_s, job.loaded_at_s - self.now_s)
        compute_s, num_layers = self._costs.pack_s(sizes), self.cache.kv_spec.num_layers
        whole_s = overlapped_s(compute_s, load_s, num_layers) if self._is_layerwise else compute_s + load_s
        if self.scheduler.num_decoding:
            for _ in range(num_layers):
                self.now_s += whole_s / num_layers
                if self.scheduler.after_layer(self.now_s):
                    self._decode()
        else:  # no request would need a decode step between two layers
            self.now_s += whole_s
        done = self.scheduler.pack_done(self.now_s)
        self._outcome.num_packs += 1
        kept = []
        for sequence_id in done:
            job = self._jobs[sequence_id]
            assert job.planned is not None and job.ticket is not None
            if not job.is_prefilled:
                job.is_prefilled = True
                self._outcome.ttft_s[job.number] = self.now_s - job.arrival_s
                self._outcome.note_prefill(job.number, job.planned, job.ticket)
                kept.append(job.planned)
            self._take_token(job)
        for planned in kept:  # once the first tokens are out
            self.cache.keep(planned)

    def _decode(self) -> None:
        step = self.scheduler.next_decode(self._free_pages, self._as_costs())
        for preempted in step.preempted:
            self._preempt(preempted)
        jobs = [self._jobs[sequence_id] for sequence_id in step.sequence_ids]
        for sequence_id in step.allocating:
            self._jobs[sequence_id].own_pages += 1
        self._free_pages -= len(step.allocating)
        if jobs:
            seconds = self._costs.decode_s(len(jobs), sum(job.context for job in jobs))
            self._decode_step_s = 0.9 * self._decode_step_s + 0.1 * seconds if self._decode_step_s else seconds
            self.now_s += seconds
        self.scheduler.decode_done(self.now_s)
        self._outcome.num_decode_steps += 1
        for job in jobs:
            self._take_token(job)

    # -- one request ---------------------------------------------------------------------------------------------------

    def _take_token(self, job: SimulatedJob) -> None:
        job.answered += 1
        job.context += 1
        if job.answered < job.answer_tokens:
            return
        self._outcome.latency_s[job.number] = self.now_s - job.arrival_s
        mean = self._answer_tokens
        self._answer_tokens = job.answered if mean is None else 0.9 * mean + 0.1 * job.answered
        self.scheduler.remove(job.sequence_id)
        del self._jobs[job.sequence_id]
        self._release(job)

    def _preempt(self, sequence_id: str) -> None:
        """Frees the pages of a preempted request, which is planned again and starts at the front of the queue."""
        job = self._jobs[sequence_id]
        self._outcome.num_preempted += 1
        self._release(job)
        job.planned = job.disk_at_s = None
        self._waiting = {sequence_id: job, **self._waiting}

    def _release(self, job: SimulatedJob) -> None:
        self._free_pages += job.own_pages
        job.own_pages = 0
        if job.ticket is not None:
            ticket, job.ticket = job.ticket, None
            self.cache.unpin(ticket)

    def _as_costs(self) -> StepCosts:
        """The costs that the engine measures for the scheduler."""
        last = self._scheduler_costs
        if (last.decode_step_s, last.answer_tokens) != (self._decode_step_s, self._answer_tokens):
            self._scheduler_costs = StepCosts(self._token_s, self._decode_step_s, self._answer_tokens)
        return self._scheduler_costs


def _none_shared(sequence_id: str) -> int:
    """The device tier's pages are separate from the requests' here."""
    return 0

"""The state of one answer (sequence) in the batch, from arrival to the last token."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

import numpy as np

from ccjax.cache.planned_prefill import Prefilled
from ccjax.engine.batch.group import SequenceGroup
from ccjax.engine.batch.shared_prompt import SharedPrompt, reading_work, sharing_work
from ccjax.policy.scheduling import SequenceWork
from ccjax.requests import Choice, Delta
from ccjax.runner.job import PrefillJob
from ccjax.runner.pages import RequestPages, num_own_pages
from ccjax.runner.plan_rows import PrefillOutcome
from ccjax.runner.pool import PAGE_TOKENS, DevicePool, PagedShard, num_pages
from ccjax.runner.sampling import SampledToken, SampleSpec, seed_of
from ccjax.types import ChunkId, PrefillPlan, VariantId


class TokenSequence:
    """The state of one answer.

    Attributes:
      sequence_id: its id in the scheduler.
      prefill: its plan and loads. Those of the prefill that computed a shared prompt belong to the `SharedPrompt`.
      job: its prefill, set at admission; None while it waits.
      is_decoding: True once its prompt is computed.
      reads_prompt: True while it is admitted and reads `group.shared_prompt`.
      planned_at_change: the last argument of `plan`; None before.
      num_retries: number of retries after failed steps that it was part of.
    """

    def __init__(self, request_id: str, group: SequenceGroup, *, seed: int, index: int = 0) -> None:
        """
        Args:
          request_id: unique among the requests of a loop.
          seed: the sampling seed of the whole group.
          index: its index in the group; the first sequence creates the others with `fork`.
        """
        self.sequence_id = f"{request_id}/{index}"
        self.group = group
        self.prefill = group.new_prefill()
        self.job: PrefillJob | None = None
        self.is_decoding = False
        self._keeps_kv = False
        self.reads_prompt = False
        self.planned_at_change: int | None = None
        self.num_retries = 0
        self._name, self._request_seed, self._index = request_id, seed, index
        self._seed = seed_of(seed, index)
        self._prompt = group.prompt
        self._answer = group.new_answer(index)
        self._last: tuple[Delta, Choice] | None = None
        self._tokens: list[int] = []
        self._awaited: list[SequenceGroup] = []
        self._work = self._unplanned()
        group.num_started += 1
        group.open.append(self)

    @property
    def last_token(self) -> int:
        """The token sampled last."""
        return self._tokens[-1]

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far."""
        return len(self._tokens)

    @property
    def sample_spec(self) -> SampleSpec:
        """How to sample its next token."""
        answer, sampling = self._answer, self.group.sampling
        return SampleSpec(sampling, self._seed, len(self._tokens), answer.mask, answer.adjustments)

    @property
    def pages(self) -> RequestPages:
        """Its pages; it must be admitted."""
        assert self.job is not None
        return self.job.pages

    def fork(self) -> list[TokenSequence]:
        """Creates the other sequences of the group; empty after the first call."""
        indices = range(self.group.num_started, self.group.num_answers)
        return [TokenSequence(self._name, self.group, seed=self._request_seed, index=index) for index in indices]

    def preparations(self, running: dict[ChunkId, SequenceGroup]) -> list[TokenSequence]:
        """Creates sequences that prepare the passages of its plan; it waits for them, and for those of others.

        Args:
          running: the preparations of all sequences, by what they compute; new ones are added.
        """
        if self.group.shared_prompt is not None:
            return []
        new = []
        for key, prompt in self.prefill.unprepared().items():
            if key not in running or not running[key].open:
                running[key] = self.group.preparing(prompt)
                new.append(TokenSequence(uuid.uuid4().hex, running[key], seed=0))
                self.prefill.prepared.add(prompt.chunks[-1].chunk_id)
            self._awaited.append(running[key])
        if self._awaited:
            self.prefill.protect()
        return new

    @property
    def is_waiting(self) -> bool:
        """True while it waits for preparations."""
        return any(group.open for group in self._awaited)

    # -- in the queue ------------------------------------------------------------------------------------------

    def work(self, is_in_place: Callable[[str], bool]) -> SequenceWork:
        """Its work for the scheduler, by its plan and the variants whose pages it can read now; without a plan, as if
        nothing were reused."""
        plan = self._plan
        if plan is None:
            self._work = self._unplanned()
            return self._work
        group, shared_prompt = self.group, self.group.shared_prompt
        in_place = shared_prompt.shards if shared_prompt is not None else set(filter(is_in_place, plan.pin))
        prompt_pages = num_own_pages(plan, in_place)
        all_pages = sum(num_pages(segment.num_tokens) for segment in plan.segments)
        computed = sum(
            segment.num_tokens if segment.action == "compute" else len(segment.recompute_offsets)
            for segment in plan.segments
        )
        self._work = SequenceWork(
            self.sequence_id,
            prefill_tokens=computed,
            prompt_pages=prompt_pages,
            max_new_tokens=self._prompt.max_new_tokens,
            flow=group.flow,
            priority=group.priority,
            deadline_s=group.deadline_s,
            cached_tokens=plan.num_tokens - round(sum(map(plan.computed_tokens, plan.segments))),
            shared_pages=all_pages - prompt_pages,
            tail_slots=-plan.segments[-1].num_tokens % PAGE_TOKENS,
            is_divisible=plan.is_divisible,
        )
        return self._work

    @property
    def most_work(self) -> SequenceWork:
        """An upper bound of the work of each sequence of the group."""
        return self._unplanned() if self.group.num_answers == 1 else reading_work(self._unplanned())

    def num_shared_pages(self, to_pin: Callable[[str], int]) -> int:
        """Pages of cached chunks, or of its shared prompt, that are reclaimable now and would not be if it ran.

        Args:
          to_pin: returns how many of a variant's pages are reclaimable now.
        """
        shared_prompt = self.group.shared_prompt
        if shared_prompt is not None:
            return shared_prompt.num_pages if self.group.is_unread else 0
        plan = self.prefill.plan
        if plan is None or not self._work.shared_pages:
            return 0
        return sum(map(to_pin, plan.pin))

    def plan(self, at: int) -> None:
        """Plans its prefill, or plans it again, unless its prompt is shared; `at` is the count of variant changes."""
        if self.group.shared_prompt is None:
            self.prefill.make_plan()
        self.planned_at_change = at

    @property
    def chunk_ids(self) -> tuple[ChunkId, ...]:
        """The chunks whose stored KV its prompt can reuse."""
        return tuple(self.prefill.prompt.stored_ids)

    @property
    def pinned_ids(self) -> tuple[VariantId, ...]:
        """The variants that its plan reuses; none without a plan of its own."""
        plan = None if self.group.shared_prompt is not None else self.prefill.plan
        return () if plan is None else tuple(map(VariantId, plan.pin))

    @property
    def _plan(self) -> PrefillPlan | None:
        shared_prompt = self.group.shared_prompt
        return self.prefill.plan if shared_prompt is None else shared_prompt.plan

    # -- admitted ----------------------------------------------------------------------------------------------

    def mark_started(self) -> None:
        """Records when it first left the queue; later calls have no effect."""
        self.group.mark_started()

    def read_shared_prompt(self) -> None:
        """Marks a shared prompt as read before admission, so that it is not dropped meanwhile."""
        self.reads_prompt = self.group.shared_prompt is not None

    def is_wait_over(self) -> bool:
        """True once there is nothing left to wait for: preparations, or other processes."""
        if self.is_waiting:
            return False
        self._awaited = []
        return self.prefill.is_wait_over()

    def claim(self) -> bool:
        """Returns False if it has to wait for what another process computes; call `read_shared_prompt` first."""
        return self.reads_prompt or self.prefill.claim()

    def pin(self) -> None:
        """Pins the variants it reuses."""
        if not self.reads_prompt:
            self.prefill.pin()

    @property
    def num_own_pages(self) -> int:
        """Number of own pages that `start_prefill` will allocate; call `pin` first."""
        plan = self._plan
        assert plan is not None
        chunks = self.prefill.in_place if self.group.shared_prompt is None else self.group.shared_prompt.shards
        tail_slots = -plan.segments[-1].num_tokens % PAGE_TOKENS
        return num_own_pages(plan, chunks) + num_pages(max(0, len(self._tokens) - tail_slots))

    def start_prefill(self, pool: DevicePool) -> None:
        """Allocates the pages of the prompt and of the answer so far, and starts loading.

        Raises:
          TierFullError: too few pages are free.
        """
        plan, shared_prompt = self._plan, self.group.shared_prompt
        assert plan is not None
        chunks: Mapping[VariantId, PagedShard]
        chunks = (
            {key: pool.get(key) for key in self.prefill.in_place} if shared_prompt is None else shared_prompt.shards
        )
        pages = RequestPages(pool, plan, chunks)
        if shared_prompt is None:
            pages.count_reused(plan)
        for _ in self._tokens:
            pages.append()
        token_ids = np.concatenate([self._prompt.token_ids, np.asarray(self._tokens, np.int32)])
        contexts = None if shared_prompt is not None else self.prefill.start_loading(pages.shared)
        self._keeps_kv = shared_prompt is None and self.prefill.collects and self.group.reuse is None
        collect = self._keeps_kv and self.prefill.keeps_chunks
        num_logits = min(self.group.sampling.prompt_logits, plan.segments[-1].num_tokens)
        num_top = self.group.sampling.prompt_logprobs if shared_prompt is None else None
        self.job = PrefillJob(
            token_ids, plan, pages, contexts=contexts, collect=collect, num_logits=num_logits, num_top=num_top
        )

    @property
    def is_as_scheduled(self) -> bool:
        """True if its prefill matches the work last reported to the scheduler."""
        assert self.job is not None
        computed = len(self.job.offsets) - len(self._tokens)
        return (computed, self.job.plan.is_divisible) == (self._work.prefill_tokens, self._work.is_divisible)

    def release_pages(self) -> None:
        """Frees its own pages; the tokens sampled so far are kept."""
        if self.job is not None:
            self.job.pages.release()
        self.job = None
        self.is_decoding = self.reads_prompt = False

    def finish_prefill(self) -> Prefilled | None:
        """Starts decoding after the last piece of its prefill. Returns what to store of the group's first prefill, None
        for later ones."""
        assert self.job is not None
        self.is_decoding = True
        outcome, self.job.result = self.job.result, PrefillOutcome()  # frees its memory before the answer is complete
        if self._keeps_kv:
            outcome.kv = self.job.pages.hold()
        if self.reads_prompt:
            return None
        prefilled = self.prefill.prefilled(outcome, self.job.plan)
        return prefilled if self.group.record_prefill(prefilled) else None

    def share(self) -> SequenceWork:
        """Shares its prompt with the other sequences of its group; returns its own work from now on."""
        assert self.job is not None
        self.group.shared_prompt = SharedPrompt(self.job.plan, self.job.pages, self.prefill)
        self.prefill = self.group.new_prefill()
        self.reads_prompt = True
        self._work = sharing_work(self._work)
        return self._work

    def append_token(self, token: SampledToken) -> bool:
        """Adds a token and emits the text it completes; True if it ends the answer: then `finish` emits the rest."""
        self.group.record_token()
        self._tokens.append(token.token_id)
        delta = self._answer.push(token)
        if self._answer.finish_reason is None:
            if delta.token_ids:
                self.group.emit_delta(delta)
            if self._answer.num_tokens < self._prompt.max_new_tokens:
                return False
        self._last = self._answer.finish(delta)
        return True

    def finish(self) -> None:
        """Emits the last delta, with the response if all sequences of the group have finished."""
        assert self._last is not None
        self.group.finish(*self._last)

    def keep_run(self) -> None:
        """Stores the KV of prompt and answer."""
        self.group.keep_run(self._tokens, self.pages.hold())

    def _unplanned(self) -> SequenceWork:
        prompt = self._prompt
        lengths = [len(segment.chunk.token_ids) for segment in prompt.segments]
        return SequenceWork(
            self.sequence_id,
            prefill_tokens=prompt.num_tokens,
            prompt_pages=sum(map(num_pages, lengths)),
            max_new_tokens=prompt.max_new_tokens,
            flow=self.group.flow,
            priority=self.group.priority,
            deadline_s=self.group.deadline_s,
            tail_slots=-lengths[-1] % PAGE_TOKENS,
        )

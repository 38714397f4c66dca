"""One request in the batch, from its arrival to its last token. Knows no other request and no step."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ccjax.engine.admission import Admission
from ccjax.engine.answer import Answer
from ccjax.engine.batch.job import PrefillJob
from ccjax.engine.batch.pages import RequestPages, shared_segments
from ccjax.engine.cached_prefill import Prefilled
from ccjax.engine.plan_rows import PrefillOutcome
from ccjax.engine.pool import PAGE_TOKENS, DevicePool, num_pages
from ccjax.engine.requests import Delta, Request
from ccjax.engine.sampling import Draw, Drawn
from ccjax.policy.scheduling import Work
from ccjax.types import ReuseReport
from store.usage import DEVICE

Emit = Callable[[Delta | Exception], None]
"""Takes the pieces of an answer, or what ended it; called on the loop's thread, must return at once."""

Report = Callable[[Prefilled], ReuseReport]


class Serving:
    """A request's state. `emit` gets the deltas in order, the last of which has the response.

    Attributes:
      job: its prefill, from admission on; None while it waits.
      is_decoding: True once its prompt is through.
      started_s: `time.perf_counter` when it was first admitted, None before.
      planned_at: what the caller of `plan` said last; None before.
      deadline_s: `time.perf_counter` when its answer is of no use any more, None for never.
    """

    def __init__(
        self,
        request_id: str,
        request: Request,
        admission: Admission,
        answer: Answer,
        *,
        seed: int,
        assemble_s: float,
        emit: Emit,
        on_start: Callable[[], None],
        is_cancelled: Callable[[], bool],
        report: Report,
    ) -> None:
        """
        Args:
          seed: of its draws.
          assemble_s: seconds that were spent on it before.
          report: of what its prefill reused.
        """
        self.request_id = request_id
        self.priority = request.priority
        self.flow = request.flow
        arrived_s = time.perf_counter() - assemble_s
        self.deadline_s = None if request.timeout_s is None else arrived_s + request.timeout_s
        self.is_cancelled = is_cancelled
        self.emit = emit
        self._on_start = on_start
        self.job: PrefillJob | None = None
        self.is_decoding = False
        self.started_s: float | None = None
        self.planned_at: int | None = None
        self.admission = admission
        self._sampling = request.sampling
        self._prompt = admission.prompt
        self._answer = answer
        self._seed = seed
        self._assemble_s = assemble_s
        self._report = report
        self._reuse: ReuseReport | None = None
        self._last: Delta | None = None
        self._ttft_s = 0.0
        self._tokens: list[int] = []
        self._work = self._unplanned()

    @property
    def last_token(self) -> int:
        """The token drawn last."""
        return self._tokens[-1]

    @property
    def num_drawn(self) -> int:
        """Tokens of its answer so far."""
        return len(self._tokens)

    @property
    def draw(self) -> Draw:
        """How its next token is drawn."""
        return Draw(self._sampling, self._seed, len(self._tokens))

    @property
    def pages(self) -> RequestPages:
        """Its pages; it must be admitted."""
        assert self.job is not None
        return self.job.pages

    # -- in line -----------------------------------------------------------------------------------------------

    def work(self, tier_of: Callable[[str], str | None]) -> Work:
        """The request for the scheduler: by its plan and where things are now, or as if nothing were reused."""
        plan = self.admission.plan
        if plan is None:
            return self._work
        on_device = {key for key in plan.pin if tier_of(key) == DEVICE}
        shared = shared_segments(plan, on_device)
        counts = [num_pages(segment.num_tokens) for segment in plan.segments]
        computed = sum(
            segment.num_tokens if segment.action == "compute" else len(segment.recompute_offsets)
            for segment in plan.segments
        )
        self._work = Work(
            self.request_id,
            prefill_tokens=computed,
            prompt_pages=sum(count for index, count in enumerate(counts) if index not in shared),
            max_new_tokens=self._prompt.max_new_tokens,
            flow=self.flow,
            priority=self.priority,
            deadline_s=self.deadline_s,
            cached_tokens=plan.num_tokens - computed,
            shared_pages=sum(count for index, count in enumerate(counts) if index in shared),
            tail_slots=-plan.segments[-1].num_tokens % PAGE_TOKENS,
            is_divisible=plan.focus_window is None,
        )
        return self._work

    def num_shared_pages(self, is_pinned: Callable[[str], bool]) -> int:
        """Pages of cached chunks that only this request would keep from being evicted."""
        plan = self.admission.plan
        if plan is None or not self._work.shared_pages:
            return 0
        sizes = {s.variant_id: num_pages(s.num_tokens) for s in plan.segments if s.variant_id is not None}
        return sum(size for key, size in sizes.items() if not is_pinned(key))

    def plan(self, at: int) -> None:
        """Plans, or plans anew."""
        self.admission.settle()
        self.planned_at = at

    # -- admitted ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Notes that it left the line; what counts is the first time."""
        if self.started_s is None:
            self.started_s = time.perf_counter()
            self._on_start()

    @property
    def num_own_pages(self) -> int:
        """Pages of its own that `begin` will draw; `admission.open` comes first."""
        plan = self.admission.plan
        assert plan is not None
        shared = shared_segments(plan, self.admission.on_device)
        counts = (num_pages(s.num_tokens) for index, s in enumerate(plan.segments) if index not in shared)
        tail_slots = -plan.segments[-1].num_tokens % PAGE_TOKENS
        return sum(counts) + num_pages(max(0, len(self._tokens) - tail_slots))

    def begin(self, pool: DevicePool) -> None:
        """Draws the pages of the prompt and of the answer so far, and starts to load.

        Raises:
          TierFullError: too few pages are free.
        """
        plan = self.admission.plan
        assert plan is not None
        pages = RequestPages(pool, plan, {key: pool.get(key) for key in self.admission.on_device})
        for _ in self._tokens:
            pages.append()
        token_ids = np.concatenate([self._prompt.token_ids, np.asarray(self._tokens, np.int32)])
        contexts = self.admission.load(pages.shared)
        collect = self.admission.collects and self._reuse is None
        self.job = PrefillJob(token_ids, plan, pages, contexts=contexts, collect=collect)

    @property
    def is_as_scheduled(self) -> bool:
        """True while its prefill is what the scheduler was told by `work`."""
        assert self.job is not None
        computed = len(self.job.offsets) - len(self._tokens)
        is_divisible = self.job.plan.focus_window is None
        return (computed, is_divisible) == (self._work.prefill_tokens, self._work.is_divisible)

    def drop(self) -> None:
        """Gives all pages back; the tokens drawn so far stay."""
        if self.job is not None:
            self.job.pages.release()
        self.job = None
        self.is_decoding = False

    def note_prefill(self) -> Prefilled | None:
        """To be called when the last piece of its prefill ran; the first time, what there is to keep of it."""
        assert self.job is not None
        prefilled = self.admission.prefilled(self.job.result)
        self.job.result = PrefillOutcome()  # so much memory need not wait for the answer
        self.is_decoding = True
        if self._reuse is not None:
            return None
        self._reuse = self._report(prefilled)
        return prefilled

    def take_in(self, drawn: Drawn) -> bool:
        """Takes in a token and emits what it completes; True if the answer ends with it: `finish` emits the rest."""
        assert self.started_s is not None and self._reuse is not None
        elapsed_s = time.perf_counter() - self.started_s + self._assemble_s
        self._ttft_s = self._ttft_s or elapsed_s
        self._tokens.append(drawn.token_id)
        delta = self._answer.push(drawn)
        if self._answer.finish_reason is None:
            if delta.token_ids:
                self.emit(delta)
            if self._answer.num_tokens < self._prompt.max_new_tokens:
                return False
        self._last = self._answer.finish(
            delta,
            reuse=self._reuse,
            num_prompt_tokens=self._prompt.num_tokens,
            ttft_s=self._ttft_s,
            total_s=elapsed_s,
        )
        return True

    def finish(self) -> None:
        """Emits the delta with the response."""
        assert self._last is not None
        self.emit(self._last)

    def _unplanned(self) -> Work:
        prompt = self._prompt
        lengths = [len(chunk.token_ids) for chunk in prompt.chunks] + [len(prompt.question)]
        return Work(
            self.request_id,
            prefill_tokens=prompt.num_tokens,
            prompt_pages=sum(map(num_pages, lengths)),
            max_new_tokens=prompt.max_new_tokens,
            flow=self.flow,
            priority=self.priority,
            deadline_s=self.deadline_s,
            tail_slots=-lengths[-1] % PAGE_TOKENS,
        )

"""One request in the batch, from its arrival to its last token. Knows no other request and no step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from ccjax.engine.answer import Answer
from ccjax.engine.batch.admission import Admission
from ccjax.engine.batch.job import PrefillJob
from ccjax.engine.batch.pages import RequestPages, shared_segments
from ccjax.engine.cached_prefill import Prefilled
from ccjax.engine.pool import PAGE_TOKENS, DevicePool, num_pages
from ccjax.engine.prompts import Prompt
from ccjax.engine.requests import Delta, Request
from ccjax.engine.sampling import Draw, Drawn
from ccjax.policy.scheduling import Work
from ccjax.types import ReuseReport
from store.usage import DEVICE

Emit = Callable[[Delta | Exception], None]
"""Takes the pieces of an answer, or what ended it; called on the loop's thread, must return at once."""

Report = Callable[[Prefilled, Request], ReuseReport]


class Serving:
    """A request's state. `emit` is called with the deltas in order, the last of which has the response.

    Attributes:
      started_s: `time.perf_counter` when it was first admitted, None before.
    """

    def __init__(
        self,
        request_id: str,
        request: Request,
        prompt: Prompt,
        admission: Admission,
        answer: Answer,
        *,
        seed: int,
        assemble_s: float,
        emit: Emit,
        is_cancelled: Callable[[], bool],
        report: Report,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.prompt = prompt
        self.admission = admission
        self.is_cancelled = is_cancelled
        self.emit = emit
        self.job: PrefillJob | None = None
        self.started_s: float | None = None
        self._answer = answer
        self._seed = seed
        self._assemble_s = assemble_s
        self._report = report
        self._reuse: ReuseReport | None = None
        self._ttft_s = 0.0
        self._tokens: list[int] = []

    @property
    def last_token(self) -> int:
        """The token drawn last."""
        return self._tokens[-1]

    @property
    def draw(self) -> Draw:
        """How its next token is drawn."""
        return Draw(self.request.sampling, self._seed, len(self._tokens))

    def work(self, pool: DevicePool, tiers: Callable[[str], str | None]) -> Work:
        """The request for the scheduler, by its plan and by which tier holds what now."""
        plan = self.admission.plan
        on_device = {key: key for key in plan.pin if tiers(key) == DEVICE}
        shared = shared_segments(plan, on_device)
        counts = [num_pages(segment.num_tokens) for segment in plan.segments]
        computed = sum(
            segment.num_tokens if segment.action == "compute" else len(segment.recompute_offsets)
            for segment in plan.segments
        )
        return Work(
            self.request_id,
            prefill_tokens=computed,
            prompt_pages=sum(count for index, count in enumerate(counts) if index not in shared),
            max_new_tokens=self.prompt.max_new_tokens,
            cached_tokens=plan.num_tokens - computed,
            shared_pages=sum(count for index, count in enumerate(counts) if index in shared),
            tail_slots=-plan.segments[-1].num_tokens % PAGE_TOKENS,
        )

    def begin(self, pool: DevicePool) -> None:
        """Draws the pages of the prompt and of the answer so far, and starts to load.

        Raises:
          TierFullError: too few pages are free.
        """
        ticket = self.admission.open()
        tiers = {} if ticket is None else ticket.tiers
        chunks = {key: pool.get(key) for key in self.admission.plan.pin if tiers.get(key) == DEVICE}
        pages = RequestPages(pool, self.admission.plan, chunks)
        for _ in self._tokens:
            pages.append()
        token_ids = np.concatenate([self.prompt.token_ids, np.asarray(self._tokens, np.int32)])
        contexts = self.admission.load(pages.shared)
        collect = ticket is not None and not self._tokens and self.admission.collects
        self.job = PrefillJob(token_ids, self.admission.plan, pages, contexts=contexts, collect=collect)
        if self.started_s is None:
            self.started_s = time.perf_counter()

    def drop_pages(self) -> None:
        """Gives all pages back; the tokens drawn so far stay."""
        self.job = None
        self.admission.close()

    def note_prefill(self) -> Prefilled:
        """What report and capture need, once the last piece of the prefill ran; the first time also the report."""
        assert self.job is not None
        prefilled = self.admission.prefilled(self.job.result)
        if self._reuse is None:
            self._reuse = self._report(prefilled, self.request)
        return prefilled

    def take_in(self, drawn: Drawn) -> bool:
        """Takes in a token and emits what it completes; True if the answer ends with it."""
        assert self.started_s is not None and self._reuse is not None
        if not self._tokens:
            self._ttft_s = time.perf_counter() - self.started_s + self._assemble_s
        self._tokens.append(drawn.token_id)
        delta = self._answer.push(drawn)
        if self._answer.finish_reason is None:
            if delta.token_ids:
                self.emit(delta)
            if self._answer.num_tokens < self.prompt.max_new_tokens:
                return False
        last = self._answer.finish(
            delta,
            reuse=self._reuse,
            num_prompt_tokens=self.prompt.num_tokens,
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self.started_s + self._assemble_s,
        )
        self.emit(last)
        return True

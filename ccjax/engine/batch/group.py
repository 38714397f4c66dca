"""What the sequences of one request have in common: who gets their tokens, and the prompt's pages, computed once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ccjax.engine.admission import Admission
from ccjax.engine.answer import Answer
from ccjax.engine.batch.pages import RequestPages
from ccjax.engine.cached_prefill import Prefilled
from ccjax.engine.pool import PAGE_TOKENS, PagedShard
from ccjax.engine.prompts import Prompt
from ccjax.engine.requests import Choice, Delta, Request, Response
from ccjax.engine.trace import Tracer
from ccjax.policy.scheduling import SequenceWork
from ccjax.types import PrefillPlan, ReuseReport, VariantId

if TYPE_CHECKING:
    from ccjax.engine.batch.sequence import TokenSequence

Emit = Callable[[Delta | Exception], None]
"""Gets the deltas of an answer, or what ended it; called on the loop's thread, must return at once."""


class SharedPrompt:
    """The KV of a prompt that several sequences read; none of them writes there.

    The one that computed it goes on in the prompt's last page, behind all that the others read of it.

    Attributes:
      plan: of a sequence that reads it. All is reused but the last token, which is computed again in a page of that
        sequence's own: the sequence's first token is drawn from its logits.
      shards: where the reused segments of the plan lie.
      num_pages: pages that are free once this is dropped; those of cached chunks are not among them.
      admission: holds the cached chunks that the prompt reads; to be closed then.
    """

    def __init__(self, plan: PrefillPlan, pages: RequestPages, admission: Admission) -> None:
        """
        Args:
          plan: of the prefill that computed it.
          pages: of the request that did, which keeps those of its answer.
        """
        shards, self._own = pages.hand_over()
        question = plan.segments[-1]
        segments = [
            dataclasses.replace(segment, action="reuse", variant_id=VariantId(f"prompt/{index}"), recompute_offsets=())
            for index, segment in enumerate(plan.segments)
        ]
        segments[-1] = dataclasses.replace(segments[-1], num_tokens=question.num_tokens - 1)
        if not segments[-1].num_tokens:
            segments.pop()
        last = dataclasses.replace(question, start=plan.num_tokens - 1, num_tokens=1)
        self.plan = PrefillPlan(plan.request_id, (*segments, last))
        self.shards = {one.variant_id: shard for one, shard in zip(segments, shards, strict=False) if one.variant_id}
        self.num_pages = sum(shard.num_pages for shard in self._own)
        self.admission = admission

    def drop(self) -> None:
        """Gives the pages back, which no sequence reads any more."""
        for shard in self._own:
            shard.free()
        self._own: list[PagedShard] = []
        self.shards = {}


class SequenceGroup:
    """The sequences of one request, one for most.

    Attributes:
      num_answers: sequences that there will be.
      num_started: those that were queued so far.
      open: those of them that have not ended.
      prompt: the prompt's KV, from when the first of several sequences had its first token; None again once its pages
        were needed while no admitted sequence read them.
      reuse: what the prefill reused; None before it is through.
      arrived_s: `time.perf_counter` when the request came.
      started_s: `time.perf_counter` when the request left the queue, None before.
      deadline_s: `time.perf_counter` when the answers are of no use any more, None for never.
      tracer: notes what happens; None if not requested.
    """

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        *,
        assemble_s: float,
        emit: Emit,
        on_start: Callable[[], None],
        is_cancelled: Callable[[], bool],
        new_admission: Callable[[], Admission],
        new_answer: Callable[[int], Answer],
        report: Callable[[Prefilled], ReuseReport],
        keep: Callable[[Prefilled], None],
        priority: int | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """
        Args:
          assemble_s: seconds that were spent on the request before.
          emit: gets the deltas of all answers, the last of which has the response.
          new_answer: the answer of an index.
          report: of what a prefill reused.
          keep: called on the loop's thread when the prefill is through and the first tokens are out, while what it
            reused is pinned.
          priority: None for that of the request.
          tracer: notes what happens, where the request asked for that.
        """
        self.num_answers = request.sampling.n
        self.num_started = 0
        self.open: list[TokenSequence] = []
        self.priority = request.priority if priority is None else priority
        self.flow = request.flow
        self.arrived_s = time.perf_counter() - assemble_s
        self.deadline_s = None if request.timeout_s is None else self.arrived_s + request.timeout_s
        self.sampling = request.sampling
        self.tokens = prompt
        self.emit = emit
        self.is_cancelled = is_cancelled
        self.new_admission = new_admission
        self.new_answer = new_answer
        self.prompt: SharedPrompt | None = None
        self.reuse: ReuseReport | None = None
        self._prompt_logits: np.ndarray | None = None
        self.started_s: float | None = None
        self._assemble_s = assemble_s
        self._on_start = on_start
        self._report = report
        self.keep = keep
        self.tracer = tracer
        self._ttft_s = self._total_s = 0.0
        self._choices: dict[int, Choice] = {}

    @property
    def is_unread(self) -> bool:
        """True while the prompt is in the pool and no admitted sequence reads it."""
        return self.prompt is not None and not any(one.reads_prompt for one in self.open)

    def mark_started(self) -> None:
        """Notes that a sequence left the queue; the first call counts."""
        if self.started_s is None:
            self.started_s = time.perf_counter()
            self._on_start()

    def record_prefill(self, prefilled: Prefilled) -> bool:
        """Records a prefill of the prompt; True the first time."""
        if self.reuse is not None:
            return False
        self.reuse = self._report(prefilled)
        self._prompt_logits = prefilled.result.last_logits
        if self.tracer is not None:
            self.tracer.prefilled(prefilled, self.reuse)
        return True

    def record_token(self) -> None:
        """Records when a sequence has a token."""
        assert self.started_s is not None
        now_s = time.perf_counter()
        self._total_s = now_s - self.started_s + self._assemble_s
        self._ttft_s = self._ttft_s or self._total_s
        if self.tracer is not None:
            self.tracer.token(now_s)

    def finish(self, last: Delta, choice: Choice) -> None:
        """Emits the last delta of a sequence; that of the last sequence has the response."""
        self._choices[last.index] = choice
        if len(self._choices) == self.num_answers:
            assert self.reuse is not None and self.started_s is not None
            first, *others = (self._choices[index] for index in range(self.num_answers))
            response = Response(
                text=first.text,
                token_ids=first.token_ids,
                finish_reason=first.finish_reason,
                reuse=self.reuse,
                num_prompt_tokens=self.tokens.num_tokens,
                ttft_s=self._ttft_s,
                total_s=self._total_s,
                logprobs=first.logprobs,
                others=tuple(others),
                first_logits=first.first_logits,
                prompt_logits=self._prompt_logits,
                trace=None if self.tracer is None else self.tracer.finish(self.arrived_s, self.started_s),
            )
            last = dataclasses.replace(last, response=response)
        self.emit(last)


def sharing_work(work: SequenceWork) -> SequenceWork:
    """The work of a sequence that computed its prompt, once others read that, too."""
    return dataclasses.replace(work, prompt_pages=0, shared_pages=work.shared_pages + work.prompt_pages)


def reading_work(work: SequenceWork) -> SequenceWork:
    """The most work of a sequence that reads another one's prompt."""
    return dataclasses.replace(sharing_work(work), prefill_tokens=1, prompt_pages=1, tail_slots=PAGE_TOKENS - 1)

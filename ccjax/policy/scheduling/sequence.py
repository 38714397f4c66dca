"""What the scheduler keeps of a request. Knows the state of one request and no other."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ccjax.policy.scheduling.work import SequenceWork, StepCosts

State = Literal["waiting", "prefill", "decode", "held"]


@dataclasses.dataclass(slots=True)
class ScheduledSequence:
    """A request between `add` and `remove`.

    Attributes:
      number: counts arrivals.
      place: its arrival within its flow.
      tag: its place in the fair order, fixed when it is first admitted.
      tokens_left: computed tokens still to prefill.
      unserved_tokens: tokens that it was not yet served in the fair order; what a preemption makes it compute again is
        no service.
      num_answered: tokens of the answer that were drawn.
      last_token_s: when the last one was, or a decode step had no page for it.
      is_alone: it shares no step with others.
    """

    work: SequenceWork
    number: int
    page_tokens: int
    place: int = 0
    tag: float | None = None
    state: State = "waiting"
    tokens_left: int = 0
    unserved_tokens: int = 0
    num_answered: int = 0
    last_token_s: float = 0.0
    is_alone: bool = False

    def __post_init__(self) -> None:
        self.start_over(self.work)

    @property
    def request_id(self) -> str:
        return self.work.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the more important."""
        return self.work.priority, self.number

    @property
    def is_unserved(self) -> bool:
        """True while it is in line, or in prefill."""
        return self.state not in ("decode", "held")

    @property
    def is_complete(self) -> bool:
        """True when it has all its tokens and only waits to be removed."""
        return self.num_answered == self.work.max_new_tokens

    @property
    def total_tokens(self) -> int:
        """Computed tokens of a prefill from the start, the answer so far behind the prompt."""
        return self.work.prefill_tokens + self.num_answered

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt, reused or not, and of the answer so far."""
        return self.total_tokens + self.work.cached_tokens

    @property
    def own_pages(self) -> int:
        """Pages that it holds or, while it waits, would draw; the last token drawn by a decode has no KV yet."""
        return self.work.pages_with(self.num_answered - (self.state == "decode"), self.page_tokens)

    @property
    def draws_page(self) -> bool:
        """True when its next decode step begins a new page."""
        return self.work.pages_with(self.num_answered, self.page_tokens) > self.own_pages

    @property
    def growth_pages(self) -> int:
        """Pages that it may yet draw."""
        return self.work.most_pages(self.page_tokens) - self.own_pages

    def start_over(self, work: SequenceWork) -> None:
        """Prefills from its first token, as `work` says."""
        self.work = work
        self.state = "waiting"
        self.tokens_left = self.total_tokens
        if self.tag is None:
            self.unserved_tokens = work.prefill_tokens

    def steps_left(self, costs: StepCosts) -> float:
        """Decode steps until its answer ends, of the usual length unless it is longer already."""
        most = self.work.max_new_tokens
        usual = most if costs.answer_tokens is None else min(most, costs.answer_tokens)
        return max(1.0, usual - self.num_answered)

"""The scheduler's state of one sequence."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ccjax.policy.scheduling.work import SequenceWork, StepCosts

State = Literal["waiting", "prefill", "decode", "held"]


@dataclasses.dataclass(slots=True)
class ScheduledSequence:
    """A sequence between `add` and `remove`.

    Attributes:
      number: counts arrivals.
      place: its arrival number within its flow.
      tag: its finish tag in the fair order, fixed when it is first admitted.
      tokens_left: tokens still to prefill.
      uncharged_tokens: tokens not yet counted as service in the fair order; recomputation after a preemption does not
        count.
      num_answered: tokens generated so far.
      last_token_s: when the last of them was sampled, or when a decode step had no page for it.
      is_alone: it shares no step with other sequences.
    """

    work: SequenceWork
    number: int
    page_tokens: int
    place: int = 0
    tag: float | None = None
    state: State = "waiting"
    tokens_left: int = 0
    uncharged_tokens: int = 0
    num_answered: int = 0
    last_token_s: float = 0.0
    is_alone: bool = False

    def __post_init__(self) -> None:
        self.start_over(self.work)

    @property
    def sequence_id(self) -> str:
        return self.work.sequence_id

    @property
    def rank(self) -> tuple[int, int]:
        """Importance: smaller is more important."""
        return self.work.priority, self.number

    @property
    def is_unserved(self) -> bool:
        """True while it is queued or in prefill."""
        return self.state not in ("decode", "held")

    @property
    def is_complete(self) -> bool:
        """True when it has all its tokens and is only waiting to be removed."""
        return self.num_answered == self.work.max_new_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens to compute in a prefill from the start, generated tokens included."""
        return self.work.prefill_tokens + self.num_answered

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt, reused or not, and of the answer so far."""
        return self.total_tokens + self.work.cached_tokens

    @property
    def own_pages(self) -> int:
        """Pages that it holds or, while it waits, would allocate; the last token of a decode has no KV yet."""
        return self.work.pages_with(self.num_answered - (self.state == "decode"), self.page_tokens)

    @property
    def allocates_page(self) -> bool:
        """True when its next decode step needs a new page."""
        return self.work.pages_with(self.num_answered, self.page_tokens) > self.own_pages

    @property
    def growth_pages(self) -> int:
        """Pages that it may still allocate."""
        return self.work.most_pages(self.page_tokens) - self.own_pages

    def start_over(self, work: SequenceWork) -> None:
        """Resets it to prefill from its first token, with this work."""
        self.work = work
        self.state = "waiting"
        self.tokens_left = self.total_tokens
        if self.tag is None:
            self.uncharged_tokens = work.prefill_tokens

    def steps_left(self, costs: StepCosts) -> float:
        """Estimated decode steps until it reaches the usual answer length; at least one."""
        most = self.work.max_new_tokens
        usual = most if costs.answer_tokens is None else min(most, costs.answer_tokens)
        return max(1.0, usual - self.num_answered)

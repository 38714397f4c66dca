"""What the scheduler is told (requests, limits, costs) and what it answers (packs, decode steps). Decides nothing."""

from __future__ import annotations

import dataclasses

from ccjax.policy._checks import check_count, check_mass

USUAL_DECODE_GAP_S = 0.2
"""A steady pace for who reads along."""
DECODE_SHARE = 1 / 3
"""Of the device's time, where a usual gap would leave the prompts in line less than the rest."""


class NeverFitsError(ValueError):
    """The request needs more pages than the whole pool has: it could never end, however long it waits."""


class AdmissionQueueFullError(Exception):
    """As many requests wait as may, in all or in this flow. To wait and to ask again helps."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceWork:
    """A request as the scheduler knows it; checked on construction (ValueError naming the field).

    Attributes:
      request_id: unique among the requests that are scheduled.
      prefill_tokens: tokens of the prompt that run through the model. With partial prefill those are only some of them.
      prompt_pages: pages of its own that the prompt takes, all drawn when it is admitted; 0 once others read them, too
        (`Scheduler.share`).
      max_new_tokens: most tokens of the answer.
      flow: client or tenant; flows of one priority share the device fairly.
      priority: the lower, the sooner, as in vLLM. Stands above fairness.
      deadline_s: when the answer is of no use any more, on the engine's clock; None for never.
      cached_tokens: tokens of the prompt that are reused and not computed (RAGCache sec. 5.2).
      shared_pages: pages that it reads only, of cached chunks or of a prompt that several answers share, in the pool
        for as long as it runs.
      tail_slots: tokens of the answer that the prompt's last page still takes.
      is_divisible: whether its pieces may be of any size. If not, where they end depends on nobody else: each fills a
        pack of its own, and the rest shares one. For plans whose result depends on what is computed together, as those
        do that drop tokens once the question's focus is known (CacheCraft alg. 1).
    """

    request_id: str
    prefill_tokens: int
    prompt_pages: int
    max_new_tokens: int
    flow: str = ""
    priority: int = 0
    deadline_s: float | None = None
    cached_tokens: int = 0
    shared_pages: int = 0
    tail_slots: int = 0
    is_divisible: bool = True

    def __post_init__(self) -> None:
        check_count("prefill_tokens", self.prefill_tokens)
        check_count("prompt_pages", self.prompt_pages, least=0)
        check_count("max_new_tokens", self.max_new_tokens)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ValueError(f"priority: wanted an integer, got {self.priority!r}")
        if self.deadline_s is not None:
            check_mass("deadline_s", self.deadline_s)
        check_count("cached_tokens", self.cached_tokens, least=0)
        check_count("shared_pages", self.shared_pages, least=0)
        check_count("tail_slots", self.tail_slots, least=0)

    def check_change(self, work: SequenceWork) -> None:
        """Raises ValueError where `work` cannot be this request with another plan."""
        for name in ("flow", "priority", "max_new_tokens"):
            wanted, got = getattr(self, name), getattr(work, name)
            if got != wanted:
                raise ValueError(f"{name}: wanted {wanted!r} as before, got {got!r}")

    def pages_with(self, num_slots: int, page_tokens: int) -> int:
        """Pages of its own with the KV of `num_slots` answer tokens behind the prompt's."""
        return self.prompt_pages - (-max(0, num_slots - self.tail_slots) // page_tokens)

    def most_pages(self, page_tokens: int) -> int:
        """Pages of its own that it ever needs: the last token of an answer leaves no KV behind."""
        return self.pages_with(self.max_new_tokens - 1, page_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits, checked on construction (ValueError naming the field).

    Attributes:
      num_pages: of the pool, all of them.
      page_tokens: tokens of a page.
      max_num_batched_tokens: most computed tokens of a pack.
      max_num_context_tokens: most tokens that those of a pack see, prompts added up; a longer prompt has a pack of its
        own. None for no limit.
      max_num_seqs: most requests that are admitted, in prefill or decoding.
      max_decode_gap_s: longest time between two tokens of an answer that a prefill may cause. None: 0.2 s, or three
        decode steps where that is longer, so that prompts in line keep two thirds of the device.
      reserve_pages: pages to be left free at admission for the answer of each admitted request, as far as it may yet
        grow; the more, the fewer preemptions and the fewer requests at once.
      max_queue: most requests that wait for admission.
      flow_share: a flow may have up to so many times as many requests in line as there are free places.
      reorder_window: within a flow, of so many requests the one with most cached tokens per computed one goes first
        (RAGCache sec. 5.2, which takes 32); 1 for the order of arrival.
    """

    num_pages: int
    page_tokens: int = 16
    max_num_batched_tokens: int = 1024
    max_num_context_tokens: int | None = None
    max_num_seqs: int = 32
    max_decode_gap_s: float | None = None
    reserve_pages: int = 1
    max_queue: int = 128
    flow_share: float = 4.0
    reorder_window: int = 1

    def __post_init__(self) -> None:
        for name in (
            "num_pages",
            "page_tokens",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_queue",
            "reorder_window",
        ):
            check_count(name, getattr(self, name))
        check_count("reserve_pages", self.reserve_pages, least=0)
        if self.max_num_context_tokens is not None:
            check_count("max_num_context_tokens", self.max_num_context_tokens)
        if self.max_decode_gap_s is not None:
            check_mass("max_decode_gap_s", self.max_decode_gap_s)
        check_mass("flow_share", self.flow_share)
        if self.flow_share == 0.0:
            raise ValueError("flow_share: wanted more than 0, got 0")

    def decode_gap_s(self, decode_step_s: float) -> float:
        """`max_decode_gap_s`, for decode steps of so many seconds where it is None."""
        if self.max_decode_gap_s is not None:
            return self.max_decode_gap_s
        return max(USUAL_DECODE_GAP_S, decode_step_s / DECODE_SHARE)

    def check_fits(self, work: SequenceWork) -> None:
        """Nothing, for a request that the pool could run.

        Raises:
          NeverFitsError: the pool is too small for it, even empty.
          ValueError: `tail_slots` makes more than a page.
        """
        if work.tail_slots >= self.page_tokens:
            raise ValueError(f"tail_slots: wanted less than a page of {self.page_tokens}, got {work.tail_slots}")
        most = work.most_pages(self.page_tokens) + work.shared_pages
        if most > self.num_pages:
            raise NeverFitsError(
                f"wanted a request of at most {self.num_pages} pages of {self.page_tokens} tokens, the whole pool; got "
                f"{work.prompt_pages + work.shared_pages} for the prompt and {most} with an answer of "
                f"{work.max_new_tokens} tokens"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class StepCosts:
    """What things take here, as measured lately; checked on construction (ValueError naming the field).

    Attributes:
      token_s: to prefill a token.
      decode_step_s: one decode step of the running batch.
      answer_tokens: of a usual answer; None: each is taken to be as long as it may be.
    """

    token_s: float
    decode_step_s: float
    answer_tokens: float | None = None

    def __post_init__(self) -> None:
        check_mass("token_s", self.token_s)
        check_mass("decode_step_s", self.decode_step_s)
        if self.answer_tokens is not None:
            check_mass("answer_tokens", self.answer_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledPiece:
    """Computed tokens `[start, start + num_tokens)` of a request, counted from the first one that it computes; behind
    the prompt's come those of the answer so far, where it was preempted. `is_last`: it then has its next token."""

    request_id: str
    start: int
    num_tokens: int
    is_last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledPack:
    """What runs through the layers next; carried out in the order of the fields.

    Attributes:
      preempted: requests that give their pages back and wait at the head of their flow, least important first; the
        tokens drawn so far are later prefilled behind the prompt.
      admitted: requests that draw the pages of their prompt, and of the answer so far, now.
      pieces: at most one of each request; empty when there is nothing to prefill.
    """

    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    pieces: tuple[ScheduledPiece, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for each running request.

    Attributes:
      preempted: what makes room, to be carried out first, least important first.
      request_ids: who decodes, most important first; may be empty.
      draws: those of them that draw one more page first.
    """

    preempted: tuple[str, ...] = ()
    request_ids: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()

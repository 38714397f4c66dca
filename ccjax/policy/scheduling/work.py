"""The inputs of the scheduler (work, limits, costs) and its decisions (packs, decode steps)."""

from __future__ import annotations

import dataclasses
import math

from ccjax.policy._checks import check_count, check_mass

USUAL_DECODE_GAP_S = 0.2
"""Default pause between two tokens: a steady pace for readers."""
PACK_S, LEAST_PACK = 0.5, 1024
"""Packs are halved while they would take longer than `PACK_S` seconds, though those of a single prompt not below
`LEAST_PACK` tokens: other prompts wait until they end."""
SHORT_SHARE = 3
"""A prompt is short if any pack of a long prompt, halved ones too, has room for this many of it."""
DECODE_SHARE = 1 / 3
"""Largest share of device time for decoding if the default gap would leave less than the rest for queued prompts."""


class NeverFitsError(ValueError):
    """The request needs more pages than the whole pool has, so it could never run."""


class AdmissionQueueFullError(Exception):
    """The admission queue is full, in all or for this flow. Retrying later helps."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceWork:
    """A sequence as the scheduler sees it; checked on construction (ValueError naming the field).

    Attributes:
      sequence_id: unique among the scheduled sequences.
      prefill_tokens: prompt tokens that run through the model; with partial prefill only some of the prompt.
      prompt_pages: pages of its own for the prompt, all allocated at admission; 0 once they are shared
        (`Scheduler.share`).
      max_new_tokens: most tokens to generate.
      flow: client or tenant; flows of one priority share the device fairly.
      priority: lower runs sooner, as in vLLM. Takes precedence over fairness.
      deadline_s: when the answer becomes useless, on the engine's clock; None for never.
      cached_tokens: prompt tokens that are reused, not computed (RAGCache sec. 5.2).
      shared_pages: pages that it only reads, of cached chunks or of a prompt shared by several sequences; they stay in
        the pool while it runs.
      tail_slots: generated tokens that still fit into the last page of the prompt.
      is_divisible: whether it may be split into pieces. If not, and it is longer than a pack, it is prefilled alone,
        layer by layer. For plans whose result depends on which tokens are computed together: those that drop tokens on
        the way (CacheBlend sec. 4.3, CacheCraft alg. 1).
    """

    sequence_id: str
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
        """Raises ValueError if `work` cannot be another plan of this sequence."""
        for name in ("flow", "priority", "max_new_tokens"):
            wanted, got = getattr(self, name), getattr(work, name)
            if got != wanted:
                raise ValueError(f"{name}: wanted {wanted!r} as before, got {got!r}")

    def pages_with(self, num_slots: int, page_tokens: int) -> int:
        """Pages of its own if the KV of `num_slots` generated tokens follows the prompt."""
        return self.prompt_pages - (-max(0, num_slots - self.tail_slots) // page_tokens)

    def most_pages(self, page_tokens: int) -> int:
        """Most pages of its own that it ever needs; the last generated token leaves no KV."""
        return self.pages_with(self.max_new_tokens - 1, page_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of the scheduler, checked on construction (ValueError naming the field).

    Attributes:
      num_pages: pages of the whole pool.
      page_tokens: tokens per page.
      max_num_batched_tokens: most computed tokens per pack, but for a sequence that cannot be split; see
        `pack_tokens`.
      max_num_context_tokens: most context tokens that the sequences of a pack see in all; a longer prompt gets a pack
        of its own. None for no limit.
      max_num_seqs: most admitted sequences, in prefill or decoding.
      max_decode_gap_s: longest delay between two tokens of an answer that a prefill may cause. None: 0.2 s, or three
        decode steps if that is longer, so that queued prompts keep two thirds of the device.
      reserve_pages: pages left free at admission for the growth of each admitted sequence, as far as it may still grow;
        a larger reserve means fewer preemptions and fewer concurrent sequences.
      max_queue: most requests waiting for admission.
      flow_share: a flow may queue up to this many times the number of free queue slots.
      reorder_window: within a flow, of this many sequences short ones go first, then the one with the most cached
        tokens per computed one (RAGCache sec. 5.2, which uses 32); 1 keeps the order of arrival.
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
    reorder_window: int = 32

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

    @property
    def short_tokens(self) -> int:
        """Most computed tokens of a short prompt, which overtakes longer ones of its flow and interrupts packs."""
        return min(self.max_num_batched_tokens, LEAST_PACK) // SHORT_SHARE

    def pack_tokens(self, token_s: float) -> int:
        """Most computed tokens of a pack while one takes `token_s` seconds."""
        most = self.max_num_batched_tokens
        while most >= 2 * LEAST_PACK and most * token_s > PACK_S:
            most //= 2
        return most

    def tokens_together(self, token_s: float) -> float:
        """Most computed tokens of a pack of several sequences while one takes `token_s` seconds."""
        return PACK_S / token_s if token_s else math.inf

    def decode_gap_s(self, decode_step_s: float) -> float:
        """`max_decode_gap_s`, or its default for decode steps of this length."""
        if self.max_decode_gap_s is not None:
            return self.max_decode_gap_s
        return max(USUAL_DECODE_GAP_S, decode_step_s / DECODE_SHARE)

    def check_fits(self, work: SequenceWork) -> None:
        """Checks that the pool could run the sequence.

        Raises:
          NeverFitsError: the pool is too small for it even when empty.
          ValueError: `tail_slots` is a page or more.
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
    """Recently measured costs; checked on construction (ValueError naming the field).

    Attributes:
      token_s: to prefill one token.
      decode_step_s: of one decode step of the running batch.
      answer_tokens: usual answer length; None assumes `max_new_tokens` for each.
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
    """Computed tokens `[start, start + num_tokens)` of a sequence, counted from the first one it computes; after a
    preemption the generated tokens follow those of the prompt. `is_last`: its next token is sampled afterwards."""

    sequence_id: str
    start: int
    num_tokens: int
    is_last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledPack:
    """What runs through the layers next; carried out in the order of the fields.

    Attributes:
      preempted: sequences that free their pages and return to the front of their flow, least important first; the
        tokens generated so far are later prefilled behind the prompt.
      admitted: sequences that allocate the pages of their prompt and of the tokens generated so far.
      pieces: at most one per sequence; empty if there is nothing to prefill.
    """

    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    pieces: tuple[ScheduledPiece, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for each running sequence.

    Attributes:
      preempted: sequences that free pages for it, to be carried out first, least important first.
      sequence_ids: sequences that decode, most important first; may be empty.
      allocating: those of them that allocate one more page first.
    """

    preempted: tuple[str, ...] = ()
    sequence_ids: tuple[str, ...] = ()
    allocating: tuple[str, ...] = ()

"""The state of a request in the batch, and what its sequences have in common."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.planned_prefill import PlannedPrefill, Prefilled
from ccjax.cache.run_capture import KVOrigin
from ccjax.engine.answer import Answer, bad_word_ids, ends_of, token_logprob
from ccjax.engine.batch.shared_prompt import SharedPrompt
from ccjax.engine.contracts import ReuseContracts
from ccjax.engine.trace import Tracer
from ccjax.policy.contract import ReuseContract
from ccjax.prompts import Prompt
from ccjax.requests import MOST_PRIORITY, Choice, Delta, Request, Response, TokenLogprob
from ccjax.runner.adjustments import Adjustments
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.pool import PagedShard
from ccjax.runner.sampling import SampledToken, mask_of
from ccjax.sampling import SamplingParams
from ccjax.text import Grammars, Matcher, Tokenizer
from ccjax.types import ReuseMode, ReuseReport

BACKGROUND_PRIORITY = MOST_PRIORITY + 1
"""A lower priority than any that a client can request."""

Emit = Callable[[Delta | Exception], None]
"""Receives the deltas of an answer, or the error that ended it. Called on the loop's thread, or, with what an answer
said before its search was complete, on the thread that ended the search; must return at once."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Whoever waits for the answers to a prompt. All but `is_cancelled` are called once per event on the loop's thread,
    and must return at once.

    Attributes:
      emit: receives the deltas of all answers; the last one has the response.
      on_start: called when the request leaves the queue.
      is_cancelled: called between the layers of a prefill and between decode steps.
      keep: called when the prefill is complete and the first token is known, while what it reused is still pinned;
        None to store it as the answer to a question.
    """

    emit: Emit
    on_start: Callable[[], None] = lambda: None
    is_cancelled: IsCancelled = lambda: False
    keep: Callable[[Prefilled], None] | None = None


@dataclasses.dataclass(frozen=True)
class GroupParts:
    """What the requests of an engine have in common.

    Attributes:
      grammars: None for a model without a tokenizer.
      is_shared: coordinate with other processes on the store which of them computes what.
    """

    chunks: ChunkCache
    contracts: ReuseContracts
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    eos_ids: frozenset[int]
    vocab_size: int
    is_shared: bool


class SequenceGroup:
    """The sequences of one request; for most requests just one.

    Attributes:
      num_answers: number of sequences in total.
      num_started: number of sequences created so far.
      open: created sequences (`TokenSequence`) that have not ended.
      prompt: the prompt itself.
      shared_prompt: the prompt's KV, set when the first of several sequences has its first token; reset to None if its
        pages are reclaimed while no admitted sequence reads them.
      reuse: what the prefill reused; None before it is complete.
      arrived_s: `time.perf_counter` at the arrival of the request.
      started_s: `time.perf_counter` when the request first left the queue; None before.
      deadline_s: `time.perf_counter` at which the answers become useless; None for never.
      tracer: records what happens; None if the request wants no trace.
    """

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        contract: ReuseContract,
        caller: Caller,
        parts: GroupParts,
        *,
        assemble_s: float = 0.0,
        is_background: bool = False,
    ) -> None:
        """
        Args:
          assemble_s: seconds already spent on the request.
          is_background: it waits until no client's request is left in the queue.
        """
        self.num_answers = request.sampling.n
        self.num_started = 0
        self.open: list[Any] = []
        self.priority = BACKGROUND_PRIORITY if is_background else request.priority
        self.flow = request.flow
        self.arrived_s = time.perf_counter() - assemble_s
        self.deadline_s = None if request.timeout_s is None else self.arrived_s + request.timeout_s
        self.sampling = request.sampling
        self.prompt = prompt
        self.emit, self.is_cancelled = caller.emit, caller.is_cancelled
        self.keep = caller.keep or parts.chunks.capture.keep
        self.shared_prompt: SharedPrompt | None = None
        self.reuse: ReuseReport | None = None
        self.started_s: float | None = None
        self.tracer: Tracer | None = None
        if request.trace:
            variants, costs = parts.chunks.variants, parts.chunks.costs
            self.tracer = Tracer(contract.settings.num_layers, variants.peek, costs.full_prefill_s)
        self._caller, self._contract, self._parts = caller, contract, parts
        self._is_kept_whole = caller.keep is None and parts.chunks.planner.prepared.are_kept_apart
        self._runs = parts.chunks.runs if self._is_kept_whole and contract.mode != "off" else None
        # What was recomputed for another quality is no base for requests of this one, nor the other way round.
        self._has_default_contract = contract == parts.contracts.contract("bounded")
        self._origin: KVOrigin | None = None
        self._mode: ReuseMode = request.reuse
        self._assemble_s = assemble_s
        self._prompt_logits: np.ndarray | None = None
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._ttft_s = self._total_s = 0.0
        self._choices: dict[int, Choice] = {}
        self._begun: set[int] = set()
        self._matcher: Matcher | None = None
        if self.sampling.constraint is not None and parts.grammars is not None:
            self._matcher = parts.grammars.matcher(self.sampling.constraint.grammar)
        self._allowed: bytes | None = None
        if self.sampling.allowed_token_ids is not None:
            self._allowed = mask_of(self.sampling.allowed_token_ids, parts.vocab_size)
        self._bad_words = bad_word_ids(self.sampling.bad_words, parts.tokenizer)

    def new_prefill(self) -> PlannedPrefill:
        """A prefill of the prompt, not planned yet."""
        return PlannedPrefill(
            self._parts.chunks.planner,
            self.prompt,
            self._contract,
            num_last=max(1, self.sampling.prompt_logits) if self._is_kept_whole else None,
            takes_approximate_runs=self._has_default_contract,
            is_shared=self._parts.is_shared,
            is_cancelled=self.is_cancelled,
            on_load=None if self.tracer is None else self.tracer.load,
        )

    def preparing(self, prompt: Prompt) -> SequenceGroup:
        """A request that computes the last passage of a prompt and stores it, for the sake of this one."""
        request = Request(
            segments=(),
            sampling=SamplingParams(max_new_tokens=1),
            reuse="exact",
            flow=self.flow,
        )
        caller = Caller(lambda _: None, is_cancelled=self.is_cancelled, keep=self._parts.chunks.capture.keep_prepared)
        group = SequenceGroup(request, prompt, self._parts.contracts.contract("exact"), caller, self._parts)
        group.priority = self.priority
        return group

    def new_answer(self, index: int) -> Answer:
        """The answer with this index, empty."""
        parts, sampling = self._parts, self.sampling
        adjustments = None
        if sampling.is_adjusted:
            ends = ends_of(sampling, parts.eos_ids)
            adjustments = Adjustments(sampling, self.prompt.token_ids, ends=ends, bad_words=self._bad_words)
        return Answer(
            sampling,
            parts.tokenizer,
            parts.eos_ids,
            self.prompt.question,
            index=index,
            matcher=None if self._matcher is None else self._matcher.begin(),
            allowed=self._allowed,
            adjustments=adjustments,
        )

    @property
    def is_unread(self) -> bool:
        """True if the shared prompt is in the pool and no admitted sequence reads it."""
        return self.shared_prompt is not None and not any(sequence.reads_prompt for sequence in self.open)

    def mark_started(self) -> None:
        """Records when a sequence first left the queue; later calls have no effect."""
        if self.started_s is None:
            self.started_s = time.perf_counter()
            self._caller.on_start()

    @property
    def keeps_run(self) -> bool:
        """True if the KV of its prompt and answers is to be stored."""
        return self._runs is not None

    def keep_run(self, answer: list[int], kv: PagedShard) -> None:
        """Stores what a finished sequence computed, given its tokens and the KV of the whole prompt and of them."""
        if self._runs is not None and self._origin is not None:
            self._runs.keep(self.prompt, answer, kv, self._origin, with_approximate=self._has_default_contract)

    def record_prefill(self, prefilled: Prefilled) -> bool:
        """Records the first prefill of the prompt; returns False for later ones."""
        if self._runs is not None:
            self._origin = self._runs.origin_of(prefilled).joined(self._origin)
        if self.reuse is not None:
            return False
        self.reuse = self._parts.contracts.report(prefilled, self._contract, self._mode)
        self._prompt_logits = prefilled.result.last_logits
        if self.sampling.prompt_logprobs is not None:
            first = SampledToken(int(self.prompt.token_ids[0]), math.nan, ())
            scores = [first, *prefilled.result.scores]
            tokenizer, skips = self._parts.tokenizer, self.sampling.skip_special_tokens
            told = (token_logprob(token, tokenizer, skip_special=skips) for token in scores)
            self._prompt_logprobs = tuple(told)
        if self.tracer is not None:
            self.tracer.prefilled(prefilled)
        return True

    def record_token(self) -> None:
        """Records the time of a new token."""
        assert self.started_s is not None
        now_s = time.perf_counter()
        self._total_s = now_s - self.started_s + self._assemble_s
        self._ttft_s = self._ttft_s or self._total_s
        if self.tracer is not None:
            self.tracer.token(now_s)

    def emit_delta(self, delta: Delta) -> None:
        """Emits a delta of a sequence; the first one of each has the log-probabilities of the prompt."""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            delta = dataclasses.replace(delta, prompt_logprobs=self._prompt_logprobs)
        self.emit(delta)

    def finish(self, last: Delta, choice: Choice) -> None:
        """Emits the last delta of a sequence, with the response if all sequences have finished."""
        self._choices[last.index] = choice
        if len(self._choices) == self.num_answers:
            assert self.reuse is not None and self.started_s is not None
            told = {"prompt_logprobs": self._prompt_logprobs}
            choices = (self._choices[index] for index in range(self.num_answers))
            first, *others = (dataclasses.replace(choice, **told) for choice in choices)
            response = Response(
                text=first.text,
                token_ids=first.token_ids,
                finish_reason=first.finish_reason,
                reuse=self.reuse,
                num_prompt_tokens=self.prompt.num_tokens,
                ttft_s=self._ttft_s,
                total_s=self._total_s,
                logprobs=first.logprobs,
                others=tuple(others),
                first_logits=first.first_logits,
                stop_reason=first.stop_reason,
                prompt_logits=self._prompt_logits,
                **told,
                trace=None if self.tracer is None else self.tracer.finish(self.arrived_s, self.started_s),
            )
            last = dataclasses.replace(last, response=response)
        self.emit_delta(last)

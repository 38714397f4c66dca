"""Prefills without a client: requests in the batch loop, of the lowest priority unless their caller waits."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable

from ccjax.cache.planned_prefill import PlannedPrefill, Prefilled
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.engine.answer import Answer
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.loop import BatchLoop
from ccjax.engine.batch.sequence import SequenceGroup, TokenSequence
from ccjax.engine.contracts import ReuseContracts
from ccjax.errors import OverloadError
from ccjax.prompts import Prompt
from ccjax.requests import MOST_PRIORITY, Delta, Request, Response, SamplingParams
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.types import ReuseMode

BACKGROUND_PRIORITY = MOST_PRIORITY + 1
"""A lower priority than any that a client can request."""

_QUEUE_LOOK_S = 0.05


class BackgroundPrefills:
    """Runs prefills for warming, preparing, repair and shadow checks. Thread-safe. Each call waits for its prefill, so
    it must not be made on the batch loop's thread or while the loop is paused."""

    def __init__(self, loop: BatchLoop, planner: PrefillPlanner, contracts: ReuseContracts) -> None:
        self._loop = loop
        self._planner = planner
        self._contracts = contracts

    def run(
        self,
        prompt: Prompt,
        mode: ReuseMode,
        keep: Callable[[Prefilled], None] = lambda _: None,
        *,
        num_logits: int = 0,
        is_urgent: bool = False,
        is_cancelled: IsCancelled | None = None,
    ) -> Response:
        """Prefills a prompt.

        Args:
          keep: called on the batch loop's thread when the prefill is complete, while what it reused is pinned.
          num_logits: number of last tokens whose logits `Response.prompt_logits` contains.
          is_urgent: queue it like a client's request, by arrival, instead of after all of them.
          is_cancelled: called between layers, and while the queue is full.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True; `keep` was not called.
          RuntimeError: the engine is closed.
          Exception: what `keep` raised, or what made the prefill fail.
        """
        asked = is_cancelled or (lambda: False)
        sampling = SamplingParams(max_new_tokens=1, prompt_logits=num_logits)
        events: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        failures: list[Exception] = []

        def kept(prefilled: Prefilled) -> None:
            try:
                keep(prefilled)
            except Exception as error:  # raised to the caller below; the loop continues
                failures.append(error)

        answers = SequenceGroup(
            Request(segments=(), sampling=sampling, reuse=mode),
            prompt,
            assemble_s=0.0,
            emit=events.put,
            on_start=lambda: None,
            is_cancelled=asked,
            new_prefill=lambda: PlannedPrefill(self._planner, prompt, mode, is_cancelled=asked),
            new_answer=lambda index: Answer(sampling, None, frozenset(), (), index=index),
            report=lambda prefilled: self._contracts.report(prefilled, self._contracts.contract(mode), mode),
            keep=kept,
            priority=None if is_urgent else BACKGROUND_PRIORITY,
        )
        self._submit(TokenSequence(uuid.uuid4().hex, answers, seed=0), asked)
        while True:
            event = events.get()
            if isinstance(event, CancelledError):
                raise PrefillCancelledError
            if isinstance(event, Exception):
                raise event
            if event.response is not None:
                break
        if failures:
            raise failures[0]
        return event.response

    def _submit(self, sequence: TokenSequence, is_cancelled: IsCancelled) -> None:
        while True:
            if is_cancelled():
                raise PrefillCancelledError
            try:
                self._loop.submit(sequence)
                return
            except OverloadError:
                time.sleep(_QUEUE_LOOK_S)

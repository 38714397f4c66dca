"""Prefills without a client: requests in the batch loop, of the lowest priority unless their caller waits."""

from __future__ import annotations

import dataclasses
import queue
import time
import uuid
from collections.abc import Callable

from ccjax.cache.planned_prefill import Prefilled
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.group import Caller, GroupParts, SequenceGroup
from ccjax.engine.batch.loop import BatchLoop
from ccjax.engine.batch.sequence import TokenSequence
from ccjax.errors import OverloadError
from ccjax.prompts import Prompt
from ccjax.requests import Delta, Request, Response, SamplingParams
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.types import ReuseMode

_QUEUE_LOOK_S = 0.05


class BackgroundPrefills:
    """Runs prefills for warming, preparing, repair and shadow checks. Thread-safe. Each call waits for its prefill, so
    it must not be made on the batch loop's thread or while the loop is paused."""

    def __init__(self, parts: GroupParts, loop: BatchLoop) -> None:
        self._parts = dataclasses.replace(parts, is_shared=False)
        self._loop = loop

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
        events: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        failures: list[Exception] = []

        def kept(prefilled: Prefilled) -> None:
            try:
                keep(prefilled)
            except Exception as error:  # raised to the caller below; the loop continues
                failures.append(error)

        sampling = SamplingParams(max_new_tokens=1, prompt_logits=num_logits)
        contract = dataclasses.replace(self._parts.contracts.contract(mode), mode=mode)
        group = SequenceGroup(
            Request(segments=(), sampling=sampling, reuse=mode),
            prompt,
            contract,
            Caller(events.put, is_cancelled=asked, keep=kept),
            self._parts,
            is_background=not is_urgent,
        )
        self._add(TokenSequence(uuid.uuid4().hex, group, seed=0), asked)
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

    def _add(self, sequence: TokenSequence, is_cancelled: IsCancelled) -> None:
        while True:
            if is_cancelled():
                raise PrefillCancelledError
            try:
                self._loop.add(sequence)
                return
            except OverloadError:
                time.sleep(_QUEUE_LOOK_S)

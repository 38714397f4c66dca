"""Submits requests to the batch loop."""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.planned_prefill import PlannedPrefill
from ccjax.engine.answer import Answer
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.loop import BatchLoop
from ccjax.engine.batch.sequence import Emit, SequenceGroup, TokenSequence
from ccjax.engine.contracts import ReuseContracts
from ccjax.engine.shadow import ShadowChecks
from ccjax.engine.trace import Tracer
from ccjax.loading.model import LoadedModel
from ccjax.policy.contract import ReuseContract
from ccjax.prompts import Prompt
from ccjax.requests import Delta, Request
from ccjax.runner.cancellation import IsCancelled


class RequestSubmission:
    """Turns each request into a sequence group and submits it; thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        chunks: ChunkCache,
        loop: BatchLoop,
        contracts: ReuseContracts,
        shadow: ShadowChecks,
        *,
        is_shared: bool,
    ) -> None:
        """
        Args:
          is_shared: as for `PlannedPrefill`.
        """
        self._tokenizer, self._eos_ids, self._num_layers = model.tokenizer, model.eos_ids, model.config.num_layers
        self._chunks = chunks
        self._loop = loop
        self._contracts = contracts
        self._shadow = shadow
        self._is_shared = is_shared

    def contract(self, request: Request) -> ReuseContract:
        """Determines how much may be reused for a request, adjusted by the results of the shadow checks so far."""
        contract = self._contracts.contract(request.reuse, request.quality_target)
        if contract.mode == "bounded":
            contract = dataclasses.replace(contract, settings=self._shadow.control.applied(contract.settings))
        return contract

    def submit(
        self,
        request: Request,
        prompt: Prompt,
        assemble_s: float,
        emit: Emit,
        on_start: Callable[[], None],
        is_cancelled: IsCancelled,
    ) -> Callable[[], None]:
        """See `Engine.submit`; `prompt` is the assembled prompt, `assemble_s` the seconds spent assembling it."""
        contract = self.contract(request)
        if contract.mode in ("bounded", "fast"):
            is_controlled = contract.mode == "bounded"
            sampling, emit = self._shadow.watched(prompt, request.sampling, emit, is_controlled=is_controlled)
            request = dataclasses.replace(request, sampling=sampling)
        sampling = request.sampling
        is_given_up = threading.Event()

        def gives_up() -> bool:
            return is_given_up.is_set() or is_cancelled()

        tracer = None
        if request.trace:
            tracer = Tracer(self._num_layers, self._chunks.variants.peek, self._chunks.costs.full_prefill_s)
        group = SequenceGroup(
            request,
            prompt,
            assemble_s=assemble_s,
            emit=emit,
            on_start=on_start,
            is_cancelled=gives_up,
            new_prefill=lambda: PlannedPrefill(
                self._chunks.planner,
                prompt,
                contract.mode,
                settings=contract.settings,
                is_shared=self._is_shared,
                is_cancelled=gives_up,
                on_load=None if tracer is None else tracer.load,
            ),
            new_answer=lambda index: Answer(sampling, self._tokenizer, self._eos_ids, prompt.question, index=index),
            report=lambda prefilled: self._contracts.report(prefilled, contract, request.reuse),
            keep=self._chunks.capture.keep,
            tracer=tracer,
        )
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._loop.submit(TokenSequence(uuid.uuid4().hex, group, seed=seed))

        def cancel() -> None:
            is_given_up.set()
            self._loop.wake()

        return cancel

    def stream(
        self, request: Request, prompt: Prompt, assemble_s: float, is_cancelled: IsCancelled | None
    ) -> Iterator[Delta]:
        """See `Engine.stream`; further arguments as for `submit`."""
        events: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        asked = is_cancelled or (lambda: False)
        cancel = self.submit(request, prompt, assemble_s, events.put, lambda: None, asked)
        try:
            while True:
                event = events.get()
                if isinstance(event, CancelledError):
                    return
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.response is not None:
                    return
        finally:
            cancel()

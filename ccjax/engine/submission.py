"""Submits requests to the batch loop."""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator

from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.group import Caller, GroupParts, SequenceGroup
from ccjax.engine.batch.loop import BatchLoop
from ccjax.engine.batch.sequence import TokenSequence
from ccjax.engine.shadow import ShadowChecks
from ccjax.policy.contract import ReuseContract
from ccjax.prompts import Prompt
from ccjax.requests import Delta, Request
from ccjax.runner.cancellation import IsCancelled


class RequestSubmission:
    """Turns each request into a sequence group and submits it; thread-safe."""

    def __init__(self, parts: GroupParts, loop: BatchLoop, shadow: ShadowChecks) -> None:
        self._parts = parts
        self._loop = loop
        self._shadow = shadow

    def contract(self, request: Request) -> ReuseContract:
        """Determines how much may be reused for a request, adjusted by the results of the shadow checks so far."""
        contract = self._parts.contracts.contract(request.reuse, request.quality_target)
        if contract.mode == "bounded":
            contract = dataclasses.replace(contract, settings=self._shadow.control.applied(contract.settings))
        return contract

    def start(self, request: Request, prompt: Prompt, assemble_s: float, caller: Caller) -> Callable[[], None]:
        """See `Engine.submit`; `prompt` is the assembled prompt, `assemble_s` the seconds spent assembling it."""
        if request.sampling.prompt_logprobs is not None:
            request = dataclasses.replace(request, reuse="off")
        contract = self.contract(request)
        emit = caller.emit
        if contract.mode in ("bounded", "fast"):
            is_controlled = contract.mode == "bounded"
            sampling, emit = self._shadow.watched(prompt, request.sampling, emit, is_controlled=is_controlled)
            request = dataclasses.replace(request, sampling=sampling)
        is_given_up = threading.Event()

        def gives_up() -> bool:
            return is_given_up.is_set() or caller.is_cancelled()

        watched = dataclasses.replace(caller, emit=emit, is_cancelled=gives_up)
        group = SequenceGroup(request, prompt, contract, watched, self._parts, assemble_s=assemble_s)
        seed = request.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed
        self._loop.add(TokenSequence(uuid.uuid4().hex, group, seed=seed))

        def cancel() -> None:
            is_given_up.set()
            self._loop.wake()

        return cancel

    def stream(
        self, request: Request, prompt: Prompt, assemble_s: float, is_cancelled: IsCancelled | None
    ) -> Iterator[Delta]:
        """See `Engine.stream`; further arguments as for `start`."""
        events: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        caller = Caller(events.put, is_cancelled=is_cancelled or (lambda: False))
        cancel = self.start(request, prompt, assemble_s, caller)
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

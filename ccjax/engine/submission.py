"""Submits requests to the batch loop and builds their reuse reports."""

from __future__ import annotations

import dataclasses
import functools
import queue
import secrets
import threading
import uuid
from collections.abc import Callable, Collection, Iterator

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.planned_prefill import PlannedPrefill, Prefilled
from ccjax.cache.prefill_capture import PrefillCapture
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.variants import VariantIndex
from ccjax.engine.answer import Answer
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.loop import BatchLoop
from ccjax.engine.batch.sequence import Emit, SequenceGroup, TokenSequence
from ccjax.engine.report import build_report
from ccjax.engine.shadow import ShadowChecks
from ccjax.engine.trace import Tracer
from ccjax.loading.model import LoadedModel
from ccjax.policy.calibration import Calibration
from ccjax.policy.contract import ReuseContract, reuse_contract
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import get_strategy
from ccjax.prompts import Prompt
from ccjax.requests import Delta, Request
from ccjax.runner.cancellation import IsCancelled
from ccjax.types import ReuseMode, ReuseReport, VariantId


class RequestSubmission:
    """Turns each request into a sequence group and submits it; thread-safe.

    Args:
      framed: returns the variants of a prompt that were computed behind the frame.
      is_shared: as for `PlannedPrefill`.
    """

    def __init__(
        self,
        model: LoadedModel,
        planner: PrefillPlanner,
        capture: PrefillCapture,
        variants: VariantIndex,
        costs: MeasuredCosts,
        loop: BatchLoop,
        shadow: ShadowChecks,
        settings: PlannerSettings,
        calibration: Calibration | None,
        framed: Callable[[Prompt], Collection[VariantId]],
        *,
        is_shared: bool,
    ) -> None:
        self._tokenizer, self._eos_ids, self._num_layers = model.tokenizer, model.eos_ids, model.config.num_layers
        self._planner = planner
        self._capture = capture
        self._variants = variants
        self._costs = costs
        self._loop = loop
        self._shadow = shadow
        self._settings = settings
        contract = functools.partial(reuse_contract, settings=settings, calibration=calibration)
        self._contract = functools.lru_cache(maxsize=64)(contract)  # a calibration's bounds take long
        self._framed = framed
        self._is_shared = is_shared

    def contract(self, request: Request) -> ReuseContract:
        """Determines how much may be reused for a request, adjusted by the results of the shadow checks so far."""
        mode: ReuseMode = request.reuse if get_strategy(self._settings.strategy).needs else "off"
        contract = self._contract(mode, request.quality_target)
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
            tracer = Tracer(self._num_layers, self._variants.peek, self._costs.full_prefill_s)
        group = SequenceGroup(
            request,
            prompt,
            assemble_s=assemble_s,
            emit=emit,
            on_start=on_start,
            is_cancelled=gives_up,
            new_prefill=lambda: PlannedPrefill(
                self._planner,
                prompt,
                contract.mode,
                settings=contract.settings,
                is_shared=self._is_shared,
                is_cancelled=gives_up,
                on_load=None if tracer is None else tracer.load,
            ),
            new_answer=lambda index: Answer(sampling, self._tokenizer, self._eos_ids, prompt.question, index=index),
            report=lambda prefilled: self.report(prefilled, contract, request.reuse),
            keep=self._capture.keep,
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

    def report(self, prefilled: Prefilled, contract: ReuseContract, wanted: ReuseMode) -> ReuseReport:
        """Builds the report of what a prefill reused; `wanted` is the mode that was requested."""
        return build_report(
            prefilled,
            mode=wanted,
            contract=contract,
            strategy="full" if contract.mode == "off" else self._settings.strategy,
            num_layers=self._num_layers,
            framed=self._framed(prefilled.prompt),
        )

    def background_report(self, prefilled: Prefilled, mode: ReuseMode) -> ReuseReport:
        """Builds the report of a background prefill."""
        return self.report(prefilled, self._contract(mode, None), mode)

"""A prefill outside the batch, for work in idle time and ahead of requests."""

from __future__ import annotations

import time

import jax

from ccjax.engine.admission import Admission
from ccjax.engine.cached_prefill import CachedPrefill, Prefilled
from ccjax.engine.prefill import IsCancelled, Prefiller, Size
from ccjax.engine.prompts import Prompt
from ccjax.engine.reads import LoadFailedError
from ccjax.types import ReuseMode


class PrefillAlone:
    """Runs prefills of one model; not thread-safe, nothing else may run meanwhile."""

    def __init__(self, model: Prefiller, prefill: CachedPrefill) -> None:
        self._model = model
        self._prefill = prefill

    def size_of(self, prompt: Prompt, mode: ReuseMode) -> Size:
        """The size that `run` will begin with, if all loads succeed."""
        prefill = self._prefill
        return self._model.size_of(prefill.plan(prompt, mode, prefill.usable(prompt)))

    def run(self, prompt: Prompt, mode: ReuseMode, *, is_cancelled: IsCancelled | None = None) -> Prefilled:
        """Plans, loads and computes. Variants that cannot be read, or not in time, are left out and the prompt planned
        again without them. What comes back must be given to the `CachedPrefill`, which unpins its variants.

        No layer is queued on the device before the one before it is through: who cancels waits for one at most.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True; nothing stays pinned.
        """
        admission = Admission(self._prefill, prompt, mode, is_cancelled=is_cancelled)
        try:
            plan = admission.settle()
            while True:
                plan = admission.open()
                contexts = admission.load(frozenset())
                started = time.perf_counter()
                try:
                    result = self._model.run(
                        prompt.token_ids,
                        plan,
                        contexts=contexts,
                        collect=admission.collects,
                        is_cancelled=is_cancelled,
                        queued_layers=0,
                    )
                    break
                except LoadFailedError as error:
                    admission.fail(error)
        except BaseException:
            admission.close(ok=False)
            raise
        jax.block_until_ready(result.hidden)  # so that the clock tells what computing took
        waited_s = 0.0 if contexts is None else contexts.waited_s
        seconds = time.perf_counter() - started - waited_s
        self._prefill.rates.compute.observe(result, self._model.config.num_layers, seconds)
        return admission.prefilled(result)

"""Writes the reused KV of one prompt to its pages, layer by layer."""

from __future__ import annotations

import jax
import numpy as np

from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import Contexts, PrefillJob
from ccjax.runner.pool import DevicePool


class JobFailedError(Exception):
    """A job of a pack cannot continue; `__cause__` is the reason."""

    def __init__(self, job: PrefillJob) -> None:
        super().__init__()
        self.job = job


class ContextLoader:
    """Writes each layer once, the layers in order."""

    def __init__(self, model: DeviceModel, pool: DevicePool, job: PrefillJob, contexts: Contexts) -> None:
        self._model, self._pool = model, pool
        self._job, self._contexts = job, contexts
        self._slots: jax.Array | None = None
        self._num_written = 0

    def is_ready(self, layer: int) -> bool:
        """True if `write` would not wait."""
        return layer < self._num_written or self._contexts.is_ready(layer)

    def write(self, layer: int) -> None:
        """Writes the KV of a layer, if that is not done yet.

        Raises:
          JobFailedError: it could not be loaded.
        """
        if layer < self._num_written:  # the layer is run again, after another job failed in it
            return
        try:
            k, v = self._contexts.take(layer)
        except Exception as error:
            raise JobFailedError(self._job) from error
        slots = self._slots
        if slots is None:
            slots = self._slots = self._model.put(self._slots_to_load(len(k)))
        self._pool.write_rows(layer, slots, k, v)
        self._num_written = layer + 1

    def _slots_to_load(self, num_slots: int) -> np.ndarray:
        """For each slot of the context, the pool slot that its loaded row is written to, or `pool.num_slots`."""
        job, slots = self._job, np.full(num_slots, self._pool.num_slots, np.int32)
        for index, segment in enumerate(job.plan.segments):
            if segment.action == "reuse" and index not in job.pages.shared:
                where = slice(segment.start, segment.start + segment.num_tokens)
                slots[where] = job.pages.slots[where]
        return slots

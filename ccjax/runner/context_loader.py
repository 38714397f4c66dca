"""Writes the reused KV of one prompt to its pages, layer by layer."""

from __future__ import annotations

import jax

from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import Contexts, PrefillJob
from ccjax.runner.plan_rows import padded_to
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
        self._slots: list[jax.Array] = []
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
            pieces = self._contexts.take(layer)
        except Exception as error:
            raise JobFailedError(self._job) from error
        if not self._slots:
            slots, nowhere = self._job.pages.slots, self._pool.num_slots
            self._slots = [self._model.put(padded_to(slots[rows.positions], len(rows.k), nowhere)) for rows in pieces]
        for slots, rows in zip(self._slots, pieces, strict=True):
            self._pool.write_rows(layer, slots, rows.k, rows.v)
        self._num_written = layer + 1

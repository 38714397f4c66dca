"""Decode steps: one token for each request of a batch, over their pages."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ccjax.models.llama3.inputs import DecodeInputs
from ccjax.models.llama3.paged_steps import paged_decode_step
from ccjax.models.llama3.steps import embed_step, logits_step
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.pages import RequestPages
from ccjax.runner.plan_rows import padded_to
from ccjax.runner.pool import DevicePool


class DecodeBatch:
    """Runs decode steps of one model over one pool."""

    def __init__(self, model: DeviceModel, pool: DevicePool) -> None:
        self._model = model
        self._pool = pool

    def step(self, requests: Sequence[RequestPages], token_ids: Sequence[int]) -> jax.Array:
        """Writes the KV of each request's last token and returns the logits `[B, V]`, float32, of the next, B padded.

        Raises:
          TierFullError: a request needs a page and none is free. Nothing has run, but the preceding requests have an
            additional slot.
        """
        positions = [request.num_tokens for request in requests]
        slots = [request.append() for request in requests]
        sizes = self._model.sizes
        size, num_entries = sizes.decode(len(requests), max(request.num_entries for request in requests))
        table = np.zeros((3, size, num_entries), np.int32)
        for row, request in enumerate(requests):
            table[:, row, : request.num_entries] = request.table
        page, start, length = self._model.put(tuple(table))
        rows = padded_to(positions, size, 0), padded_to(slots, size, self._pool.num_slots)
        q_pos, q_slot = self._model.put(rows)
        inputs = DecodeInputs(page, length, self._model.rotation(start), q_pos=q_pos, q_slot=q_slot)
        x = embed_step(self._model.top, self._model.put(padded_to(token_ids, size, 0)))
        for number, layer in enumerate(self._model.params.layers):
            x = self._pool.update(
                number,
                lambda pages, layer=layer, x=x: paged_decode_step(
                    layer, x, pages, inputs, settings=self._model.settings
                ),
            ).x
        logits = logits_step(self._model.top, x, config=self._model.config)
        sizes.note("decode", (size, num_entries))
        sizes.note("batch", (size,))
        return logits

"""Decode steps: one token for each request of a batch, over their pages."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ccjax.kernels.inputs import KVPages
from ccjax.models.llama3.inputs import DecodeInputs
from ccjax.models.llama3.paged_steps import PagedDecodeOutput, paged_decode_step
from ccjax.models.llama3.steps import embed_step, logits_step
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.pages import RequestPages
from ccjax.runner.plan_rows import padded_to
from ccjax.runner.pool import DevicePool

_MOST_LAYERS = 8
"""Most layers of a call on CPUs."""


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
        model, pool, sizes = self._model, self._pool, self._model.sizes
        size, num_entries = sizes.decode(len(requests), max(request.num_entries for request in requests))
        table = np.zeros((3, size, num_entries), np.int32)
        for row, request in enumerate(requests):
            table[:, row, : request.num_entries] = request.table
        page, start, length = model.put(tuple(table))
        rows = padded_to(positions, size, 0), padded_to(slots, size, pool.num_slots), padded_to(token_ids, size, 0)
        q_pos, q_slot, tokens = model.put(rows)
        inputs = DecodeInputs(page, length, model.rotation(start), q_pos=q_pos, q_slot=q_slot)
        logits = run_layers(model, pool, tokens, inputs)
        sizes.note("decode", (size, num_entries))
        sizes.note("batch", (size,))
        return logits


def run_layers(model: DeviceModel, pool: DevicePool, token_ids: jax.Array, inputs: DecodeInputs) -> jax.Array:
    """Logits `[B, V]`, float32, after all layers."""
    parts = decode_parts(model)
    is_whole = len(parts) == 1
    x, top = (token_ids, model.top) if is_whole else (embed_step(model.top, token_ids), None)
    for part in parts:

        def step(pages: list[KVPages], part: slice = part, x: jax.Array = x) -> PagedDecodeOutput:
            return paged_decode_step(model.params.layers[part], top, x, pages, inputs, settings=model.settings)

        x = pool.update(part, step).x
    return x if is_whole else logits_step(model.top, x, config=model.config)


def decode_parts(model: DeviceModel) -> list[slice]:
    """The layers of each call of a decode step: all of them on accelerators, where a launch takes longer than a layer;
    on CPUs equal parts, which share one program: compiling 30 layers of SmolLM2 takes 20 s of processor time, 6 take
    5."""
    count = model.config.num_layers
    if jax.default_backend() == "cpu":
        count = max(size for size in range(1, _MOST_LAYERS + 1) if model.config.num_layers % size == 0)
    return [slice(first, first + count) for first in range(0, model.config.num_layers, count)]

"""One token for each of many requests: a step of the whole batch, over the pages of each. Knows no queue, no text and
no stop rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ccjax.engine.batch.pages import RequestPages
from ccjax.engine.buckets import batch_bucket, entry_bucket
from ccjax.engine.plan_rows import padded_to
from ccjax.engine.pool import DevicePool
from ccjax.engine.prefill import Prefiller
from ccjax.engine.requests import SamplingParams
from models.llama3.paged_steps import paged_decode_step
from models.llama3.sampling import SampleOutput, seed_words
from models.llama3.steps import embed_step, logits_step, sample_step


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """How one request draws the token number `index` of its answer; the same draw whatever else is in the batch."""

    sampling: SamplingParams
    seed: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token: its id, its log-probability under the model, and the likeliest ones as (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def draw(logits: jax.Array, draws: Sequence[Draw]) -> list[Drawn]:
    """A token for each of the first rows of `logits` `[B, V]`."""
    size = logits.shape[0]
    num_top = max((one.sampling.logprobs or 0 for one in draws), default=0)
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seeds, index = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
    for row, one in enumerate(draws):
        temperature[row], top_p[row] = one.sampling.temperature, one.sampling.top_p
        seeds[row], index[row] = seed_words(one.seed), one.index
    out = sample_step(logits, temperature, top_p, seeds, index, num_top=_top_bucket(num_top))
    return _drawn(jax.device_get(out), draws)


class DecodeBatch:
    """Runs decode steps of one model over one pool."""

    def __init__(self, model: Prefiller, pool: DevicePool, *, implementation: str | None = None) -> None:
        """
        Args:
          implementation: of `pallas_kernels.decode.decode_attention`.
        """
        self._model = model
        self._pool = pool
        self._implementation = implementation

    def step(self, requests: Sequence[RequestPages], token_ids: Sequence[int]) -> jax.Array:
        """Takes in the last token of each request and returns the logits `[B, V]`, float32, of the next, B padded.

        Raises:
          TierFullError: a request needs a page and none is free; nothing has run, but requests before it have a slot
            more. Whoever asks `needs_page` first never sees that.
        """
        size = batch_bucket(len(requests))
        positions = [request.num_tokens for request in requests]
        slots = [request.append() for request in requests]
        num_entries = entry_bucket(max(request.num_entries for request in requests))
        table = np.zeros((3, size, num_entries), np.int32)
        for row, request in enumerate(requests):
            table[:, row, : request.num_entries] = request.table
        page, start, length = jax.device_put(tuple(table))
        nowhere = self._pool.num_slots
        q_pos, q_slot = jax.device_put((padded_to(positions, size, 0), padded_to(slots, size, nowhere)))
        x = embed_step(self._model.top, padded_to(token_ids, size, 0))
        for number, layer in enumerate(self._model.params.layers):
            x = self._pool.update(
                number,
                lambda k_pages, v_pages, layer=layer, x=x: paged_decode_step(
                    layer,
                    x,
                    k_pages,
                    v_pages,
                    q_pos,
                    q_slot,
                    page,
                    length,
                    start,
                    config=self._model.config,
                    implementation=self._implementation,
                ),
            ).x
        return logits_step(self._model.top, x, config=self._model.config)


def _drawn(out: SampleOutput, draws: Sequence[Draw]) -> list[Drawn]:
    drawn = []
    for row, one in enumerate(draws):
        count = one.sampling.logprobs or 0
        top = zip(out.top_ids[row, :count].tolist(), out.top_logprobs[row, :count].tolist(), strict=True)
        drawn.append(Drawn(int(out.token_ids[row]), float(out.logprobs[row]), tuple(top)))
    return drawn


def _top_bucket(num_top: int) -> int:
    """0, 5 or 20 (what OpenAI allows at most): so many lists are compiled."""
    return next((size for size in (0, 5, 20) if num_top <= size), num_top)

"""Samples the next tokens of several sequences from their logits, on the device."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ccjax.models.llama3.inputs import SamplingState
from ccjax.models.llama3.sampling import SampleOutput, seed_words
from ccjax.models.llama3.steps import sample_step, score_step
from ccjax.runner.adjustments import Adjustments, batched
from ccjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample token number `index` of an answer; the result does not depend on the rest of the batch. `mask`
    returns the tokens that may be sampled, one bit for each, lowest first; None allows all. `adjustments` is None if
    the logits stay as they are."""

    sampling: SamplingParams
    seed: int
    index: int
    mask: Callable[[], bytes] | None = None
    adjustments: Adjustments | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token: its id, its log-probability under the model, and the likeliest tokens as (id, log-probability).
    If the logits are not finite, it means nothing, and its log-probability is NaN. `rank` is 1 for the likeliest token;
    None if it is not known.

    `logits` [V], float32: the logits it was sampled from; only for the first token of an answer, and only if requested.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None
    logits: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)


def seed_of(seed: int, answer: int) -> int:
    """The seed of one of the answers to a prompt: the request's own for the first, a hash for the others. If it were
    `seed + answer`, the second answer of one request would equal the first of the request with the next seed."""
    if not answer:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{answer}".encode()).digest()[:8], "big")


def mask_of(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """The mask (`SampleSpec.mask`) that allows these tokens."""
    is_allowed = np.zeros(32 * -(-vocab_size // 32), bool)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").tobytes()


def sample_tokens(logits: jax.Array, specs: Sequence[SampleSpec]) -> list[SampledToken]:
    """Samples a token for each of the first `len(specs)` rows of `logits` `[B, V]`."""
    size = logits.shape[0]
    num_top = max((spec.sampling.logprobs or 0 for spec in specs), default=0)
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    seeds, index = np.zeros((size, 2), np.uint32), np.zeros(size, np.int32)
    for row, spec in enumerate(specs):
        temperature[row], top_p[row] = spec.sampling.temperature, spec.sampling.top_p
        seeds[row], index[row] = seed_words(spec.seed), spec.index
    allowed = _allowed(specs, logits.shape)
    adjustments = batched([spec.adjustments for spec in specs], size, logits.shape[1])
    state = SamplingState(temperature, top_p, seeds, index, allowed, adjustments)  # pyright: ignore[reportArgumentType]
    out = sample_step(logits, state, num_top=_top_bucket(num_top))
    wanted = [row for row, spec in enumerate(specs) if spec.sampling.first_logits and spec.index == 0]
    kept = jax.device_get(logits).astype(np.float32) if wanted else None
    return [
        dataclasses.replace(token, logits=kept[row].copy()) if kept is not None and row in wanted else token
        for row, token in enumerate(_sampled(jax.device_get(out), specs))
    ]


def score_tokens(logits: jax.Array, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """Scores a given token for each of the first rows of `logits` `[B, V]`, with `num_top` likeliest ones."""
    padded = np.zeros(logits.shape[0], np.int32)
    padded[: len(token_ids)] = token_ids
    out = jax.device_get(score_step(logits, padded, num_top=_top_bucket(num_top)))  # pyright: ignore[reportArgumentType]
    found = []
    for row, token_id in enumerate(token_ids):
        top = zip(out.top_ids[row, :num_top].tolist(), out.top_logprobs[row, :num_top].tolist(), strict=True)
        found.append(SampledToken(int(token_id), float(out.logprobs[row]), tuple(top), int(out.ranks[row])))
    return found


def _allowed(specs: Sequence[SampleSpec], shape: tuple[int, ...]) -> np.ndarray | None:
    """The masks `[B, W]` of all rows; None, so that none is copied to the device, if every token of each is allowed."""
    if all(spec.mask is None for spec in specs):
        return None
    words = np.full((shape[0], -(-shape[1] // 32)), np.iinfo(np.uint32).max, np.uint32)
    for row, spec in enumerate(specs):
        if spec.mask is not None:
            words[row] = np.frombuffer(spec.mask(), np.uint32)
    return words


def _sampled(out: SampleOutput, specs: Sequence[SampleSpec]) -> list[SampledToken]:
    sampled = []
    for row, spec in enumerate(specs):
        count = spec.sampling.logprobs or 0
        top = zip(out.top_ids[row, :count].tolist(), out.top_logprobs[row, :count].tolist(), strict=True)
        sampled.append(SampledToken(int(out.token_ids[row]), float(out.logprobs[row]), tuple(top)))
    return sampled


def _top_bucket(num_top: int) -> int:
    """Pads the number of likeliest tokens to 0, 5 or 20 (OpenAI's maximum), the sizes that are compiled."""
    return next((size for size in (0, 5, 20) if num_top <= size), num_top)

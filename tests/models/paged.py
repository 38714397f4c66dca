"""Requests over one pool of pages, computed layer by layer as in an engine, and each of them alone.

Pages are allocated in random order and initialised with NaN, so that reading an unwritten slot gives NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.kernels.attention import attention
from ccjax.kernels.inputs import AttentionInputs, KVPages
from ccjax.kernels.rope import apply_rope
from ccjax.models.llama3 import LlamaConfig, Params, paged_steps
from ccjax.models.llama3.inputs import DecodeInputs, StepInputs, StepSettings
from ccjax.models.llama3.layers import finish_layer, own_mass, project_qkv, rope_frequencies
from ccjax.models.llama3.pages import read_slots
from ccjax.models.llama3.steps import embed_step, logits_step
from tests.data import data_path
from tests.engine.helpers import params_from_hf
from tests.oracles import random_llama, read_llama2c

T = 16
UNUSED = np.iinfo(np.int32).max


class Model(NamedTuple):
    """A model for the steps and for the oracle; `weights` and `raw` are the oracle's."""

    params: Params
    config: LlamaConfig
    weights: dict[str, np.ndarray]
    raw: dict[str, Any]


class Pool:
    """Pages of every layer, and the list of free pages."""

    def __init__(self, config: LlamaConfig, num_pages: int, seed: int = 0) -> None:
        shape = (config.num_kv_heads, num_pages, T, config.head_dim)
        empty = np.full(shape, np.nan, np.float32)
        self.layers = [KVPages(jnp.asarray(empty), jnp.asarray(empty)) for _ in range(config.num_layers)]
        self.free = list(np.random.default_rng(seed).permutation(num_pages))
        self.num_slots = num_pages * T

    def write(self, slots: np.ndarray, rows: Sequence[tuple[Any, Any]]) -> None:
        """Writes KV of some tokens, (k before RoPE, v) per layer, to slots."""
        for number, pair in enumerate(self.layers):
            pages = [np.array(part) for part in (pair.k, pair.v)]
            for part, new in zip(pages, rows[number], strict=True):
                part[:, slots // T, slots % T] = np.swapaxes(new, 0, 1)
            self.layers[number] = KVPages(jnp.asarray(pages[0]), jnp.asarray(pages[1]))


class Request:
    """A table of (page, length, start): pages of shared chunks, and the request's own."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.entries: list[tuple[int, int, int]] = []
        self._owns_last = False

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length, _ in self.entries)

    def share(self, slots: np.ndarray) -> None:
        """Appends the pages of a chunk, given by the slots of its tokens, to the table."""
        for first in range(0, len(slots), T):
            self.entries.append((int(slots[first]) // T, min(T, len(slots) - first), self.num_tokens))
        self._owns_last = False

    def extend(self, num_tokens: int) -> np.ndarray:
        """Allocates space for more tokens in the request's own pages; returns their slots."""
        before = self.num_tokens
        for position in range(before, before + num_tokens):
            page, length, start = self.entries[-1] if self._owns_last else (-1, T, 0)
            if length < T:
                self.entries[-1] = (page, length + 1, start)
            else:
                self.entries.append((int(self.pool.free.pop()), 1, position))
                self._owns_last = True
        return self.slots()[before:]

    def slots(self) -> np.ndarray:
        """The slot of every position."""
        parts = [page * T + np.arange(length) for page, length, _ in self.entries]
        return np.concatenate(parts).astype(np.int32)


class Work(NamedTuple):
    """The tokens of one request that a pack computes: ids at ascending positions, all already in its table."""

    request: Request
    token_ids: np.ndarray
    positions: np.ndarray


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LENGTHS = (37, 5, 64, 1, 90)
MODELS = "tiny", "scaled rope", "stories260K"


def load(name: str) -> Model:
    """One of `MODELS`: random models, and real weights if the test data has them."""
    if name == "stories260K":
        weights, raw = read_llama2c(data_path("weights_stories260K") / "stories260K.bin")
        return make(weights, raw | {"hidden_act": "silu"})
    changes = {} if name == "tiny" else {"rope_scaling": SCALING, "rope_theta": 5e5, "head_dim": 16}
    return make(*random_llama(3, **changes))


def make(weights: dict[str, np.ndarray], raw: dict[str, Any]) -> Model:
    config = LlamaConfig.from_hf(raw)
    return Model(params_from_hf(weights, config), config, weights, raw)


def draw(random: np.random.Generator, model: Model, length: int) -> np.ndarray:
    return random.integers(0, model.config.vocab_size, length).astype(np.int32)


def whole(pool: Pool, token_ids: np.ndarray) -> Work:
    """A whole prompt of a new request as work."""
    request = Request(pool)
    request.extend(len(token_ids))
    return Work(request, token_ids, np.arange(len(token_ids)))


def some_work(model: Model, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> tuple[Pool, list[Work]]:
    """A pool, and prompts of the given lengths in it."""
    random, pool = np.random.default_rng(seed), Pool(model.config, 40, seed)
    return pool, [whole(pool, draw(random, model, length)) for length in lengths]


@dataclasses.dataclass
class Pack:
    """The `StepInputs` that are not derived from others, on the host."""

    q_pos: np.ndarray
    q_slot: np.ndarray
    q_request: np.ndarray
    k_slot: np.ndarray
    k_pos: np.ndarray
    k_request: np.ndarray
    k_segment: np.ndarray

    def on_device(self, config: LlamaConfig) -> StepInputs:
        arrays = {field.name: jnp.asarray(getattr(self, field.name), jnp.int32) for field in dataclasses.fields(self)}
        turn = functools.partial(paged_steps.rotation_step, settings=StepSettings(config))
        rotations = {f"{side}_rotation": turn(arrays[f"{side}_pos"]) for side in ("q", "k")}
        return StepInputs(**arrays, **rotations, num_segments=40)


SEGMENT = 16
"""Tokens per segment in these tests; a request has at most eight segments, a pack at most five requests."""
ALONE = 128
"""Most tokens for `run_alone`."""


def pack(work: Sequence[Work], *, rows: int, slots: int) -> Pack:
    """Flattens the work, padded to `rows` computed tokens and `slots` context tokens."""
    none = work[0].request.pool.num_slots
    tables = [piece.request.slots() for piece in work]
    spare_rows, spare_slots = rows - sum(len(piece.positions) for piece in work), slots - sum(map(len, tables))

    def joined(parts: list[Any], size: int, fill: int | None) -> np.ndarray:
        parts = [np.asarray(part, np.int32) for part in parts]
        return np.concatenate([*parts, np.full(size, parts[-1][-1] if fill is None else fill, np.int32)])

    return Pack(
        q_pos=joined([piece.positions for piece in work], spare_rows, None),
        q_slot=joined([table[piece.positions] for table, piece in zip(tables, work, strict=True)], spare_rows, none),
        q_request=joined([[n] * len(piece.positions) for n, piece in enumerate(work)], spare_rows, None),
        k_slot=joined(tables, spare_slots, none),
        k_pos=joined([np.arange(len(table)) for table in tables], spare_slots, UNUSED),
        k_request=joined([[n] * len(table) for n, table in enumerate(tables)], spare_slots, None),
        k_segment=joined([8 * n + np.arange(len(table)) // SEGMENT for n, table in enumerate(tables)], spare_slots, -1),
    )


class Computed(NamedTuple):
    """Results of all computed rows: logits [n, V]; per layer k (before RoPE), v, mass [n, C] and self_mass [n]."""

    logits: np.ndarray
    layers: list[tuple[np.ndarray, ...]]


def run_packed(
    model: Model,
    pool: Pool,
    work: Sequence[Work],
    *,
    rows: int = 256,
    slots: int = 512,
    change: Callable[[Pack], None] | None = None,
    implementation: str | None = None,
) -> list[Computed]:
    """Computes all requests in one pack; returns the result of each. `change` may corrupt the pack."""
    packed = pack(work, rows=rows, slots=slots)
    token_ids = np.concatenate([piece.token_ids for piece in work]).astype(np.int32)
    x = embed_step(model.params, jnp.asarray(np.pad(token_ids, (0, rows - len(token_ids)))))
    if change is not None:
        change(packed)
    inputs, layers = packed.on_device(model.config), []
    settings = StepSettings(model.config, implementation)
    for number, layer in enumerate(model.params.layers):
        out = paged_steps.paged_layer_step(layer, x, pool.layers[number], inputs, settings=settings)
        x, pool.layers[number] = out.x, out.pages
        kv = (read_slots(part, inputs.q_slot) for part in (out.pages.k, out.pages.v))
        layers.append([np.asarray(part) for part in (*kv, out.mass, out.self_mass)])
    logits = np.asarray(logits_step(model.params, x, config=model.config))
    computed, first = [], 0
    for n, piece in enumerate(work):
        mine, own = slice(first, first + len(piece.positions)), slice(8 * n, 8 * n + 8)
        parts = [(k[mine], v[mine], mass[mine, own], self_mass[mine]) for k, v, mass, self_mass in layers]
        computed.append(Computed(logits[mine], parts))
        first += len(piece.positions)
    return computed


@functools.partial(jax.jit, static_argnames=("config", "num_segments"))
def dense_layer(layer, x, k_context, v_context, q_pos, q_slot, k_pos, k_segment, *, config, num_segments):
    """One layer over a context [S, K, H] of rotated keys: k before RoPE, v, mass and self mass of the rows."""
    q, k, v = project_qkv(x, layer, config.rms_norm_eps)
    frequencies, scale = rope_frequencies(config), config.head_dim**-0.5
    q, rotated = apply_rope(q, q_pos, frequencies), apply_rope(k, q_pos, frequencies)
    k_context = k_context.at[q_slot].set(rotated, mode="drop")
    v_context = v_context.at[q_slot].set(v, mode="drop")
    inputs = AttentionInputs(q_pos=q_pos, k_pos=k_pos, k_segment=k_segment, num_segments=num_segments)
    attended, mass, lse = attention(q, k_context, v_context, inputs, scale=scale)
    x = finish_layer(x, attended, layer, config.rms_norm_eps)
    return x, (k, v, mass.mean(1), own_mass(q, rotated, lse, scale))


def run_alone(
    model: Model,
    token_ids: Sequence[int],
    positions: np.ndarray | None = None,
    contexts: Sequence[tuple[Any, Any]] | None = None,
) -> Computed:
    """The result of one request with `dense_layer`: all of `token_ids`, or some positions over contexts [S, K, H] per
    layer with rotated keys."""
    config, num_tokens = model.config, len(token_ids)
    where = np.arange(num_tokens) if positions is None else positions
    # One size for all: earlier rows do not see the padding rows after the last one.
    q_pos = np.concatenate([where, np.full(ALONE - len(where), where[-1])]).astype(np.int32)
    q_slot = np.concatenate([where, np.full(ALONE - len(where), ALONE)]).astype(np.int32)
    x = embed_step(model.params, jnp.asarray(np.asarray(token_ids, np.int32)[q_pos]))
    every = jnp.arange(ALONE, dtype=jnp.int32)
    layers = []
    for number, layer in enumerate(model.params.layers):
        k, v = np.zeros((2, ALONE, config.num_kv_heads, config.head_dim), np.float32)
        if contexts is not None:
            k[:num_tokens], v[:num_tokens] = contexts[number]
        arguments = map(jnp.asarray, (k, v, q_pos, q_slot, every, every // SEGMENT))
        x, rows = dense_layer(layer, x, *arguments, config=config, num_segments=8)
        layers.append(tuple(np.asarray(part)[: len(where)] for part in rows))
    return Computed(np.asarray(logits_step(model.params, x, config=config))[: len(where)], layers)


def decode(
    model: Model,
    requests: Sequence[Request],
    token_ids: Sequence[int],
    *,
    batch: int,
    entries: int = 16,
    implementation: str | None = None,
    in_parts: bool = False,
) -> np.ndarray:
    """Logits [B, V] after one more token of every request, in a batch with padding rows. `in_parts`: in two calls."""
    pool = requests[0].pool
    pos, slot = np.zeros(batch, np.int32), np.full(batch, pool.num_slots, np.int32)
    tables = np.full((3, batch, entries), 10**6, np.int32)
    tables[1:] = 0
    for row, request in enumerate(requests):
        pos[row], slot[row] = request.num_tokens, request.extend(1)[0]
        tables[:, row, : len(request.entries)] = np.array(request.entries, np.int32).T
    page_table, page_length, page_start = map(jnp.asarray, tables)
    settings = StepSettings(model.config, implementation)
    rotation = paged_steps.rotation_step(page_start, settings=settings)
    inputs = DecodeInputs(page_table, page_length, rotation, q_pos=jnp.asarray(pos), q_slot=jnp.asarray(slot))
    x = jnp.asarray(np.pad(np.asarray(token_ids, np.int32), (0, batch - len(token_ids))))
    layers, pools, top = model.params.layers, pool.layers, model.params.replace(layers=())
    if in_parts:
        x, first = embed_step(top, x), len(layers) // 2
        parts = [(layers[:first], pools[:first]), (layers[first:], pools[first:])]
    else:
        parts = [(layers, pools)]
    pool.layers = []
    for some, pages in parts:
        out = paged_steps.paged_decode_step(some, None if in_parts else top, x, pages, inputs, settings=settings)
        x = out.x
        pool.layers += out.pages
    return np.asarray(logits_step(top, x, config=model.config) if in_parts else x)[: len(requests)]


def worst(got: Computed, wanted: Computed) -> float:
    """Largest absolute difference of all fields; NaN counts as infinite."""
    pairs = [(got.logits, wanted.logits)]
    for mine, other in zip(got.layers, wanted.layers, strict=True):
        pairs += zip(mine, other, strict=True)
    differences = [np.abs(part - other) for part, other in pairs]
    return float(max(np.where(np.isnan(difference), np.inf, difference).max() for difference in differences))

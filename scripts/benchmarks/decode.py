"""Decode: tokens per second of a running batch over a pool of pages, against one sequence after the other.

Steps are a server's: one layer step per layer, logits, a token for every row sampled on the device. Keys are stored
before RoPE and rotated as they are read (`rope-free`), or stored rotated (`rotated`), which only requests with the same
preceding text could share. Weights and contexts are random, so only time is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.cli.progress import bars
from ccjax.cli.values import positive_int
from ccjax.engine.device_model import DeviceModel
from ccjax.engine.pool import PAGE_TOKENS
from ccjax.evaluation.pages import show
from ccjax.models.llama3 import LlamaConfig, init_params
from ccjax.models.llama3.paged_steps import page_rotation_step, paged_decode_step
from ccjax.models.llama3.steps import embed_step, logits_step, sample_step
from scripts.benchmarks.common import environment, median, random_config, shapes_of

WAYS = ("one by one", "rope-free", "rotated")
_NUM_ALONE = 4
"""Number of sequences run one by one; it does not affect their tokens per second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--batch", type=positive_int, nargs="+", help="sequences in the batch (default 1 4 8 16 32)")
    parser.add_argument(
        "--context-tokens", type=positive_int, nargs="+", help="tokens before each answer (default 512 2048)"
    )
    parser.add_argument("--repetitions", type=positive_int, default=5, help="runs per case; the median counts")
    parser.add_argument("--steps", type=positive_int, default=4, help="tokens per sequence and run")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all ways in alternation and prints the table."""
    batches = arguments.batch or ([1, 4] if arguments.quick else [1, 4, 8, 16, 32])
    lengths = arguments.context_tokens or ([256] if arguments.quick else [512, 2048])
    repetitions = 2 if arguments.quick else arguments.repetitions
    config = random_config(is_quick=arguments.quick)
    model = DeviceModel(init_params(config, jax.random.key(0)), config)
    rows = []
    with bars() as progress:
        task = progress.add_task("compile, then measure", total=len(lengths) * len(batches) * (repetitions + 1))
        for length in lengths:
            pool = _Pool(config, max(batches), length + arguments.steps)
            tables = np.split(pool.tables, len(pool.tables))[:_NUM_ALONE]
            alone = [_DecodeBatch(model, pool, table, length, arguments.steps, rotates=True) for table in tables]
            for batch in batches:
                calls: dict[str, Callable[[], int]] = {
                    "one by one": _one_by_one(alone),
                    "rope-free": _DecodeBatch(
                        model, pool, pool.tables[:batch], length, arguments.steps, rotates=True
                    ).run,
                    "rotated": _DecodeBatch(
                        model, pool, pool.tables[:batch], length, arguments.steps, rotates=False
                    ).run,
                }
                seconds: dict[str, list[float]] = {way: [] for way in WAYS}
                for number in range(repetitions + 1):
                    for way in WAYS if number % 2 else reversed(WAYS):
                        started = time.perf_counter()
                        num_tokens = calls[way]()
                        seconds[way].append((time.perf_counter() - started) / num_tokens)
                    progress.advance(task)
                for way, runs_s in seconds.items():
                    runs_s = runs_s[1:]  # the first one compiles
                    figures = {"tokens_per_s": 1 / median(runs_s), "seconds_per_token": runs_s}
                    rows.append({"context_tokens": length, "batch": batch, "way": way, **figures})
    _print(rows)
    shapes = {**shapes_of(config), "steps": arguments.steps}
    return {"benchmark": "decode", **environment(), "shapes": shapes, "repetitions": repetitions, "cases": rows}


class _Pool:
    """Pages for the largest batch, with random KV, assigned in random order."""

    def __init__(self, config: LlamaConfig, batch: int, num_tokens: int) -> None:
        entries = -(-num_tokens // PAGE_TOKENS)
        shape = (config.num_kv_heads, batch * entries, PAGE_TOKENS, config.head_dim)
        self.layers = [
            tuple(jax.random.normal(jax.random.key(2 * n + part), shape) for part in range(2))
            for n in range(config.num_layers)
        ]
        self.tables = np.random.default_rng(0).permutation(batch * entries).astype(np.int32).reshape(batch, entries)


class _DecodeBatch:
    """Sequences of the same length that decode together."""

    def __init__(
        self, model: DeviceModel, pool: _Pool, table: np.ndarray, length: int, steps: int, *, rotates: bool
    ) -> None:
        """`table`: the pages of each sequence."""
        self._model, self._pool = model, pool
        self._length, self._steps, self._rotates = length, steps, rotates
        self._table = table
        batch = len(table)
        self._sampling = jnp.zeros(batch), jnp.ones(batch), jnp.zeros((batch, 2), jnp.uint32)

    def run(self) -> int:
        """Decodes the steps from the same context again; returns the number of sampled tokens."""
        batch, entries = self._table.shape
        starts = np.arange(entries, dtype=np.int32) * PAGE_TOKENS
        token_ids = jnp.ones(batch, jnp.int32)
        table = jnp.asarray(self._table)
        page_start = jnp.asarray(np.broadcast_to(starts, (batch, entries))) if self._rotates else None
        for position in range(self._length, self._length + self._steps):
            used = np.clip(position + 1 - starts, 0, PAGE_TOKENS).astype(np.int32)
            lengths = jnp.asarray(np.broadcast_to(used, (batch, entries)))
            slots = jnp.asarray(self._table[:, position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS)
            positions = jnp.full(batch, position, jnp.int32)
            x = embed_step(self._model.top, token_ids)
            rotation = None
            if page_start is not None:
                rotation = page_rotation_step(page_start, config=self._model.config, mesh=None)
            for number, layer in enumerate(self._model.params.layers):
                out = paged_decode_step(
                    layer,
                    x,
                    *self._pool.layers[number],
                    positions,
                    slots,
                    table,
                    lengths,
                    page_start,
                    rotation,
                    config=self._model.config,
                    implementation=None,
                    mesh=None,
                )
                x, self._pool.layers[number] = out.x, (out.k_pages, out.v_pages)
            logits = logits_step(self._model.top, x, config=self._model.config)
            token_ids = sample_step(logits, *self._sampling, positions, num_top=0).token_ids
            np.asarray(token_ids)  # a server reads every token before the next step
        return batch * self._steps


def _one_by_one(sequences: Sequence[_DecodeBatch]) -> Callable[[], int]:
    """The same steps for one sequence after the other."""
    return lambda: sum(sequence.run() for sequence in sequences)


def _print(rows: list[dict[str, Any]]) -> None:
    cells = []
    for first in range(0, len(rows), len(WAYS)):
        rates = {row["way"]: row["tokens_per_s"] for row in rows[first : first + len(WAYS)]}
        gain, cost = rates["rope-free"] / rates["one by one"], rates["rotated"] / rates["rope-free"]
        case = (str(rows[first]["context_tokens"]), str(rows[first]["batch"]))
        cells.append((*case, *(f"{rates[way]:.1f}" for way in WAYS), f"{gain:.2f}x", f"{cost:.2f}x"))
    show(("context", "batch", *WAYS, "rope-free / one by one", "rotated / rope-free"), cells, "tokens per second")

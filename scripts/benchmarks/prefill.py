"""Prefill: the model's steps over KV in place, for all of a prompt or part of it, compared with transformers.

Measures kernels and layers without planning, loading and capture, which `ttft` includes. A partial prefill computes
scattered tokens, including the last one, over the KV written by the full one, and must give the same logits.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.cli.progress import bars
from ccjax.cli.values import positive_int
from ccjax.engine import EngineConfig
from ccjax.evaluation.pages import show, text
from ccjax.models.llama3 import init_params
from ccjax.models.llama3.paged_steps import paged_layer_step, rotation_step
from ccjax.models.llama3.steps import embed_step, logits_step, select_step
from ccjax.runner.buckets import segment_bucket, slot_bucket, token_bucket
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.plan_rows import padded_to
from ccjax.runner.pool import PAGE_TOKENS
from scripts.benchmarks import transformers_peer
from scripts.benchmarks.common import BenchmarkError, environment, median, random_config, shapes_of

SHARES = (1.0, 0.15, 0.3)
_NUM_SEGMENTS = 10
_PIECE = EngineConfig().max_num_batched_tokens
_MOST_DIFFERENCE = 1e-3
"""Tolerance of logits, whose spread is 1: 16 layers over 2,048 tokens differed by 9e-6, and by 3e-2 with one token's KV
in place of another's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--context-tokens", type=positive_int, nargs="+", help="prompt lengths (default 2048)")
    parser.add_argument(
        "--repetitions", type=positive_int, default=5, help="rounds, in each of which every case runs once"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out even if it is installed")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases in alternation and prints the table.

    Raises:
      BenchmarkError: a partial prefill gave other logits than the full one.
    """
    lengths = arguments.context_tokens or ([512] if arguments.quick else [2048])
    repetitions = 2 if arguments.quick else arguments.repetitions
    config = random_config(is_quick=arguments.quick)
    model = DeviceModel(init_params(config, jax.random.key(0)), config)
    has_peer = transformers_peer.is_installed() and not arguments.no_peers
    peer = transformers_peer.full_prefill(config) if has_peer else None
    rows: list[dict[str, Any]] = []
    with bars() as progress:
        task = progress.add_task("compile, then measure", total=len(lengths) * (repetitions + 1))
        for length in lengths:
            prompt = TimedPrompt(model, length)
            seconds: dict[str, list[float]] = {f"{share:.0%}": [] for share in SHARES}
            if peer is not None:
                seconds["transformers"] = []
            for _ in range(repetitions + 1):
                for share in SHARES:
                    seconds[f"{share:.0%}"].append(prompt.measure(share))
                if peer is not None:
                    seconds["transformers"].append(peer(prompt.token_ids))
                progress.advance(task)
            # Ratios within a round, since shared machines change their speed within minutes.
            rounds = {name: np.asarray(runs_s[1:]) for name, runs_s in seconds.items()}
            for name, runs_s in rounds.items():
                figures = {"seconds": median(runs_s.tolist()), "runs_s": runs_s.tolist()}
                figures["of_full"] = median((runs_s / rounds["100%"]).tolist())
                if peer is not None:
                    figures["of_transformers"] = median((runs_s / rounds["transformers"]).tolist())
                rows.append({"context_tokens": length, "computed": name, **figures})
    _print(rows)
    shapes = {**shapes_of(config), "segments": _NUM_SEGMENTS}
    return {"benchmark": "prefill", **environment(), "shapes": shapes, "repetitions": repetitions, "cases": rows}


class TimedPrompt:
    """Random tokens, pages for their KV, and the logits of a full prefill.

    Attributes:
      token_ids: the prompt.
      pages: [K, P, T, H] of keys before RoPE and of values, for each layer.
    """

    def __init__(self, model: DeviceModel, length: int) -> None:
        self._model, self._length = model, length
        config = model.config
        self._random = np.random.default_rng(length)
        self.token_ids = self._random.integers(0, config.vocab_size, length).tolist()
        self._num_slots = -(-length // PAGE_TOKENS) * PAGE_TOKENS
        shape = (config.num_kv_heads, self._num_slots // PAGE_TOKENS, PAGE_TOKENS, config.head_dim)
        self.pages = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
        slots = np.arange(slot_bucket(length), dtype=np.int32)
        is_used = slots < length
        self._slots = jnp.asarray(np.where(is_used, slots, self._num_slots))
        self._k_pos = jnp.asarray(np.where(is_used, slots, np.iinfo(np.int32).max))
        self._k_segment = jnp.asarray(np.where(is_used, slots * _NUM_SEGMENTS // length, -1))
        self._logits: jax.Array | None = None

    def measure(self, share: float) -> float:
        """Seconds from token ids to the first token, with that share of the prompt computed (first of all 1).

        Raises:
          BenchmarkError: the logits are not those of the full prefill.
        """
        count = max(1, round(share * self._length))
        others = self._random.choice(self._length - 1, count - 1, replace=False)
        offsets = np.append(np.sort(others), self._length - 1).astype(np.int32)
        ids = np.asarray(self.token_ids, np.int32)[offsets]
        started = time.perf_counter()
        logits = self._prefill(ids, offsets)
        int(logits[0].argmax())
        seconds = time.perf_counter() - started
        if self._logits is None:
            self._logits = logits
        difference = float(jnp.abs(logits - self._logits).max())
        if not difference <= _MOST_DIFFERENCE:
            raise BenchmarkError(f"{share:.0%} computed: logits differ from those of a full prefill by {difference}")
        return seconds

    def _prefill(self, token_ids: np.ndarray, offsets: np.ndarray) -> jax.Array:
        """Logits [1, V] of the last token, computed piece by piece as the engine does."""
        model = self._model
        for first in range(0, len(offsets), _PIECE):
            piece = slice(first, first + _PIECE)
            x = self._run_layers(token_ids[piece], offsets[piece])
        last = np.asarray([(len(offsets) - 1) % _PIECE], np.int32)
        return logits_step(model.top, select_step(x, model.put(last)), config=model.config)

    def _run_layers(self, token_ids: np.ndarray, offsets: np.ndarray) -> jax.Array:
        model, num_rows = self._model, token_bucket(len(offsets))
        put = model.put
        q_pos = put(padded_to(offsets, num_rows, int(offsets[-1])))
        q_slot = put(padded_to(offsets, num_rows, self._num_slots))
        q_request, k_request = put(np.zeros(num_rows, np.int32)), put(np.zeros(len(self._slots), np.int32))
        q_rotation, k_rotation = (rotation_step(pos, config=model.config, mesh=None) for pos in (q_pos, self._k_pos))
        x = embed_step(model.top, put(padded_to(token_ids, num_rows, 0)))
        for number, layer in enumerate(model.params.layers):
            out = paged_layer_step(
                layer,
                x,
                *self.pages[number],
                q_pos,
                q_slot,
                q_request,
                self._slots,
                self._k_pos,
                k_request,
                self._k_segment,
                q_rotation,
                k_rotation,
                config=model.config,
                num_segments=segment_bucket(_NUM_SEGMENTS),
                implementation=model.implementation,
                mesh=None,
            )
            x, self.pages[number] = out.x, (out.k_pages, out.v_pages)
        return x


def _print(rows: list[dict[str, Any]]) -> None:
    cells = [
        (str(row["context_tokens"]), row["computed"], f"{row['seconds']:.3f}", f"{row['of_full']:.3f}")
        + (text(row.get("of_transformers"), ".3f"),)
        for row in rows
    ]
    show(("context", "computed", "seconds", "of full prefill", "of transformers"), cells)

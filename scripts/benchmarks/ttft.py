"""Time to first token: the default options on a real model; full prefill, reuse and Cache-Craft on random weights.

Compared with Hugging Face transformers and llama.cpp. Every ccjax case goes through the public engine: plan, load,
merge, compute, first token. The prompt is a system prompt, eight passages in a new order, and a question; only time is
measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any

import jax

from ccjax.cli.values import positive_int
from ccjax.engine import Engine, EngineConfig
from ccjax.evaluation.pages import show, text
from ccjax.loading.model import LoadedModel
from ccjax.models.llama3 import LlamaConfig, Params, init_params
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.buckets import slot_bucket
from ccjax.runner.warmup import compile_pack
from ccjax.types import ReuseMode
from scripts.benchmarks import transformers_peer, ttft_default
from scripts.benchmarks.common import (
    NUM_QUESTION,
    NUM_SYSTEM,
    environment,
    median,
    random_config,
    random_prompt,
    shapes_of,
    stages,
)

NUM_PASSAGES = 8
QUICK = {"repetitions": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    text = "prompt lengths (default 1024 2048 on the real model, 2048 4096 on random weights)"
    parser.add_argument("--context-tokens", type=positive_int, nargs="+", help=text)
    parser.add_argument("--repetitions", type=positive_int, default=5, help="runs per case; the median counts")
    parser.add_argument("--no-peers", action="store_true", help="without transformers and llama.cpp")


@dataclasses.dataclass
class TtftCase:
    """One column of the comparison, with its own engine."""

    engine: Engine
    reuse: ReuseMode
    description: dict[str, Any]
    runs_s: list[float] = dataclasses.field(default_factory=list)
    shares: list[float] = dataclasses.field(default_factory=list)

    def measure(self, segments: list[list[int]]) -> None:
        """Runs one prompt and records its time to first token."""
        response = self.engine.generate_from_tokens(segments, max_new_tokens=1, reuse=self.reuse)
        self.runs_s.append(response.ttft_s)
        self.shares.append(response.reuse.computed_share)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases in alternation and prints the table."""
    lengths = arguments.context_tokens or ([512] if arguments.quick else [2048, 4096])
    repetitions = arguments.repetitions
    config = random_config(is_quick=arguments.quick)
    params = init_params(config, jax.random.key(0))
    peer, _ = transformers_peer.peer(config, is_wanted=not arguments.no_peers)
    rows: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    with stages() as say:
        real = arguments.context_tokens or ([256] if arguments.quick else [1024, 2048])
        default_rows, default_peers, skipped = ttft_default.measure(arguments, real, say)
        for length in lengths:
            say(f"random weights, {length} tokens")
            prompts = _Prompts(config.vocab_size, length)
            cases = _cases(params, config, length, prompts.original())
            if not arguments.quick:  # it would take half of its minute
                _compile_packs(cases[0].engine, length)
            peer_s = []
            for _ in range(repetitions + 1):
                segments = prompts.shuffled()
                for case in cases:
                    case.measure(segments)
                if peer is not None:
                    peer_s.append(peer([token for segment in segments for token in segment]))
            for case in cases:
                case.engine.close()
                runs_s = case.runs_s[1:]  # the first run is not counted, for any case
                figures = {"ttft_s": median(runs_s), "runs_s": runs_s, "computed_share": median(case.shares[1:])}
                rows.append({"context_tokens": length, "model": "random", **case.description, **figures})
            if peer is not None:
                name = {"name": "transformers", "model": "random", "context_tokens": length}
                peers.append({**name, "ttft_s": median(peer_s[1:]), "runs_s": peer_s[1:]})
    rows, peers = [*default_rows, *rows], [*default_peers, *peers]
    _print(rows, peers, skipped)
    shapes = {"system_tokens": NUM_SYSTEM, "question_tokens": NUM_QUESTION, "passages": NUM_PASSAGES}
    figures = {"shapes": {**shapes_of(config), **shapes}, "cases": rows, "peers": peers, "skipped": skipped}
    return {"benchmark": "ttft", **environment(), **figures}


class _Prompts:
    """A prompt's segments, with the passages in changing order."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._random = random.Random(length)
        self.system, *self.passages, self.question = random_prompt(length, NUM_PASSAGES, vocab_size)

    def shuffled(self) -> list[list[int]]:
        """Segments with the first passage never in front, so that no passage is reused exactly."""
        order = self.passages[:]
        while order[0] is self.passages[0]:
            self._random.shuffle(order)
        return [self.system, *order, self.question]

    def original(self) -> list[list[int]]:
        """Segments in the order that fills the store."""
        return [self.system, *self.passages, self.question]


def _cases(params: Params, config: LlamaConfig, length: int, original: list[list[int]]) -> list[TtftCase]:
    """All ways to answer, each with the passages stored in their original order."""
    model = LoadedModel("random", config, params, None, None, frozenset(), "ttft")

    def case(strategy: str, ratio: float, reuse: Any, **settings: Any) -> TtftCase:
        # Space for the original variants and one answer's repaired ones, so that every prompt is repaired anew.
        limit = 2 * NUM_PASSAGES + 1
        engine = Engine(
            model, EngineConfig(strategy=strategy, max_model_len=length + 1, max_variants=limit, **settings)
        )
        if reuse != "off":
            engine.generate_from_tokens(original, max_new_tokens=1, reuse="exact")
        return TtftCase(engine, reuse, {"strategy": strategy, "ratio": ratio})

    cases = [case("full", 1.0, "off"), case("reuse", 0.0, "bounded")]
    for ratio in (0.15, 0.30):
        cases.append(case("cachecraft", ratio, "bounded", recompute_ratio=ratio))
        cases.append(case("cachecraft", ratio, "bounded", recompute_ratio=ratio, focus_window=None))
        cases[-2].description["focus"], cases[-1].description["focus"] = True, False
    return cases


def _compile_packs(engine: Engine, length: int) -> None:
    """Compiles every size, since the focus cut decides which sizes a prompt needs."""
    sizes = BatchSizes(length)
    for count, slots in sizes.packs():
        if slots == slot_bucket(length):
            compile_pack(engine._model, engine._pool, (count, slots, sizes.num_segments))


def _print(rows: list[dict[str, Any]], peers: list[dict[str, Any]], skipped: list[str]) -> None:
    # Nothing is reused from an empty store.
    is_full = lambda row: row["strategy"] == "full" or row.get("state") == "empty"  # noqa: E731
    full = {(row["model"], row["context_tokens"]): row["ttft_s"] for row in rows if is_full(row)}
    cells = [
        (
            row["model"],
            str(row["context_tokens"]),
            row.get("strategy") or row["name"],
            row.get("state", ""),
            text(row.get("ratio"), ".0%"),
            "" if "focus" not in row else "on" if row["focus"] else "off",
            text(row.get("computed_share"), ".1%"),
            f"{row['ttft_s']:.3f}",
            f"{full[row['model'], row['context_tokens']] / row['ttft_s']:.2f}x",
        )
        for row in (*rows, *peers)
    ]
    head = ("model", "context", "strategy", "store", "recompute", "focus cut", "computed", "TTFT s", "faster")
    show(head, cells, says=[f"SKIPPED {reason}" for reason in skipped])

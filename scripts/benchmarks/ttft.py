"""Time to first token: full prefill, naive reuse and Cache-Craft, and Hugging Face transformers, side by side.

Every ccjax case goes through the public engine: plan, load, merge, compute, first token. The prompt is a system prompt,
eight passages in an order that was never seen before, and a question; weights are random, so only time is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.benchmarks.common import environment, median

NUM_SYSTEM, NUM_QUESTION, NUM_PASSAGES = 32, 16, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--context-tokens", type=int, nargs="+", help="prompt lengths (default 2048 4096)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs per case, alternating; the median counts")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out even where it is installed")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases in alternation and prints the table."""
    import jax

    from models.llama3 import LlamaConfig, init_params

    lengths = arguments.context_tokens or ([512] if arguments.quick else [2048, 4096])
    repetitions = 2 if arguments.quick else arguments.repetitions
    layers, width = (2, 256) if arguments.quick else (16, 1024)
    config = LlamaConfig(32000, width, layers, 16, 4, width // 16, 2816 * width // 1024, 500000.0)
    params = init_params(config, jax.random.key(0))
    rows: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as store:
        task = progress.add_task("ttft", total=len(lengths) * (repetitions + 1))
        peer = None if arguments.no_peers or not _has_transformers() else _transformers(config)
        for length in lengths:
            cases = _cases(params, config, f"file://{store}", length)
            if peer is not None:
                cases["transformers"] = ({"name": "transformers"}, peer)
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            prompts = _Prompts(config.vocab_size, length)
            for repetition in range(repetitions + 1):
                segments = prompts.shuffled()
                for name, (_, measure) in cases.items():
                    taken = measure(segments)
                    if repetition > 0:  # the first round compiles
                        seconds[name].append(taken)
                progress.advance(task)
            for name, (description, _) in cases.items():
                row = {
                    "context_tokens": length,
                    **description,
                    "ttft_s": median(seconds[name]),
                    "runs_s": seconds[name],
                }
                (peers if name == "transformers" else rows).append(row)
    _print(rows, peers)
    shapes = {"layers": layers, "d_model": width, "heads": 16, "kv_heads": 4, "d_ff": config.d_ff, "dtype": "float32"}
    shapes |= {"system_tokens": NUM_SYSTEM, "question_tokens": NUM_QUESTION, "passages": NUM_PASSAGES}
    return {"benchmark": "ttft", **environment(), "shapes": shapes, "cases": rows, "peers": peers}


class _Prompts:
    """A prompt's segments, with the passages in ever new order."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._random = random.Random(length)
        draw = lambda count: [self._random.randrange(vocab_size) for _ in range(count)]  # noqa: E731
        left = length - NUM_SYSTEM - NUM_QUESTION
        sizes = [left // NUM_PASSAGES + (number < left % NUM_PASSAGES) for number in range(NUM_PASSAGES)]
        self.system, self.question = draw(NUM_SYSTEM), draw(NUM_QUESTION)
        self.passages = [draw(size) for size in sizes]

    def shuffled(self) -> list[list[int]]:
        """Segments with the first passage never in front, so that no passage is reused exactly."""
        order = self.passages[:]
        while order[0] is self.passages[0]:
            self._random.shuffle(order)
        return [self.system, *order, self.question]

    def original(self) -> list[list[int]]:
        """Segments in the order that fills the store."""
        return [self.system, *self.passages, self.question]


Measure = Callable[[list[list[int]]], float]


def _cases(params: Any, config: Any, store: str, length: int) -> dict[str, tuple[dict[str, Any], Measure]]:
    """Case name -> (its description, a function that runs one prompt and returns its TTFT)."""
    from ccjax.engine import Engine
    from ccjax.engine.config import EngineConfig
    from ccjax.engine.loading import LoadedModel

    model = LoadedModel("random", config, params, None, None, frozenset(), f"ttft-{length}")

    def engine(**settings: Any) -> Engine:
        return Engine(model, EngineConfig(store=store, max_model_len=length + 16, **settings))

    with engine() as filler:
        filler.generate_from_tokens(_Prompts(config.vocab_size, length).original(), max_new_tokens=1, reuse="exact")

    def measure(reader: Engine, reuse: Any) -> Measure:
        return lambda segments: reader.generate_from_tokens(segments, max_new_tokens=1, reuse=reuse).ttft_s

    cases: dict[str, tuple[dict[str, Any], Measure]] = {
        "full": ({"strategy": "full", "ratio": 1.0}, measure(engine(read_only=True), "off")),
        "reuse": (
            {"strategy": "reuse", "ratio": 0.0},
            measure(engine(read_only=True, strategy="reuse"), "bounded"),
        ),
    }
    for ratio in (0.15, 0.30):
        for focus in (True, False):
            reader = engine(read_only=True, recompute_ratio=ratio, **({} if focus else {"focus_window": None}))
            description = {"strategy": "cachecraft", "ratio": ratio, "focus": focus}
            cases[f"cachecraft {ratio} {focus}"] = (description, measure(reader, "bounded"))
    return cases


def _has_transformers() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def _transformers(config: Any) -> Measure:
    """Full prefill of the same shapes in Hugging Face transformers: sdpa attention, float32, all cores."""
    import os

    import torch
    from transformers import LlamaConfig as PeerConfig
    from transformers import LlamaForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    raw = {name: value for name, value in config.to_hf().items() if name not in ("architectures", "model_type")}
    peer_config = PeerConfig(**raw)
    peer_config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(peer_config).eval().float()

    def measure(segments: list[list[int]]) -> float:
        ids = torch.tensor([[token for segment in segments for token in segment]])
        started = time.perf_counter()
        with torch.inference_mode():
            int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - started

    return measure


def _print(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    full = {row["context_tokens"]: row["ttft_s"] for row in rows if row["strategy"] == "full"}
    table = Table("context", "strategy", "recompute", "focus cut", "TTFT s", "faster than full")
    for row in rows:
        length = row["context_tokens"]
        focus = "" if "focus" not in row else "on" if row["focus"] else "off"
        speedup = full[length] / row["ttft_s"]
        table.add_row(
            str(length), row["strategy"], f"{row['ratio']:.0%}", focus, f"{row['ttft_s']:.3f}", f"{speedup:.2f}x"
        )
    for row in peers:
        length = row["context_tokens"]
        speedup = full[length] / row["ttft_s"]
        table.add_row(str(length), row["name"], "", "", f"{row['ttft_s']:.3f}", f"{speedup:.2f}x")
    Console().print(table)

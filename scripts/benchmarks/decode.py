"""Decode: tokens per second of answers with the default options on a real model, one and eight requests at once.

llama.cpp is measured in the same process, also on all cores, with the model's file and with the same float32 weights.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ccjax.cli.values import positive_int
from ccjax.engine import Engine, Request, SamplingParams
from ccjax.evaluation.pages import show
from scripts.benchmarks import llama_cpp_peer
from scripts.benchmarks.common import environment, median, stages

MODEL = "smollm2"
QUICK = {"requests": [1, 2], "prompt_tokens": 8, "answer_tokens": 4, "repetitions": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--requests", type=positive_int, nargs="+", default=[1, 8], help="at once (%(default)s)")
    parser.add_argument("--prompt-tokens", type=positive_int, default=256, help="of each request (%(default)s)")
    parser.add_argument("--answer-tokens", type=positive_int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--repetitions", type=positive_int, default=3, help="runs per case; the median counts")
    parser.add_argument("--no-peers", action="store_true", help="without llama.cpp")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one way after the other, since an idle server of llama.cpp takes time from others; prints the table."""
    counts, repetitions = arguments.requests, arguments.repetitions
    prompt, answer = arguments.prompt_tokens, arguments.answer_tokens
    cases: list[dict[str, Any]] = []
    with stages() as say, tempfile.TemporaryDirectory() as folder:
        file, skipped = (None, []) if arguments.no_peers else llama_cpp_peer.file_of(MODEL)
        peers = {}
        if file is not None:
            float32 = llama_cpp_peer.in_float32(file, Path(folder) / "float32.gguf")
            peers = {"llama.cpp, float32": float32, "llama.cpp, the model's file": file}

        def measure(way: str, rate: Callable[[int, int, int], float]) -> None:
            for count in counts:
                say(f"{way}, {count} at once")
                runs = [rate(count, prompt, answer) for _ in range(repetitions + 1)][1:]  # the first one compiles
                about = {"way": way, "model": MODEL, "requests": count}
                cases.append({**about, "tokens_per_s": median(runs), "runs": runs})

        with Engine.from_pretrained(MODEL, read_only=True) as engine:
            measure("default", lambda *sizes: _rate(engine, *sizes))
        for name, path in peers.items():
            server = llama_cpp_peer.Server(path, max(counts), max(counts) * (prompt + answer + 16))
            measure(name, server.tokens_per_s)
            del server
    _print(cases, counts)
    for reason in skipped:
        print(f"skipped: {reason}")
    about = {"prompt_tokens": prompt, "answer_tokens": answer, "repetitions": repetitions, "skipped": skipped}
    return {"benchmark": "decode", **environment(), **about, "cases": cases}


def _rate(engine: Engine, count: int, num_prompt_tokens: int, num_answer_tokens: int) -> float:
    """Tokens per second of all answers while all of them are being decoded."""
    times: list[list[float]] = [[] for _ in range(count)]

    def ask(number: int) -> None:
        request = Request(
            segments=[[], llama_cpp_peer.prompt(number, num_prompt_tokens)],
            sampling=SamplingParams(num_answer_tokens, ignore_eos=True),
        )
        for delta in engine.stream(request):
            times[number] += [time.perf_counter()] * len(delta.token_ids)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(moments[0] for moments in times), min(moments[-1] for moments in times)
    return sum(begin < moment <= end for moments in times for moment in moments) / (end - begin)


def _print(cases: list[dict[str, Any]], counts: list[int]) -> None:
    rates = {(case["way"], case["requests"]): case["tokens_per_s"] for case in cases}
    rows = [
        (way, *(f"{rates[way, count]:.1f} ({rates[way, count] / rates['default', count]:.2f}x)" for count in counts))
        for way in dict.fromkeys(case["way"] for case in cases)
    ]
    show(("", *(f"{count} at once" for count in counts)), rows, f"tokens per second, {MODEL}")

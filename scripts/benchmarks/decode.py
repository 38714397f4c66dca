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

from ccjax.cli.progress import bars
from ccjax.cli.values import positive_int
from ccjax.engine import Engine, Request, SamplingParams
from ccjax.errors import ConfigError
from ccjax.evaluation.pages import show
from ccjax.loading.named import gguf_path
from scripts.benchmarks import llama_cpp_peer
from scripts.benchmarks.common import BenchmarkError, environment, median

MODEL = "smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--requests", type=positive_int, nargs="+", help="requests at once (default 1 8)")
    parser.add_argument("--prompt-tokens", type=positive_int, default=256, help="of each request (default 256)")
    parser.add_argument("--answer-tokens", type=positive_int, default=64, help="of each answer (default 64)")
    parser.add_argument("--repetitions", type=positive_int, default=3, help="runs per case; the median counts")
    parser.add_argument("--no-peers", action="store_true", help="without llama.cpp")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one way after the other, since an idle server of llama.cpp takes time from others; prints the table."""
    counts = arguments.requests or ([1, 2] if arguments.quick else [1, 8])
    repetitions = 1 if arguments.quick else arguments.repetitions
    prompt, answer = (8, 4) if arguments.quick else (arguments.prompt_tokens, arguments.answer_tokens)
    cases: list[dict[str, Any]] = []
    with bars() as progress, tempfile.TemporaryDirectory() as folder:
        peers, skipped = _peers(arguments, Path(folder))
        task = progress.add_task("", total=(1 + len(peers)) * len(counts) * (repetitions + 1))

        def measure(way: str, rate: Callable[[int, int, int], float]) -> None:
            progress.update(task, description=way)
            for count in counts:
                runs = []
                for _ in range(repetitions + 1):
                    runs.append(rate(count, prompt, answer))
                    progress.advance(task)
                runs = runs[1:]  # the first one compiles
                about = {"way": way, "model": MODEL, "requests": count}
                cases.append({**about, "tokens_per_s": median(runs), "runs": runs})

        try:
            engine = Engine.from_pretrained(MODEL, read_only=True)
        except ConfigError as error:
            raise BenchmarkError(str(error)) from error
        with engine:
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


def _peers(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Files for llama.cpp by name, and what is left out and why."""
    if arguments.no_peers:
        return {}, []
    if not llama_cpp_peer.has_package():
        return {}, ["llama.cpp: xllamacpp is not installed"]
    try:
        file = gguf_path(MODEL)
    except ConfigError:
        file = None
    if file is None:
        return {}, [f"llama.cpp: {MODEL} is no GGUF file"]
    float32 = llama_cpp_peer.in_float32(file, folder / "float32.gguf")
    return {"llama.cpp, float32": float32, "llama.cpp, the model's file": file}, []


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

"""Decode: tokens per second of answers with the default options, one and eight requests at once, free and by a JSON
schema, with weights in int8, and of llama.cpp.

Counted while all requests are being decoded. llama.cpp runs in the same process, on all cores, with the model's file
and with the same weights in float32 and in Q8_0. The ways run one after the other, since an idle server of llama.cpp
takes time from others: use a machine that is otherwise idle.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  model, dtype, prompt_tokens, answer_tokens, repetitions
  cases[]: `way` (default | default, JSON schema | int8 | llama.cpp, float32 | llama.cpp, Q8_0 | llama.cpp, the model's
    file), `requests` (at once), `tokens_per_s` (of all answers; median), `runs`
  skipped[]: what was left out, and why; empty with --no-peers
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ccjax.cli.values import positive_int
from ccjax.engine import Constraint, Engine, Request, SamplingParams
from ccjax.errors import ConfigError
from ccjax.evaluation.pages import show
from ccjax.loading.devices import with_dtype
from ccjax.loading.named import default_model
from ccjax.server.loading import load_engine
from scripts.benchmarks import peers
from scripts.benchmarks.common import environment, median, stages

ROW = {"name": {"type": "string", "minLength": 5}, "size": {"type": "number"}, "open": {"type": "boolean"}}
ROWS = {"type": "array", "minItems": 1000, "items": {"type": "object", "properties": ROW, "required": list(ROW)}}
"""A schema of answers that do not end."""
QUICK = {"requests": [1, 2], "prompt_tokens": 8, "answer_tokens": 4, "repetitions": 1}
_TRIES = 20
"""Runs for each one in which all answers are decoded at the same time: short answers may miss each other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--model", default=default_model(), help="as with ccjax serve (default: its default, %(default)s)")
    add("--requests", type=positive_int, nargs="+", default=[1, 8], help="at once (%(default)s)")
    add("--prompt-tokens", type=positive_int, default=256, help="of each request (%(default)s)")
    add("--answer-tokens", type=positive_int, default=64, help="of each answer (%(default)s)")
    add("--repetitions", type=positive_int, default=3, help="runs per case; the median counts (%(default)s)")
    add("--no-peers", action="store_true", help="without llama.cpp")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one way after the other and prints the table."""
    counts, repetitions = arguments.requests, arguments.repetitions
    prompt, answer = arguments.prompt_tokens, arguments.answer_tokens
    cases: list[dict[str, Any]] = []
    skipped: list[str] = []
    with stages() as say, tempfile.TemporaryDirectory() as folder:

        def measure(way: str, rate: Callable[[int, int, int], float]) -> None:
            for count in counts:
                say(f"{way}, {count} at once")
                overlapping = filter(None, (rate(count, prompt, answer) for _ in range(_TRIES * repetitions)))
                runs = [*itertools.islice(overlapping, repetitions + 1)][1:]  # the first one compiles
                if len(runs) < repetitions:
                    raise ConfigError(f"answer_tokens: wanted so many that {count} answers overlap, got {answer}")
                cases.append({"way": way, "requests": count, "tokens_per_s": median(runs), "runs": runs})

        with load_engine(arguments.model, {"read_only": True}) as engine:
            measure("default", lambda *sizes: _rate(engine, *sizes))
            measure("default, JSON schema", lambda *sizes: _rate(engine, *sizes, constraint=Constraint.json(ROWS)))
        with load_engine(arguments.model, {"read_only": True, "quantization": "int8"}) as narrow:
            measure("int8", lambda *sizes: _rate(narrow, *sizes))
        if not arguments.no_peers:
            file, reason = peers.gguf_file(arguments.model)
            skipped += [f"llama.cpp: {reason}"] if reason else []
            if file is not None:
                float32 = peers.converted(file, Path(folder) / "float32.gguf")
                eight = peers.converted(file, Path(folder) / "q8_0.gguf", "Q8_0")
                for way, path in (("float32", float32), ("Q8_0", eight), ("the model's file", file)):
                    server = peers.LlamaCpp(path, max(counts), max(counts) * (prompt + answer + 16))
                    measure(f"llama.cpp, {way}", server.tokens_per_s)
                    del server
    rates = {(case["way"], case["requests"]): case["tokens_per_s"] for case in cases}
    rows = [
        (way, *(f"{rates[way, count]:.1f} ({rates[way, count] / rates['default', count]:.2f}x)" for count in counts))
        for way in dict.fromkeys(case["way"] for case in cases)
    ]
    head = ("", *(f"{count} at once" for count in counts))
    show(head, rows, f"tokens per second, {arguments.model}", [f"SKIPPED {reason}" for reason in skipped])
    about = {"model": arguments.model, "dtype": with_dtype({})["dtype"], "prompt_tokens": prompt}
    about |= {"answer_tokens": answer, "repetitions": repetitions}
    return {"benchmark": "decode", **environment(), **about, "cases": cases, "skipped": skipped}


def _rate(
    engine: Engine, count: int, num_prompt_tokens: int, num_answer_tokens: int, constraint: Constraint | None = None
) -> float:
    """Tokens per second of all answers while all of them are being decoded."""
    times: list[list[float]] = [[] for _ in range(count)]
    sampling = SamplingParams(num_answer_tokens, ignore_eos=constraint is None, constraint=constraint)

    def ask(number: int) -> None:
        request = Request(segments=[[], peers.prompt(number, num_prompt_tokens)], sampling=sampling)
        for delta in engine.stream(request):
            times[number] += [time.perf_counter()] * len(delta.token_ids)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return overlapping_rate(times)


def overlapping_rate(times: list[list[float]]) -> float:
    """Tokens per second between the last answer's first token and the first answer's last one; 0 if that comes first.

    Args:
      times: of each token of each answer.
    """
    begin, end = max(moments[0] for moments in times), min(moments[-1] for moments in times)
    if begin >= end:
        return 0.0
    return sum(begin < moment <= end for moments in times for moment in moments) / (end - begin)

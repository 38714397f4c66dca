"""Short prompts beside a stream of long ones, and /health beside a large body: `bench.py serve --mixed`."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ccjax.evaluation.pages import show, text
from scripts.benchmarks.client import Body, RequestRecord, chat, check_answered, closed_loop, open_loop, ttft_s
from scripts.benchmarks.common import BenchmarkError

LONG_TOKENS, SHORT_TOKENS = 6000, 300
NUM_SHORT, INTERVAL_S = 24, 5.0
QUICK_SHORT, QUICK_INTERVAL_S = 6, 0.5
BODY_BYTES = 9_900_000
_HEALTH_EVERY_S = 0.05
_LEFT_TOKENS = 100
"""For the template and the answer, and because no two prompts of as many words have as many tokens."""


def measure(url: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The figures of a running server; keys as in `serve`.

    Raises:
      BenchmarkError: a request failed.
    """
    words = _words_a_token(url)
    longest = _get(url, "/v1/models")["data"][0]["max_model_len"] - options.max_tokens - _LEFT_TOKENS
    short, long = (min(size, longest) for size in (SHORT_TOKENS - _LEFT_TOKENS, LONG_TOKENS))
    count, interval_s = (QUICK_SHORT, QUICK_INTERVAL_S) if options.quick else (NUM_SHORT, INTERVAL_S)
    times_s = [number * interval_s for number in range(count)]
    draw = random.Random(0)

    def prompts(tokens: int) -> Iterator[Body]:
        while True:
            yield chat(_text(draw, round(tokens * words)), [], options.max_tokens, retrieval=False)

    shorts, longs = prompts(short), prompts(long)
    check_answered(closed_loop(url, [next(shorts), next(longs)] * 2, 1, options.timeout_s))
    say("short prompts alone")
    found = {"short alone": open_loop(url, [next(shorts) for _ in times_s], times_s, options.timeout_s)}
    with ThreadPoolExecutor(1) as pool:
        say("long prompts alone")
        waiting: Future[Any] = pool.submit(time.sleep, times_s[-1] + interval_s)
        found["long alone"] = _stream(url, longs, waiting, options.timeout_s)
        say("both")
        asking = pool.submit(open_loop, url, [next(shorts) for _ in times_s], times_s, options.timeout_s)
        found["long beside short"] = _stream(url, longs, asking, options.timeout_s)
        found["short beside long"] = asking.result()
        say("/health beside a large body")
        idle = _health(url, pool.submit(time.sleep, 2.0))
        refused: Future[int] = pool.submit(_post_large, url, options.timeout_s)
        beside = _health(url, refused)
    for records in found.values():
        check_answered(records)
    cases = [{"prompts": name, **_figures(records)} for name, records in found.items()]
    for case in cases:
        alone = next(other for other in cases if other["prompts"] == f"{case['prompts'].split()[0]} alone")
        case["of_alone"] = case["ttft_p95_ms"] / alone["ttft_p95_ms"]
    health = {"idle_max_ms": 1e3 * max(idle), "beside_max_ms": 1e3 * max(beside), "status": refused.result()}
    _print(cases, health)
    return {"cases": cases, "health": health, "interval_s": interval_s}


def _stream(url: str, bodies: Iterator[Body], until: Future[Any], timeout_s: float) -> list[RequestRecord]:
    """Sends one request after another until a future is done."""
    records = []
    while not records or not until.done():
        records += closed_loop(url, [next(bodies)], 1, timeout_s)
    return records


def _figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    times_ms = [1e3 * ttft_s(record) for record in records]
    p50, p95 = np.percentile(times_ms, (50, 95)).tolist()
    tokens = float(np.median([record.prompt_tokens for record in records]))
    return {"requests": len(records), "prompt_tokens": tokens, "ttft_p50_ms": p50, "ttft_p95_ms": p95}


def _health(url: str, until: Future[Any]) -> list[float]:
    """Seconds of each answer of /health until a future is done."""
    found = []
    while not found or not until.done():
        begun_s = time.perf_counter()
        _get(url, "/health")
        found.append(time.perf_counter() - begun_s)
        time.sleep(_HEALTH_EVERY_S)
    return found


def _post_large(url: str, timeout_s: float) -> int:
    """The status of a chat that no context holds; the server's limit on bodies is higher."""
    body = json.dumps(chat("word " * (BODY_BYTES // 5), [], 1, stream=False, stream_options=None, truncate=False))
    return _call(url, "POST", "/v1/chat/completions", body, timeout_s)[0]


def _words_a_token(url: str) -> float:
    words = 500
    body = json.dumps({"prompt": _text(random.Random(1), words)})
    return words / len(json.loads(_call(url, "POST", "/tokenize", body, 60.0)[1])["tokens"])


def _text(draw: random.Random, num_words: int) -> str:
    """Words that nobody asked for before."""
    known = (
        "the harbour has boats and a market where every morning bread fish and stories are sold to travellers".split()
    )
    return " ".join(draw.choice(known) for _ in range(num_words))


def _get(url: str, path: str) -> Any:
    status, data = _call(url, "GET", path, None, 60.0)
    if status != 200:
        raise BenchmarkError(f"{path}: wanted status 200, got {status}")
    return json.loads(data)


def _call(url: str, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _print(cases: Sequence[dict[str, Any]], health: dict[str, Any]) -> None:
    numbers = (("requests", ".0f"), ("prompt_tokens", ".0f"), ("ttft_p50_ms", ".0f"), ("ttft_p95_ms", ".0f"))
    rows = [
        (case["prompts"], *(text(case[key], how) for key, how in numbers), f"{case['of_alone']:.2f}") for case in cases
    ]
    head = ("prompts", "requests", "tokens", "TTFT p50 ms", "TTFT p95 ms", "of alone")
    show(head, rows, "short prompts beside a stream of long ones")
    slowest = [text(health[key], ".0f") for key in ("idle_max_ms", "beside_max_ms")]
    body = f"{BODY_BYTES / 1e6:.1f} MB, status {health['status']}"
    show(("slowest /health ms, idle", f"beside a body of {body}"), [tuple(slowest)], "/health")

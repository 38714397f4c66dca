"""A server process, load on it through its socket, and the figures of a run; shared by benchmarks of servers.

While an answer streams, only times and raw bytes are kept; events are parsed when it is over.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from scripts.benchmarks.common import BenchmarkError, spread

Body = Mapping[str, Any]
Counters = Mapping[str, float]
"""Sample name -> value of a server's /metrics, labels summed up."""
_ROOT = Path(__file__).resolve().parents[2]
_READY_S = 3600.0
"""Compiling every size for the first time takes minutes, on a busy machine many."""
_END_S = 60.0
_IDLE_WORK = ("ccjax_sizes_to_compile", "ccjax_passages_to_prepare")


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """Runs `ccjax serve` on a free port; yields its URL once it is ready, and ends it afterwards.

    Raises:
      BenchmarkError: it did not start; the message ends with its last output.
    """
    command = [sys.executable, str(_ROOT / "scripts/serve.py"), *flags, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        limit = threading.Timer(_READY_S, process.kill)
        limit.start()
        try:
            found = re.search(r"http://[^\s]+:\d+", process.stdout.readline())
            limit.cancel()
            if found is None:
                log.seek(0)
                words = log.read().strip().splitlines()[-5:]
                raise BenchmarkError("the server did not start: " + (" | ".join(words) or "no output"))
            yield found[0]
        finally:
            limit.cancel()
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def scrape(url: str) -> Counters:
    """The samples of /metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60.0)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    values: dict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
    return dict(values)


def wait_for_idle_time(url: str, longest_s: float) -> None:
    """Waits until idle time has compiled all sizes and prepared the passages of all requests, `longest_s` at most."""
    until = time.monotonic() + longest_s
    while time.monotonic() < until and any(map(scrape(url).get, _IDLE_WORK)):
        time.sleep(1.0)


@dataclasses.dataclass
class RequestRecord:
    """One request. Times are seconds since the run began.

    Attributes:
      scheduled_s: planned time to send it; latencies count from here, since a late client would flatter the server.
      text_s: when each piece of the answer's text arrived: one event of the stream, seldom none or several tokens. For
        a complete answer without text (all its tokens were control tokens, or parts of characters), when it ended.
      end_s: when the answer ended, completely or not.
      status: "ok" only for a complete answer; "refused" is 429.
      error: the reason if it is not "ok".
      computed_tokens: prompt tokens that ran through the model, as reported by the server (its share of token-layers
        times `prompt_tokens`), or None.
    """

    scheduled_s: float
    sent_s: float
    text_s: list[float] = dataclasses.field(default_factory=list)
    end_s: float = 0.0
    status: Literal["ok", "refused", "failed"] = "failed"
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: float | None = None
    cached_tokens: int = 0
    reuse: Mapping[str, Any] | None = None
    text: str = ""


def chat(question: str, documents: Sequence[Body], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a streamed chat with exactly `max_tokens` tokens of answer."""
    body = {"messages": [{"role": "user", "content": question}], "documents": list(documents), "max_tokens": max_tokens}
    body |= {"ignore_eos": True, "temperature": 0, "truncate": True, "stream": True}
    return {**body, "stream_options": {"include_usage": True}, **more}


def poisson_times(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrivals of a Poisson process of `rate` a second; another rate stretches the same arrivals."""
    draw, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(1.0)
        times.append(at / rate)
    return times


def open_loop(url: str, bodies: Sequence[Body], times_s: Sequence[float], timeout_s: float) -> list[RequestRecord]:
    """Sends each body at its time, whether or not others were answered; returns when all answers are over."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = []
        for at, body in zip(times_s, bodies, strict=True):
            time.sleep(max(0.0, at - (time.perf_counter() - start)))
            asked.append(pool.submit(_ask, url, body, start, at, timeout_s))
        return [record.result() for record in asked]


def closed_loop(url: str, bodies: Sequence[Body], concurrency: int, timeout_s: float) -> list[RequestRecord]:
    """Keeps `concurrency` requests in progress until all are answered."""
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: _ask(url, body, start, None, timeout_s), bodies))


def _ask(url: str, body: Body, start: float, scheduled_s: float | None, timeout_s: float) -> RequestRecord:
    """Sends a request; planned for now if `scheduled_s` is None."""
    sent_s = time.perf_counter() - start
    record = RequestRecord(sent_s if scheduled_s is None else scheduled_s, sent_s)
    arrived: list[tuple[float, bytes]] = []
    status = 0
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status = response.status
        while part := response.read1():
            arrived.append((time.perf_counter() - start, part))
    except (OSError, http.client.HTTPException) as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    record.end_s = time.perf_counter() - start
    if status == 200:
        read_stream(record, arrived, body["max_tokens"])
    elif status:
        record.status = "refused" if status == 429 else "failed"
        record.error = f"HTTP {status}: {b''.join(part for _, part in arrived)[:200].decode(errors='replace')}"
    return record


def read_stream(record: RequestRecord, arrived: Sequence[tuple[float, bytes]], max_tokens: int) -> None:
    """Fills a record from what arrived when; it is "ok" if the stream was complete and the answer has that length."""
    is_done, rest = False, b""
    events: list[tuple[float, bytes]] = []
    for at, part in arrived:  # the time of an event is that of its last byte
        *whole, rest = (rest + part).split(b"\n\n")
        events += [(at, event.removeprefix(b"data: ")) for event in whole if event.startswith(b"data: ")]
    for at, data in events:
        if data == b"[DONE]":
            is_done = True
            continue
        value = json.loads(data)
        if "error" in value:
            record.error = record.error or str(value["error"].get("message", value["error"]))
        pieces = [choice.get("delta", {}).get("content") for choice in value.get("choices", ())]
        record.text_s += [at for piece in pieces if piece]
        record.text += "".join(piece for piece in pieces if piece)
        if value.get("usage"):
            record.prompt_tokens = value["usage"]["prompt_tokens"]
            record.completion_tokens = value["usage"]["completion_tokens"]
            record.cached_tokens = (value["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if value.get("reuse"):
            record.reuse = value["reuse"]
            record.computed_tokens = value["reuse"]["computed_share"] * value["reuse"]["prompt_tokens"]
    if record.error is None and not is_done:
        record.error = "the stream ended early"
    if record.error is None and record.completion_tokens != max_tokens:
        record.error = f"wanted {max_tokens} tokens of answer, got {record.completion_tokens}"
    if record.error is None:
        record.status, record.text_s = "ok", record.text_s or [record.end_s]


def check_answered(records: Sequence[RequestRecord]) -> None:
    """Raises BenchmarkError unless every answer is complete."""
    failed = [record for record in records if record.status != "ok"]
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(records)} requests failed, the first: {failed[0].error}")


def ttft_s(record: RequestRecord) -> float:
    """Seconds to the first text, from the planned time to send the request."""
    return record.text_s[0] - record.scheduled_s


def figures(records: Sequence[RequestRecord], slo_s: float, before: Counters, after: Counters) -> dict[str, Any]:
    """All figures of one run (keys: `serve`); except for `refused` and `failed`, only complete answers count.

    Args:
      slo_s: bound on TTFT; goodput counts the answers within it.
      before, after: /metrics around the run.
    """
    good = [record for record in records if record.status == "ok"]
    duration_s = max(record.end_s for record in records) - min(record.scheduled_s for record in records)
    ttfts = [ttft_s(record) for record in good]
    # A growing queue makes TTFT grow, so a long enough run exceeds the bound: at a rate r above the capacity c after
    # about slo_s / (1/c - 1/r) requests.
    found = spread(ttfts)
    is_bounded = len(good) == len(records) and found["p99"] is not None and found["p99"] <= slo_s * 1e3
    longer = [record for record in good if record.completion_tokens > 1]
    known = [record for record in good if record.computed_tokens is not None]
    prompt_tokens = sum(record.prompt_tokens for record in known)
    compilations = "ccjax_compilations_total"
    return {
        "completed": len(good),
        "refused": sum(record.status == "refused" for record in records),
        "failed": sum(record.status == "failed" for record in records),
        "errors": sorted({record.error for record in records if record.error})[:5],
        "duration_s": duration_s,
        "request_throughput": len(good) / duration_s,
        "output_throughput": sum(record.completion_tokens for record in good) / duration_s,
        "request_goodput": sum(value <= slo_s for value in ttfts) / duration_s,
        "bounded": is_bounded,
        "ttft_ms": found,
        "tpot_ms": spread([(r.text_s[-1] - r.text_s[0]) / (r.completion_tokens - 1) for r in longer]),
        "itl_ms": spread([b - a for record in good for a, b in zip(record.text_s, record.text_s[1:], strict=False)]),
        "e2el_ms": spread([record.end_s - record.scheduled_s for record in good]),
        "computed_share": sum(r.computed_tokens or 0.0 for r in known) / prompt_tokens if prompt_tokens else None,
        "send_lag_ms": spread([record.sent_s - record.scheduled_s for record in records]),
        "compilations": after.get(compilations, 0.0) - before.get(compilations, 0.0),
        "rss_bytes": after.get("process_resident_memory_bytes"),
    }

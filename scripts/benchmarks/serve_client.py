"""Load generator for an OpenAI-compatible server: open or closed loop, with the times of streamed answers.

While answers stream, only times and raw bytes are kept; events are parsed when an answer is over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import httpx

Status = Literal["ok", "refused", "failed"]
_EVENT_END = b"\n\n"
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # bytes are read as they come


@dataclasses.dataclass
class RequestRecord:
    """One request. Times are seconds since the run began.

    Attributes:
      number: of its body in the run.
      scheduled_s: planned time to send it; latencies count from here, since a late client would flatter the server.
      sent_s: when it was sent.
      text_s: when each piece of the answer's text arrived: one event of the stream, seldom none or several tokens. For
        a complete answer without text (all its tokens were control tokens, or parts of characters), when it ended.
      end_s: when the answer ended, completely or not.
      status: "ok" only for a complete answer; "refused" is 429.
      error: the reason if it is not "ok".
      computed_tokens: prompt tokens that ran through the model, as reported by the server (its share of token-layers
        times `prompt_tokens`), or None.
    """

    number: int
    scheduled_s: float
    sent_s: float
    text_s: list[float] = dataclasses.field(default_factory=list)
    end_s: float = 0.0
    status: Status = "failed"
    error: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: float | None = None


def open_loop(
    url: str, bodies: Sequence[dict[str, Any]], times_s: Sequence[float], timeout_s: float
) -> list[RequestRecord]:
    """Sends each body at its time, whether or not others were answered; returns when all answers are over."""

    async def run(client: httpx.AsyncClient) -> list[RequestRecord]:
        contents = [json.dumps(body).encode() for body in bodies]
        start = time.perf_counter()
        tasks = []
        for number, at in enumerate(times_s):
            await asyncio.sleep(at - (time.perf_counter() - start))
            record = RequestRecord(number, at, time.perf_counter() - start)
            answer = _ask(client, record, contents[number], bodies[number]["max_tokens"], start, timeout_s)
            tasks.append(asyncio.create_task(answer))
        return list(await asyncio.gather(*tasks))

    return asyncio.run(_with_client(url, run))


def closed_loop(
    url: str, bodies: Iterable[dict[str, Any]], concurrency: int, timeout_s: float, *, stop_after_s: float = math.inf
) -> list[RequestRecord]:
    """Keeps `concurrency` requests in progress; none is started `stop_after_s` seconds after the first."""

    async def run(client: httpx.AsyncClient) -> list[RequestRecord]:
        start = time.perf_counter()
        records: list[RequestRecord] = []
        waiting = enumerate(bodies)

        async def work() -> None:
            for number, body in waiting:
                now = time.perf_counter() - start
                if now >= stop_after_s:
                    return
                record = RequestRecord(number, now, now)
                content = json.dumps(body).encode()
                records.append(await _ask(client, record, content, body["max_tokens"], start, timeout_s))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return records

    return asyncio.run(_with_client(url, run))


async def _with_client(url: str, run: Any) -> list[RequestRecord]:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False) as client:
        return await run(client)


async def _ask(
    client: httpx.AsyncClient, record: RequestRecord, content: bytes, max_tokens: int, start: float, timeout_s: float
) -> RequestRecord:
    """Sends a request and fills its `record`."""
    import httpx

    arrived: list[tuple[float, bytes]] = []
    status_code = 0
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", "/v1/chat/completions", content=content, headers=_HEADERS) as response,
        ):
            status_code = response.status_code
            async for part in response.aiter_raw():
                arrived.append((time.perf_counter() - start, part))
    except (httpx.HTTPError, TimeoutError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end_s = time.perf_counter() - start
    if status_code == 200:
        _read_stream(record, arrived, max_tokens)
    elif status_code:
        record.status = "refused" if status_code == 429 else "failed"
        record.error = f"HTTP {status_code}: {b''.join(part for _, part in arrived)[:200].decode(errors='replace')}"
    return record


def _read_stream(record: RequestRecord, arrived: Sequence[tuple[float, bytes]], max_tokens: int) -> None:
    """Fills a record from its events; it is "ok" if the stream was complete and the answer has the requested length."""
    is_done = False
    texts = []
    for at, data in _events(arrived):
        if data == "[DONE]":
            is_done = True
            continue
        value = json.loads(data)
        if "error" in value:
            record.error = record.error or str(value["error"].get("message", value["error"]))
        for choice in value.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                texts.append(text)
                record.text_s.append(at)
        if value.get("usage"):
            record.prompt_tokens = value["usage"]["prompt_tokens"]
            record.completion_tokens = value["usage"]["completion_tokens"]
        if value.get("reuse"):
            record.computed_tokens = value["reuse"]["computed_share"] * value["reuse"]["prompt_tokens"]
    record.text = "".join(texts)
    if record.error is None and not is_done:
        record.error = "the stream ended early"
    if record.error is None and record.completion_tokens != max_tokens:
        record.error = f"wanted {max_tokens} tokens of answer, got {record.completion_tokens}"
    if record.error is None:
        record.status = "ok"
        record.text_s = record.text_s or [record.end_s]


def _events(arrived: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """(time, data) of each server-sent event, at the time when its last byte arrived."""
    rest = b""
    for at, part in arrived:
        *whole, rest = (rest + part).split(_EVENT_END)
        for event in whole:
            if event.startswith(b"data: "):
                yield at, event[len(b"data: ") :].decode()

"""The load generator: when it sends what, what it measures, what it counts as a failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import types
from typing import Any

import httpx
import pytest

from scripts.benchmarks import serve_client
from scripts.benchmarks.serve_client import RequestRecord, closed_loop, open_loop
from scripts.benchmarks.serve_figures import itl_s, ttft_s

TIMEOUT_S = 60.0
BODY = {"max_tokens": 3}


class Answering:
    """Stands for requests over HTTP: none is answered before `until` of them are in progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int) -> None:
        self.until, self.most, self.num_open = until, 0, 0
        monkeypatch.setattr(serve_client, "_ask", self.ask)

    async def ask(self, client: Any, record: RequestRecord, content: bytes, *how: Any) -> RequestRecord:
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        while self.most < self.until:
            await asyncio.sleep(0.001)
        self.num_open -= 1
        record.status = "ok"
        return record


def test_the_open_loop_does_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies count from the planned time: a client that is late, as for the first request here, must not hide it."""
    server = Answering(monkeypatch, until=12)
    times = [-5.0, *(0.01 * number for number in range(11))]
    records = open_loop("http://server", [BODY] * 12, times, TIMEOUT_S)
    assert server.most == 12 and [record.scheduled_s for record in records] == times
    assert all(record.sent_s >= max(0.0, at) - 1e-6 for record, at in zip(records, times, strict=True))
    records[0].text_s = [records[0].sent_s + 0.1]
    assert ttft_s(records[0]) >= 5.1


def test_closed_loop_keeps_the_set_number_of_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Answering(monkeypatch, until=3)
    records = closed_loop("http://server", [BODY] * 9, 3, TIMEOUT_S)
    assert server.most == 3 and sorted(record.number for record in records) == list(range(9))
    assert all(record.scheduled_s == record.sent_s for record in records)
    clock = itertools.count()
    monkeypatch.setattr(serve_client, "time", types.SimpleNamespace(perf_counter=lambda: 0.01 * next(clock)))
    records = closed_loop("http://server", itertools.repeat(BODY), 2, TIMEOUT_S, stop_after_s=0.5)
    assert len(records) > 2 and max(record.sent_s for record in records) < 0.5
    assert all(record.status == "ok" for record in records), "what is under way is finished"


def event(value: Any) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
TEXT = event({"choices": [{"delta": {"content": "ab"}}]})
REUSE = {"computed_share": 0.25, "prompt_tokens": 40}
DONE = event("[DONE]")


def usage(num_tokens: int = 3) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": num_tokens}, "reuse": REUSE})


def asked(parts: list[bytes], status: int = 200, error: Exception | None = None) -> RequestRecord:
    """The record of one request, each part of whose answer comes a second after the other."""

    class Parts(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            for part in parts:
                now_s[0] += 1.0
                yield part
            if error is not None:
                raise error

    async def ask() -> RequestRecord:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Parts()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await serve_client._ask(client, RequestRecord(0, 0.5, 0.5), b"{}", 3, 0.0, TIMEOUT_S)

    now_s = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_client, "time", types.SimpleNamespace(perf_counter=lambda: now_s[0]))
        return asyncio.run(ask())


def test_times_are_those_of_each_events_last_byte() -> None:
    """The role comes first and does not count."""
    record = asked([ROLE, TEXT[:9], TEXT[9:] + TEXT, usage(), DONE])
    assert (record.status, record.error, record.text, record.text_s) == ("ok", None, "abab", [3.0, 3.0])
    assert (ttft_s(record), itl_s(record), record.end_s) == (2.5, [0.0], 5.0)
    assert (record.prompt_tokens, record.completion_tokens, record.computed_tokens) == (40, 3, 10.0)
    mute = asked([ROLE, usage(), DONE])  # as many tokens as asked for, none of them visible
    assert (mute.status, mute.text, mute.text_s) == ("ok", "", [3.0])


@pytest.mark.parametrize(
    ("parts", "how", "status", "error"),
    [
        ([b"busy"], {"status": 429}, "refused", "HTTP 429: busy"),
        ([b"no"], {"status": 500}, "failed", "HTTP 500: no"),
        ([TEXT], {"error": httpx.RemoteProtocolError("cut")}, "failed", "RemoteProtocolError"),
        ([TEXT, usage()], {}, "failed", "ended early"),
        ([TEXT, event({"error": {"message": "the server failed"}}), usage(), DONE], {}, "failed", "the server failed"),
        ([TEXT, usage(2), DONE], {}, "failed", "wanted 3 tokens of answer, got 2"),
    ],
)
def test_only_a_complete_answer_counts_as_success(parts: list, how: dict, status: str, error: str) -> None:
    record = asked(parts, **how)
    assert record.status == status and error in (record.error or "")


def test_unreachable_server_is_a_failure() -> None:
    (record,) = closed_loop("http://127.0.0.1:9", [BODY], 1, TIMEOUT_S)
    assert record.status == "failed" and "ConnectError" in (record.error or "")

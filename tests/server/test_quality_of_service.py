"""Order of service, refusals, deadlines, and clients that do not read, over real sockets."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ccjax.errors import DeadlineError, DeviceMemoryError, OverloadError
from ccjax.server import ServerSettings
from ccjax.server.errors import as_api_error
from ccjax.server.listening import listen
from ccjax.server.openai_format import Formatter
from ccjax.server.schemas import ChatBody
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import Server, StartServer
from tests.server.test_traffic import body, busy, held_steps, metrics

CHAT = "/v1/chat/completions"
LATE = ("ccjax_request_errors_total", "deadline_exceeded")


@pytest.fixture(scope="module")
def narrow(start_server: StartServer) -> Iterator[Server]:
    """A server whose engine runs one request at a time."""
    with start_server(ServerSettings(refresh_interval_s=None), max_num_seqs=1, max_queue=64) as server:
        ask(server, max_tokens=120)  # compiled once and for all
        yield server


def ask(server: Server, **fields: Any) -> httpx.Response:
    return patience.post(f"{server.url}{CHAT}", json=body("Who?", **fields))


class Starts:
    """The users whose requests left the queue, in order."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users: list[str] = []
        worker = server.service.backend.worker
        begin = worker._begin

        def noted(job: Any) -> None:
            self.users.append(job.request.flow)
            begin(job)

        monkeypatch.setattr(worker, "_begin", noted)


def all_at_once(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to requests that are queued, in this order, before the first one starts."""

    async def send() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            answers = []
            with busy(server):
                for number, request in enumerate(bodies):
                    answers.append(asyncio.create_task(client.post(f"{server.url}{CHAT}", json=request)))
                    async with asyncio.timeout(60):
                        while server.engine.batch_counts.waiting <= number:
                            await asyncio.sleep(0.001)
            return list(await asyncio.gather(*answers))

    return asyncio.run(send())


def test_flooding_client_blocks_no_other_and_urgent_requests_run_first(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(narrow, monkeypatch)
    flood = [body("Who?", user="flood", max_tokens=1) for _ in range(40)]
    polite = [body("Who?", user="polite", max_tokens=1) for _ in range(2)]
    other = body("Who?", safety_identifier="other", max_tokens=1)
    urgent = body("Who?", user="flood too", max_tokens=1, priority=-10)
    idle = body("Who?", user="idle", max_tokens=1, priority=10)
    answers = all_at_once(narrow, [*flood, idle, *polite, other, urgent])
    assert [answer.status_code for answer in answers] == [200] * 45
    order = starts.users
    assert order[0] == "flood too" and order[-1] == "idle"
    # Three flows take turns: a client waits at most for a round and one prompt of each, though 40 arrived first.
    assert order.index("other") <= 3 and order.index("polite") <= 3
    assert [number for number, user in enumerate(order) if user == "polite"][1] <= 5


def test_a_client_that_floods_the_queue_is_refused_before_others(narrow: Server) -> None:
    share = narrow.engine.config.flow_share
    limit = narrow.engine.config.max_queue
    assert limit is not None
    most = math.ceil(share * limit / (1 + share))  # then it has `share` times the rest

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            request = body("Who?", user="flood", max_tokens=1)
            with busy(narrow):
                answers = [asyncio.create_task(client.post(f"{narrow.url}{CHAT}", json=request)) for _ in range(limit)]
                async with asyncio.timeout(60):
                    while sum(answer.done() for answer in answers) < limit - most:
                        await asyncio.sleep(0.01)
                assert narrow.engine.batch_counts.waiting == most
                polite = asyncio.create_task(client.post(f"{narrow.url}{CHAT}", json=body("Who?", user="polite")))
                async with asyncio.timeout(60):
                    while narrow.engine.batch_counts.waiting == most:
                        await asyncio.sleep(0.001)
            return [*await asyncio.gather(*answers), await polite]

    *answers, polite = asyncio.run(flood())
    assert polite.status_code == 200
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == limit - most
    for answer in refused:
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        assert "flow 'flood'" in answer.json()["error"]["message"] and int(answer.headers["retry-after"]) >= 1


def test_deadline_exceeded_in_the_queue_is_504(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    starts = Starts(narrow, monkeypatch)
    before = metrics(narrow).get(LATE, 0)
    with busy(narrow):
        for stream in (False, True):
            answer = ask(narrow, timeout_s=0.2, stream=stream, user="late")
            assert answer.status_code == (200 if stream else 504)
            told = answer.text.split("data: ")[1] if stream else answer.text
            error = json.loads(told)["error"]
            assert error["code"] == "deadline_exceeded" and error["type"] == "server_error"
            assert error["param"] == "timeout_s" and "timeout_s" in error["message"]
        with narrow.client() as client, pytest.raises(openai.InternalServerError, match="timeout_s"):
            client.chat.completions.create(
                model="tiny", messages=body("Who?")["messages"], extra_body={"timeout_s": 0.1, "documents": []}
            )
    assert metrics(narrow)[LATE] == before + 3
    assert ask(narrow).status_code == 200
    assert starts.users == [""]


def test_stream_begins_at_once_and_tells_that_it_is_alive(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccjax.server.app.PAUSE_S", 0.05)
    with contextlib.ExitStack() as stack:
        stack.enter_context(busy(narrow))
        response = stack.enter_context(
            httpx.stream("POST", f"{narrow.url}{CHAT}", json=body("Who?", stream=True), timeout=60)
        )
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": no token yet", ""] * 2
    with narrow.client() as client:
        with busy(narrow):
            stream = client.chat.completions.create(model="tiny", messages=body("Who?")["messages"], stream=True)
        assert list(stream)[-1].choices[0].finish_reason


def test_deadline_exceeded_mid_stream_is_an_error_event(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After five steps the clock of deadlines is much later."""
    free = narrow.engine.batch_counts.free_pages
    fields = body("Who?", max_tokens=20, stream=True, timeout_s=5000.0, ignore_eos=True)
    decoder, scheduler = narrow.engine._loop._decoder, narrow.engine._loop._scheduler
    step, expire, steps = decoder.step, scheduler.expire, []
    monkeypatch.setattr(decoder, "step", lambda *args: (steps.append(1), step(*args))[1])
    monkeypatch.setattr(scheduler, "expire", lambda now_s: expire(now_s + (10_000 if len(steps) >= 5 else 0)))
    with httpx.stream("POST", f"{narrow.url}{CHAT}", json=fields, timeout=60) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    monkeypatch.undo()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert 1 < len(events) < 12 and "choices" in json.loads(events[-3])
    wait_until(lambda: narrow.engine.batch_counts.free_pages == free)
    assert ask(narrow).status_code == 200


def test_deadline_exceeded_before_anything_was_sent_is_504(narrow: Server) -> None:
    step = narrow.engine._loop._decoder.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow.engine._loop._decoder, "step", lambda *args: (time.sleep(0.01), step(*args))[1])
        assert ask(narrow, max_tokens=440, timeout_s=0.3, ignore_eos=True).status_code == 504
    assert ask(narrow).status_code == 200


def test_time_before_queueing_counts_towards_the_timeout(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble, submit = narrow.engine.assemble, narrow.engine.submit
    left = []

    def slow(request: Any) -> Any:
        time.sleep(0.05)
        return assemble(request)

    def noted(request: Any, *args: Any, **options: Any) -> Any:
        left.append(request.timeout_s)
        return submit(request, *args, **options)

    monkeypatch.setattr(narrow.engine, "assemble", slow)
    monkeypatch.setattr(narrow.engine, "submit", noted)
    assert ask(narrow, timeout_s=0.02).status_code == 504 and not left
    assert ask(narrow, timeout_s=5000).status_code == 200 and 0 < left[0] <= 5000 - 0.05


def test_work_that_grows_with_a_body_is_not_done_on_the_event_loop(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(narrow.engine, "assemble")
    for owner, name in ((ChatBody, "own_documents"), (ChatBody, "to_request"), (Formatter, "answer")):
        note(owner, name)
    assert ask(narrow).status_code == 200
    assert calls == ["own_documents", "to_request", "assemble", "answer"], "each once"


def test_request_fields_set_flow_priority_and_timeout() -> None:
    def request(limit_s: float | None = None, **fields: Any) -> Any:
        chat = ChatBody(messages=[{"role": "user", "content": "x"}], **fields)
        return chat.to_request((), reuse="off", timeout_s=limit_s, request_id="x")

    plain = request()
    assert (plain.priority, plain.flow, plain.timeout_s) == (0, "", None)
    assert request(60.0).timeout_s == 60.0  # the server's own
    assert request(60.0, timeout_s=90.0).timeout_s == 90.0
    assert request(user="a", safety_identifier="b").flow == "a"
    assert request(safety_identifier="b").flow == request(user="", safety_identifier="b").flow == "b"
    assert request(priority=-3).priority == -3


def test_server_request_timeout_applies_without_a_client_timeout(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow.service, "settings", narrow.service.settings.replace(request_timeout_s=0.2))
    with busy(narrow):
        assert ask(narrow).status_code == 504


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (70.5, "71")])
def test_full_queue_response_has_retry_after(wait_s: float, header: str) -> None:
    refusal = as_api_error(OverloadError("wanted fewer", wait_s))
    assert refusal.status == 429 and refusal.response().headers["retry-after"] == header


def test_device_out_of_memory_is_503_with_retry_after() -> None:
    refusal = as_api_error(DeviceMemoryError("too little memory"))
    assert refusal.status == 503 and refusal.code == "out_of_memory" and refusal.headers == {"Retry-After": "1"}
    assert as_api_error(DeadlineError("late")).status == 504


def test_metrics_cover_queue_batch_and_pages(narrow: Server) -> None:
    queued = "ccjax_request_queue_time_seconds_count"
    before = metrics(narrow)
    counts = narrow.engine.batch_counts
    assert before[("ccjax_kv_cache_pages", "free")] == counts.free_pages == counts.num_pages
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with held_steps(narrow.engine, after=2):
            slow = pool.submit(ask, narrow, max_tokens=20, ignore_eos=True, reuse="off")
            wait_until(lambda: narrow.engine.batch_counts.running == 1, timeout_s=60)
            wait_until(lambda: metrics(narrow)[(queued,)] == before[(queued,)] + 1, timeout_s=60)  # once it is known
            while_running = metrics(narrow)
            assert while_running[("ccjax_num_requests_running",)] == 1
            used = while_running[("ccjax_kv_cache_pages", "used")]
            assert 0 < used == counts.num_pages - while_running[("ccjax_kv_cache_pages", "free")]
            assert while_running[("ccjax_kv_cache_usage_perc",)] == pytest.approx(used / counts.num_pages)
            urgent = pool.submit(ask, narrow, max_tokens=1, priority=-1)
            wait_until(lambda: narrow.engine.batch_counts.waiting == 1, timeout_s=60)
        assert urgent.result().status_code == slow.result().status_code == 200
    after = metrics(narrow)
    preempted = ("ccjax_num_preemptions_total",)
    assert after[preempted] == before[preempted] + 1
    assert after[(queued,)] == before[(queued,)] + 2


def test_metrics_count_retried_answers(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = metrics(narrow)
    step, failed = narrow.engine._loop._decoder.step, []

    def fails_once(*args: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("the device failed a step")
        return step(*args)

    monkeypatch.setattr(narrow.engine._loop._decoder, "step", fails_once)
    assert ask(narrow, max_tokens=5, ignore_eos=True, reuse="off").status_code == 200
    retried = ("ccjax_num_retries_total",)
    assert metrics(narrow)[retried] == before[retried] + 1


class Unread:
    """A client that requests a long stream and does not read it, with small buffers."""

    def __init__(self, url: str, **fields: Any) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((host, int(port)))
        data = json.dumps(body("Who?", stream=True, ignore_eos=True, **fields)).encode()
        named = {"Host": host, "Content-Type": "application/json", "Content-Length": len(data)}
        lines = [f"POST {CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
        head = "\r\n".join(lines)
        self.socket.sendall(head.encode() + data)

    def read(self) -> str:
        """Reads all that was sent."""
        self.socket.settimeout(120)
        parts = []
        while not b"".join(parts[-2:]).endswith(b"0\r\n\r\n"):
            parts.append(self.socket.recv(1 << 16))
            assert parts[-1], "ended too early"
        return b"".join(parts).decode()

    def __enter__(self) -> Unread:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends like a process that is killed with data unread."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def held_back(monkeypatch: pytest.MonkeyPatch, server: Server) -> list[Any]:
    """Later jobs; `_events` of each has the events not yet sent to its client."""
    jobs: list[Any] = []
    submit = server.service.backend.worker.submit

    def noted(*how: Any, **options: Any) -> Any:
        jobs.append(submit(*how, **options))
        return jobs[-1]

    monkeypatch.setattr(server.service.backend.worker, "submit", noted)
    return jobs


LONG = {"max_tokens": 120, "logprobs": True, "top_logprobs": 20}
"""A stream of about 190 KB: more than the socket buffers here."""


def test_slow_reader_delays_no_other_client_and_buffers_only_its_answer(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = held_back(monkeypatch, narrow)
    with Unread(narrow.url, **LONG) as first, Unread(narrow.url, **LONG) as second:
        wait_until(
            lambda: [job.response is not None for job in jobs] == [True] * 2, timeout_s=60
        )  # waits for no reader
        assert narrow.engine.batch_counts.running == 0
        assert ask(narrow).status_code == 200
        wanted = ask(narrow, stream=True, ignore_eos=True, **LONG).text
        unread = jobs[:2]  # in either order: the two connections race
        assert all(0 < job._events.qsize() <= LONG["max_tokens"] for job in unread)
        for client in (first, second):
            told = client.read()
            assert told.count("data: ") == wanted.count("data: ") and "data: [DONE]" in told
        assert all(job._events.empty() for job in unread)


def test_disconnect_of_a_client_that_does_not_read_is_detected(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = held_back(monkeypatch, narrow)
    with held_steps(narrow.engine, after=2):
        with Unread(narrow.url, **LONG):
            wait_until(lambda: bool(jobs) and jobs[0].first_delta_s is not None, timeout_s=60)
        wait_until(lambda: jobs[0].cancelled, timeout_s=60)
    wait_until(lambda: narrow.engine.batch_counts.running == 0)


def test_a_connection_whose_client_reads_nothing_is_closed() -> None:
    with listen("127.0.0.1", 0, stall_timeout_s=1.0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000
        failed = threading.Event()

        def send() -> None:
            with connection, contextlib.suppress(ConnectionError, TimeoutError):
                while True:
                    connection.sendall(b"x" * (1 << 20))
            failed.set()

        threading.Thread(target=send, daemon=True).start()
        assert failed.wait(300)

"""Requests that come, or are under way, while no replica is there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import httpx
import pytest

from ccjax.cluster import waiting
from ccjax.cluster.calls import Call, perform_whole
from ccjax.cluster.waiting import NobodyThereError, Patience, is_anybody_there
from ccjax.server import ServerSettings, create_app
from tests.cluster.conftest import API_KEY, SETTINGS, Cluster, bearer
from tests.cluster.local import LocalReplicas, running_front
from tests.polling import wait_until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Who lives in Paris?"}], "max_tokens": 6, "retrieval": False}
NOBODY = {"starting": 2}
Begin = Callable[..., contextlib.AbstractContextManager[Cluster]]


@pytest.fixture
def begin(tiny_model, servers) -> Begin:
    """A front that waits `no_replica_s` for a replica, while none is there."""

    @contextlib.contextmanager
    def start(no_replica_s: float, settings: ServerSettings = SETTINGS) -> Iterator[Cluster]:
        replicas = LocalReplicas(*(create_app(server.service) for server in servers[1:]))
        replicas.states = dict(NOBODY)
        how = {"settings": settings, "no_replica_s": no_replica_s}
        with running_front(tiny_model, servers[0], replicas, **how) as (front, url):
            yield Cluster(url, front, replicas, servers[1:], servers[0].retriever)
            replicas.states = None
            wait_until(lambda: all(server.service.backend.worker.is_idle for server in servers))

    return start


def refused_after(answer: httpx.Response, started: float) -> float:
    """The seconds that a refusal took which says that no replica runs."""
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1", answer.text
    error = answer.json()["error"]
    assert error["code"] == "no_replica" and error["message"].startswith("no replica runs, and none came within ")
    return time.monotonic() - started


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"messages": []}, None], ids=str)
def test_a_request_is_refused_once_its_time_is_over(begin, more):
    with begin(1.5) as cluster:
        started = time.monotonic()
        if more is None:
            answer = httpx.get(f"{cluster.url}/v1/models", headers=bearer(API_KEY), timeout=60)
        else:
            answer = cluster.post(CHAT, {**BODY, **more})
        assert 1.4 < refused_after(answer, started) < 10
        assert cluster.replicas.calls == []


@pytest.mark.parametrize("of_server", [False, True], ids=["of the request", "of the server"])
def test_a_timeout_goes_before_the_fronts_own(begin, of_server):
    more = {} if of_server else {"timeout_s": 2.0}
    settings = dataclasses.replace(SETTINGS, request_timeout_s=2.0 if of_server else 50.0)
    for no_replica_s in (0.1, 60.0):
        with begin(no_replica_s, settings) as cluster:
            started = time.monotonic()
            assert 1.9 < refused_after(cluster.post(CHAT, {**BODY, **more}), started) < 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_comes_in_time_answers(begin, stream):
    body = {**BODY, "stream": stream, "timeout_s": 50.0}
    with begin(0.1) as cluster, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(cluster.post, CHAT, body)
        time.sleep(1.2)
        assert not answer.done()
        cluster.replicas.states = {"running": 2}
        assert answer.result().status_code == 200 and "error" not in answer.result().text
        (call,) = cluster.replicas.calls
        assert 1.0 < call.waited_s < 20  # which its timeout is told of


@pytest.mark.parametrize(("waited_s", "status"), [(0.0, 200), (49.0, 200), (50.1, 504)])
def test_what_was_waited_counts_towards_the_timeout(servers, waited_s, status):
    headers = ((b"content-type", b"application/json"), (b"authorization", f"Bearer {API_KEY}".encode()))
    content = json.dumps({**BODY, "timeout_s": 50.0}).encode()
    call = Call("POST", CHAT.encode(), b"", headers, content, waited_s=waited_s)
    answer = asyncio.run(perform_whole(create_app(servers[0].service), call))
    assert answer.head.status == status, answer.body


@pytest.mark.parametrize("states", [{"running": 1, "starting": 1}, {"stopping": 1}, {"recovering": 2}], ids=str)
def test_whoever_has_a_replica_is_not_hurried(begin, states):
    """Plain answers come whole, so that nothing is heard for long; and a replica that stops ends what it took."""
    with begin(0.2) as cluster, concurrent.futures.ThreadPoolExecutor() as pool:
        cluster.replicas.states = states
        with contextlib.ExitStack() as busy:
            for server in cluster.servers:
                busy.enter_context(server.engine._exclusive())
            answer = pool.submit(cluster.post, CHAT, BODY)
            time.sleep(2.0)
            assert not answer.done()
        assert answer.result().status_code == 200 and len(cluster.replicas.calls) == 1


def test_readiness_says_that_no_replica_runs(begin):
    with begin(1.0) as cluster:
        found = httpx.get(f"{cluster.url}/ready", timeout=60)
        assert (found.status_code, found.json()) == (503, {"status": "no replica runs", "replicas": NOBODY})
        assert httpx.get(f"{cluster.url}/health", timeout=60).status_code == 200
        cluster.replicas.states = {"running": 1, "starting": 1}
        assert httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200


def test_what_goes_to_all_is_refused_at_once_and_metrics_go_on(begin):
    with begin(60.0) as cluster:
        for method, path in (("GET", "/v1/cache/documents"), ("DELETE", "/v1/cache/documents/x"), ("GET", "/v1/live")):
            answer = cluster.ask(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "there is no replica" in answer.json()["error"]["message"]
        text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        assert 'ccjax_cluster_replicas{state="starting"} 2.0' in text


def test_a_front_that_breaks_off_waits_for_nobody(begin):
    with begin(60.0) as cluster, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(cluster.post, CHAT, BODY)
        wait_until(lambda: cluster.front._answering)
        time.sleep(1.0)  # it gave its call up by now
        cluster.front.drain()
        assert not cluster.front.is_drained
        cluster.front.break_off()
        assert answer.result().status_code == 503 and answer.result().json()["error"]["code"] == "not_ready"
        wait_until(lambda: cluster.front.is_drained)


def test_who_leaves_is_waited_for_no_longer(begin):
    with begin(60.0) as cluster:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{cluster.url}{CHAT}", json=BODY, headers=bearer(API_KEY), timeout=1.0)
        cluster.front.drain()
        wait_until(lambda: cluster.front.is_drained)
        assert cluster.replicas.calls == []


# -- patience by itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "is_there"),
    [
        ({}, False),
        ({"starting": 3}, False),
        ({"running": 0, "starting": 1}, False),
        ({"stopped": 1}, False),
        ({"running": 1}, True),
        ({"updating": 1}, True),
        ({"stopping": 1, "starting": 1}, True),
    ],
)
def test_who_is_there(counts, is_there):
    assert is_anybody_there(counts) is is_there


class Looks:
    """What each look finds; the last one for ever."""

    def __init__(self, *found: int) -> None:
        self.left = list(found)

    async def __call__(self) -> Mapping[str, int]:
        number = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {"running": number, "starting": 1}


async def after(seconds: float, cancelled: list[bool] | None = None) -> AsyncIterator[str]:
    try:
        await asyncio.sleep(seconds)
        yield "first"
        yield "second"
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.append(True)
        raise


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)


def test_one_look_that_finds_nobody_is_not_believed(quick):
    patience = Patience(Looks(*[0, 1] * 15, 1), time.monotonic(), None)
    assert asyncio.run(patience.first(after(0.5))) == "first"


def test_two_looks_in_a_row_are_and_the_answer_is_told_to_end(quick):
    cancelled: list[bool] = []
    with pytest.raises(NobodyThereError):
        asyncio.run(Patience(Looks(1, 0, 0), time.monotonic(), None).first(after(60, cancelled)))
    assert cancelled == [True]


def test_a_look_that_takes_long_delays_no_answer(quick):
    async def never() -> Mapping[str, int]:
        await asyncio.sleep(3600)
        return {}

    started = time.monotonic()
    assert asyncio.run(Patience(never, started, None).first(after(0.2))) == "first"
    assert time.monotonic() - started < 10


def test_what_has_no_beginning_is_an_error(quick):
    async def nothing() -> AsyncIterator[str]:
        return
        yield

    with pytest.raises(RuntimeError, match="without a beginning"):
        asyncio.run(Patience(Looks(1), time.monotonic(), None).first(nothing()))


def test_times_without_a_replica_add_up(quick):
    """Replicas that come and die at once keep nobody for ever."""

    async def run() -> list[bool]:
        patience, found = Patience(Looks(*[0] * 20, *[1, *[0] * 20] * 50), time.monotonic(), None, 0.8), []
        while not found or found[-1]:
            found.append(await patience.until_somebody())
        return found

    started = time.monotonic()
    found = asyncio.run(run())
    assert 1 < len(found) < 6 and time.monotonic() - started < 10

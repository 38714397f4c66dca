"""Requests that arrive, or are in progress, while no replica is available."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import httpx
import pytest

from ccjax.cluster.calls import Call, perform_whole
from ccjax.cluster.waiting import CHECK_EVERY_S, Clock, NoLiveReplicaError, ReplicaWait, has_live_replica
from ccjax.server import ServerSettings, create_app
from tests.cluster.conftest import API_KEY, SETTINGS, Cluster, bearer
from tests.cluster.local import LocalReplicas, running_front
from tests.polling import wait_until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Who lives in Paris?"}], "max_tokens": 6, "retrieval": False}
NOBODY = {"starting": 2}
Begin = Callable[..., contextlib.AbstractContextManager[Cluster]]


class Passing:
    """A clock that advances only during sleeps, by at most `limit_s` in all; later sleeps never end."""

    def __init__(self, limit_s: float = 1000.0) -> None:
        self.now_s, self.limit_s = 0.0, limit_s
        self.clock = Clock(lambda: self.now_s, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        await asyncio.sleep(0.001)
        while until_s > self.limit_s:
            await asyncio.sleep(0.01)
        self.now_s = max(self.now_s, until_s)


@pytest.fixture
def time() -> Passing:
    return Passing()


@pytest.fixture
def begin(tiny_model, servers, time) -> Begin:
    """A front that waits `no_replica_s` for a replica, while none is available."""

    @contextlib.contextmanager
    def start(no_replica_s: float, settings: ServerSettings = SETTINGS) -> Iterator[Cluster]:
        replicas = LocalReplicas(*(create_app(server.service) for server in servers[1:]))
        replicas.states = dict(NOBODY)
        how = {"settings": settings, "no_replica_s": no_replica_s, "clock": time.clock}
        with running_front(tiny_model, servers[0], replicas, **how) as (front, url):
            yield Cluster(url, front, replicas, servers[1:], servers[0].retriever)
            replicas.states = None
            wait_until(lambda: all(server.service.backend.worker.is_idle for server in servers))

    return start


def refused_after(answer: httpx.Response, time: Passing) -> float:
    """The seconds until the first request was refused because no replica runs."""
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1", answer.text
    error = answer.json()["error"]
    assert error["code"] == "no_replica" and error["message"].startswith("no replica runs, and none started within ")
    return time.now_s


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"messages": []}, None], ids=str)
def test_request_is_refused_after_waiting_too_long_for_a_replica(begin, time, more):
    with begin(1.5) as cluster:
        if more is None:
            answer = httpx.get(f"{cluster.url}/v1/models", headers=bearer(API_KEY), timeout=60)
        else:
            answer = cluster.post(CHAT, {**BODY, **more})
        assert refused_after(answer, time) == pytest.approx(CHECK_EVERY_S + 1.5)  # from the first look on
        assert cluster.replicas.calls == []


@pytest.mark.parametrize("no_replica_s", [0.1, 60.0])
@pytest.mark.parametrize("of_server", [False, True], ids=["of the request", "of the server"])
def test_request_timeout_overrides_that_of_the_front(begin, time, of_server, no_replica_s):
    more = {} if of_server else {"timeout_s": 2.0}
    settings = SETTINGS.replace(request_timeout_s=2.0 if of_server else 50.0)
    with begin(no_replica_s, settings) as cluster:
        assert refused_after(cluster.post(CHAT, {**BODY, **more}), time) == pytest.approx(2.0)


@pytest.mark.parametrize("stream", [False, True])
def test_replica_started_within_the_timeout_answers_waiting_request(begin, time, stream):
    body = {**BODY, "stream": stream, "timeout_s": 500.0}
    time.limit_s = 12.0
    with begin(0.1) as cluster, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(cluster.post, CHAT, body)
        wait_until(lambda: time.now_s + CHECK_EVERY_S > 12.0, timeout_s=60)
        assert not answer.done()
        cluster.replicas.states = {"running": 2}
        time.limit_s = 400.0
        assert answer.result().status_code == 200 and "error" not in answer.result().text
        (call,) = cluster.replicas.calls
        assert 11.5 < call.waited_s < 13.0  # which its timeout is told of


@pytest.mark.parametrize(("waited_s", "status"), [(0.0, 200), (49.0, 200), (50.1, 504)])
def test_waiting_counts_towards_the_timeout(servers, waited_s, status):
    headers = ((b"content-type", b"application/json"), (b"authorization", f"Bearer {API_KEY}".encode()))
    content = json.dumps({**BODY, "timeout_s": 50.0}).encode()
    call = Call("POST", CHAT.encode(), b"", headers, content, waited_s=waited_s)
    answer = asyncio.run(perform_whole(create_app(servers[0].service), call))
    assert answer.head.status == status, answer.body


@pytest.mark.parametrize("states", [{"running": 1, "starting": 1}, {"stopping": 1}, {"recovering": 2}], ids=str)
def test_waiting_deadline_does_not_apply_while_a_replica_is_live(begin, time, states):
    """Plain answers arrive whole, so nothing arrives for long; and a stopping replica finishes its requests."""
    with begin(0.2) as cluster, concurrent.futures.ThreadPoolExecutor() as pool:
        cluster.replicas.states = states
        with contextlib.ExitStack() as busy:
            for server in cluster.servers:
                busy.enter_context(server.engine._loop.exclusive())
            answer = pool.submit(cluster.post, CHAT, BODY)
            wait_until(lambda: time.now_s > 2.0, timeout_s=60)
            assert not answer.done()
        assert answer.result().status_code == 200 and len(cluster.replicas.calls) == 1


def test_readiness_reports_when_no_replica_runs_and_what_is_indexed(begin, servers):
    with begin(1.0) as cluster:
        found = httpx.get(f"{cluster.url}/ready", timeout=60)
        assert (found.status_code, found.json()) == (503, {"status": "no replica runs", "replicas": NOBODY})
        assert httpx.get(f"{cluster.url}/health", timeout=60).status_code == 200
        cluster.replicas.states = {"running": 1, "starting": 1}
        found = httpx.get(f"{cluster.url}/ready", timeout=60)
        documents = httpx.get(f"{servers[0].url}/ready", timeout=60).json()["documents"]
        wanted = {"status": "ready", "replicas": cluster.replicas.states, "documents": documents}
        assert (found.status_code, found.json()) == (200, wanted) and documents["num_passages"] > 0


def test_without_replicas_broadcast_calls_fail_at_once_and_metrics_work(begin):
    with begin(60.0) as cluster:
        for method, path in (("GET", "/v1/cache/documents"), ("DELETE", "/v1/cache/documents/x"), ("GET", "/v1/live")):
            answer = cluster.ask(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "there is no replica" in answer.json()["error"]["message"]
        text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        assert 'ccjax_cluster_replicas{state="starting"} 2.0' in text


def test_aborting_front_does_not_wait_for_a_replica(begin, time):
    time.limit_s = 2.0
    with begin(60.0) as cluster, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(cluster.post, CHAT, BODY)
        wait_until(lambda: cluster.front._answering and time.now_s > 1.0, timeout_s=60)  # its call has ended by now
        cluster.front.drain()
        assert not cluster.front.is_drained
        cluster.front.break_off()
        assert answer.result().status_code == 503 and answer.result().json()["error"]["code"] == "not_ready"
        wait_until(lambda: cluster.front.is_drained)


def test_waiting_ends_when_the_client_disconnects(begin, time):
    time.limit_s = 2.0
    with begin(60.0) as cluster:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{cluster.url}{CHAT}", json=BODY, headers=bearer(API_KEY), timeout=httpx.Timeout(60, read=0.3))
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
def test_which_replica_states_count_as_live(counts, is_there):
    assert has_live_replica(counts) is is_there


class Looks:
    """The result of each check; the last one is repeated."""

    def __init__(self, *found: int) -> None:
        self.left = list(found)
        self.count = 0

    async def __call__(self) -> Mapping[str, int]:
        self.count += 1
        number = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {"running": number, "starting": 1}


async def after(looks: Looks, num_looks: int, cancelled: list[bool] | None = None) -> AsyncIterator[str]:
    """Two parts, after this many checks."""
    try:
        while looks.count < num_looks:
            await asyncio.sleep(0)
        yield "first"
        yield "second"
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.append(True)
        raise


def test_single_check_without_a_replica_does_not_end_the_answer(time):
    looks = Looks(*[0, 1] * 15, 1)
    assert asyncio.run(ReplicaWait(looks, 0.0, None, clock=time.clock).first(after(looks, 40))) == "first"


def test_two_consecutive_checks_without_a_replica_end_the_answer(time):
    cancelled: list[bool] = []
    looks = Looks(1, 0, 0)
    with pytest.raises(NoLiveReplicaError):
        asyncio.run(ReplicaWait(looks, 0.0, None, clock=time.clock).first(after(looks, 1000, cancelled)))
    assert cancelled == [True] and looks.count == 3


def test_slow_check_does_not_delay_the_answer(time):
    looks = Looks(1)

    async def never() -> Mapping[str, int]:
        await looks()
        await asyncio.Event().wait()
        return {}

    assert asyncio.run(ReplicaWait(never, 0.0, None, clock=time.clock).first(after(looks, 1))) == "first"


def test_an_answer_without_parts_is_an_error(time):
    async def nothing() -> AsyncIterator[str]:
        return
        yield

    with pytest.raises(RuntimeError, match="without a beginning"):
        asyncio.run(ReplicaWait(Looks(1), 0.0, None, clock=time.clock).first(nothing()))


def test_waiting_time_accumulates_across_brief_replica_starts(time):
    """Replicas that start and die at once do not keep a request waiting for ever."""

    async def run() -> list[bool]:
        looks = Looks(*[0] * 20, *[1, *[0] * 20] * 50)
        patience, found = ReplicaWait(looks, 0.0, None, 70 * CHECK_EVERY_S, time.clock), []
        while not found or found[-1]:
            found.append(await patience.wait_for_replica())
        return found

    assert asyncio.run(run()) == [True, True, True, False]
    assert time.now_s < 100 * CHECK_EVERY_S

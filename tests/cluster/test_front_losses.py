"""Errors that clients get when replicas are lost, fail or refuse, and when a front ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json

import httpx
import openai
import pytest

from ccjax.cluster.front import MAX_RETRIES, NoReplicaError, ReplicaLostError
from tests.cluster.conftest import API_KEY, Cluster, bearer
from tests.polling import wait_until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Who lives in Paris?"}], "max_tokens": 6, "retrieval": False}
STREAM = {**BODY, "stream": True}
LOST = ReplicaLostError("killed")


def outcomes(cluster: Cluster) -> dict[str, float]:
    text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith("ccjax_cluster_lost_replicas_total")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def events(text: str) -> list[str]:
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("num_pieces", [0, 1], ids=["nothing yet", "its head only"])
@pytest.mark.parametrize("num_lost", [1, MAX_RETRIES])
def test_replica_lost_before_answering_causes_a_retry(cluster, body, num_pieces, num_lost):
    wanted = cluster.post(CHAT, body)
    cluster.replicas.plan = [(LOST, num_pieces)] * num_lost
    found = cluster.post(CHAT, body)
    assert found.status_code == 200 and len(cluster.replicas.calls) == 2 + num_lost
    if body is STREAM:
        assert len(events(found.text)) == len(events(wanted.text)) and "error" not in found.text
    else:
        assert found.json()["choices"] == wanted.json()["choices"]
    assert outcomes(cluster) == {"tried again": num_lost, "given up": 0, "answer begun": 0}


def test_client_gets_an_error_once_retries_are_exhausted(cluster):
    cluster.replicas.plan = [(LOST, 0)] * (MAX_RETRIES + 1)
    answer = cluster.post(CHAT, BODY)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "replica_lost" and answer.json()["error"]["type"] == "server_error"
    assert len(cluster.replicas.calls) == MAX_RETRIES + 1
    assert outcomes(cluster) == {"tried again": MAX_RETRIES, "given up": 1, "answer begun": 0}


def test_replica_loss_during_a_stream_ends_it_with_one_error(cluster):
    cluster.replicas.plan = [(LOST, 4)]
    answer = cluster.post(CHAT, STREAM)
    *pieces, error, done = events(answer.text)
    assert answer.status_code == 200 and done == "[DONE]" and len(cluster.replicas.calls) == 1
    assert json.loads(error)["error"]["code"] == "replica_lost"
    assert pieces and all("error" not in json.loads(piece) for piece in pieces)
    assert outcomes(cluster)["answer begun"] == 1


@pytest.mark.parametrize("num_pieces", [2, 5])
def test_replica_loss_during_a_response_of_items_is_its_error_event(cluster, num_pieces):
    cluster.replicas.plan = [(LOST, num_pieces)]
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=API_KEY, max_retries=0)
    body = {"retrieval": False, "ignore_eos": True}
    with client:
        found = list(client.responses.create(input="Who?", stream=True, max_output_tokens=9, extra_body=body))
    error = found[-1]
    assert [event.sequence_number for event in found] == list(range(len(found))) and len(found) >= num_pieces
    assert (error.type, error.code) == ("error", "replica_lost") and "try again" in error.message
    assert "error" not in {event.type for event in found[:-1]}


def test_replica_loss_during_a_plain_response_leaves_it_incomplete(cluster):
    async def app(scope, receive, send):
        headers = [(b"content-type", b"application/json"), (b"content-length", b"20")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(2):
            await send({"type": "http.response.body", "body": b"0123456789", "more_body": True})
        await send({"type": "http.response.body"})

    cluster.replicas.apps = (app,)
    assert cluster.post(CHAT, BODY).text == "0123456789" * 2
    cluster.replicas.plan = [(LOST, 2)]
    with pytest.raises(httpx.RemoteProtocolError):
        cluster.post(CHAT, BODY)


@pytest.mark.parametrize(("status", "body"), [(400, {"messages": []}), (404, {**BODY, "model": "other"})])
def test_a_refusal_is_not_retried(cluster, status, body):
    assert cluster.post(CHAT, body).status_code == status
    assert len(cluster.replicas.calls) == 1


def test_client_gets_the_reason_when_no_replica_is_available(cluster):
    cluster.replicas.plan = [(NoReplicaError("the deployment failed"), 0)]
    answer = cluster.post(CHAT, BODY)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "the deployment failed; try again"
    assert len(cluster.replicas.calls) == 1


@pytest.mark.parametrize("num_pieces", [0, 4])
def test_an_unforeseen_failure_is_logged_without_revealing_details(cluster, caplog, num_pieces):
    cluster.replicas.plan = [(KeyError("secret"), num_pieces)]
    answer = cluster.post(CHAT, STREAM)
    error = answer.json() if num_pieces == 0 else json.loads(events(answer.text)[-2])
    assert answer.status_code == (500 if num_pieces == 0 else 200)
    assert error["error"]["code"] == "internal_error" and "secret" not in answer.text
    assert "secret" in caplog.text and len(cluster.replicas.calls) == 1


@contextlib.contextmanager
def under_way(cluster: Cluster, *bodies):
    """The answers to requests that are in progress until the block ends."""
    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as busy:
        for server in cluster.servers:
            busy.enter_context(server.engine._loop.exclusive())
        answers = [pool.submit(cluster.post, CHAT, body) for body in bodies]
        wait_until(lambda: sum(server.engine.batch_counts.waiting for server in cluster.servers) == len(bodies))
        yield answers


def test_a_draining_front_answers_accepted_requests_and_refuses_others(cluster):
    with under_way(cluster, BODY, STREAM) as answers:
        cluster.front.drain()
        assert not cluster.front.is_drained
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("DELETE", "/v1/cache/documents/x")):
            refused = httpx.request(method, f"{cluster.url}{path}", timeout=60)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
            assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{cluster.url}/health", timeout=60).status_code == 200
        ready = httpx.get(f"{cluster.url}/ready", timeout=60)
        assert (ready.status_code, ready.json()["status"]) == (503, "shutting down")
    assert [answer.result().status_code for answer in answers] == [200, 200]
    assert answers[1].result().text.endswith("data: [DONE]\n\n") and "error" not in answers[1].result().text
    wait_until(lambda: cluster.front.is_drained)


def test_aborting_front_sends_an_error_to_every_client(cluster):
    long = {**STREAM, "max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}{CHAT}", json=long, headers=bearer(API_KEY), timeout=60) as begun:
        lines = begun.iter_lines()
        next(lines)
        with under_way_beside(cluster) as waiting:
            cluster.front.drain()
            cluster.front.break_off()
            answer = waiting.result(60)
        rest = [line for line in lines if line]
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "not_ready" and rest[-1] == "data: [DONE]"
    assert cluster.front.is_closing
    wait_until(lambda: cluster.front.is_drained)
    wait_until(lambda: all(server.engine.batch_counts.running == 0 for server in cluster.servers))


@contextlib.contextmanager
def under_way_beside(cluster: Cluster):
    """A plain request that the front has forwarded and that is not answered."""
    before = len(cluster.replicas.calls)
    body = {**BODY, "max_tokens": 400, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(cluster.post, CHAT, body)
        wait_until(lambda: len(cluster.replicas.calls) > before)
        yield waiting

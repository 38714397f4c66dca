"""Rules for all requests, over a socket: hosts and origins without keys, CORS, HEAD, OPTIONS, slashes, request ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest

from ccjax.server import ServerSettings, Service
from tests.polling import wait_until
from tests.server.conftest import Server, StartServer, running
from tests.server.patience import get, post

QUESTION = {"messages": [{"role": "user", "content": "Who lives in Paris?"}], "max_tokens": 1}
ORIGIN = "https://chat.example.com"


@pytest.fixture(scope="module")
def named(start_server: StartServer) -> Iterator[Server]:
    """A server without keys that has names and an origin of its own."""
    settings = ServerSettings(top_k=1, allowed_hosts=("rag.example", "*.b.example"), allowed_origins=(ORIGIN,))
    with start_server(settings) as server:
        yield server


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1", "127.9.9.9:8", "[::1]", "[::1]:80", "10.1.2.3:8000"],
)
def test_a_server_without_keys_answers_to_this_machines_names_and_addresses(server: Server, host: str) -> None:
    assert get(f"{server.url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "xlocalhost",
        "a@b",
        ":80",
    ],
)
def test_other_hosts_are_refused_by_a_server_without_keys(server: Server, named: Server, host: str) -> None:
    for one in (server, named):
        for refused in (
            get(f"{one.url}/v1/live", headers={"Host": host}),
            get(f"{one.url}/", headers={"Host": host}),
            post(f"{one.url}/v1/chat/completions", json=QUESTION, headers={"Host": host}),
        ):
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts" in refused.text and refused.headers["x-request-id"]
        for public in ("health", "ready", "metrics"):
            assert get(f"{one.url}/{public}", headers={"Host": host}).status_code == 200


def test_named_hosts_are_allowed(named: Server) -> None:
    for host, status in {"rag.example": 200, "x.b.example:80": 200, "b.example": 403, "xrag.example": 403}.items():
        assert get(f"{named.url}/v1/models", headers={"Host": host}).status_code == status, host


def test_origins_of_other_pages_are_refused(server: Server, named: Server) -> None:
    own = server.url
    refused = {"https://evil.example", "null", "http://127.0.0.1.evil.example", "chrome-extension://abc", ORIGIN}
    for origin, status in {own: 200, "http://localhost:3000": 200, **dict.fromkeys(refused, 403)}.items():
        answer = post(f"{server.url}/v1/chat/completions", json=QUESTION, headers={"Origin": origin})
        assert answer.status_code == status, origin
        assert "access-control-allow-origin" not in answer.headers
    assert "--allowed-origins" in answer.text and answer.json()["error"]["code"] == "origin_not_allowed"
    assert post(f"{named.url}/v1/chat/completions", json=QUESTION, headers={"Origin": ORIGIN}).status_code == 200


def test_a_server_with_keys_checks_no_host_unless_it_has_names() -> None:
    for hosts, status in (((), 401), (("rag.example",), 403)):
        with running(Service(ServerSettings(api_key="sesame", allowed_hosts=hosts))) as url:
            assert get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == status


def test_cors_answers_pages_of_allowed_origins(named: Server) -> None:
    url = f"{named.url}/v1/chat/completions"
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    allowed = httpx.options(url, headers=asked, timeout=60)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in allowed.headers["access-control-allow-methods"] and allowed.headers["x-request-id"]
    assert httpx.options(url, headers=asked | {"Origin": "https://evil.example"}, timeout=60).status_code == 400
    answer = post(url, json=QUESTION, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_wrong_origins_are_reported_at_start() -> None:
    for origin in ("chat.example.com", "https://a.example/path", "https://a.example/"):
        with pytest.raises(ValueError, match=r"allowed_origins: wanted origins such as https"):
            ServerSettings(allowed_origins=(origin,))


def test_head_options_and_trailing_slashes_are_served(server: Server) -> None:
    for path in ("health", "v1/models", ""):
        whole, head = get(f"{server.url}/{path}"), httpx.head(f"{server.url}/{path}", timeout=60)
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert httpx.head(f"{server.url}/v1/chat/completions", timeout=60).status_code == 405
    answers = {"v1/chat/completions": {"POST"}, "v1/models": {"GET", "HEAD"}, "v1/cache/pins/x": {"PUT", "DELETE"}}
    for path, methods in answers.items():
        for method, status in (("OPTIONS", 204), ("PATCH", 405)):
            answer = httpx.request(method, f"{server.url}/{path}", timeout=60)
            assert answer.status_code == status, method
            assert set(answer.headers["allow"].split(", ")) == {*methods, "OPTIONS"}
    assert httpx.options(f"{server.url}/v1/nothing", timeout=60).status_code == 404
    assert get(f"{server.url}/v1/models/").json() == get(f"{server.url}/v1/models").json()
    assert post(f"{server.url}/v1/chat/completions/", json=QUESTION).status_code == 200


def test_replies_and_log_lines_have_the_request_id(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ccjax.request")
    url = f"{server.url}/v1/chat/completions"
    given = post(url, json=QUESTION, headers={"X-Request-Id": "trace-1/a:b"})
    made = [
        post(url, json=QUESTION, headers=headers)
        for headers in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129})
    ]
    streamed = post(url, json={**QUESTION, "stream": True}, headers={"X-Request-Id": "streamed"})
    refused = post(url, json={**QUESTION, "model": "other"}, headers={"X-Request-Id": "refused"})
    unknown = get(f"{server.url}/nothing", headers={"X-Request-Id": "unknown"})
    ids = [answer.headers.get_list("x-request-id") for answer in (given, streamed, refused, unknown)]
    assert ids == [["trace-1/a:b"], ["streamed"], ["refused"], ["unknown"]]
    ours = [answer.headers["x-request-id"] for answer in made]
    assert len({*ours}) == 3 and all(one.startswith("req-") for one in ours)
    wait_until(lambda: len(caplog.records) >= 6)
    lines = [record for record in caplog.records if record.name == "ccjax.request"]
    logged = {vars(record)["x_request_id"]: record.getMessage() for record in lines}
    assert logged.keys() == {"trace-1/a:b", *ours, "streamed", "refused"}
    assert all(name in line for name, line in logged.items())


def test_an_unforeseen_error_has_its_request_id(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.service), "check_model", lambda *_: 1 / 0)
    failed = get(f"{server.url}/v1/models/x", headers={"X-Request-Id": "oops"})
    assert failed.status_code == 500 and failed.headers["x-request-id"] == "oops"
    assert any(getattr(record, "x_request_id", None) == "oops" for record in caplog.records)

"""The admin API over a real socket: status codes, keys, ids with slashes, warm jobs, and their effect on requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ccjax.engine.engine_documents import EngineDocuments
from ccjax.errors import ConfigError, EraseIncompleteError, RequestError
from ccjax.requests import MOST_PRIORITY, Request
from ccjax.retrieval import Retriever
from ccjax.server import ServerSettings
from ccjax.types import Document
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import DOCUMENTS, Server, StartServer
from tests.server.test_traffic import busy, metrics

ADMIN, CLIENT = "admin-sesame", "client-sesame"
SETTINGS = ServerSettings(api_key=CLIENT, admin_key=ADMIN, top_k=2, repair=False)
QUESTION = [{"role": "user", "content": "Who sings?"}]
ANNA = {"text": "Anna sings in the morning.", "id": "anna", "version": "1"}
BOB = {"text": "Bob sings in the evening.", "id": "bob"}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[Server]:
    with start_server(SETTINGS) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    """Each test begins with an empty cache."""
    for item in server.engine.documents.list():
        with contextlib.suppress(ValueError):
            server.engine.documents.erase(item.document_id)


def call(server: Server, method: str, path: str, *, key: str | None = ADMIN, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}/v1/cache{path}", headers=headers, timeout=60, **more)


def ask(server: Server, *documents: dict, **more: Any) -> dict[str, Any]:
    """The reuse report of a short answer."""
    body = {"messages": QUESTION, "max_tokens": 1, "documents": list(documents), **more}
    headers = {"Authorization": f"Bearer {CLIENT}"}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["reuse"]


def refused(response: httpx.Response, status: int, code: str | None, param: str | None = None, *words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    for word in words:
        assert word in error["message"], error["message"]


def test_documents_are_listed_looked_up_and_invalidated(server: Server) -> None:
    began = time.time()
    ask(server, ANNA, BOB)
    listing = call(server, "GET", "/documents").json()
    assert (listing["object"], listing["total"], listing["has_more"]) == ("list", 2, False)
    anna, bob = listing["data"]
    assert (anna["object"], anna["id"], anna["version"]) == ("cache.document", "anna", "1") and bob["version"] is None
    assert (anna["chunks"], anna["variants"], anna["pinned_until"], anna["erasing"]) == (1, 1, None, False)
    assert (
        anna["bytes"]["host"] > 0 and began - 1 < anna["last_used"] < time.time() + 1 and anna["frequency_reuse"] == 0
    )
    assert call(server, "GET", "/documents?limit=1").json() == listing | {"data": [anna], "has_more": True}
    assert call(server, "GET", "/documents?limit=1&offset=1").json()["data"] == [bob]
    assert call(server, "GET", "/documents/anna?version=1").json()["data"] == [anna]
    removal = call(server, "DELETE", "/documents/anna?version=1")
    assert removal.status_code == 200
    body = removal.json()
    assert body.pop("bytes")["host"] == anna["bytes"]["host"]
    assert body == {
        "object": "cache.removal",
        "id": "anna",
        "version": "1",
        "erased": False,
        "chunks": 1,
        "kept_chunks": 0,
        "variants": 1,
        "in_documents_directory": False,
    }
    refused(call(server, "GET", "/documents/anna"), 404, "document_not_found", "document_id", "'anna'")
    assert ask(server, ANNA)["per_document"][1]["reused_tokens"] == 0


def test_erase_includes_variants_computed_after_the_document(server: Server) -> None:
    ask(server, ANNA, BOB)
    body = call(server, "DELETE", "/documents/anna?erase=true").json()
    assert body["erased"] and body["variants"] == 2 and server.engine.cache.num_variants == 1  # the system prompt
    assert call(server, "GET", "/documents/bob").json()["data"][0]["variants"] == 0


NAMES = [
    "a/b/c.md",
    "/etc/passwd",
    "x/",
    "pins/y",
    "a b+c",
    "ü/日本.md",
    "100%",
    "q?version=2",
    "a#1",
    "a&b=c",
    "..x/…",
]


def test_every_document_id_is_accepted(server: Server) -> None:
    for name in NAMES:
        ask(server, ANNA | {"id": name, "version": name}, BOB)
        path, version = urllib.parse.quote(name), urllib.parse.quote(name, safe="")
        assert call(server, "PUT", f"/pins/{path}?version={version}", json={"ttl_s": 3600}).json()["id"] == name
        (found,) = call(server, "GET", f"/documents/{path}?version={version}").json()["data"]
        assert found["id"] == found["version"] == name and found["pinned_until"] > time.time()
        assert call(server, "DELETE", f"/pins/{path}?version={version}").json()["deleted"] is True
        assert call(server, "DELETE", f"/documents/{path}").json()["chunks"] == 1
        refused(call(server, "DELETE", f"/documents/{path}"), 404, "document_not_found", "document_id")
        assert [item["id"] for item in call(server, "GET", "/documents").json()["data"]] == ["bob"]


WRONG = [
    ("DELETE", "/documents/anna?version=", 400, None, "version", ["1 to 1024 characters", "got 0"]),
    ("DELETE", f"/documents/anna?version={'x' * 1025}", 400, None, "version", ["1025 characters"]),
    ("DELETE", "/documents/anna?version=9", 404, "document_not_found", "version", ["'1'", "'9'"]),
    ("DELETE", "/documents/anna?versoin=1", 400, None, "versoin", ["version, erase"]),
    ("DELETE", "/documents/anna?version=1&version=2", 400, None, "version", ["once"]),
    ("DELETE", "/documents/anna?erase=yes", 400, None, "erase", ["true or false", "'yes'"]),
    ("DELETE", "/documents/", 400, None, "document_id", ["1 to 1024"]),
    ("DELETE", "/documents/eve", 404, "document_not_found", "document_id", ["'eve'"]),
    ("GET", "/documents/eve", 404, "document_not_found", "document_id", ["'eve'"]),
    ("GET", "/documents/anna?erase=true", 400, None, "erase", ["version"]),
    ("GET", "/documents?limit=0", 400, None, "limit", ["1 to 10000", "'0'"]),
    ("GET", "/documents?limit=ten", 400, None, "limit", ["'ten'"]),
    ("GET", "/documents?offset=-1", 400, None, "offset", ["'-1'"]),
    ("PUT", "/documents/anna", 405, "method_not_allowed", None, []),
    ("POST", "/documents", 405, "method_not_allowed", None, []),
    ("GET", "/pins/anna", 405, "method_not_allowed", None, []),
    ("DELETE", "/pins/anna", 404, "no_pin", "document_id", ["no pin", "'anna'"]),
    ("DELETE", "/pins/anna?version=1", 404, "no_pin", "document_id", ["'1'"]),
    ("GET", "/warm/none", 404, "job_not_found", "job_id", ["'none'"]),
    ("DELETE", "/warm/none", 404, "job_not_found", "job_id", []),
    ("GET", "/nothing", 404, "not_found", None, []),
]


WRONG_BODIES = [
    ("PUT", "/pins/anna", {"ttl_s": 0}, 400, "ttl_s"),
    ("PUT", "/pins/anna", {"ttl_s": "60"}, 400, "ttl_s"),
    ("PUT", "/pins/anna", {"ttl": 60}, 400, "ttl"),
    ("PUT", "/pins/anna", {"host": 1}, 400, "host"),
    ("PUT", "/pins/eve", {}, 404, "document_id"),
    ("PUT", "/pins/anna?version=2", {}, 404, "version"),
    ("POST", "/warm", {}, 400, "documents"),
    ("POST", "/warm", {"documents": [ANNA], "document_ids": "all"}, 400, "documents"),
    ("POST", "/warm", {"documents": []}, 400, "documents"),
    ("POST", "/warm", {"documents": [{"text": " "}]}, 400, "documents[0]"),
    ("POST", "/warm", {"documents": [ANNA, {"text": "word " * 2000}]}, 400, "documents[1]"),
    ("POST", "/warm", {"document_ids": ["anna.md", "eve.md"]}, 404, "document_ids[1]"),
    ("POST", "/warm", {"document_ids": "some"}, 400, "document_ids"),
    ("POST", "/warm?now=1", {"documents": [ANNA]}, 400, "now"),
]


def test_an_invalid_call_names_the_argument_and_changes_nothing(server: Server) -> None:
    ask(server, ANNA)
    before = server.engine.documents.list()
    assert before[0].variants == 1 and before[0].pinned_until is None
    for method, path, status, code, param, words in WRONG:
        response = call(server, method, path)
        refused(response, status, code, param, *words)
        assert status != 405 or response.headers["allow"]
        assert server.engine.documents.list() == before, path
    for method, path, body, status, param in WRONG_BODIES:
        response = call(server, method, path, json=body)
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == param and param in response.json()["error"]["message"]
        assert server.engine.documents.list() == before, body


def test_only_the_admin_key_opens_the_admin_api(server: Server) -> None:
    ask(server, ANNA)
    for method, path in (
        ("GET", "/documents"),
        ("DELETE", "/documents/anna"),
        ("PUT", "/pins/anna"),
        ("POST", "/warm"),
    ):
        for key in (None, "wrong", ADMIN + "x", "ü"):
            response = call(server, method, path, key=key if key != "ü" else None, json={})
            refused(response, 401, "invalid_admin_key")
            assert response.headers["www-authenticate"] == "Bearer"
        refused(call(server, method, path, key=CLIENT, json={}), 403, "admin_key_required")
    assert server.engine.documents.list("anna")[0].variants == 1
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).status_code == 401  # nor is it a client's


def test_without_an_admin_key_the_admin_api_is_closed_to_everyone(start_server: StartServer) -> None:
    with start_server(ServerSettings(api_key=CLIENT)) as closed:
        for key in (None, CLIENT, ADMIN, "None"):
            refused(call(closed, "GET", "/documents", key=key), 403, "admin_disabled", None, "--admin-key")
    with pytest.raises(ConfigError, match="admin_key: wanted another key than api_key"):
        ServerSettings(api_key="same", admin_key="same")


def finished(server: Server, job: dict[str, Any]) -> dict[str, Any]:
    wait_until(lambda: call(server, "GET", f"/warm/{job['id']}").json()["status"] != "running")
    return call(server, "GET", f"/warm/{job['id']}").json()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_warm_job_computes_documents_before_the_question(
    server: Server, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lowest priority, unless `at_once`."""
    priorities, add = [], server.engine._loop.add
    monkeypatch.setattr(
        server.engine._loop, "add", lambda sequence: priorities.append(sequence.group.priority) or add(sequence)
    )
    response = call(server, "POST", "/warm", json={"documents": [ANNA, BOB, ANNA], "at_once": at_once})
    job = response.json()
    assert response.status_code == 202 and response.headers["location"] == f"/v1/cache/warm/{job['id']}"
    assert (job["object"], job["total"]) == ("cache.warm", 3)
    done = finished(server, job)
    assert priorities and all(priority == 0 if at_once else priority > MOST_PRIORITY for priority in priorities)
    assert (done["status"], done["done"], done["computed"], done["present"]) == ("completed", 3, 2, 1)
    assert [entry["computed_tokens"] for entry in ask(server, BOB)["per_document"]] == [0, 0]
    refused(call(server, "DELETE", f"/warm/{job['id']}"), 409, "job_over", None, "completed")


def test_indexed_documents_can_be_warmed_by_file_name(server: Server) -> None:
    job = patience.warmed(server.url, ADMIN, document_ids="all", at_once=True)
    assert job["done"] == server.retriever.num_passages
    listing = call(server, "GET", "/documents").json()["data"]
    assert [item["id"] for item in listing] == sorted(DOCUMENTS) and all(len(item["version"]) == 64 for item in listing)
    body = {"messages": [{"role": "user", "content": "Who repairs violins in Paris?"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {CLIENT}"}
    report = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()["reuse"]
    assert all(entry["computed_tokens"] == 0 for entry in report["per_document"])
    assert call(server, "DELETE", "/documents/anna.md?erase=true").json()["in_documents_directory"] is True


def test_a_warm_job_yields_to_requests_and_can_be_cancelled(server: Server) -> None:
    with busy(server):  # the engine is in other hands
        job = call(server, "POST", "/warm", json={"documents": [ANNA]}).json()
        assert call(server, "GET", f"/warm/{job['id']}").json()["done"] == 0
        ended = call(server, "DELETE", f"/warm/{job['id']}")
        assert ended.status_code == 200 and ended.json()["status"] == "cancelled"
    wait_until(lambda: server.service.backend.worker.thread.call(lambda: True).result())
    assert call(server, "GET", f"/warm/{job['id']}").json()["status"] == "cancelled"
    assert ask(server, ANNA)["per_document"][1]["computed_tokens"] > 0


def test_too_many_warm_jobs_are_refused(server: Server) -> None:
    with busy(server):
        jobs = [call(server, "POST", "/warm", json={"documents": [ANNA]}) for _ in range(17)]
        assert [job.status_code for job in jobs] == [202] * 16 + [429]
        refused(jobs[-1], 429, "queue_full", None, "16")
    for job in jobs[:-1]:
        finished(server, job.json())


def test_admin_call_waits_for_the_running_request_but_health_does_not(server: Server) -> None:
    ask(server, ANNA)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, busy(server):
        order = pool.submit(call, server, "DELETE", "/documents/anna?erase=true")
        wait_until(lambda: server.service.backend.worker.thread.is_calling, timeout_s=60)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert not order.done()
    assert order.result().status_code == 200 and server.engine.documents.list() == ()


def test_incomplete_erase_returns_503_and_names_the_remaining_objects(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def incomplete(*_: Any) -> None:
        raise EraseIncompleteError("document 'anna': 7 objects", [f"key{number}" for number in range(7)])

    monkeypatch.setattr(EngineDocuments, "erase", incomplete)
    response = call(server, "DELETE", "/documents/anna?erase=true")
    refused(response, 503, "erase_incomplete", None, "key0; key1", "key4; ...")
    assert response.headers["retry-after"]

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EngineDocuments, "pin", refuse)
    refused(call(server, "PUT", "/pins/anna", json={}), 503, "store_unavailable", None, "No space left")


def test_pin_limit_and_read_only_engine_return_409(start_server: StartServer, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with start_server(SETTINGS, store=url, max_variants=4, pin_share=0.25) as small:
        ask(small, ANNA, BOB)
        assert call(small, "PUT", "/pins/anna", json={}).status_code == 200
        refused(call(small, "PUT", "/pins/bob", json={}), 409, "pin_limit", "document_id", "at most 1 variants")
        small.engine.cache.flush()
    with start_server(SETTINGS, store=url, read_only=True) as reader:
        refused(call(reader, "DELETE", "/documents/anna"), 409, "read_only", "read_only")
        refused(call(reader, "POST", "/warm", json={"documents": [ANNA]}), 409, "read_only", "read_only")
        assert len(call(reader, "GET", "/documents").json()["data"]) == 2
        assert call(reader, "GET", "/documents/anna").json()["data"][0]["pinned_until"] > time.time()


def test_metrics_count_the_calls_by_a_bounded_outcome(server: Server) -> None:
    before = metrics(server)
    ask(server, ANNA, BOB)
    call(server, "DELETE", "/documents/anna")
    call(server, "DELETE", "/documents/anna")
    call(server, "PUT", "/pins/bob", json={})
    after = metrics(server)

    def grown(*key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert grown("ccjax_cache_admin_total", "invalidate", "ok") == 1
    assert grown("ccjax_cache_admin_total", "invalidate", "refused") == 1
    assert after[("ccjax_cached_documents",)] == 1 and after[("ccjax_pins",)] == 1
    assert after[("ccjax_unfinished_erasures",)] == 0


def test_the_openapi_schema_has_the_admin_calls(server: Server) -> None:
    schema = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    paths = {path: set(methods) for path, methods in schema["paths"].items() if path.startswith("/v1/cache")}
    assert paths == {
        "/v1/cache/documents": {"get"},
        "/v1/cache/documents/{document_id}": {"get", "delete"},
        "/v1/cache/pins/{document_id}": {"put", "delete"},
        "/v1/cache/warm": {"post"},
        "/v1/cache/warm/{job_id}": {"get", "delete"},
    }
    remove = schema["paths"]["/v1/cache/documents/{document_id}"]["delete"]
    assert {item["name"] for item in remove["parameters"]} == {"document_id", "version", "erase"}
    assert {"401", "403", "404", "409", "503"} <= remove["responses"].keys()
    assert {"ttl_s", "host"} <= schema["components"]["schemas"]["PinBody"]["properties"].keys()


def test_a_changed_file_drops_only_its_old_passages(start_server: StartServer, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    body = "\n\n".join(f"## Part {n}\n\n" + f"Sentence {n} tells of the number {n}. " * 8 for n in range(3))
    (docs / "book.md").write_text(f"# Book\n\n{body}")
    (docs / "gone.md").write_text("# Gone\n\nThis file is deleted soon.")
    with start_server(ServerSettings(admin_key=ADMIN, refresh_interval_s=0.1, repair=False)) as server:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        count = functools.partial(tokenizer.encode, allow_special=False)
        retriever = Retriever(docs, search="lexical", count_tokens=lambda text: len(count(text)), chunk_tokens=90)
        backend = server.service.backend
        object.__setattr__(backend, "retriever", retriever)
        patience.warmed(server.url, ADMIN, document_ids="all", at_once=True)
        (old,) = call(server, "GET", "/documents/book.md").json()["data"]
        assert old["chunks"] >= 3
        (docs / "book.md").write_text(f"# Book\n\n{body.replace('Sentence 2 tells', 'Sentence 2 now tells')}")
        (docs / "gone.md").unlink()

        def versions() -> list[str]:
            return [item["version"] for item in call(server, "GET", "/documents").json()["data"]]

        wait_until(lambda: len(versions()) == 1 and versions() != [old["version"]], timeout_s=120.0)
        (new,) = call(server, "GET", "/documents/book.md").json()["data"]
        assert 0 < new["chunks"] < old["chunks"] and new["variants"] == new["chunks"]
        retriever.close()


@pytest.mark.parametrize(
    "name",
    ["a\nb", "\n", "a/b", "/", "a/", "//a", ".", "..", "../a", "a b?c#d%2F", "é\u2028", "a\x00\r\tb", "i" * 1024],
)
def test_every_accepted_id_can_be_pinned_found_and_erased(server: Server, name: str) -> None:
    ask(server, {"text": "Carla sings at noon, in the small garden.", "id": name})
    path = urllib.parse.quote(name, safe="")
    path = path.replace(".", "%2E")  # or clients take it for a step in a path
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("GET", "documents", {}),
        ("PUT", "pins", {"json": {}}),
        ("DELETE", "pins", {}),
        ("DELETE", "documents", {"params": {"erase": "true"}}),
    )
    for method, place, more in calls:
        found = call(server, method, f"/{place}/{path}", **more)
        assert found.status_code == 200, found.text
    assert found.json()["id"] == name and found.json()["erased"] is True
    assert call(server, "GET", f"/documents/{path}").status_code == 404


@pytest.mark.parametrize("field", ["id", "version"])
@pytest.mark.parametrize("value", ["", "i" * 1025])
def test_ids_that_could_not_be_named_are_refused(server: Server, field: str, value: str) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "documents": [{"text": "Anna sings.", field: value}]}
    refused = patience.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {CLIENT}"}
    )
    assert refused.status_code == 400 and "1 to 1024 characters" in refused.text and f"'{field}'" in refused.text
    with pytest.raises(RequestError, match=rf"documents\[0\].{field}: wanted 1 to 1024 characters, got {len(value)}"):
        Request(messages=QUESTION, documents=[dataclasses.replace(Document("Anna sings."), **{field: value})])

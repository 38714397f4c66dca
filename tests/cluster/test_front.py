"""Clients of the front get the answers of a single server, to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ccjax.cluster.front import Front
from ccjax.cluster.prompts import PromptReader
from ccjax.loading.model import load_prompt_builder
from ccjax.server import ServerSettings, create_app
from ccjax.server.body import parse_body
from ccjax.server.keys import salt_of
from ccjax.server.schemas import ChatBody
from tests.cluster.conftest import API_KEY, SETTINGS, bearer
from tests.cluster.local import ADMIN_KEY, MAX_BODY_BYTES, LocalReplicas, running_front
from tests.polling import wait_until
from tests.server import patience

QUESTION = [{"role": "user", "content": "Who lives in Paris?"}]
PASSAGES = [
    {"id": "p1", "title": "Anna", "text": "Anna lives in Paris and repairs violins.", "version": "3"},
    {"id": "p2", "text": "Bob works in Rome and paints houses all day."},
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(**more):
    return {"messages": QUESTION, "max_tokens": 6, **more}


def ask(path, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return "POST", path, content, {"Content-Type": "application/json", **bearer(API_KEY), **headers}


def get(path, key=API_KEY):
    return "GET", path, b"", bearer(key)


REQUESTS = {
    "health": get("/health", None),
    "version": get("/version"),
    "problems of documents": get("/v1/documents/problems"),
    "models": get("/v1/models"),
    "model": get("/v1/models/tiny"),
    "description": get("/openapi.json"),
    "tokens": ask("/tokenize", {"messages": QUESTION, "documents": PASSAGES}),
    "own documents": ask(CHAT, chat()),
    "one of them": ask(CHAT, chat(retrieval={"top_k": 1})),
    "filtered": ask(CHAT, chat(retrieval={"filters": {"type": "ne", "key": "document_id", "value": "anna.md"}})),
    "none of them": ask(CHAT, chat(retrieval=False)),
    "brought documents": ask(CHAT, chat(documents=PASSAGES, reuse="off")),
    "from the cache": ask(CHAT, chat(documents=PASSAGES, reuse="exact")),
    "permuted": ask(CHAT, chat(documents=PASSAGES[::-1], reuse="fast")),
    "drawn": ask(CHAT, chat(documents=PASSAGES, temperature=1.0, seed=3, n=3, logprobs=True, top_logprobs=2)),
    "stream": ask(CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "response": ask("/v1/responses", {"input": "Who lives in Paris?", "max_output_tokens": 5}),
    "response stream": ask("/v1/responses", {"input": "Who lives in Paris?", "max_output_tokens": 5, "stream": True}),
    "slash at the end": get("/v1/models/"),
    "completion": ask(COMPLETIONS, {"prompt": "Bob works", "max_tokens": 5}),
    "completion stream": ask(COMPLETIONS, {"prompt": [5, 77, 301], "max_tokens": 5, "stream": True, "logprobs": 2}),
    "no json": ask(CHAT, b"{"),
    "no text": ask(CHAT, b"\xff"),
    "wrong field": ask(CHAT, chat(temperature=9)),
    "wrong documents": ask(CHAT, chat(documents=[{"text": " "}])),
    "too long a prompt": ask(CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}])),
    "wrong filters": ask(CHAT, chat(retrieval={"filters": {"type": "no", "key": "x", "value": 1}})),
    "wrong stream": ask(CHAT, chat(stream=True, n=99)),
    "other model": get("/v1/models/other"),
    "other path": get("/v1/none?x=%20y"),
    "other method": ("DELETE", CHAT, b"", bearer(API_KEY)),
    "no key": ("POST", CHAT, b"{}", {"Content-Type": "application/json"}),
    "wrong key": ask(CHAT, chat(), Authorization="Bearer open"),
    "other type": ask(CHAT, b"x", **{"Content-Type": "text/plain"}),
    "oversize": ask(CHAT, b"x" * (MAX_BODY_BYTES + 1)),
    "api key for the caches": ("DELETE", "/v1/cache/documents/anna.md", b"", bearer(API_KEY)),
    "wrong query": ("DELETE", "/v1/cache/documents/anna.md?versoin=1", b"", bearer(ADMIN_KEY)),
    "cached": get("/v1/cache/documents", ADMIN_KEY),
    "unknown job": get("/v1/cache/warm/none", ADMIN_KEY),
}
_CHANGING = [
    (rb'"(chatcmpl|cmpl|resp|msg)-[0-9a-f]{32}"', b'"ID"'),
    (rb'"(created|created_at|completed_at|last_used|\w+_s)": ?[0-9.e+-]+', b'"TIME":0'),
    (rb'"per_document": ?\[.*?\]', lambda found: re.sub(rb"[0-9]\.[0-9]+", b"0.0", found[0])),
]


def told(url, request):
    """Status, headers and body, without ids and times."""
    method, path, content, headers = request
    answer = httpx.request(method, f"{url}{path}", content=content, headers=headers, timeout=60)
    body = answer.content
    for pattern, replacement in _CHANGING:
        body = re.sub(pattern, replacement, body)
    kept = {k: v for k, v in answer.headers.items() if k not in ("date", "content-length", "server", "x-request-id")}
    return answer.status_code, kept, body


def test_every_answer_matches_that_of_a_single_server(tiny_model, start_server):
    """One replica, so that its cache has the same history as the single server's: both begin empty."""
    statuses = []
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_server(SETTINGS)) for _ in range(2)]
        replicas = LocalReplicas(create_app(servers[1].service))
        _, url = stack.enter_context(running_front(tiny_model, servers[1], replicas))
        for name, request in REQUESTS.items():
            wanted, found = told(servers[0].url, request), told(url, request)
            assert found == wanted, name
            for server in servers:  # what an answer leaves in the cache is stored behind it
                with server.engine._loop.exclusive():
                    pass
            statuses.append(found[0])
    assert {200, 400, 401, 403, 404, 405, 413, 415} <= set(statuses)


def test_a_front_without_keys_checks_hosts_and_keeps_request_ids(servers, tiny_model):
    """Its replicas have other settings here: what they see is the client's."""
    replicas = LocalReplicas(create_app(servers[1].service))
    with running_front(tiny_model, servers[1], replicas, settings=ServerSettings(allowed_hosts=("rag.example",))) as (
        _,
        url,
    ):
        for host, status in {"evil.example": 403, "rag.example": 200, "localhost:1": 200}.items():
            headers = {"Host": host, "X-Request-Id": "given", **bearer(API_KEY)}
            answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=60)
            assert answer.status_code == status and answer.headers.get_list("x-request-id") == ["given"]
    assert len(replicas.calls) == 2 and all((b"x-request-id", b"given") in call.headers for call in replicas.calls)


def test_oversized_body_is_truncated_before_forwarding(servers, tiny_model):
    piece = b" " * (MAX_BODY_BYTES // 8)
    sent = []

    async def receive():
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def send(message):
        sent.append(message)

    replicas = LocalReplicas(create_app(servers[0].service))
    reader = PromptReader(load_prompt_builder(tiny_model), servers[0].retriever, servers[0].service.settings)
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {API_KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    asyncio.run(Front(replicas, reader, servers[0].service.settings)(scope, receive, send))
    assert sent[0]["status"] == 413
    assert len(replicas.calls[0].body) == 9 * len(piece) > MAX_BODY_BYTES


@pytest.mark.parametrize("salt", [None, "apart"])
def test_front_and_replicas_use_the_same_chunk_ids_for_each_tenant(servers, tiny_model, tmp_path, salt):
    """Otherwise no call of a tenant would be routed to the replica with its passages."""
    keys = tmp_path / "keys"
    keys.write_text("anna:anna-key-0123456789\nbob:bob-key-0123456789\n")
    keys.chmod(0o600)
    settings = SETTINGS.replace(api_key_file=str(keys))
    replicas = LocalReplicas(_answer_nothing)
    front = Front(replicas, PromptReader(load_prompt_builder(tiny_model), None, settings), settings)
    engine, named = servers[0].engine, {}
    for key in ("anna-key-0123456789", "bob-key-0123456789", API_KEY, "none"):
        content = json.dumps(chat(documents=PASSAGES) | ({} if salt is None else {"cache_salt": salt})).encode()
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive(messages=messages):
            return next(messages, None) or await asyncio.sleep(60)

        headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
        asyncio.run(front(scope, receive, _ignore))
        found = front._keys.api.find(key)
        request = parse_body(ChatBody, content).to_request(
            parse_body(ChatBody, content).own_documents(),
            reuse="exact",
            timeout_s=None,
            request_id="r",
            cache_salt=salt_of(salt or "", found),
        )
        chunks = engine.assemble(request).chunks
        named[key] = {chunk.chunk_id for chunk in chunks}
        told = {chunk_id for chunk_id, _ in replicas.prompts[-1].chunks}
        assert told == (named[key] - {chunks[0].chunk_id} if found is not None else set())
    assert named["anna-key-0123456789"].isdisjoint(named["bob-key-0123456789"])


async def _ignore(_):
    pass


async def _answer_nothing(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_stream_is_forwarded_as_it_arrives(cluster):
    """The first part arrives while the engine is blocked."""
    body = chat(stream=True, max_tokens=200, ignore_eos=True)
    url = f"{cluster.url}{CHAT}"
    with httpx.stream("POST", url, json=body, headers=bearer(API_KEY), timeout=60) as answer:
        lines = answer.iter_lines()
        assert "role" in next(lines)
        engine = cluster.servers[0].engine
        assert engine.batch_counts.running == 1
    wait_until(lambda: engine.batch_counts.running == 0)  # a disconnect frees the slot


def test_passages_found_by_the_front_reach_the_replica(servers, cluster, monkeypatch):
    question = [{"role": "user", "content": "Where does Carla sail with Minerva?"}]
    body = chat(messages=question, reuse="off")  # what is cached differs
    wanted = patience.post(f"{servers[0].url}{CHAT}", json=body, headers=bearer(API_KEY)).json()

    def no_search(*_, **__):
        raise AssertionError("the replica searched")

    for server in cluster.servers:
        monkeypatch.setattr(server.retriever, "stages", no_search)
    found = cluster.post(CHAT, body)
    assert found.status_code == 200, found.text
    assert found.json()["documents"] == wanted["documents"] and len(wanted["documents"]) == 2
    assert found.json()["choices"] == wanted["choices"]


def test_router_and_engine_see_the_same_chunks(cluster):
    body = chat(documents=PASSAGES)
    report = cluster.post(CHAT, body).json()["reuse"]["per_document"]
    chunks = [(entry["chunk_id"], entry["num_tokens"]) for entry in report if entry["role"] == "passage"]
    (prompt,) = cluster.replicas.prompts
    assert list(prompt.chunks) == chunks and len(chunks) == 2
    total = cluster.post(CHAT, body).json()["usage"]["prompt_tokens"]
    assert prompt.other_tokens == total - sum(length for _, length in chunks)


def test_router_sees_what_earlier_turns_a_prompt_has(cluster):
    turns = [QUESTION[0], {"role": "assistant", "content": "Anna does."}, {"role": "user", "content": "And in Rome?"}]
    totals = [
        cluster.post(CHAT, chat(messages=messages, retrieval=False)).json()["usage"]["prompt_tokens"]
        for messages in (turns[:1], turns, turns[2:])
    ]
    first, second, other = cluster.replicas.prompts
    assert "" != first.conversation == second.conversation != other.conversation != ""
    assert first.earlier_tokens == 0 < second.earlier_tokens
    assert [prompt.other_tokens + prompt.earlier_tokens for prompt in (first, second, other)] == totals
    assert second.other_tokens < first.other_tokens + second.earlier_tokens


@pytest.mark.parametrize("key", [None, "open", ADMIN_KEY])
def test_no_search_runs_without_a_valid_key(cluster, monkeypatch, key):
    searched = []
    stages = cluster.searcher.stages
    monkeypatch.setattr(
        cluster.searcher, "stages", lambda *args, **more: searched.append(args) or stages(*args, **more)
    )
    assert cluster.post(CHAT, chat(), key=key).status_code == 401
    assert searched == [] and cluster.replicas.calls[0].passages is None
    assert cluster.post(CHAT, chat()).status_code == 200
    assert len(searched) == 1


def test_documents_are_pinned_and_removed_on_every_replica(cluster):
    document = {"id": "d1", "text": "Quentin keeps forty bees in a blue hive behind the mill."}
    for _ in cluster.servers:  # one after the other
        assert cluster.post(CHAT, chat(documents=[document])).status_code == 200

    def known():
        return [any(d.document_id == "d1" for d in server.engine.documents.list()) for server in cluster.servers]

    assert known() == [True, True]
    assert cluster.ask("PUT", "/v1/cache/pins/d1", {"ttl_s": 3600}).status_code == 200
    assert all(server.engine.documents.list("d1")[0].pinned_until is not None for server in cluster.servers)
    assert cluster.ask("DELETE", "/v1/cache/pins/d1").status_code == 200
    assert cluster.ask("DELETE", "/v1/cache/documents/d1?erase=true").json()["chunks"] == 1
    assert known() == [False, False]
    assert cluster.ask("GET", "/v1/cache/documents/d1").status_code == 404


def test_document_cached_on_one_replica_is_found(cluster):
    document = {"id": "d2", "text": "Rosalind mends clocks for the whole valley."}
    assert cluster.post(CHAT, chat(documents=[document])).status_code == 200
    assert cluster.ask("GET", "/v1/cache/documents/d2").json()["data"][0]["id"] == "d2"
    for _ in cluster.servers:
        job = cluster.ask("POST", "/v1/cache/warm", {"documents": [{"id": "d3", "text": "Saul sells salt."}]}).json()
        wait_until(lambda path=f"/v1/cache/warm/{job['id']}": cluster.ask("GET", path).json()["status"] == "completed")


def test_broadcast_call_fails_if_any_replica_is_unreachable(cluster):
    cluster.replicas.unreachable = {1}
    for method, path in (("DELETE", "/v1/cache/documents/d1"), ("GET", "/v1/cache/documents")):
        answer = cluster.ask(method, path)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "1 of 2 replicas could not be reached" in answer.json()["error"]["message"]
    cluster.replicas.apps = ()
    assert "there is no replica" in cluster.ask("DELETE", "/v1/cache/documents/d1").json()["error"]["message"]


def test_metrics_include_those_of_each_replica(servers, cluster):
    for _ in range(3):
        cluster.post(CHAT, chat())
    cluster.replicas.generators = [
        f"# TYPE ccjax_orders_taken_total counter\nccjax_orders_taken_total {n}\n" for n in (7, 9)
    ]
    text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    merged = {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert merged["ccjax_cluster_replicas", ("state", "running")] == 2
    taken = [merged.pop(("ccjax_orders_taken_total", ("generator", str(number)))) for number in range(2)]
    assert taken == [7, 9]
    moving = re.compile("process_|python_|_created$|_seconds|_s$|ccjax_cluster")
    for number, server in enumerate(cluster.servers):
        own = httpx.get(f"{server.url}/metrics", timeout=60).text
        for family in text_string_to_metric_families(own):
            for sample in family.samples:
                labels = sorted({**sample.labels, "replica": str(number)}.items())
                value = merged.pop((sample.name, *labels))
                assert moving.search(sample.name) or value == sample.value, sample
    assert all(name.startswith("ccjax_cluster") for name, *_ in merged), merged.keys()

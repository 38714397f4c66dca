"""Bad input gets a 4xx in OpenAI's format that names the field and the limit, and the next good request is answered."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.server import patience
from tests.server.conftest import MAX_MODEL_LEN, Server

QUESTION = [{"role": "user", "content": "Who lives in Paris?"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def assert_refused(response: httpx.Response, status: int, param: str | None, *words: str) -> dict[str, Any]:
    """The error, which has the four fields of OpenAI's and says what was wanted."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    for word in (param or "", *words):
        assert word in error["message"], error["message"]
    return error


def assert_serves(server: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "documents": [{"text": "Anna lives in Paris."}]}
    response = patience.post(f"{server.url}{CHAT}", json=body)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 2


BAD_FIELDS = [
    ({"messages": [{"role": "user", "content": " \n"}]}, "messages[0].content", ["question"]),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", ["question"]),
    ({"messages": []}, "messages", ["user"]),
    ({"messages": None}, "messages", []),
    ({"messages": "hello"}, "messages", ["array", "hello"]),
    ({"messages": ["hello"]}, "messages[0]", []),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["string", "int"]),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", ["user", "wizard"]),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", ["text", "image"]),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", ["user"]),
    ({"documents": [{"text": "fine"}, {"text": "  "}]}, "documents[1]", ["non-empty"]),
    ({"documents": [{"title": "no text"}]}, "documents[0].text", ["required"]),
    ({"documents": [{"text": 5}]}, "documents[0].text", ["string", "5"]),
    ({"documents": ["text"]}, "documents[0]", []),
    ({"documents": "text"}, "documents", ["array", "text"]),
    ({"documents": {"text": "x"}}, "documents", ["array"]),
    ({"documents": [{"text": "x", "id": 1.5}]}, "documents[0].id", ["string", "1.5"]),
    ({"documents": [{"text": "word " * 3000}]}, "documents", [str(MAX_MODEL_LEN), "1 documents"]),
    ({"documents": [{"text": "Anna lives in Paris. " * 3}] * 60}, "documents", [str(MAX_MODEL_LEN), "60 documents"]),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", [str(MAX_MODEL_LEN)]),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens", [str(MAX_MODEL_LEN)]),
    ({"max_tokens": -5}, "max_tokens", ["positive", "-5"]),
    ({"max_tokens": 0}, "max_tokens", ["positive", "0"]),
    ({"max_completion_tokens": -1}, "max_completion_tokens", ["positive", "-1"]),
    ({"max_tokens": "5"}, "max_tokens", ["integer", "'5'"]),
    ({"max_tokens": 5.5}, "max_tokens", ["integer", "5.5"]),
    ({"max_tokens": True}, "max_tokens", ["integer", "True"]),
    ({"temperature": 5}, "temperature", ["0 to 2", "5"]),
    ({"temperature": -0.1}, "temperature", ["0 to 2", "-0.1"]),
    ({"temperature": "hot"}, "temperature", ["number", "hot"]),
    ({"top_p": 0}, "top_p", ["above 0", "0"]),
    ({"top_p": 1.5}, "top_p", ["at most 1", "1.5"]),
    ({"stop": 5}, "stop", ["string", "5"]),
    ({"stop": ["a", 5]}, "stop", ["string"]),
    ({"stop": ""}, "stop", ["empty"]),
    ({"stop": ["a"] * 17}, "stop", ["16"]),
    ({"seed": "x"}, "seed", ["integer"]),
    ({"seed": 2**63}, "seed", [str(2**63)]),
    ({"n": 0}, "n", ["1 to 16", "0"]),
    ({"n": 17}, "n", ["1 to 16", "17"]),
    ({"n": "2"}, "n", ["integer", "'2'"]),
    ({"n": True}, "n", ["integer", "True"]),
    ({"best_of": 2}, "best_of", ["1", "2"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["20"]),
    ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
    ({"logprobs": 3}, "logprobs", ["boolean"]),
    ({"reuse": "sometimes"}, "reuse", ["off", "exact", "bounded", "fast", "sometimes"]),
    ({"reuse": 3}, "reuse", ["string"]),
    ({"truncate": "yes"}, "truncate", ["boolean", "yes"]),
    ({"retrieval": 5}, "retrieval", ["top_k", "5"]),
    ({"retrieval": {"top_k": 0}}, "retrieval.top_k", ["1", "0"]),
    ({"retrieval": {"top_k": 1000}}, "retrieval.top_k", ["100", "1000"]),
    ({"retrieval": {"filters": {"type": "like"}}}, "retrieval.filters", ["filters.type", "nin", "like"]),
    ({"retrieval": {"filters": 5}}, "retrieval.filters", ["5"]),
    ({"retrieval": {"topk": 5}}, "retrieval", ["top_k", "filters", "{'topk': 5}"]),
    ({"retrieval": {"top_k": 2}, "documents": [{"text": "x"}]}, "retrieval", ["both"]),
    ({"cache_salt": "someone else's"}, "cache_salt", ["server"]),
    ({"stream": "yes"}, "stream", ["boolean"]),
    ({"priority": "high"}, "priority", ["integer", "high"]),
    ({"priority": 1.5}, "priority", ["integer", "1.5"]),
    ({"priority": 1001}, "priority", ["-1000 to 1000", "1001"]),
    ({"user": 5}, "user", ["string", "5"]),
    ({"user": "x" * 257}, "user", ["256"]),
    ({"safety_identifier": "x" * 257}, "safety_identifier", ["256"]),
    ({"timeout_s": 0}, "timeout_s", ["positive", "0"]),
    ({"timeout_s": -1.5}, "timeout_s", ["positive", "-1.5"]),
    ({"timeout_s": "soon"}, "timeout_s", ["number", "soon"]),
    ({"stream": True, "stream_options": True}, "stream_options", []),
]


BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", ["non-empty"]),
    ({"prompt": ["one", 2]}, "prompt", ["texts or lists"]),
    ({"prompt": {"text": "x"}}, "prompt", ["a text"]),
    ({"prompt": []}, "prompt", ["texts or lists"]),
    ({"prompt": [5, -1]}, "prompt", ["token ids", "-1"]),
    ({"prompt": [5, 10**9]}, "prompt", ["token ids", str(10**9)]),
    ({"prompt": [5, 6], "documents": [{"text": "x"}]}, "documents", ["token ids"]),
    ({"prompt": [5, 6], "retrieval": {"top_k": 1}}, "retrieval", ["token ids"]),
    ({"prompt": "word " * 3000}, "prompt", [str(MAX_MODEL_LEN)]),
    ({"prompt": "x", "logprobs": 50}, "logprobs", ["20", "50"]),
    ({"prompt": "x", "echo": 1}, "echo", ["boolean"]),
    ({"prompt": "x", "best_of": 3}, "best_of", ["not supported"]),
    ({}, "prompt", ["required"]),
]


def test_bad_fields_are_rejected_with_400(server: Server) -> None:
    for fields, param, words in BAD_FIELDS:
        body = {"messages": QUESTION, "max_tokens": 2} | fields
        error = assert_refused(patience.post(f"{server.url}{CHAT}", json=body), 400, param, *words)
        assert len(error["message"]) < 500
        assert (error["code"] == "context_length_exceeded") == ("max_model_len" in error["message"])
    assert_refused(patience.post(f"{server.url}{CHAT}", json={"max_tokens": 2}), 400, "messages", "required")
    assert_serves(server)
    for fields, param, words in BAD_COMPLETIONS:
        assert_refused(patience.post(f"{server.url}{COMPLETIONS}", json=fields), 400, param, *words)
    assert_serves(server)


def test_too_many_documents_are_fine_with_truncate(server: Server) -> None:
    documents = [{"text": "Anna lives in Paris. " * 3}] * 60
    body = {"messages": QUESTION, "max_tokens": 2, "documents": documents, "truncate": True}
    assert patience.post(f"{server.url}{CHAT}", json=body).status_code == 200


def test_an_unknown_model_is_404(server: Server) -> None:
    for path, body in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "x"})):
        answer = patience.post(f"{server.url}{path}", json=body | {"model": "gpt-9"})
        assert assert_refused(answer, 404, "model", "tiny", "gpt-9")["code"] == "model_not_found"
    assert_refused(patience.get(f"{server.url}/v1/models/org/gpt-9"), 404, "model", "tiny", "org/gpt-9")
    assert_serves(server)


BROKEN = [
    (b'{"messages": [', "invalid_json", ["JSON", "EOF"]),
    (b"", "invalid_json", ["JSON"]),
    (b"hello", "invalid_json", ["JSON"]),
    (b"[" * 10_000, "invalid_json", ["recursion"]),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", ["JSON"]),
    (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "invalid_encoding", ["UTF-8", "0xe9", "46"]),
    ('{"messages": []}'.encode("utf-16"), "invalid_encoding", ["UTF-8"]),
    (b"[1, 2]", None, ["object"]),
    (b'"text"', None, ["object"]),
]


def test_malformed_bodies_are_rejected_with_400(server: Server) -> None:
    headers = {"Content-Type": "application/json"}
    for content, code, words in BROKEN:
        answer = patience.post(f"{server.url}{CHAT}", content=content, headers=headers)
        error = assert_refused(answer, 400, None, *words)
        assert error["code"] == code and "body" in error["message"]
    # Which Python's json reads, and no answer may have.
    tool = {"type": "function", "name": "f", "parameters": {"minimum": float("nan")}}
    headers = {"Content-Type": "application/json; charset=utf-8"}
    asked = {CHAT: {"temperature": float("inf"), "messages": QUESTION}, "/v1/responses": {"tools": [tool]}}
    for path, fields in asked.items():
        body = json.dumps({"input": "Who?", "max_output_tokens": 16} | fields)
        assert_refused(patience.post(f"{server.url}{path}", content=body, headers=headers), 400, None, "body", "JSON")
    said = [{"role": "user", "content": "What is NaN, or Infinity?"}]
    assert patience.post(f"{server.url}{CHAT}", json={"messages": said, "max_tokens": 1}).status_code == 200
    assert_serves(server)


def test_unsupported_content_types_paths_and_methods_are_rejected(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {"Content-Type": kind} if kind else {}
        content = json.dumps({"messages": QUESTION}).encode()
        response = patience.post(f"{server.url}{CHAT}", content=content, headers=headers)
        assert_refused(response, 415, None, "Content-Type", "application/json")
    assert_refused(patience.get(f"{server.url}/v1/nothing"), 404, None)
    response = patience.get(f"{server.url}{CHAT}")
    assert_refused(response, 405, None)
    assert response.headers["allow"] == "POST, OPTIONS"
    assert_serves(server)


def test_a_50_mb_body_is_413(server: Server) -> None:
    content = b'{"messages": "' + b"x" * 50_000_000 + b'"}'
    response = patience.post(f"{server.url}{CHAT}", content=content, headers={"Content-Type": "application/json"})
    error = assert_refused(response, 413, None, "body", "10000000")
    assert error["code"] == "body_too_large"
    assert_serves(server)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_413_is_sent_before_the_body_is_read(server: Server, is_chunked: bool) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    length = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 50000000"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        connection.sendall(head.encode())
        if is_chunked:
            for _ in range(11):  # just over the limit, and no end to it
                connection.sendall(b"%x\r\n" % 1_000_000 + b"x" * 1_000_000 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert_serves(server)


def test_tokenize_requires_exactly_one_input(server: Server) -> None:
    for body in ({}, {"prompt": "x", "messages": QUESTION}):
        assert_refused(patience.post(f"{server.url}/tokenize", json=body), 400, "prompt", "exactly one")
    assert_refused(patience.post(f"{server.url}/tokenize", json={"prompt": 5}), 400, "prompt", "string")
    assert_refused(patience.post(f"{server.url}/tokenize", json={"messages": []}), 400, "messages", "user")

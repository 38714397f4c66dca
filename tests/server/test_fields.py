"""Every field of the other servers' request schemas is served, accepted without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ccjax.server import fields
from tests.server import patience
from tests.server.conftest import Server
from tests.server.test_bad_requests import QUESTION, assert_refused

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    fields.CHAT: ("ChatBody", {"messages": QUESTION, "max_tokens": 1, "retrieval": False}),
    fields.COMPLETIONS: ("CompletionBody", {"prompt": "Bob", "max_tokens": 1, "retrieval": False}),
    fields.RESPONSES: ("ResponsesBody", {"input": "Who?", "max_output_tokens": 1, "retrieval": False}),
    fields.EMBEDDINGS: ("EmbeddingsBody", {"input": "Bob"}),
    fields.TOKENIZE: ("TokenizeBody", {"prompt": "Bob"}),
    fields.DETOKENIZE: ("DetokenizeBody", {"tokens": [66]}),
}
ELSEWHERE = ("ChatBody",)
"""Bodies whose fields /v1/responses takes, too."""


def served(server: Server, path: str) -> set[str]:
    schemas = patience.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    names = [BODIES[path][0], *(ELSEWHERE if path == fields.RESPONSES else ())]
    return {field for name in names for field in schemas[name]["properties"]} - set(fields.REFUSED_OF[path])


def listed(path: str) -> set[str]:
    return {name for names in fields.FIELDS[path].values() for name in names.split()}


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_in_one_of_three_classes(server: Server, path: str) -> None:
    known = served(server, path)
    refused, harmless = set(fields.refused_of(path)) - known, fields.HARMLESS - known
    assert not listed(path) - known - refused - harmless
    assert not refused & harmless


@pytest.mark.parametrize("path", BODIES)
def test_what_has_no_effect_is_accepted(server: Server, path: str) -> None:
    """Harmless fields with any value, and all others with those that change nothing."""
    known, body = served(server, path), BODIES[path][1]
    plain = patience.post(f"{server.url}{path}", json=body)
    harmless = {name: {} for name in listed(path) & fields.HARMLESS - known}
    neutral = {name: values[0] for name, values in fields.refused_of(path).items() if values and name not in known}
    none = dict.fromkeys(set(fields.refused_of(path)) - known)
    for more in (harmless, neutral, none):
        answer = patience.post(f"{server.url}{path}", json=body | more)
        assert answer.status_code == plain.status_code in (200, 501), answer.text
        if path in (fields.CHAT, fields.COMPLETIONS) and answer.status_code == 200:
            assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("path", BODIES)
def test_what_would_change_the_answer_is_refused_by_name(server: Server, path: str) -> None:
    known = served(server, path)
    names = set(fields.refused_of(path)) - known
    assert len(names) > 3 and (path in (fields.DETOKENIZE,) or names & listed(path))
    for name in names:
        answer = patience.post(f"{server.url}{path}", json=BODIES[path][1] | {name: ["another", 7.25]})
        error = assert_refused(answer, 400, name)
        assert len(error["message"]) < 300


def test_reasoning_effort_is_a_variable_of_the_template(server: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "retrieval": False, "reasoning_effort": "low"}
    assert patience.post(f"{server.url}{fields.CHAT}", json=body).status_code == 200
    answer = patience.post(f"{server.url}{fields.CHAT}", json=body | {"reasoning_effort": "a lot"})
    assert_refused(answer, 400, "reasoning_effort", "minimal", "a lot")


def test_constraints_have_the_names_of_other_servers(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    cases: list[tuple[str, Any, str]] = [
        ("regex", "ab", "ab"),
        ("json_schema", schema, '{"a":1}'),
        ("ebnf", 'root ::= "xyz"', "xyz"),
        ("grammar", 'root ::= "xyz"', "xyz"),
    ]
    for name, value, wanted in cases:
        body = {"prompt": "Bob", "max_tokens": 20, "retrieval": False, name: value}
        answer = patience.post(f"{server.url}{fields.COMPLETIONS}", json=body)
        assert answer.status_code == 200, answer.text
        assert "".join(answer.json()["choices"][0]["text"].split()) == wanted
    body = {"prompt": "Bob", "ebnf": "no grammar"}
    assert_refused(patience.post(f"{server.url}{fields.COMPLETIONS}", json=body), 400, "ebnf", "llguidance")

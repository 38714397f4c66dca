"""Constrained answers, requested by OpenAI's own client and in vLLM's fields, whole and streamed, beside free ones."""

from __future__ import annotations

import concurrent.futures
import json
import re
from typing import TYPE_CHECKING, Any, Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server import patience
from tests.server.conftest import Server
from tests.server.test_bad_requests import assert_refused

if TYPE_CHECKING:
    import openai

QUESTION: list[Any] = [{"role": "user", "content": "Who lives in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["old", "größe", "new"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 200, "extra_body": {"retrieval": False}}


class Person(BaseModel):
    """What `parse` of OpenAI's client turns into a schema."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    kind: Literal["violinist", "baker"]
    age: int = Field(ge=0, le=120)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=QUESTION, **{**DRAWN, **fields})


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema_answers_validate_whole_and_streamed(client: openai.OpenAI, strict: bool | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": strict, "schema": SCHEMA}}
    answer = chat(client, response_format=form, seed=1, n=3)
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = list(chat(client, response_format=form, seed=1, stream=True))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == answer.choices[0].message.content and len(texts) > 5
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_pydantic_models_are_parsed_by_openais_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Person, **DRAWN)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_json_object_starts_an_object_and_a_cut_answer_says_length(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=5)
    assert answer.choices[0].message.content.startswith("{")
    answer = chat(client, response_format=FORMAT, max_tokens=5)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5


FIELDS = [
    ({"guided_json": SCHEMA}, r"\{.*\}"),
    ({"guided_json": json.dumps(SCHEMA)}, r"\{.*\}"),
    ({"guided_regex": r"\d{3}-[a-z]{2}"}, r"\d{3}-[a-z]{2}"),
    ({"guided_choice": ["Anna", "Bob"]}, "Anna|Bob"),
    ({"guided_grammar": 'root ::= "so " [xyz]{2,3}'}, "so [xyz]{2,3}"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{.*\}"),
    ({"structured_outputs": {"regex": "a{2}b"}}, "aab"),
    ({"structured_outputs": {"choice": ["größe"], "json_object": False}}, "größe"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ({"response_format": {"type": "text"}, "guided_choice": None, "structured_outputs": {}}, ".*"),
]


@pytest.mark.parametrize(("fields", "pattern"), FIELDS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_spelling_is_followed(server: Server, path: str, fields: dict[str, Any], pattern: str) -> None:
    prompt: dict[str, Any] = {"messages": QUESTION} if "chat" in path else {"prompt": "Anna lives"}
    body = {"max_tokens": 150, "temperature": 1.0, "retrieval": False, "seed": 4}
    choice = patience.post(f"{server.url}{path}", json=prompt | body | fields).json()["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert re.fullmatch(pattern, text, re.DOTALL), text
    if SCHEMA in fields.values():
        jsonschema.validate(json.loads(text), SCHEMA)


def test_constrained_and_free_requests_run_side_by_side(client: openai.OpenAI) -> None:
    wanted = [chat(client, seed=seed, max_tokens=40).choices[0].message.content for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        free = [threads.submit(chat, client, seed=seed, max_tokens=40) for seed in range(4)]
        bound = [threads.submit(chat, client, seed=seed, response_format=FORMAT) for seed in range(4)]
        assert [one.result().choices[0].message.content for one in free] == wanted
        for one in bound:
            jsonschema.validate(json.loads(one.result().choices[0].message.content), SCHEMA)


REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format", ["json_schema"]),
    ({"response_format": {"type": "xml"}}, "response_format.type", ["json_object", "xml"]),
    ({"response_format": "json"}, "response_format", []),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "(?=a)"}}}},
        "response_format.json_schema.schema",
        ["llguidance", "pattern"],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        [],
    ),
    ({"guided_json": "{"}, "guided_json", ["JSON schema"]),
    ({"guided_json": {"type": "wizard"}}, "guided_json", ["wizard"]),
    ({"guided_json": 5}, "guided_json", []),
    ({"guided_regex": "(a"}, "guided_regex", ["llguidance"]),
    ({"guided_choice": []}, "guided_choice", ["non-empty"]),
    ({"guided_choice": "yes"}, "guided_choice", ["array"]),
    ({"guided_grammar": "nothing"}, "guided_grammar", ["GBNF"]),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", ["at most one", "guided_choice"]),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", ["structural_tag"]),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", ["llguidance"]),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", ["constraint"]),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_followed_is_refused(
    server: Server, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    for more in ({}, {"stream": True}):
        body = {"messages": QUESTION, "max_tokens": 5, **more, **fields}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert_refused(response, 400, param, *words)

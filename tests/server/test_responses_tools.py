"""Functions over /v1/responses with OpenAI's client: calls, results, answers, and what constrains them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ccjax.text import StopStrings
from tests.server.conftest import Server
from tests.server.patience import post
from tests.server.test_tools import CALL, FUNCTIONS, TOOLS, TWO, USER, says, server

if TYPE_CHECKING:
    import openai

__all__ = ["says", "server"]
OURS = [{"type": "function", "strict": None, "parameters": None, **function} for function in FUNCTIONS]


def respond(client: Any, input: Any = USER["content"], **fields: Any) -> Any:
    extra = {"documents": [], **fields.pop("extra_body", {})}
    asked = {"model": "tiny", "max_output_tokens": 300, "tools": OURS} | fields
    return client.responses.create(input=input, extra_body=extra, **asked)


def test_call_result_and_answer(client: openai.OpenAI, says: Any) -> None:
    says(CALL)
    first = respond(client)
    (call,) = first.output
    assert first.status == call.status == "completed" and first.output_text == ""
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    assert [tool.name for tool in first.tools] == ["get_weather", "get_time"] and first.tool_choice == "auto"
    says("It rains.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain, 4 °C"}
    history = [USER, call.model_dump(exclude_none=True), result]
    second = respond(client, history, extra_body={"trace": True, "reuse": "exact"})
    assert second.output_text == "It rains." and second.status == "completed"
    prompt = "".join(text for segment in second.trace["segments"] for text in segment["tokens"])
    assert f"assistant\n{CALL}user\n" in prompt
    assert prompt.endswith("user\n<tool_response>\nrain, 4 °C\n</tool_response>assistant\n")
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens / 2


def test_prompt_is_that_of_the_chat(client: openai.OpenAI, server: Server) -> None:
    chat: Any = client.chat.completions.create(
        model="tiny", messages=[USER], tools=TOOLS, max_tokens=1, extra_body={"documents": []}  # type: ignore[arg-type]
    )  # fmt: skip
    plain = [{"type": "function", **function} for function in FUNCTIONS]
    assert respond(client, max_output_tokens=16, tools=plain).usage.input_tokens == chat.usage.prompt_tokens
    tokens = post(f"{server.url}/tokenize", json={"messages": [USER], "tools": TOOLS}).json()["tokens"]
    assert len(tokens) == chat.usage.prompt_tokens


@pytest.mark.parametrize("text", [CALL, TWO, "No call."])
def test_a_stream_has_the_items_of_the_whole_response(client: openai.OpenAI, says: Any, text: str) -> None:
    says(text)

    def shown(response: Any) -> list[Any]:
        kinds = {
            "message": lambda item: item.content[0].text,
            "function_call": lambda item: (item.name, item.arguments),
        }
        return [(item.status, kinds[item.type](item)) for item in response.output]

    whole, events = respond(client), list(respond(client, stream=True))
    assert events[-1].type == "response.completed" and shown(events[-1].response) == shown(whole)
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == events[-1].response.output
    assert [event.output_index for event in done] == list(range(len(done))) and len(done) == max(
        1, text.count('"name"')
    ) + (text == TWO)
    for event in events:
        if event.type == "response.function_call_arguments.done":
            pieces = [e.delta for e in events if e.type.endswith("arguments.delta") and e.item_id == event.item_id]
            assert "".join(pieces) == event.arguments


@pytest.mark.parametrize("is_cut_finely", [True, False])
def test_text_and_calls_keep_their_order(
    client: openai.OpenAI, says: Any, monkeypatch: Any, is_cut_finely: bool
) -> None:
    """Of which the end of a call and the text behind it may come at once."""
    says(f"{TWO} Done.\n{CALL}")
    if not is_cut_finely:
        monkeypatch.setattr(StopStrings, "push", _hold)
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    whole, events = respond(client, **fields), list(respond(client, stream=True, **fields))
    parts = {"message": lambda item: item.content[0].text, "function_call": lambda item: item.name}
    for response in (whole, events[-1].response):
        told = [parts[item.type](item) for item in response.output]
        assert told == ["Let me see.", "get_weather", "get_time", " Done.", "get_weather"]
    begun = {event.item.id: place for place, event in enumerate(events) if event.type.endswith("item.added")}
    ended = {event.item.id: place for place, event in enumerate(events) if event.type.endswith("item.done")}
    for place, event in enumerate(events):
        if (item_id := getattr(event, "item_id", None)) is not None:
            assert begun[item_id] < place < ended[item_id], event
    first = events[-1].response.output[0].content[0]
    assert first.logprobs and all(entry.token for entry in first.logprobs)


def _hold(stops: StopStrings, text: str, **_: Any) -> str:
    """Of `StopStrings.push`: holds all back."""
    stops._held += text
    return ""


def test_a_call_alone_has_no_message_before_it(client: openai.OpenAI, says: Any) -> None:
    says(CALL)
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    for response in (respond(client, **fields), list(respond(client, stream=True, **fields))[-1].response):
        assert [item.type for item in response.output] == ["function_call"]


def test_a_schema_constrains_the_text(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    found = respond(client, tools=[], text=form, max_output_tokens=40)
    assert json.loads(found.output_text)["ok"] in (True, False) and found.text.format.name == "answer"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [*OURS, {"type": "function", "name": "x", "parameters": 3}]}, "tools[2].parameters"),
        ({"tool_choice": {"type": "function", "name": "rm_rf"}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no such"}}}},
            "text.format.schema",
        ),
        ({"input": [USER, {"type": "function_call", "call_id": "c", "name": "f"}]}, "input[1].arguments"),
    ],
)
def test_error_names_the_field(server: Server, fields: dict, named: str) -> None:
    refused = post(f"{server.url}/v1/responses", json={"input": "Weather?", "tools": OURS} | fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == named, refused.text

"""/v1/responses with OpenAI's client: the answers are those of chats, the events those of OpenAI's API."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ccjax.engine import Delta
from ccjax.errors import RequestError
from ccjax.requests import Choice
from ccjax.server.responses import ResponsesBody
from ccjax.server.responses_format import ResponsesFormatter
from tests.server.conftest import Server
from tests.server.patience import get, post
from tests.server.test_nearly import nearly_equal

if TYPE_CHECKING:
    import openai

QUESTION = "Who lives in Paris?"
PASSAGES = [{"id": "p1", "title": "Anna", "text": "Anna lives in Paris and repairs violins."}]
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"name": "Anna"}'}


def chat(client: Any, messages: list[Any], **more: Any) -> Any:
    extra = {"documents": PASSAGES, "reuse": "off"} | more.pop("extra", {})
    return client.chat.completions.create(
        model="tiny", messages=messages, **{"max_tokens": 12} | more, extra_body=extra
    )  # fmt: skip


def respond(client: Any, input: Any = QUESTION, **more: Any) -> Any:
    extra = {"documents": PASSAGES, "reuse": "off"} | more.pop("extra", {})
    return client.responses.create(model="tiny", input=input, **{"max_output_tokens": 12} | more, extra_body=extra)


def test_a_response_has_the_answer_and_figures_of_the_chat(client: openai.OpenAI) -> None:
    wanted = chat(client, [{"role": "user", "content": QUESTION}])
    found = respond(client, metadata={"k": "v"}, store=True)
    assert found.output_text == wanted.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (message,) = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert found.object == "response" and found.model == "tiny" and found.error is None and found.store is False
    assert found.metadata == {"k": "v"} and found.max_output_tokens == 12 and found.temperature == 0.0
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens) == (wanted.usage.prompt_tokens, 12)
    assert usage.total_tokens == wanted.usage.total_tokens and usage.input_tokens_details.cached_tokens == 0
    assert found.reuse["mode"] == "off" and found.ttft_s > 0
    assert [entry["id"] for entry in found.documents] == ["p1"]


def test_a_repeated_response_counts_cached_tokens(client: openai.OpenAI) -> None:
    again = [respond(client, extra={"reuse": "bounded"}) for _ in range(2)][1]
    assert again.usage.input_tokens_details.cached_tokens == again.reuse["reused_tokens"] > 0


def test_items_are_the_messages_of_a_chat(client: openai.OpenAI) -> None:
    turns = [("user", "Who lives in Rome?"), ("assistant", "Bob does."), ("user", QUESTION)]
    messages = [{"role": "system", "content": "Be brief."}, *({"role": role, "content": text} for role, text in turns)]
    wanted = chat(client, messages, extra={"documents": None, "retrieval": False})
    without = {"documents": None, "retrieval": False}
    kinds = {"user": "input_text", "assistant": "output_text"}
    plain = [{"role": role, "content": text} for role, text in turns]
    parts = [{"type": "message", "role": r, "content": [{"type": kinds[r], "text": t}]} for r, t in turns]
    developer = [{"role": "developer", "content": "Be brief."}, *parts]
    for how in ({"input": plain, "instructions": "Be brief."}, {"input": developer}):
        found = respond(client, **how, extra=without)
        assert found.output_text == wanted.choices[0].message.content
        assert found.usage.input_tokens == wanted.usage.prompt_tokens
    # An answer is an item of the next request as it came.
    first = respond(client, extra=without)
    items = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in first.output), plain[0]]
    assert respond(client, items, extra=without).usage.input_tokens > first.usage.input_tokens


def test_calls_of_functions_and_their_results_are_messages_of_a_chat() -> None:
    second = CALL | {"call_id": "c2", "arguments": "{}"}
    outputs = [{"type": "function_call_output", "call_id": name, "output": name * 2} for name in ("c1", "c2")]
    said = {"role": "assistant", "content": "I look."}
    body = {
        "input": [{"role": "user", "content": QUESTION}, said, CALL, second, *outputs],
        "tool_choice": {"type": "function", "name": "find"},
    }
    parsed = ResponsesBody.model_validate_json(json.dumps(body))
    tools = [{"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True}]
    places, messages = zip(*parsed._messages(), strict=True)
    assert places[3:5] == ("input[3].content", "input[4].output") and messages[4]["content"] == "c1c1"
    chat = parsed.as_chat()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    calls = [
        {"id": c["call_id"], "type": "function", "function": {"name": "find", "arguments": c["arguments"]}}
        for c in (CALL, second)
    ]
    assert chat.messages[1] == {"role": "assistant", "content": "I look.", "tool_calls": calls}
    assert chat.messages[3] == {"role": "tool", "tool_call_id": "c2", "content": "c2c2"}
    names = chat.argument_names()
    assert names["messages[2].content"] == "input[4].output" and names["messages[1]"] == "input[1]"
    asked = ResponsesBody.model_validate_json(json.dumps(body | {"tools": tools})).as_chat().model_dump()
    assert asked["tools"] == [
        {"type": "function", "function": {name: tools[0][name] for name in ("name", "parameters", "strict")}}
    ]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_events_of_openai(client: openai.OpenAI, logprobs: bool) -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if logprobs else {}
    whole = respond(client, **more)
    events = list(respond(client, stream=True, **more))
    kinds = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*begin, *["output_text.delta"] * (len(kinds) - 8), *end] and len(kinds) > 10
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = events[4:-4]
    assert "".join(event.delta for event in deltas) == events[-4].text == events[-1].response.output_text
    assert {event.item_id for event in deltas} == {events[2].item.id} == {events[-1].response.output[0].id}
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage and final.id == events[0].response.id
    assert final.reuse["mode"] == "off" and events[0].response.status == "in_progress"
    assert nearly_equal(final.output[0].content[0].logprobs, whole.output[0].content[0].logprobs)
    if logprobs:
        found = [entry for event in deltas for entry in event.logprobs]
        assert [entry.token for entry in found] == [entry.token for entry in final.output[0].content[0].logprobs]
        assert len(found) == 12 and all(len(entry.top_logprobs) == 2 for entry in found)


def test_a_stream_has_named_events_and_ends_with_the_response(server: Server) -> None:
    text = post(f"{server.url}/v1/responses", json={"input": QUESTION, "max_output_tokens": 2, "stream": True}).text
    events = [event.split("\n") for event in text.strip().split("\n\n")]
    assert all(
        event.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"] for event, data in events
    )
    assert events[-1][0] == "event: response.incomplete"


def test_a_helper_of_the_client_reads_the_stream(client: openai.OpenAI) -> None:
    """It wants a whole answer, not one cut at its limit."""
    text = respond(client, max_output_tokens=40).output_text
    stop = re.findall(r"[A-Za-z]{2,}", text)[2]
    extra = {"documents": PASSAGES, "reuse": "off", "stop": stop}
    with client.responses.stream(model="tiny", input=QUESTION, max_output_tokens=40, extra_body=extra) as stream:
        list(stream)
        final: Any = stream.get_final_response()
    assert final.output_text == text.split(stop)[0] and final.status == final.output[0].status == "completed"
    assert final.incomplete_details is None and final.completed_at >= final.created_at


def test_a_failure_during_the_stream_ends_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponsesFormatter, "_whole", lambda *_: 1 / 0)
    text = post(f"{server.url}/v1/responses", json={"input": QUESTION, "max_output_tokens": 2, "stream": True}).text
    last = json.loads(text.strip().split("\n\n")[-1].split("data: ")[1])
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "internal_error"
    assert last["response"]["status"] == "failed" and last["response"]["output"][0]["status"] == "incomplete"


class _Calls:
    """A formatter of chats that says something and calls two functions."""

    deltas = (
        {"role": "assistant", "content": ""},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "get", "arguments": "{}"}}]},
    )
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }

    def chunks(self, delta: Delta, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        for one in self.deltas:
            yield {"choices": [{"index": 0, "delta": one, "logprobs": None, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}]}
        yield {"choices": [], "usage": self.usage, "reuse": {}}


def test_calls_of_functions_are_items() -> None:
    calls: Any = _Calls()

    def formatter() -> ResponsesFormatter:
        return ResponsesFormatter(
            calls, ResponsesBody.model_validate({"input": "x"}), {"id": "r", "model": "m", "created_at": 0}
        )  # type: ignore[arg-type]

    events = list(formatter().chunks(Delta("")))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(
            "output_item.added",
            *["function_call_arguments.delta"] * 2,
            "function_call_arguments.done",
            "output_item.done",
        ),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["output_index"] for event in events if "output_index" in event] == [0] * 6 + [1] * 5 + [2] * 4
    answer = types.SimpleNamespace(choices=[Choice("", (), "stop")])
    streamed, whole = events[-1]["response"], formatter().answer(answer)  # type: ignore[arg-type]
    for response in (streamed, whole):
        assert [(item["type"], item["status"]) for item in response["output"]] == [
            ("message", "completed"), ("function_call", "completed"), ("function_call", "completed")
        ]  # fmt: skip
        calls = [(item["call_id"], item["name"], item["arguments"]) for item in response["output"][1:]]
        assert calls == [("c1", "find", '{"a":1}'), ("c2", "get", "{}")]


@pytest.mark.parametrize(
    ("fields", "named", "said"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"background": True}, "background", "keeps no responses"),
        ({"prompt": {"id": "p"}}, "prompt", "keeps no responses"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type", "keeps no responses"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_image"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "king"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content", "NoneType"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "function_call"}]}, "input[1].call_id", "a text"),
        ({"input": []}, "input", "role 'user'"),
        ({"instructions": "a", "input": [{"role": "user", "content": " "}]}, "input[0].content", "blank"),
        ({"input": 3}, "input", "3"),
        ({"input": " "}, "input", "blank"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "max_model_len"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"include": ["everything"]}, "include[0]", "everything"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "extreme"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "auto"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "xml"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"n": 2}, "n", "not supported"),
        ({"top_p": 7.0}, "top_p", "7.0"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_what_is_not_supported_is_refused(server: Server, fields: dict, named: str | None, said: str) -> None:
    for stream in (False, True):
        refused = post(f"{server.url}/v1/responses", json={"input": QUESTION, "stream": stream} | fields)
        assert refused.status_code == (404 if named == "model" else 400), refused.text
        error = refused.json()["error"]
        assert said in error["message"] and (named is None or error["param"] == named), error


def test_harmless_fields_are_accepted(client: openai.OpenAI) -> None:
    more = {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": "none"}}
    extra = {"background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"], "tools": []}
    found = respond(client, **more, prompt_cache_key="k", service_tier="auto", store=False, extra=extra)
    assert found.output_text == respond(client).output_text


def test_effort_is_a_variable_of_the_template_as_in_chats() -> None:
    body = {"input": "x", "reasoning": {"effort": "low"}}
    chat = ResponsesBody.model_validate_json(json.dumps(body)).as_chat()
    assert chat.rendering().variables == {"reasoning_effort": "low", "enable_thinking": True}


def test_no_response_is_kept(server: Server) -> None:
    for path in ("resp-1", "resp-1/input_items"):
        gone = get(f"{server.url}/v1/responses/{path}")
        assert gone.status_code == 404 and "keeps no responses" in gone.text


def test_a_body_that_is_no_chat_names_its_own_fields() -> None:
    with pytest.raises(RequestError, match=r"input\[0\].output"):
        body = {"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}
        ResponsesBody.model_validate(body).as_chat()

"""Tools over a socket with OpenAI's client: calls, results, answers; the model's words are given where they matter."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from ccjax.engine.answer import Answer
from ccjax.server.tool_use import ToolUse
from ccjax.text.chat import tools_text
from scripts.benchmarks.wrappers import Turn, in_tools
from tests.server.conftest import DOCUMENTS, Server
from tests.server.tiny_model import write_tiny_model

if TYPE_CHECKING:
    import openai

USER = {"role": "user", "content": "Weather in Oslo?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
FUNCTIONS = [tool["function"] for tool in TOOLS]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory: pytest.TempPathFactory):
    """One whose context is long enough for definitions of tools, and whose tokenizer knows their words."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    texts = [*DOCUMENTS.values(), tools_text(TOOLS), TWO]
    write_tiny_model(directory, texts, max_position_embeddings=2048)
    with start_server(model=directory, max_model_len=1536) as server:
        yield server


@pytest.fixture
def says(server: Server, monkeypatch: pytest.MonkeyPatch):
    """`says(text)` makes every answer this text."""
    tokenizer, push = server.engine.tokenizer, Answer.push
    assert tokenizer is not None

    def say(text: str) -> None:
        ids = [*tokenizer.encode(text, allow_special=False), next(iter(tokenizer.eos_ids))]
        told = lambda self, token: push(self, dataclasses.replace(token, token_id=ids[self.num_tokens]))  # noqa: E731
        monkeypatch.setattr(Answer, "push", told)

    return say


def ask(client: openai.OpenAI, messages: list[dict] | None = None, **fields: Any):
    fields = {"model": "tiny", "max_tokens": 300, "extra_body": {"documents": []}, "tools": TOOLS} | fields
    return client.chat.completions.create(messages=messages or [USER], **fields)  # type: ignore[arg-type]


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[list[str]], list[str]]:
    """The text, name and arguments of each call, and the finish reasons of a stream."""
    text, calls, reasons, ids = "", list[list[str]](), list[str](), set[str]()
    for chunk in ask(client, stream=True, **fields):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function" and call.id not in ids
                ids.add(call.id)
                calls.append([call.function.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.function.arguments
    return text, calls, reasons


def test_call_result_and_answer(client: openai.OpenAI, server: Server, says) -> None:
    says(CALL)
    first = ask(client)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    says("It rains.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain, 4 °C"}
    history = [USER, choice.message.model_dump(exclude_none=True), result]
    second = ask(client, history, extra_body={"documents": [], "trace": True, "reuse": "exact"})
    assert second.choices[0].message.content == "It rains." and second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.tool_calls is None
    prompt = "".join(text for segment in second.trace["segments"] for text in segment["tokens"])
    assert f"assistant\n{CALL}user\n" in prompt
    assert prompt.endswith("user\n<tool_response>\nrain, 4 °C\n</tool_response>assistant\n")
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens / 2


def test_stream_has_the_same_calls_as_the_whole_answer(client: openai.OpenAI, says) -> None:
    for text in (CALL, TWO, "No call.", "<tool_call> is a tag", CALL.replace("get_weather", "rm_rf")):
        says(text)
        choice = ask(client).choices[0]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        assert streamed(client) == (choice.message.content or "", calls, [choice.finish_reason])
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert bool(calls) == (text in (CALL, TWO))
        assert text == TWO or calls or choice.message.content == text
    says(TWO)
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=TOOLS, max_tokens=300) as stream:  # type: ignore[arg-type]
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Let me see." and len(message.tool_calls or ()) == 2


def test_arguments_come_in_pieces(client: openai.OpenAI, says) -> None:
    says(CALL.replace("Oslo", "Oslo in the north of the world"))
    chunks = [chunk.choices[0].delta.tool_calls for chunk in ask(client, stream=True)]
    assert sum(bool(calls and calls[0].function.arguments) for calls in chunks) > 5


def test_parallel_calls_and_several_answers(client: openai.OpenAI, says) -> None:
    says(TWO)
    calls = ask(client, n=2).choices[1].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_time"]
    assert len({call.id for call in calls}) == 2
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(streamed(client, parallel_tool_calls=False)[1]) == 1


def test_cut_call_ends_with_length(client: openai.OpenAI, says) -> None:
    says(CALL)
    choice = ask(client, max_tokens=len(CALL) // 4).choices[0]
    assert choice.finish_reason == "length"
    text, calls, reasons = streamed(client, max_tokens=len(CALL) // 4)
    assert reasons == ["length"] and (text or None) == choice.message.content


def test_none_leaves_tools_out_and_does_not_look_for_calls(client: openai.OpenAI, says) -> None:
    says(CALL)
    none = ask(client, tool_choice="none")
    assert none.choices[0].message.content == CALL and none.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens == ask(client, tools=[]).usage.prompt_tokens
    assert none.usage.prompt_tokens < ask(client, tool_choice="auto").usage.prompt_tokens


def test_older_functions(client: openai.OpenAI, says) -> None:
    says(TWO)
    choice = ask(client, tools=[], functions=FUNCTIONS).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    deltas = [chunk.choices[0].delta.function_call for chunk in ask(client, tools=[], functions=FUNCTIONS, stream=True)]
    got = [delta for delta in deltas if delta is not None]
    assert [delta.name for delta in got if delta.name] == ["get_weather"]
    assert "".join(delta.arguments for delta in got) == choice.message.function_call.arguments
    history = [USER, choice.message.model_dump(exclude_none=True)]
    history.append({"role": "function", "name": "get_weather", "content": "rain"})
    assert ask(client, history, tools=[], functions=FUNCTIONS, function_call="none").choices[0].message.content == TWO


def test_passages_in_results_are_reused_in_another_order(client: openai.OpenAI) -> None:
    """The messages of a client whose retriever is a tool."""
    passages = (
        "Anna lives in Paris. She repairs tuned violins in a small shop by the river, and plays in it on Sundays.",
        "Bob works in Rome. He paints tuned houses, drives an old green van, and sings while he paints the doors.",
    )

    def asked(*order: str):
        return ask(client, in_tools("openwebui tools", Turn("Who lives in Paris?", order), ()), max_tokens=4)

    asked(*passages)
    swapped = asked(*passages[::-1])
    parts = [part for part in swapped.reuse["per_document"] if part["role"] == "passage"]
    longest = sorted(parts, key=lambda part: part["num_tokens"])[-2:]
    assert all(part["computed_tokens"] == 0 < part["reused_tokens"] for part in longest)


CITIES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
    "required": ["city"],
}
BOUNDED = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITIES}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"])
def test_required_and_named_calls_come_from_any_model(
    client: openai.OpenAI, server: Server, parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random weights: what they answer is decided by the grammar, and the drawing."""
    settings = server.service.settings.model_copy(update={"tool_call_parser": parser})
    monkeypatch.setattr(server.service, "settings", settings)
    names = set()
    named = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(3):
        drawn: dict[str, Any] = {"tools": BOUNDED, "temperature": 1.0, "seed": seed, "max_tokens": 700}
        choice = ask(client, tool_choice="required", **drawn).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert streamed(client, tool_choice="required", **drawn) == ("", calls, ["tool_calls"])
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), CITIES if name == "get_weather" else {"maxProperties": 0})
            names.add(name)
        single = ask(client, tool_choice="required", parallel_tool_calls=False, **drawn).choices[0]
        assert len(single.message.tool_calls) == 1
        (call,) = ask(client, tool_choice=named, **drawn).choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), CITIES)
    assert names == {"get_weather", "get_time"}


def test_required_call_of_an_older_function_and_of_a_response(client: openai.OpenAI) -> None:
    functions = [tool["function"] for tool in BOUNDED]
    choice = ask(client, tools=[], functions=functions, function_call={"name": "get_time"}).choices[0]
    assert choice.message.function_call.model_dump() == {"name": "get_time", "arguments": "{}"}
    flat = [{"type": "function", **function} for function in functions]
    response = client.responses.create(
        model="tiny",
        input="Weather?",
        tools=flat,  # type: ignore[arg-type]
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=100,
        extra_body={"retrieval": False},
    )
    (call,) = response.output
    assert call.type == "function_call" and call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), CITIES)


def test_answers_are_calls_or_match_the_response_format(client: openai.OpenAI, says) -> None:
    import openai

    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    says(CALL)
    assert ask(client, tools=BOUNDED, response_format=format).choices[0].finish_reason == "tool_calls"
    says('{"a": 2}')
    assert ask(client, tools=BOUNDED, response_format=format).choices[0].message.content == '{"a": 2}'
    for text in ("No.", '{"a": 3}', CALL.replace("Oslo", "Bonn")):  # the grammar has none of them
        says(text)
        with pytest.raises(openai.InternalServerError):
            ask(client, tools=BOUNDED, response_format=format)


STRICT = [{"type": "function", "function": {**BOUNDED[0]["function"], "strict": True}}, BOUNDED[1]]


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_strict_function_is_called_as_its_schema_says_or_not_at_all(client: openai.OpenAI, says) -> None:
    import openai

    for text in ("No call.", CALL, f"Let me see.\n{CALL}"):
        says(text)
        choice = ask(client, tools=STRICT).choices[0]
        assert choice.finish_reason == ("tool_calls" if CALL in text else "stop")
        assert streamed(client, tools=STRICT)[2] == [choice.finish_reason]
    wrong = CALL.replace("Oslo", "Bonn")  # which the schema does not have
    says(wrong)
    assert ask(client, tools=BOUNDED).choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.InternalServerError):  # the grammar does not allow what the model is made to say
        ask(client, tools=STRICT)
    loose = wrong.replace("get_weather", "get_time")
    says(loose)
    assert json.loads(ask(client, tools=STRICT).choices[0].message.tool_calls[0].function.arguments) == {"city": "Bonn"}


def test_allowed_tools_are_the_only_ones_that_are_called(client: openai.OpenAI, says, monkeypatch) -> None:
    import openai

    whole = ask(client, tools=BOUNDED, max_tokens=1).usage.prompt_tokens
    for text in ("No call.", CALL):
        says(text)
        answer = ask(client, tools=BOUNDED, tool_choice=allowed("auto", "get_weather"))
        assert answer.choices[0].finish_reason == ("tool_calls" if text == CALL else "stop")
        assert answer.usage.prompt_tokens == whole, "all tools are in the prompt"
    with pytest.raises(openai.InternalServerError):
        ask(client, tools=BOUNDED, tool_choice=allowed("auto", "get_time"))
    monkeypatch.undo()
    for seed in range(3):
        drawn: dict[str, Any] = {"tools": BOUNDED, "temperature": 1.0, "seed": seed, "max_tokens": 900}
        calls = ask(client, tool_choice=allowed("required", "get_time"), **drawn).choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {"get_time"}
    response = client.responses.create(
        model="tiny",
        input="Weather?",
        tools=[{"type": "function", **tool["function"]} for tool in BOUNDED],  # type: ignore[arg-type]
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
        max_output_tokens=900,
        extra_body={"retrieval": False},
    )
    assert {item.to_dict()["name"] for item in response.output} == {"get_time"}


def test_qwen3_coders_calls_come_in_pieces(client: openai.OpenAI, server: Server, says, monkeypatch) -> None:
    settings = server.service.settings.model_copy(update={"tool_call_parser": "qwen3_coder"})
    monkeypatch.setattr(server.service, "settings", settings)
    says(
        "Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n<parameter=zone>\n12\n</parameter>\n</function>\n</tool_call>"
    )
    calls = [["get_weather", '{"city": "12"}'], ["get_time", '{"zone": 12}']]
    choice = ask(client).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Yes.", "tool_calls")
    assert [[call.function.name, call.function.arguments] for call in choice.message.tool_calls] == calls
    assert streamed(client) == ("Yes.", calls, ["tool_calls"])


def test_strict_calls_in_python_and_in_tags(client: openai.OpenAI, server: Server, says, monkeypatch) -> None:
    import openai

    in_tags = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    for parser, call in (("pythonic", '[get_weather(city="Oslo")]'), ("qwen3_coder", in_tags)):
        settings = server.service.settings.model_copy(update={"tool_call_parser": parser})
        monkeypatch.setattr(server.service, "settings", settings)
        for fields in ({"tools": STRICT}, {"tools": BOUNDED, "tool_choice": allowed("auto", "get_weather")}):
            for text in (call, "No call."):
                says(text)
                choice = ask(client, **fields).choices[0]
                assert choice.finish_reason == ("tool_calls" if text == call else "stop")
                assert streamed(client, **fields)[2] == [choice.finish_reason]
                if text == call:
                    assert choice.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
        says(call.replace("Oslo", "Bonn"))
        with pytest.raises(openai.InternalServerError):  # which the schema does not have
            ask(client, tools=STRICT)
        says(call.replace("get_weather", "get_time"))
        assert ask(client, tools=STRICT).choices[0].finish_reason == "tool_calls"
        says(call)
        assert ask(client, tools=BOUNDED, tool_choice="required").choices[0].finish_reason == "tool_calls"


def test_what_python_cannot_express_is_refused_or_called_in_json(
    client: openai.OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    settings = server.service.settings.model_copy(update={"tool_call_parser": "pythonic"})
    monkeypatch.setattr(server.service, "settings", settings)
    schema = {"type": "object", "properties": {"from": {"type": "boolean"}}, "required": ["from"]}
    tools = [BOUNDED[1], {"type": "function", "function": {"name": "find", "parameters": schema, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match="Python's keywords") as refused:
        ask(client, tools=tools)
    assert refused.value.param == "tools[1].function.strict"
    named = {"type": "function", "function": {"name": "find"}}
    (call,) = ask(client, tools=tools, tool_choice=named, max_tokens=200).choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"from"}


def test_names_are_collected_as_often_for_many_tools_as_for_a_few(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, counts = ToolUse.names, []
    monkeypatch.setattr(ToolUse, "names", property(lambda use: counts.append(1) or names.fget(use)))  # type: ignore
    found = []
    for num in (2, 20):
        counts.clear()
        tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(num)]
        ask(client, tools=tools, tool_choice="required", parallel_tool_calls=False)
        found.append(len(counts))
    assert found[0] == found[1] > 0


def test_an_answer_is_a_call_or_one_of_a_list(client: openai.OpenAI, says) -> None:
    fields = {"tools": BOUNDED, "extra_body": {"documents": [], "guided_choice": ["yes", "no"]}}
    for text, reason in ((CALL, "tool_calls"), ("no", "stop")):
        says(text)
        assert ask(client, **fields).choices[0].finish_reason == reason


TOOL = TOOLS[0]
UNKNOWN = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "wrong"}}}}}
NAMED = {"type": "function", "function": {"name": "rm_rf"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", ["name"]),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1].type", ["'function'", "'web_search'"]),
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools[0].function.name", ["None"]),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", ["another", "get_weather"]),
        ({"tools": "f"}, "tools", ["array"]),
        ({"tool_choice": "always"}, "tool_choice", ["'required'", "'always'"]),
        ({"tool_choice": NAMED}, "tool_choice", ["get_weather", "get_time", "rm_rf"]),
        ({"tool_choice": {"type": "function"}}, "tool_choice", ["name"]),
        ({"tool_choice": allowed("auto", "rm_rf")}, "tool_choice", ["get_time", "rm_rf"]),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", ["list of functions"]),
        ({"tool_choice": allowed("none", "get_time")}, "tool_choice.allowed_tools.mode", ["'required'", "'none'"]),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.allowed_tools", ["mode", "None"]),
        ({"tool_choice": "required", "tools": None}, "tool_choice", ["tools", "none"]),
        ({"tool_choice": "required", "tools": [UNKNOWN]}, "tools", ["llguidance", "wrong"]),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "guided_grammar": "x"}, "response_format", []),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", ["boolean"]),
        ({"tools": None, "functions": [{}]}, "functions[0].name", ["128", "None"]),
        ({"tools": None, "functions": FUNCTIONS, "function_call": {"name": "x"}}, "function_call", ["get_time", "x"]),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", ["id", "None"]),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function", []),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role", ["'tool'", "'robot'"]),
    ],
)
def test_error_names_the_field(client: openai.OpenAI, fields: dict, param: str, words: list[str]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client.post(
            "/chat/completions",
            cast_to=object,
            body={"model": "tiny", "max_tokens": 4, "messages": [USER], "tools": TOOLS} | fields,
        )
    assert refused.value.param == param
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.slow
def test_demo_model_calls_what_is_required(start_server) -> None:
    """The embedded model, whose template refuses the role of results and knows nothing of tools."""
    with start_server(model="demo", max_model_len=1024) as server, server.client() as client:
        fields: dict[str, Any] = {"model": "demo", "tools": BOUNDED, "max_tokens": 200, "parallel_tool_calls": False}
        choice = ask(client, tool_choice="required", **fields).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name in ("get_weather", "get_time")
        named = {"type": "function", "function": {"name": "get_weather"}}
        (call,) = ask(client, tool_choice=named, **fields).choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CITIES)
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        history = [USER, {"role": "assistant", "tool_calls": [call.model_dump()]}, result]
        assert ask(client, history, **fields).choices[0].finish_reason in ("stop", "length")

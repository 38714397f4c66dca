"""ccjax.text.tool_calls: calls of tools in each form, the same however the answer is cut into pieces."""

from __future__ import annotations

import json
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.text import CallParser, ChatTemplate, ToolCall, read_calls
from ccjax.text.tool_calls import CALL_FORMS, CallForm, call_form

NAMES = ["f", "get_weather"]
SCHEMAS = {
    "f": {"properties": {"a": {"type": "integer"}, "b": {"type": ["object", "null"]}, "c": {"enum": [1, True]}}},
    "get_weather": {"properties": {"city": {"type": "string"}, "x": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
}


def parser_of(form: CallForm, **options) -> CallParser:
    return CallParser(form, NAMES, schemas=SCHEMAS, **options)


def tagged(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder's template writes it."""
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def weather(arguments: str = '{"city": "Köln"}') -> ToolCall:
    return ToolCall("get_weather", arguments)


CASES: list[tuple[CallForm, str, str, list[ToolCall]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [ToolCall("f", '{"a": 1}')]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"a": "}<tool_call>\\"", "b": [1, {"c": 2}]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n',
        "Let me see.",
        [ToolCall("f", '{"a": "}<tool_call>\\"", "b": [1, {"c": 2}]}'), weather()],
    ),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f"}]</tool_call>', "", [ToolCall("f", "{}")] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [ToolCall("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [ToolCall("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [ToolCall("f", '{"a": "cut')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\', "", [ToolCall("f", '{"a": "\\')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> Done.', " Done.", [ToolCall("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}',
        '{"name": "g", "arguments": {}}',
        [ToolCall("f", "{}")],
    ),
    ("qwen3_coder", tagged("f", a="1e400", b='{"x":1}'), "", [ToolCall("f", '{"a": 1e400, "b": {"x":1}}')]),
    ("qwen3_coder", tagged("f", b="{'x': 1e400}"), "", [ToolCall("f", '{"b": "{\'x\': 1e400}"}')]),
    ("pythonic", "[f(a=1e400)]", "[f(a=1e400)]", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [ToolCall("f", '{"a": 1}')]),
    (
        "mistral",
        'Yes.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{"city": "Köln"}',
        "Yes.",
        [ToolCall("f", '{"a": 1}'), weather()],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Köln"}}', "", [weather()]),
    (
        "llama3_json",
        '\n{"type": "function", "name": "f", "parameters": {"a": null}}; {"name": "f", "parameters": {}}',
        "",
        [ToolCall("f", '{"a": null}'), ToolCall("f", "{}")],
    ),
    ("pythonic", '[get_weather(city="Köln"), f()]', "", [weather(), ToolCall("f", "{}")]),
    (
        "pythonic",
        "[f(a=-1.5, b='it\\'s )', c=[True, none := None, {'k': false}])]",
        "[f(a=-1.5, b='it\\'s )', c=[True, none := None, {'k': false}])]",
        [],
    ),
    (
        "pythonic",
        "[f(a=-1.5, b='it\\'s )', c=[True, None, {'k': false}])]",
        "",
        [ToolCall("f", '{"a": -1.5, "b": "it\'s )", "c": [true, null, {"k": false}]}')],
    ),
    ("qwen3_coder", tagged("get_weather", city="Köln"), "", [weather()]),
    ("hermes", tagged("get_weather", city="Köln"), "", [weather()]),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [ToolCall("f", '{"a": 1}')]),
    (
        "qwen3_coder",
        "Two.\n" + tagged("f", a="-3", b='{"k": [null]}', c="True", d="None", e="x y", g="7") + tagged("f") + " Done.",
        "Two. Done.",
        [ToolCall("f", '{"a": -3, "b": {"k": [null]}, "c": true, "d": null, "e": "x y", "g": 7}'), ToolCall("f", "{}")],
    ),
    (
        "qwen3_coder",
        tagged("get_weather", city='\n<b>"\\\t</b>\n\n', x="null"),
        "",
        [ToolCall("get_weather", '{"city": "\\n<b>\\"\\\\\\t</b>\\n\\n", "x": null}')],
    ),
    (
        "qwen3_coder",
        tagged("get_weather", city="12", x="12"),
        "",
        [ToolCall("get_weather", '{"city": "12", "x": "12"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>NaN</parameter></function><function=f></function>",
        "",
        [ToolCall("f", '{"a": 1, "b": "NaN"}'), ToolCall("f", "{}")],
    ),
    (
        "qwen3_coder",
        tagged("get_weather", city="Köln").partition("meter>\n</")[0],
        "",
        [ToolCall("get_weather", '{"city": "Köln\\n</para')],
    ),
    ("qwen3_coder", tagged("f", a="1")[:-23], "", [ToolCall("f", '{"a": 1')]),
]
TEXTS: list[tuple[CallForm, str]] = [
    ("hermes", " Some text \n"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", "Write <tool_call> and </tool_call> around it, < tool"),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}"),
    ("llama3_json", '{"name": "Anna", "age": 3}'),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
    ("llama3_json", ' \n{"name": "f", "param'),
    ("qwen3_coder", tagged("g", a="1")),
    ("qwen3_coder", "<tool_call>\n<function=f"),
    ("qwen3_coder", "Write <function=f> in <tool_call>"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f](https://f.example)"),
]


def in_pieces(form: CallForm, text: str, cuts: list[int], **options) -> tuple[str, list[ToolCall]]:
    parser = parser_of(form, **options)
    borders = [0, *sorted(cuts), len(text)]
    outs = [parser.push(text[start:end]) for start, end in zip(borders, borders[1:], strict=False)]
    outs.append(parser.finish())
    calls: list[ToolCall] = []
    for delta in (delta for _, deltas in outs for delta in deltas):
        if delta.name is not None:
            assert delta.index == len(calls) and delta.arguments == ""
            calls.append(ToolCall(delta.name, ""))
        calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + delta.arguments)
    assert parser.num_calls == len(calls)
    return "".join(said for said, _ in outs), calls


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES)
def test_calls_are_read_in_each_form(form, text, said, calls):
    assert read_calls(text, parser_of(form)) == (said, calls)
    first = calls[:1]
    assert read_calls(text, parser_of(form, parallel=False))[1] == first


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_text_that_is_no_call_of_a_given_tool_stays_as_it_is(form, text):
    assert read_calls(text, parser_of(form)) == (text, [])


@given(data=st.data())
@pytest.mark.parametrize(("form", "text"), [case[:2] for case in CASES] + TEXTS)
def test_pieces_of_any_length_give_the_same_as_the_whole(form, text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=30))
    assert in_pieces(form, text, cuts) == read_calls(text, parser_of(form))
    assert in_pieces(form, text, list(range(len(text)))) == read_calls(text, parser_of(form))


_MEANT = st.sampled_from(
    "<tool_call> </tool_call> [TOOL_CALLS] [ARGS] { } [ ] ( ) \" ' \\ , : ; = f a 1".split()
    + "<function= <parameter= > </parameter> </function>".split()
    + [" ", "\n", '"name"', '"f"', '"arguments"', '"parameters"', '{"name": "f", ', '"arguments": {']
)


@given(form=st.sampled_from(CALL_FORMS), text=st.lists(_MEANT, max_size=40).map("".join), data=st.data())
def test_any_text_is_read_the_same_in_pieces_and_none_of_it_hangs(form, text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    parallel = data.draw(st.booleans())
    whole = read_calls(text, parser_of(form, parallel=parallel))
    assert in_pieces(form, text, cuts, parallel=parallel) == whole
    assert whole[1] or whole[0] == text


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


_TYPES = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    list: {"type": "array"},
    dict: {"type": "object"},
    type(None): {"type": "null"},
}


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _VALUES)),
        min_size=1,
        max_size=3,
    )
)
@pytest.mark.parametrize("form", CALL_FORMS)
def test_written_calls_are_read_back(form, calls):
    def written(call: tuple[str, dict], key: str) -> str:
        name, arguments = call
        return json.dumps({"name": name, key: arguments}, ensure_ascii=False)

    if form == "pythonic" and any(keyword.iskeyword(key) for _, arguments in calls for key in arguments):
        return
    texts = {
        "hermes": "\n".join(f"<tool_call>\n{written(call, 'arguments')}\n</tool_call>" for call in calls),
        "mistral": "[TOOL_CALLS] [" + ", ".join(written(call, "arguments") for call in calls) + "]",
        "llama3_json": "; ".join(written(call, "parameters") for call in calls),
        "pythonic": "["
        + ", ".join(f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        + "]",
        "qwen3_coder": "\n".join(
            tagged(
                name, **{key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
            )
            for name, given in calls
        ),
    }
    if form == "qwen3_coder":  # which does not say what is a text, nor where one ends that contains the end
        texts_of = [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
        schemas = {
            name: {"properties": {key: _TYPES[type(value)] for key, value in given.items()}} for name, given in calls
        }
        if len(schemas) < len(calls) or any("</param" in value for value in texts_of):
            return
        got = read_calls(texts[form], CallParser(form, NAMES, schemas=schemas))[1]
        assert [(call.name, json.loads(call.arguments)) for call in got] == calls
        return
    said, got = read_calls(texts[form], parser_of(form))
    assert said == "" and [(call.name, json.loads(call.arguments)) for call in got] == calls


def test_text_of_a_tagged_argument_is_streamed_as_it_comes():
    parser = parser_of("qwen3_coder")
    assert [delta.name for delta in parser.push("<tool_call><function=get_weather>\n<param")[1]] == [
        "get_weather",
        None,
    ]
    assert [delta.arguments for delta in parser.push("eter=city>\nKö")[1]] == ['"city": ', '"', "Kö"]
    assert [delta.arguments for delta in parser.push('"ln\n</par')[1]] == ['\\"ln']
    assert [delta.arguments for delta in parser.push("ty\n</parameter>\n")[1]] == ["\\n</party", '"']
    assert [delta.arguments for delta in parser.push("</function></tool_call>")[1]] == ["}"]
    assert parser.finish() == ("", [])


def test_arguments_are_streamed_as_they_come():
    parser = CallParser("hermes", NAMES)
    assert parser.push('Yes. <tool_call>{"name": "get_wea') == ("Yes.", [])
    assert [delta.name for delta in parser.push('ther", "arguments": {"ci')[1]] == ["get_weather", None]
    assert [delta.arguments for delta in parser.push('ty": "Kö')[1]] == ['ty": "Kö']
    assert [delta.arguments for delta in parser.push('ln"}} </tool')[1]] == ['ln"}']
    assert parser.push("_call>") == parser.finish() == ("", [])


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ messages }}", "hermes"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}{{- '\"parameters\": ' }}{% endif %}", "llama3_json"),
        ("{% if tools %}respond as [func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
        ("{% if tools %}{{ tools }}{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", "qwen3_coder"),
    ],
)
def test_form_follows_from_the_chat_template(source, form):
    assert call_form(ChatTemplate(source)) == form
    assert call_form(ChatTemplate("{{ messages }}", tool_source=source)) == form or "tools" not in source

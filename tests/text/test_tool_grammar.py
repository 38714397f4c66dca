"""Grammars of calls: what they allow is what is parsed again, in every form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest

from ccjax.text import ByteTokenizer, CallForm, CallParser, Grammars, ToolCall, read_calls
from ccjax.text.tool_calls import CALL_FORMS
from ccjax.text.tool_grammar import calls_grammar, form_of_grammar

ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
SCHEMAS: dict[str, Mapping[str, Any] | None] = {"f": ARGUMENTS, "get_weather": ARGUMENTS}
WRITTEN: dict[CallForm, list[str]] = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    ],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]',
    ],
    "pythonic": ["[f(a=1)]", "[f(a=1), get_weather()]"],
    "qwen3_coder": [
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
    ],
}
WORDS = ByteTokenizer()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(WORDS, WORDS.eos_ids, 300)
    yield found
    found.close()


def accepts(grammars: Grammars, grammar: str, text: str) -> bool:
    matcher = grammars.matcher(grammar).begin()
    try:
        for token in (*WORDS.encode(text, allow_special=False), min(WORDS.eos_ids)):
            matcher.mask()
            if matcher.is_complete:
                return token in WORDS.eos_ids
            matcher.push(token)
    except RuntimeError:
        return False
    return True


def json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def swapped(text: str, old: str, new: str) -> str:
    """The call with another name of a tool or of an argument."""
    for before, behind in ('""', "[(", "=>", "(=", (" ", ")")):
        text = text.replace(f"{before}{old}{behind}", f"{before}{new}{behind}")
    return text


def valued(text: str, value: str) -> str:
    return text.replace("1", value)


@pytest.mark.parametrize("form", CALL_FORMS)
def test_calls_of_the_form_are_allowed_and_read_again(grammars: Grammars, form: CallForm) -> None:
    assert form_of_grammar(form, SCHEMAS) == form
    one, two = WRITTEN[form]
    for parallel in (True, False):
        grammar = calls_grammar(form, SCHEMAS, json_rule, parallel=parallel)
        assert accepts(grammars, grammar, one) and accepts(grammars, grammar, two) == parallel
        assert not accepts(grammars, grammar, swapped(one, "f", "g"))
        assert not accepts(grammars, grammar, valued(one, '"x"'))
        assert not accepts(grammars, grammar, "No call.") and not accepts(grammars, grammar, "")
    parser = CallParser(form, SCHEMAS, schemas={"f": ARGUMENTS})
    assert read_calls(two, parser) == ("", [ToolCall("f", '{"a": 1}'), ToolCall("get_weather", "{}")])


@pytest.mark.parametrize("form", CALL_FORMS)
def test_other_answers_are_allowed_beside_calls(grammars: Grammars, form: CallForm) -> None:
    grammar = calls_grammar(form, SCHEMAS, json_rule, parallel=True, or_else='"yes" | "no"')
    assert [accepts(grammars, grammar, text) for text in ("yes", "no", "perhaps", WRITTEN[form][0])] == [1, 1, 0, 1]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", CALL_FORMS)
def test_among_any_text_calls_have_arguments_that_the_rule_accepts(
    grammars: Grammars, form: CallForm, parallel: bool
) -> None:
    one, two = WRITTEN[form]
    grammar = calls_grammar(form, SCHEMAS | {"h": None}, json_rule, parallel=parallel, is_free=True)
    for text in ("", "No call.", " \n", "Grün [1] <tool> (x)\n", one, valued(swapped(one, "f", "h"), '["x"]')):
        assert accepts(grammars, grammar, text), text
    assert accepts(grammars, grammar, two) == parallel
    has_mark = form not in ("llama3_json", "pythonic")  # whose calls begin an answer
    for wrong in (swapped(one, "f", "g"), valued(one, '"x"'), swapped(one, "a", "b")):
        assert not accepts(grammars, grammar, wrong), wrong
        assert not has_mark or not accepts(grammars, grammar, f"Let me see. {wrong}")
    if has_mark:
        assert accepts(grammars, grammar, f"Let me see.\n\n{one}")
        assert accepts(grammars, grammar, f"{one} Done.") == (form in ("hermes", "qwen3_coder") and parallel)


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "integer", "maximum": 9},
        "hourly": {"type": "boolean"},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["days"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
PIECES = {
    "qwen3_coder": {
        "city": '<parameter=city>\nKöln,\n"<b>"\n</parameter>\n',
        "unit": "<parameter=unit>\nnull\n</parameter>\n",
        "days": "<parameter=days>\n3\n</parameter>\n",
        "hourly": "<parameter=hourly>\ntrue\n</parameter>\n",
        "place": '<parameter=place>\n{"x":0.5}\n</parameter>\n',
        "note": "<parameter=note>\nnull\n</parameter>\n",
    },
    "pythonic": {
        "city": 'city="Köln,\\n\\"<b>\\""',
        "unit": "unit=null",
        "days": "days=3",
        "hourly": "hourly=True",
        "place": 'place={"x":0.5}',
        "note": "note=null",
    },
}
ARGUMENT = {"city": 'Köln,\n"<b>"', "unit": None, "days": 3, "hourly": True, "place": {"x": 0.5}, "note": None}


def call_of(form: CallForm, pieces: list[str]) -> str:
    if form == "pythonic":
        return f"[f({', '.join(pieces)})]"
    return f"<tool_call>\n<function=f>\n{''.join(pieces)}</function>\n</tool_call>"


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_arguments_come_in_the_order_of_the_schema_without_those_that_are_not_needed(
    grammars: Grammars, form: CallForm
) -> None:
    schemas: dict[str, Mapping[str, Any] | None] = {"f": WEATHER}
    grammar, pieces = calls_grammar(form, schemas, json_rule, parallel=False), PIECES[form]
    for num in range(7):
        for names in itertools.combinations(pieces, num):
            text = call_of(form, [pieces[name] for name in names])
            assert accepts(grammars, grammar, text) == ("days" in names), text
            (call,) = read_calls(text, CallParser(form, ["f"], schemas=schemas))[1]  # type: ignore[arg-type]
            assert json.loads(call.arguments) == {name: ARGUMENT[name] for name in names}
    first, second = pieces["days"], pieces["hourly"]
    for wrong in ([second, first], [first, first], [first.replace("3", "10")], [first, second.replace("ue", "uth")]):
        assert not accepts(grammars, grammar, call_of(form, wrong))
    optional = calls_grammar(form, {"f": WEATHER | {"required": []}}, json_rule, parallel=False)
    assert all(accepts(grammars, optional, call_of(form, given)) for given in ([], [second], [first, second]))


@pytest.mark.parametrize(
    ("schema", "in_tags", "in_python"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, False, True),
        ({"properties": {"a": {"enum": ["x</parameter>"]}}}, False, True),
        ({"properties": {"a": {"enum": ["null", None]}}}, False, True),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}}, False, True),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}}, False, True),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": ["red", "5"]}}}, False, True),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": ["red", "blue"]}}}, True, True),
        ({"properties": {"a": {}}}, False, True),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}, False, False),
        ({"properties": {"a b": {"type": "integer"}}}, True, False),
        ({"properties": {"from": {"type": "integer"}}}, True, False),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"], "maxProperties": 1}, False, False),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, False, False),
        ({"additionalProperties": {"type": "integer"}}, False, False),
        ({"properties": {"a": {"anyOf": 5}}, "required": ["b"]}, False, False),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": 5, "required": ["b"]}, False, False),
        ({"type": "object"}, True, True),
    ],
)
def test_what_neither_tags_nor_python_can_express_is_called_in_json(
    grammars: Grammars, schema: dict[str, Any], in_tags: bool, in_python: bool
) -> None:
    schemas: dict[str, Mapping[str, Any] | None] = {"f": schema, "g": ARGUMENTS}
    assert form_of_grammar("pythonic", schemas) == ("pythonic" if in_python else "llama3_json")
    grammar = calls_grammar("qwen3_coder", schemas, json_rule, parallel=False)
    assert ("function=f" in grammar) == in_tags and "function=g" in grammar
    if not in_tags and "b" not in schema.get("required", ()):
        text = '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'
        jsonschema.Draft202012Validator.check_schema(schema)
        assert accepts(grammars, grammar, text) == jsonschema.Draft202012Validator(schema).is_valid({"a": 3})

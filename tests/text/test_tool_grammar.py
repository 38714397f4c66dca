"""Grammars of calls: what they allow is what is parsed again, in every form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ccjax.text import ByteTokenizer, CallForm, CallParser, Grammars, ToolCall, read_calls
from ccjax.text.tool_calls import CALL_FORMS
from ccjax.text.tool_grammar import ANY_ARGUMENTS, calls_grammar, form_of_grammar

ARGUMENTS = '%json {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'
RULES = {"f": ARGUMENTS, "get_weather": ARGUMENTS}
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


@pytest.mark.parametrize("form", CALL_FORMS)
def test_calls_of_the_form_are_allowed_and_read_again(grammars: Grammars, form: CallForm) -> None:
    form = form_of_grammar(form)
    one, two = WRITTEN[form]
    for parallel in (True, False):
        grammar = calls_grammar(form, RULES, parallel=parallel)
        assert accepts(grammars, grammar, one) and accepts(grammars, grammar, two) == parallel
        assert not accepts(grammars, grammar, one.replace('"f"', '"g"'))
        assert not accepts(grammars, grammar, one.replace(" 1", ' "x"'))
        assert not accepts(grammars, grammar, "No call.") and not accepts(grammars, grammar, "")
    assert read_calls(two, CallParser(form, RULES)) == ("", [ToolCall("f", '{"a": 1}'), ToolCall("get_weather", "{}")])


@pytest.mark.parametrize("form", CALL_FORMS)
def test_other_answers_are_allowed_beside_calls(grammars: Grammars, form: CallForm) -> None:
    form = form_of_grammar(form)
    grammar = calls_grammar(form, RULES, parallel=True, or_else='"yes" | "no"')
    assert [accepts(grammars, grammar, text) for text in ("yes", "no", "perhaps", WRITTEN[form][0])] == [1, 1, 0, 1]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", CALL_FORMS)
def test_among_any_text_calls_have_arguments_that_the_rule_accepts(
    grammars: Grammars, form: CallForm, parallel: bool
) -> None:
    form = form_of_grammar(form)
    one, two = WRITTEN[form]
    grammar = calls_grammar(form, RULES | {"h": ANY_ARGUMENTS}, parallel=parallel, is_free=True)
    for text in ("", "No call.", " \n", "Grün [1] <tool> (x)\n", one, one.replace('"f"', '"h"').replace("1", '["x"]')):
        assert accepts(grammars, grammar, text), text
    assert accepts(grammars, grammar, two) == parallel
    for wrong in (one.replace('"f"', '"g"'), one.replace(" 1", ' "x"'), one.replace('"a"', '"b"')):
        assert not accepts(grammars, grammar, wrong), wrong
        assert form == "llama3_json" or not accepts(grammars, grammar, f"Let me see. {wrong}")
    if form != "llama3_json":  # whose calls begin an answer
        assert accepts(grammars, grammar, f"Let me see.\n\n{one}")
        assert accepts(grammars, grammar, f"{one} Done.") == (form == "hermes" and parallel)

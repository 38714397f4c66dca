"""Grammars of answers that are calls of tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ccjax.text.argument_grammar import TEXT_TO_TAG, JsonRule, in_python, in_tags
from ccjax.text.tool_calls import MARKS, CallForm

_MOST_CALLS = 16
"""Calls in one answer; a small model may not know when to stop."""
_WRITTEN: dict[CallForm, tuple[str, str, str, str, str]] = {
    "hermes": ("", '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", ""),
    "llama3_json": ("", '{"name": ', ', "parameters": ', "}", ""),
    "mistral": ("[TOOL_CALLS] [", '{"name": ', ', "arguments": ', "}", "]"),
    "pythonic": ("[", "", "(", ")", "]"),
    "qwen3_coder": ("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", ""),
}
"""What stands before all calls, before a call's name, before its arguments, behind these, and behind all calls."""
_BETWEEN: dict[CallForm, str] = {
    "hermes": "\n",
    "llama3_json": "; ",
    "mistral": ", ",
    "pythonic": ", ",
    "qwen3_coder": "\n",
}

ANY_TEXT = "/(.|\\n)*/"
_NOT_FIRST: dict[CallForm, str] = {"llama3_json": "{", "pythonic": "\\["}
"""What no other text begins with in the forms that have no marker."""


def form_of_grammar(form: CallForm, schemas: Mapping[str, Mapping[str, Any] | None]) -> CallForm:
    """The form of calls of these tools that a grammar can express: JSON where arguments cannot be told in Python.

    Args:
      schemas: name of a tool -> schema of its arguments; None for any.
    """
    is_python = form == "pythonic" and all(in_python("x", schema, _no_rule) for schema in schemas.values())
    return "llama3_json" if form == "pythonic" and not is_python else form


def calls_grammar(
    form: CallForm,
    schemas: Mapping[str, Mapping[str, Any] | None],
    json_rule: JsonRule,
    *,
    parallel: bool,
    or_else: str | None = None,
    is_free: bool = False,
) -> str:
    """The grammar of one or several calls of tools.

    Args:
      form: one that `form_of_grammar` returns. A tool whose arguments Qwen3-Coder's tags cannot express is called in
        Hermes' form, which is read there, too.
      schemas: as in `form_of_grammar`.
      or_else: right side of a rule for answers that are no calls.
      is_free: any text may stand before calls, or instead of them; `or_else` is None.
    """
    before, _, _, _, behind = _WRITTEN[form]
    more = f" ({_text(_BETWEEN[form])} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
    calls, marked = f"{_text(before)} call{more} {_text(behind)}", is_free and form in MARKS
    if marked and before:
        calls = f"to_mark {_text(before.removeprefix(MARKS[form]))} call{more} {_text(behind)}"
    elif marked:
        calls = f"(to_mark call){{1,{_MOST_CALLS}}} {ANY_TEXT}" if parallel else "to_mark call"
    if is_free:
        or_else = ANY_TEXT if marked else f"/\\s*([^{_NOT_FIRST[form]}\\s](.|\\n)*)?/"
    rules = ["start: calls" + ("" if or_else is None else " | other"), f"calls: {calls}"]
    rules += [] if or_else is None else [f"other: {or_else}"]
    # A lazy lexeme ends as soon as the marker is there, so that no text contains one.
    rules += [f"to_mark[lazy]: {ANY_TEXT} {_text(MARKS[form])}"] if marked else []
    rules += [TEXT_TO_TAG] if form == "qwen3_coder" else []
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(schemas))))
    for number, (name, schema) in enumerate(schemas.items()):
        own, arguments = _arguments(form, f"args_{number}", schema, json_rule)
        _, opening, middle, closing, _ = _WRITTEN[own]
        opening = opening.removeprefix(MARKS[form]) if marked and not before else opening
        start = opening + (name if own in ("pythonic", "qwen3_coder") else json.dumps(name)) + middle
        rules += [f"call_{number}: {_text(start)} args_{number} {_text(closing)}", *arguments]
    return "\n".join(rules)


def _arguments(
    form: CallForm, name: str, schema: Mapping[str, Any] | None, json_rule: JsonRule
) -> tuple[CallForm, list[str]]:
    """The form of the calls of one tool, and the rules of its arguments."""
    if form in ("pythonic", "qwen3_coder"):
        rules = (in_python if form == "pythonic" else in_tags)(name, schema, json_rule)
        if rules is not None:
            return form, rules
        assert form == "qwen3_coder", "form_of_grammar leaves none of these in Python"
        form = "hermes"
    return form, [f"{name}: {json_rule({'type': 'object'} if schema is None else schema)}"]


def _no_rule(_: Mapping[str, Any]) -> str:
    return ""


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

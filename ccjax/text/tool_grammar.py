"""Grammars of answers that are calls of tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ccjax.text.tool_calls import MARKS, CallForm

_MOST_CALLS = 16
"""Calls in one answer; a small model may not know when to stop."""
_WRITTEN: dict[CallForm, tuple[str, str, str, str, str]] = {
    "hermes": ("", '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", ""),
    "llama3_json": ("", '{"name": ', ', "parameters": ', "}", ""),
    "mistral": ("[TOOL_CALLS] [", '{"name": ', ', "arguments": ', "}", "]"),
}
"""What stands before all calls, before a call's name, before its arguments, behind these, and behind all calls."""
_BETWEEN: dict[CallForm, str] = {"hermes": "\n", "llama3_json": "; ", "mistral": ", "}

ANY_ARGUMENTS = '%json {"type": "object"}'
"""The rule for arguments without a schema."""
ANY_TEXT = "/(.|\\n)*/"
_NO_OBJECT = "/\\s*([^{\\s](.|\\n)*)?/"
"""Any text that is not taken for a call in the form that has no marker."""


def form_of_grammar(form: CallForm) -> CallForm:
    """The form that a grammar can express: JSON instead of Python or tags, whose arguments have no schema."""
    return form if form in _WRITTEN else "hermes" if form == "qwen3_coder" else "llama3_json"


def calls_grammar(
    form: CallForm,
    json_rule: Mapping[str, str],
    *,
    parallel: bool,
    or_else: str | None = None,
    is_free: bool = False,
) -> str:
    """The grammar of one or several calls of tools.

    Args:
      form: one that `form_of_grammar` returns.
      json_rule: name of a tool -> right side of the rule for its arguments.
      or_else: right side of a rule for answers that are no calls.
      is_free: any text may stand before calls, or instead of them; `or_else` is None.
    """
    before, opening, middle, closing, behind = _WRITTEN[form]
    more = f" ({_text(_BETWEEN[form])} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
    calls, marked = f"{_text(before)} call{more} {_text(behind)}", is_free and form in MARKS
    if marked and before:
        calls = f"to_mark {_text(before.removeprefix(MARKS[form]))} call{more} {_text(behind)}"
    elif marked:
        opening = opening.removeprefix(MARKS[form])
        calls = f"(to_mark call){{1,{_MOST_CALLS}}} {ANY_TEXT}" if parallel else "to_mark call"
    if is_free:
        or_else = ANY_TEXT if marked else _NO_OBJECT
    rules = ["start: calls" + ("" if or_else is None else " | other"), f"calls: {calls}"]
    rules += [] if or_else is None else [f"other: {or_else}"]
    # A lazy lexeme ends as soon as the marker is there, so that no text contains one.
    rules += [f"to_mark[lazy]: {ANY_TEXT} {_text(MARKS[form])}"] if marked else []
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(json_rule))))
    for number, (name, rule) in enumerate(json_rule.items()):
        start = f"{opening}{json.dumps(name)}{middle}"
        rules += [f"call_{number}: {_text(start)} args_{number} {_text(closing)}", f"args_{number}: {rule}"]
    return "\n".join(rules)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

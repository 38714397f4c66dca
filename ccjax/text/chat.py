"""Messages of a chat as OpenAI's API has them, checked, and as a chat template takes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ccjax.text.placeholders import HiddenTexts

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_PART_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part of a content -> field of its text."""
_SCHEMA_WORDS = frozenset(
    "type function name description parameters return strict properties required items enum default format title "
    "anyOf allOf oneOf const additionalProperties object string number integer boolean array null".split()
)
"""What templates look for in definitions of tools; all other strings there are untrusted."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


NoContent = Literal["left out", "none", "empty"]


@dataclasses.dataclass(frozen=True)
class Message:
    """A checked message.

    Attributes:
      parts: of the content, which is their concatenation; None for no content.
      definitions: untrusted text behind the content, in which no passages are looked for.
      calls: of tools, as in the API; their arguments are text.
      call_id, name: of a tool's result.
    """

    role: str
    parts: tuple[str, ...] | None
    definitions: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    call_id: str | None = None
    name: str | None = None

    def stripped(self) -> Message:
        """The message without white space around its content."""
        if self.parts is None:
            return self
        text = "".join(self.parts)
        kept = _between(self.parts, len(text) - len(text.lstrip()), len(text.rstrip()))
        return dataclasses.replace(self, parts=tuple(kept))


@dataclasses.dataclass(frozen=True)
class Form:
    """What templates differ in.

    Attributes:
      maps_arguments: arguments of calls are mappings, not text.
      no_content: what a message without content has: no such field, None or "".
    """

    maps_arguments: bool = True
    no_content: NoContent = "left out"

    @staticmethod
    def all_of(messages: Sequence[Message]) -> Iterator[Form]:
        """The forms in which these messages differ, transformers' own first."""
        maps = (True, False) if any(message.calls for message in messages) else (True,)
        contents: tuple[NoContent, ...] = get_args(NoContent)
        contents = contents if any(message.parts is None for message in messages) else contents[:1]
        return (Form(maps_arguments, content) for content, maps_arguments in itertools.product(contents, maps))


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages.

    Raises:
      ValueError: one is malformed, or there is no question; names `messages[i]`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: wanted a list of messages, got {type(messages).__name__}")
    found: list[Message] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}]: wanted an object with role and content, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"messages[{i}].role: wanted one of {sorted(_ROLES)}, got {role!r}")
        found.append(_checked(message, role, f"messages[{i}]", found))
    questions = [i for i, message in enumerate(found) if message.role == "user"]
    if not questions:
        raise ValueError("messages: wanted at least one message with role 'user', got none")
    if not "".join(found[questions[-1]].parts or ()).strip():
        raise ValueError(f"messages[{questions[-1]}].content: wanted a question, got blank text")
    return found


def checked_tools(tools: Any, argument: str = "tools") -> list[dict[str, Any]]:
    """Definitions of tools, `{"type": "function", "function": {"name", ...}}`.

    Raises:
      ValueError: one is malformed; names `tools[i]`.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"{argument}: wanted a list of tools, got {type(tools).__name__}")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"{argument}[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            got = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
            raise ValueError(f"{where}.type: wanted 'function', got {got!r}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{where}.function: wanted an object with name, got {type(function).__name__}")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            wanted = "at most 128 letters, digits, _, - and ."
            raise ValueError(f"{where}.function.name: wanted {wanted}, got {name!r:.80}")
        if name in names:
            raise ValueError(f"{where}.function.name: wanted another name than those before, got {name!r}")
        names.add(name)
        for key, kind in (("description", str), ("parameters", Mapping), ("strict", bool)):
            value = function.get(key)
            if value is not None and not isinstance(value, kind):
                wanted = {str: "a string", Mapping: "a JSON schema", bool: "true or false"}[kind]
                raise ValueError(f"{where}.function.{key}: wanted {wanted}, got {type(value).__name__}")
        properties = (function.get("parameters") or {}).get("properties")
        if properties is not None and not isinstance(properties, Mapping):
            got = type(properties).__name__
            raise ValueError(f"{where}.function.parameters.properties: wanted an object, got {got}")
    return [dict(tool) for tool in tools]


def hidden_messages(
    messages: Sequence[Message], form: Form, texts: HiddenTexts
) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages for a template, and for each the number of its first text."""
    found, starts = [], []
    for message in messages:
        starts.append(len(texts))
        shaped: dict[str, Any] = {"role": message.role}
        if message.parts is not None:
            content = "".join(texts.hide(part, is_content=True) for part in message.parts)
            shaped["content"] = content + (texts.hide(message.definitions) if message.definitions else "")
        elif form.no_content != "left out":
            shaped["content"] = None if form.no_content == "none" else ""
        if message.calls:
            shaped["tool_calls"] = [_hidden_call(call, form, texts) for call in message.calls]
        for key, value in (("tool_call_id", message.call_id), ("name", message.name)):
            if value is not None:
                shaped[key] = texts.hide_word(value)
        found.append(shaped)
    return found, starts


def hidden_tools(tools: Sequence[Mapping[str, Any]], texts: HiddenTexts) -> list[dict[str, Any]]:
    """Definitions of tools for a template."""
    return texts.hide_json(list(tools), _SCHEMA_WORDS)


def in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages for a template that knows nothing of tools: definitions in the system message, calls and results
    as tagged text, in the form of Hermes and Qwen; results are the user's."""
    found: list[Message] = []
    for message in messages:
        if message.calls:
            calls = "\n".join(f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in message.calls)
            content = message.parts or ()
            found.append(Message(message.role, (*content, "\n", calls) if "".join(content) else (calls,)))
        elif message.role == "tool":
            result = "<tool_response>\n", *(message.parts or ()), "\n</tool_response>"
            if found and found[-1].role == "user" and (found[-1].parts or ("",))[-1] == result[-1]:
                found[-1] = Message("user", (*(found[-1].parts or ()), "\n", *result))
            else:
                found.append(Message("user", result))
        else:
            found.append(dataclasses.replace(message, parts=message.parts or ("",)))
    if tools:
        has_system = found[0].role == "system"
        system = found.pop(0) if has_system else Message("system", ())
        gap = "\n\n" if "".join(system.parts or ()) else ""
        found.insert(0, dataclasses.replace(system, definitions=gap + tools_text(tools)))
    return found


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Instructions for calling tools, with their definitions and, as an example, a call of the first. (Of six questions
    with `required`, SmolLM2-135M-Instruct chose the right one of four tools for five, as with Qwen's longer words; its
    arguments were right for four, with Qwen's for three.)"""
    functions = [tool["function"] for tool in tools]
    properties = (functions[0].get("parameters") or {}).get("properties")
    example = {"name": functions[0]["name"], "arguments": dict.fromkeys(properties or (), "...")}
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return (
        f"You can call these functions:\n<tools>\n{lines}\n</tools>\n\n"
        "To call a function, answer with nothing but its name and arguments as JSON within <tool_call></tool_call>, "
        f"for example:\n<tool_call>\n{json.dumps(example, ensure_ascii=False)}\n</tool_call>"
    )


def _checked(message: Mapping[str, Any], role: str, where: str, before: Sequence[Message]) -> Message:
    content, calls = message.get("content"), _calls(message, where)
    if calls and role != "assistant":
        raise ValueError(f"{where}.tool_calls: wanted none in a message of {role!r}, got {len(calls)}")
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        parts = (refusal,) if isinstance(refusal, str) else None if calls else ("",)
    else:
        lines = _content_parts(content, f"{where}.content")
        parts = tuple(part + "\n" for part in lines[:-1]) + tuple(lines[-1:])
    if _ROLES[role] != "tool":
        return Message(_ROLES[role], parts, calls=calls)
    name, call_id = message.get("name"), message.get("tool_call_id")
    if role == "function":
        call_id = next((call["id"] for other in reversed(before) for call in other.calls), None)
        if not isinstance(name, str):
            raise ValueError(f"{where}.name: wanted the name of a function, got {name!r}")
    elif not isinstance(call_id, str):
        raise ValueError(f"{where}.tool_call_id: wanted the id of a call in tool_calls, got {call_id!r}")
    return Message("tool", parts, call_id=call_id, name=name if isinstance(name, str) else None)


def _calls(message: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The calls of a message, that of the older `function_call` included, which gets an id from its place."""
    given, older = message.get("tool_calls"), message.get("function_call")
    if given is None and older is not None:
        digits = "".join(filter(str.isdigit, where))
        given, where = [{"id": f"call{digits:0>5}", "type": "function", "function": older}], f"{where}.function_call"
    if given is None:
        return ()
    if not isinstance(given, list):
        raise ValueError(f"{where}.tool_calls: wanted a list of calls, got {type(given).__name__}")
    for i, call in enumerate(given):
        at = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f"{at}.function: wanted an object with name and arguments, got {type(function).__name__}")
        if not isinstance(function.get("name"), str):
            raise ValueError(f"{at}.function.name: wanted a string, got {function.get('name')!r:.80}")
        if not isinstance(function.get("arguments"), str | Mapping):
            got = type(function.get("arguments")).__name__
            raise ValueError(f"{at}.function.arguments: wanted a string of JSON, got {got}")
        if not isinstance(call.get("id"), str):
            raise ValueError(f"{at}.id: wanted a string, got {call.get('id')!r:.80}")
    return tuple(given)


def _hidden_call(call: Mapping[str, Any], form: Form, texts: HiddenTexts) -> dict[str, Any]:
    text, value = _arguments(call["function"])
    is_mapped = form.maps_arguments and value is not None
    arguments = texts.hide_json(value) if is_mapped else texts.hide(text)
    function = {"name": texts.hide_word(call["function"]["name"]), "arguments": arguments}
    return {"id": texts.hide_word(call["id"]), "type": "function", "function": function}


def _arguments(function: Mapping[str, Any]) -> tuple[str, Any]:
    """The arguments of a call as text and as JSON; None if they are none, which models write now and then."""
    given = function["arguments"]
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False), given
    try:
        return given, json.loads(given)
    except (ValueError, RecursionError):
        return given, None


def _call_text(call: Mapping[str, Any]) -> str:
    name = json.dumps(call["function"]["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {_arguments(call["function"])[0]}}}'


def _content_parts(content: Any, argument: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ValueError(f"{argument}: wanted a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_PART_TYPES[kind]) if isinstance(kind, str) and kind in _PART_TYPES else None
        if not isinstance(text, str):
            raise ValueError(f"{argument}[{i}]: wanted {{'type': 'text', 'text': string}}, got type {kind!r}")
        texts.append(text)
    return texts


def _between(parts: Sequence[str], start: int, end: int) -> list[str]:
    """What is between two offsets of the whole text of some parts, without empty parts."""
    first, kept = 0, list[str]()
    for part in parts:
        kept.append(part[max(0, start - first) : max(0, end - first)])
        first += len(part)
    return [part for part in kept if part]

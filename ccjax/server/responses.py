"""Body of /v1/responses, and its translation to a chat: items become messages, other fields those of the same meaning.

Responses are not kept: the whole conversation comes in `input`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import Field, PrivateAttr

from ccjax.errors import RequestError
from ccjax.server.body import parse_body
from ccjax.server.fields import REFUSED_OF, RESPONSES, refuse_unsupported
from ccjax.server.schemas import Body, ChatBody, ReasoningEffort
from ccjax.server.tool_use import ALLOWED_TOOLS

NOT_KEPT = "this server keeps no responses: send the whole conversation as items of input"
_KEPT = ("previous_response_id", "conversation", "background", "prompt")
_AS_IN_CHATS = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier")
_INCLUDED = (
    "message.output_text.logprobs",
    # Of tools and items that no answer of this server has.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part -> its field with the text."""


class ResponsesBody(Body):
    """Body of /v1/responses; documents, retrieval, reuse and further fields of chats have the same meaning here."""

    input: str | list[dict[str, Any]] = Field(description="a question, or the items of the conversation")
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    stream: bool | None = None
    store: bool | None = Field(None, description="no response is kept, whatever it says")
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema")
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="functions")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    def as_chat(self) -> TranslatedChat:
        """The chat that asks the same.

        Raises:
          RequestError, ApiError: a field is wrong or not supported; names it.
        """
        self._refuse_unsupported()
        fields = {name: value for name in _AS_IN_CHATS if (value := getattr(self, name)) is not None}
        fields |= {name: value for name, value in (self.model_extra or {}).items() if name not in REFUSED_OF[RESPONSES]}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if (effort := (self.reasoning or {}).get("effort")) is not None:
            fields["reasoning_effort"] = effort
        fields |= _response_format(self.text or {})
        if self.tools:
            fields["tools"] = [_tool(number, tool) for number, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields["tool_choice"] = _tool_choice(self.tool_choice)
        messages, places = [], []
        for place, message in self._messages():
            if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
                # One turn of the assistant: its text and calls are items of their own here.
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                messages.append(message)
                places.append(place)
        chat = parse_body(TranslatedChat, json.dumps({**fields, "messages": messages}).encode())
        chat._places = tuple(places)
        return chat

    def _refuse_unsupported(self) -> None:
        try:
            refuse_unsupported(self.model_extra, RESPONSES)
        except RequestError as error:
            if error.argument in _KEPT:
                raise RequestError(error.argument, f"wanted none: {NOT_KEPT}") from None
            raise
        for number, name in enumerate(self.include or ()):
            if name not in _INCLUDED:
                raise RequestError(f"include[{number}]", f"wanted one of {_INCLUDED}, got {name!r}")
        for name, value in (self.reasoning or {}).items():
            if name != "effort" and value is not None:
                raise RequestError(f"reasoning.{name}", f"wanted none: reasoning is not told apart, got {value!r:.80}")
            if name == "effort" and value not in (None, *get_args(ReasoningEffort)):
                raise RequestError("reasoning.effort", f"wanted one of {get_args(ReasoningEffort)}, got {value!r:.80}")

    def _messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each message of the chat, with the name of what its content was made of."""
        if self.instructions:
            yield "instructions", {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield "input", {"role": "user", "content": self.input}
            return
        for number, item in enumerate(self.input):
            content = "output" if item.get("type") == "function_call_output" else "content"
            yield f"input[{number}].{content}", _message(f"input[{number}]", item)


class TranslatedChat(ChatBody):
    """A chat that names the fields of the response's body in errors."""

    _places: tuple[str, ...] = PrivateAttr(())

    def argument_names(self) -> dict[str, str]:
        """As `ChatBody`."""
        renamed = {
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "response_format": "text.format",
            f"tool_choice.{ALLOWED_TOOLS}": "tool_choice",
            f"tool_choice.{ALLOWED_TOOLS}.mode": "tool_choice.mode",
            f"tool_choice.{ALLOWED_TOOLS}.tools": "tool_choice.tools",
            "response_format.json_schema.schema": "text.format.schema",
        }
        for number, _ in enumerate(self.tools or ()):
            for part in ("name", "description", "parameters", "strict"):
                renamed[f"tools[{number}].function.{part}"] = f"tools[{number}].{part}"
        names = {name: renamed.get(field, field) for name, field in super().argument_names().items()} | renamed
        for number, place in enumerate(self._places):
            whole = place.removesuffix(".content").removesuffix(".output")
            names |= {f"messages[{number}]": whole, f"messages[{number}].content": place}
        return names


def _message(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """The chat's message of an item."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(f"{place}.role", f"wanted one of {_ROLES}, got {role!r}")
        role = "system" if role == "developer" else role
        return {"role": role, "content": _content(f"{place}.content", item.get("content"))}
    if kind == "function_call":
        call_id, name, arguments = (_text(place, item, field) for field in ("call_id", "name", "arguments"))
        function = {"name": name, "arguments": arguments}
        calls = [{"id": call_id, "type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    if kind == "function_call_output":
        content = _content(f"{place}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": _text(place, item, "call_id"), "content": content}
    wanted = "wanted message, function_call or function_call_output"
    reason = f"; {NOT_KEPT}" if kind == "item_reference" else ""
    raise RequestError(f"{place}.type", f"{wanted}, got {kind!r}{reason}")


def _content(place: str, content: Any) -> str | list[dict[str, Any]]:
    """A text, or the text parts of a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(place, f"wanted a text or a list of parts, got {type(content).__name__}")
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise RequestError(f"{place}[{number}]", f"wanted a part of type input_text or output_text, got {kind!r}")
        parts.append({"type": "text", "text": text})
    return parts


def _text(place: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{field}", f"wanted a text, got {value!r:.80}")
    return value


def _response_format(text: Mapping[str, Any]) -> dict[str, Any]:
    """The chat's field for `text`."""
    for name, value in text.items():
        if name != "format" and value not in (None, "medium"):
            raise RequestError(f"text.{name}", f"wanted 'medium' or none, got {value!r:.80}")
    form = text.get("format")
    if form is None:
        return {}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise RequestError("text.format", f"wanted type text, json_object or json_schema, got {form!r:.80}")
    if form["type"] != "json_schema":
        return {"response_format": {"type": form["type"]}}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """The chat's form of a function."""
    if tool.get("type") != "function":
        got = repr(tool.get("type"))[:80]
        raise RequestError(f"tools[{number}].type", f"wanted function: this server runs no tools itself, got {got}")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == ALLOWED_TOOLS:
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [{"type": "function", "function": tool} for tool in tools]
        return {"type": ALLOWED_TOOLS, ALLOWED_TOOLS: {"mode": choice.get("mode"), "tools": tools}}
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError(
            "tool_choice", f"wanted none, auto, required, a function's name or allowed_tools, got {choice!r:.80}"
        )
    return {"type": "function", "function": {"name": choice["name"]}}

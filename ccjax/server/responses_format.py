"""Formats the answer to /v1/responses from that of a chat: a response object, or its events in a stream.

As in chats there are also `reuse`, `ttft_s`, `documents` and, if requested, `trace`, on the response.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ccjax.engine import Delta
from ccjax.engine import Response as Answer
from ccjax.server.errors import ApiError
from ccjax.server.openai_format import Formatter
from ccjax.server.responses import ResponsesBody

Object = dict[str, Any]
Event = tuple[str, Object]
"""Type and fields of an event."""

_EXTRA = ("reuse", "ttft_s", "documents", "trace", "prompt_logprobs")


def error_event(refusal: ApiError, number: int) -> str:
    """The event that ends a stream whose earlier events are unknown but for their `number`."""
    return _sse({"type": "error", "sequence_number": number, **_error(refusal)})


class ResponsesFormatter:
    """Formats the answer to one request, with the interface of `Formatter`.

    Args:
      chat: formats the answer as that of a chat, which is translated.
      about: id, model and created_at of the response.
    """

    done = ""
    """Nothing follows the last event."""

    def __init__(self, chat: Formatter, body: ResponsesBody, about: Object) -> None:
        self._chat = chat
        self._base = about | _echo(body)
        self._numbers = itertools.count()
        self._items: list[_Text | _Call] = []
        self._early_logprobs: list[Object] = []
        """Of tokens before the first text or call."""
        self._finish_reason = ""
        self._extra: Object = {}
        self._has_begun = False

    def add_trace(self, trace: Object) -> None:
        """Sets extra fields for the response; call it before the response is formatted."""
        self._chat.add_trace(trace)

    def answer(self, response: Answer) -> Object:
        """The response object."""
        (choice,) = response.choices
        about = {name: getattr(choice, name) for name in ("finish_reason", "stop_reason", "prompt_logprobs")}
        whole = Delta(choice.text, choice.token_ids, choice.logprobs or (), response, **about)
        *_, (_, fields) = self._events(whole)
        return fields["response"]

    def chunks(self, delta: Delta, *, include_usage: bool = True) -> Iterator[Object]:
        """The events of one delta; the last one has the whole response, which always includes the usage."""
        events = self._events(delta)
        return ({"type": kind, "sequence_number": next(self._numbers), **fields} for kind, fields in events)

    def event(self, value: Object) -> str:
        """One server-sent event."""
        return _sse(value)

    def failure(self, refusal: ApiError) -> Object:
        """The last event of a stream that ends with an error."""
        failed = self._base | {"status": "failed", "error": _error(refusal), "output": self._output("incomplete")}
        return {"type": "response.failed", "sequence_number": next(self._numbers), "response": failed}

    def _events(self, delta: Delta) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield "response.created", {"response": self._base}
            yield "response.in_progress", {"response": self._base}
        for chunk in self._chat.chunks(delta, include_usage=True):
            self._keep_extra(chunk)
            for choice in chunk["choices"]:
                yield from self._parts(choice["delta"], choice["logprobs"])
                self._finish_reason = choice["finish_reason"] or self._finish_reason
            if "reuse" in chunk:
                if not self._items:  # an answer without text
                    yield from self._parts({"content": ""}, None, is_last=True)
                whole = self._whole(chunk)
                yield from self._items[-1].end(whole["output"][-1]["status"])
                yield f"response.{whole['status']}", {"response": whole}

    def _parts(
        self, message: Mapping[str, Any], logprobs: Mapping[str, Any] | None, *, is_last: bool = False
    ) -> Iterator[Event]:
        """The events of the text and the calls in a part of a chat's message. Log-probabilities are those of texts."""
        text, found = message.get("content") or "", (logprobs or {}).get("content") or []
        if not self._items:
            self._early_logprobs += found
            found = self._early_logprobs
        item = self._items[-1] if self._items else None
        if (text or is_last) and not isinstance(item, _Text):
            item = _Text(len(self._items))
            yield from self._begin(item)
        if isinstance(item, _Text) and (text or found):
            yield item.add(text, found)
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):  # the first part of a call has its name
                yield from self._begin(_Call(len(self._items), call["id"], function["name"]))
            item = self._items[-1]
            assert isinstance(item, _Call)
            if function.get("arguments"):
                yield item.add(function["arguments"])

    def _begin(self, item: _Text | _Call) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].end("completed")
        self._items.append(item)
        yield from item.begin()

    def _keep_extra(self, chat: Mapping[str, Any]) -> None:
        self._extra |= {name: chat[name] for name in _EXTRA if name in chat}

    def _whole(self, chat: Mapping[str, Any]) -> Object:
        """The finished response, with what a chat has on its last chunk."""
        self._keep_extra(chat)
        is_cut = self._finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return self._base | {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(status),
            "usage": _usage(chat["usage"]),
            **self._extra,
        }

    def _output(self, status: str) -> list[Object]:
        """All items; only the last one can be incomplete."""
        last = len(self._items) - 1
        return [item.shown(status if place == last else "completed") for place, item in enumerate(self._items)]


class _Text:
    """The message with the text of the answer."""

    def __init__(self, place: int) -> None:
        self._id, self._place = f"msg-{uuid.uuid4().hex}", place
        self._texts: list[str] = []
        self._logprobs: list[Object] = []

    @property
    def _at(self) -> Object:
        return {"item_id": self._id, "output_index": self._place, "content_index": 0}

    def shown(self, status: str) -> Object:
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [self._part()]}

    def begin(self) -> Iterator[Event]:
        item = self.shown("in_progress") | {"content": []}
        yield "response.output_item.added", {"output_index": self._place, "item": item}
        yield "response.content_part.added", {**self._at, "part": self._part()}

    def add(self, text: str, logprobs: Sequence[Object]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return "response.output_text.delta", {**self._at, "delta": text, "logprobs": logprobs}

    def end(self, status: str) -> Iterator[Event]:
        part = self._part()
        whole = {"text": part["text"], "logprobs": part["logprobs"]}
        yield "response.output_text.done", {**self._at, **whole}
        yield "response.content_part.done", {**self._at, "part": part}
        yield "response.output_item.done", {"output_index": self._place, "item": self.shown(status)}

    def _part(self) -> Object:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class _Call:
    """A call of a function."""

    def __init__(self, place: int, call_id: str, name: str) -> None:
        self._id, self._place = f"fc-{uuid.uuid4().hex}", place
        self._about = {"call_id": call_id, "name": name}
        self._arguments: list[str] = []

    @property
    def _at(self) -> Object:
        return {"item_id": self._id, "output_index": self._place}

    def shown(self, status: str) -> Object:
        arguments = "".join(self._arguments)
        return {"id": self._id, "type": "function_call", "status": status, **self._about, "arguments": arguments}

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._place, "item": self.shown("in_progress")}

    def add(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        return "response.function_call_arguments.delta", {**self._at, "delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        arguments = {"name": self._about["name"], "arguments": "".join(self._arguments)}
        yield "response.function_call_arguments.done", {**self._at, **arguments}
        yield "response.output_item.done", {"output_index": self._place, "item": self.shown(status)}


def _sse(value: Object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {value['type']}\ndata: {text}\n\n"


def _error(refusal: ApiError) -> Object:
    return {"code": refusal.code or "invalid_request", "message": refusal.message, "param": refusal.param}


def _usage(usage: Mapping[str, Any]) -> Object:
    """OpenAI's usage of a response from that of a chat."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0} | usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _echo(body: ResponsesBody) -> Object:
    """What a response repeats of its request, and what it has before the answer."""
    return {
        "object": "response",
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 0.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} | (body.text or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }

"""Calls of tools in an answer: which form the model writes them in, and a parser that takes the answer in pieces.

Each form is recognised by how it begins: Hermes and Qwen `<tool_call>{"name": "f", "arguments": {}}</tool_call>`,
Mistral `[TOOL_CALLS] [{"name": "f", "arguments": {}}]` or `[TOOL_CALLS]f[ARGS]{}`, and, if the answer begins so, Llama
3's `{"name": "f", "parameters": {}}` and pythonic `[f(a=1)]`; behind `<tool_call>` also Qwen3-Coder's
`<function=f><parameter=a>1</parameter></function>`. A call of a tool that was not offered is text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Generator, Mapping
from typing import Any, Literal, get_args

from ccjax.text.answer_reader import AnswerReader, CutError
from ccjax.text.python_arguments import arguments_of_python
from ccjax.text.tagged_arguments import TEXT, as_json, types_of
from ccjax.text.template import ChatTemplate

CallForm = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]
CALL_FORMS = get_args(CallForm)
MARKS: dict[CallForm, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "qwen3_coder": "<tool_call>"}
_END = "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_UNTIL_TAG_ENDS = re.compile("[^<>\n]*")
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


@dataclasses.dataclass(frozen=True)
class CallDelta:
    """A piece of a call: the first has the name, and all `arguments` joined are the JSON text of the arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A whole call; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


def call_form(template: ChatTemplate) -> CallForm:
    """The form that the chat template renders calls in; Hermes if it knows nothing of tools."""
    source = template.tool_source or template.source
    if template.takes_tools and _FUNCTION in source:
        return "qwen3_coder"
    if not template.takes_tools or MARKS["hermes"] in source:
        return "hermes"
    if MARKS["mistral"] in source:
        return "mistral"
    if re.search(r"\[\w+\(\w+=", source):
        return "pythonic"
    return "llama3_json" if re.search(r"parameters[\"']{1,2}: ", source) else "hermes"


def read_calls(text: str, parser: CallParser) -> tuple[str, list[ToolCall]]:
    """The text of a whole answer besides calls, and the calls, by a new parser."""
    first, last = parser.push(text), parser.finish()
    calls: list[ToolCall] = []
    for delta in (*first[1], *last[1]):
        if delta.index == len(calls):
            calls.append(ToolCall(delta.name or "", ""))
        calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + delta.arguments)
    return first[0] + last[0], calls


class _NotACallError(Exception):
    """What was read is no call, but text."""


class CallParser:
    """Divides an answer into text and calls, piece by piece; joined, they are the same however it is cut into pieces.

    White space around calls belongs to them. An answer without calls comes out unchanged.
    """

    def __init__(
        self,
        form: CallForm,
        names: Collection[str],
        *,
        parallel: bool = True,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        """
        Args:
          names: of the tools that may be called.
          parallel: false leaves out all calls but the first.
          schemas: name -> schema of the arguments, for the form that does not say which of them are texts.
        """
        self._form: CallForm = form
        self._names = frozenset(names)
        self._parallel, self._schemas = parallel, schemas or {}
        self._read = AnswerReader()
        self._begin = 0
        """Where the object or marker began that will be text if it is no call."""
        self._space = ""
        self._pieces: list[str | CallDelta] = []
        self._shown = True
        self.num_calls = 0
        self._steps = self._run()

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[CallDelta]]:
        """Takes the next piece; returns the text and the pieces of calls that it completes."""
        pieces = self.in_order(text, is_last=is_last)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return text, [piece for piece in pieces if isinstance(piece, CallDelta)]

    def finish(self) -> tuple[str, list[CallDelta]]:
        """What was held back, when no more comes."""
        return self.push("", is_last=True)

    def in_order(self, text: str, *, is_last: bool = False) -> list[str | CallDelta]:
        """As `push`, in the order of the answer."""
        self._read.buffer += text
        self._read.is_closed = self._read.is_closed or is_last
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return [*pieces, self._space] if is_last and not self.num_calls else pieces

    # -- the whole answer; each step waits (yields) where it needs more text ------------------------------------

    def _run(self) -> Generator[None]:
        mark = MARKS.get(self._form)
        if mark is None:
            yield from self._unless_text(self._python_calls() if self._form == "pythonic" else self._json_calls())
        while (yield from self._say_until(mark)):
            yield from self._unless_text(self._json_calls())

    def _unless_text(self, steps: Generator[None]) -> Generator[None]:
        try:
            yield from steps
            self._begin = self._read.at
        except (_NotACallError, CutError):
            mark = MARKS.get(self._form, "")
            if not self._read.buffer.startswith(mark, self._begin):  # behind other calls
                mark = ""
            self._say(mark)
            self._read.at = self._begin + len(mark)

    def _say_until(self, mark: str | None) -> Generator[None, None, bool]:
        """Passes text on up to the next marker. False at the end of the answer."""
        found = yield from self._read.until(() if mark is None else (mark,), self._say)
        self._begin = self._read.at
        return found

    def _say(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._pieces.append(said)
        self._space = text[len(said) :]

    # -- calls in JSON -----------------------------------------------------------------------------------------

    def _json_calls(self) -> Generator[None]:
        """Reads a marker, if the form has one, and the calls behind it."""
        mark = MARKS.get(self._form, "")
        self._read.at += len(mark)
        before = self.num_calls
        in_list = False
        while True:
            char = yield from self._read.next()
            is_first = self.num_calls == before
            if not is_first:
                self._begin = self._read.at
            if char == "{":
                yield from self._object()
            elif char == "[" and is_first and not in_list:
                in_list = True
                self._read.at += 1
            elif char == "]" and in_list and not is_first:
                in_list = False
                self._read.at += 1
            elif char in (",", ";") and not is_first:
                self._read.at += 1
            elif mark == MARKS["hermes"] and char == "<" and (yield from self._read.skips(_FUNCTION)):
                yield from self._tagged_call()
            elif mark == MARKS["hermes"] and char == "<" and (yield from self._read.skips(_END)):
                if is_first:
                    raise _NotACallError
                return
            elif self._form == "mistral" and is_first and char:
                yield from self._named_object()
                return
            elif is_first:
                raise _NotACallError
            else:
                return

    def _named_object(self) -> Generator[None]:
        """Mistral's newer form: the name, `[ARGS]` and the arguments."""
        name = yield from self._read.word(_NAME)
        if name not in self._names:
            raise _NotACallError
        yield from self._read.skips("[ARGS]")
        if (yield from self._read.next()) != "{":
            raise _NotACallError
        self._start_call(name)
        yield from self._read.value(self._pass_on)

    def _object(self) -> Generator[None]:
        """Reads one call, `{"name": ..., "arguments": ...}`, its fields in any order."""
        self._read.at += 1
        name, held, is_started = None, None, False
        while True:
            char = yield from self._read.next()
            if char == ",":
                self._read.at += 1
                continue
            if char == "}" and name is not None:
                self._read.at += 1
                if not is_started:
                    self._start_call(name, held or "{}")
                return
            key = (yield from self._read.string()) if char == '"' else None
            colon = "" if key is None else (yield from self._read.next())
            if colon != ":":
                break
            self._read.at += 1
            char = yield from self._read.next()
            if key == "name" and char == '"' and name is None:
                name = yield from self._read.string()
                if name not in self._names:
                    break
            elif key in ("arguments", "parameters") and not is_started and held is None:
                if name is not None and char == "{":
                    self._start_call(name)
                    is_started = True
                    yield from self._read.value(self._pass_on)
                else:
                    held = _arguments((yield from self._read.whole_value()))
            elif key in ("type", "id") or is_started:
                yield from self._read.whole_value()
            else:
                break
        if not is_started:
            raise _NotACallError

    def _tagged_call(self) -> Generator[None]:
        """Qwen3-Coder's form, behind its first tag: the name, and each argument in a tag of its own."""
        name = yield from self._read.word(_NAME)
        if name not in self._names or not (yield from self._read.skips(">")):
            raise _NotACallError
        self._start_call(name, "{")
        properties = self._schemas.get(name, {}).get("properties") or {}
        between = ""
        while (yield from self._read.next()) == "<" and (yield from self._read.skips(_PARAMETER)):
            key = yield from self._read.word(_UNTIL_TAG_ENDS)
            yield from self._read.skips(">")
            yield from self._read.skips("\n")
            self._pass_on(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._tagged_value(types_of(properties.get(key)))
            between = ", "
        ended = yield from self._read.skips(_FUNCTION_END)
        rest = self._read.buffer[self._read.at :]
        if not ended and self._read.is_closed and any(tag.startswith(rest) for tag in (_FUNCTION_END, _PARAMETER)):
            self._read.at += len(rest)  # the answer was cut
        else:
            self._pass_on("}")
        self._begin = self._read.at

    def _tagged_value(self, types: frozenset[str]) -> Generator[None]:
        """Reads a value and the tag behind it. A text is passed on as it comes, any other value when it is complete."""
        ends = ("\n" + _PARAMETER_END, _PARAMETER_END)
        pieces: list[str] = []
        if types == TEXT:
            self._pass_on('"')
            ended = yield from self._read.until(
                ends, lambda text: self._pass_on(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            self._pass_on('"' if ended else "")
        else:
            ended = yield from self._read.until(ends, pieces.append)
            self._pass_on(as_json("".join(pieces), types) if ended else "".join(pieces))
        yield from self._read.skips("\n")
        yield from self._read.skips(_PARAMETER_END)

    def _start_call(self, name: str, arguments: str = "") -> None:
        self._space = ""
        self._shown = self._parallel or not self.num_calls
        if self._shown:
            self._pieces.append(CallDelta(self.num_calls, name))
            self.num_calls += 1
        self._pass_on(arguments)
        self._begin = self._read.at

    def _pass_on(self, arguments: str) -> None:
        if arguments and self._shown:
            self._pieces.append(CallDelta(self.num_calls - 1, None, arguments))
        self._begin = self._read.at

    # -- calls in Python ---------------------------------------------------------------------------------------

    def _python_calls(self) -> Generator[None]:
        """Reads `[f(a=1), g()]`; a call is passed on when it is complete."""
        if (yield from self._read.next()) != "[":
            raise _NotACallError
        self._read.at += 1
        while True:
            char = yield from self._read.next()
            if self.num_calls:
                self._begin = self._read.at
                if char == "]":
                    self._read.at += 1
                    return
                if char == ",":
                    self._read.at += 1
                    continue
            name = yield from self._read.word(_NAME)
            if name not in self._names or not (yield from self._read.skips("(")):
                raise _NotACallError
            arguments = arguments_of_python((yield from self._read.python_arguments()))
            if arguments is None:
                raise _NotACallError
            self._start_call(name, arguments)


def _arguments(text: str) -> str:
    """Arguments that are no object: some models write one as a string of JSON, or null."""
    if text.startswith('"'):
        try:
            inner = json.loads(text, strict=False)
        except ValueError:
            return text
        return inner if inner.lstrip().startswith("{") else text
    return "{}" if text == "null" else text

"""The tools of a chat request: OpenAI's fields, checked, and the calls in an answer in OpenAI's format."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ccjax.engine import Constraint
from ccjax.errors import RequestError
from ccjax.text import CallForm, CallParser, ToolCall
from ccjax.text.chat import checked_tools
from ccjax.text.tool_calls import CallDelta
from ccjax.text.tool_grammar import calls_grammar, form_of_grammar

ALLOWED_TOOLS = "allowed_tools"
_OF_OBJECTS = frozenset("type properties required additionalProperties description title $defs $schema strict".split())


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call; there is at least one.

    Attributes:
      must_call: the answer has to be a call.
      allowed: names of the only tools that may be called; None for all.
      parallel: it may have several calls.
      is_older: the request has `functions`, so that the answer has `function_call`.
      has_constraint: an answer that is no call has to match a grammar.
    """

    tools: tuple[Mapping[str, Any], ...]
    must_call: bool = False
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    is_older: bool = False
    has_constraint: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the tools that may be called."""
        return [tool["function"]["name"] for tool in self.tools] if self.allowed is None else list(self.allowed)

    @property
    def has_grammar(self) -> bool:
        """True if not every answer is allowed: it has to be a call or to match something else, a function is `strict`,
        or some tools may not be called."""
        is_strict = any(function.get("strict") for function in self._functions())
        return self.must_call or self.has_constraint or is_strict or len(self.names) < len(self.tools)

    def form(self, form: CallForm) -> CallForm:
        """The form of the calls, given the model's own: another one if a grammar cannot express that."""
        return form_of_grammar(form, self._schemas()) if self.has_grammar else form

    def parser(self, form: CallForm) -> CallParser:
        """A parser for one answer."""
        schemas = {function["name"]: function.get("parameters") or {} for function in self._functions()}
        return CallParser(form, self.names, parallel=self.parallel, schemas=schemas)

    def constraint(self, form: CallForm, other: Constraint | None) -> Constraint | None:
        """What the answer must match: calls if it has to be one; else calls or what `other` allows, any text if that is
        None. Beside any text, only the arguments of `strict` functions have to match their schema.

        Raises:
          RequestError: a tool's parameters are no schema, `other` is a grammar of several rules, or the calls that the
            model writes if it may choose cannot be told by a grammar.
        """
        if not self.has_grammar:
            return None
        schemas, is_free = self._schemas(), self._is_free
        if is_free and form == "pythonic":
            for number, tool in enumerate(self.tools):
                name = tool["function"]["name"]
                if name in schemas and form_of_grammar(form, {name: schemas[name]}) != form:
                    wanted = "wanted false beside tool_choice auto: Python's keywords cannot express the parameters"
                    raise RequestError(f"tools[{number}].function.strict", wanted)
        or_else = None
        if not self.must_call and other is not None:
            or_else = other.grammar.removeprefix("start: ")
            if or_else == other.grammar or "\n" in or_else.removeprefix("TEXT\nTEXT: "):
                raise RequestError("constraint", "wanted a schema, a regular expression or a list beside tools")
        grammar = calls_grammar(
            self.form(form), schemas, _json_rule, parallel=self.parallel, or_else=or_else, is_free=is_free
        )
        return Constraint(grammar)

    @property
    def _is_free(self) -> bool:
        """True if the answer may be any text, of which only certain calls have to match something."""
        return not self.must_call and not self.has_constraint

    def _schemas(self) -> dict[str, Mapping[str, Any] | None]:
        """Name -> schema of the arguments; None for any."""
        return {
            function["name"]: None if self._is_free and not function.get("strict") else _schema_of(function)
            for function in self._functions()
        }

    def _functions(self) -> list[Mapping[str, Any]]:
        """The definitions of the functions that may be called."""
        names = frozenset(self.names)
        return [tool["function"] for tool in self.tools if tool["function"]["name"] in names]

    def message(self, calls: Sequence[ToolCall], form: CallForm) -> dict[str, Any]:
        """The fields of a message with these calls."""
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        if self.is_older:
            return {"function_call": functions[0]} if functions else {}
        shaped = [{"id": call_id(form), "type": "function", "function": function} for function in functions]
        return {"tool_calls": shaped} if shaped else {}

    def deltas(self, calls: Sequence[CallDelta], form: CallForm) -> Iterator[dict[str, Any]]:
        """The deltas of a stream for these pieces."""
        for call in calls:
            named = {} if call.name is None else {"name": call.name}
            function = named | {"arguments": call.arguments}
            if self.is_older:
                yield {"function_call": function}
            else:
                about = {"id": call_id(form), "type": "function"} if named else {}
                yield {"tool_calls": [{"index": call.index, **about, "function": function}]}


class ToolFields(BaseModel):
    """The fields of a chat's body."""

    model_config = ConfigDict(strict=True, extra="allow")

    tools: list[dict[str, Any]] | None = Field(None, description="functions that the answer may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, one function, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false for at most one call")
    functions: list[dict[str, Any]] | None = Field(None, description="the older form of tools")
    function_call: str | dict[str, Any] | None = Field(None, description="the older form of tool_choice")

    def checked_tool_use(self, *, has_constraint: bool) -> ToolUse | None:
        """The tools that the answer may call; None for none. `has_constraint` as in `ToolUse`.

        Raises:
          RequestError: a field is malformed, or names a tool that is not there.
        """
        is_older = not self.tools and bool(self.functions)
        field, choice = ("function_call", self.function_call) if is_older else ("tool_choice", self.tool_choice)
        given = self.tools or [{"type": "function", "function": function} for function in self.functions or ()]
        try:
            definitions = checked_tools(given)
        except ValueError as error:
            argument, _, message = str(error).partition(": ")
            if is_older:
                argument = "functions" + argument.removeprefix("tools").replace(".function", "", 1)
            raise RequestError(argument, message) from error
        use = ToolUse(
            tuple(definitions),
            parallel=self.parallel_tool_calls is not False and not is_older,
            is_older=is_older,
            has_constraint=has_constraint,
        )
        if choice in (None, "auto", "none"):
            return use if definitions and choice != "none" else None
        wanted = dataclasses.replace(use, must_call=True)
        if isinstance(choice, Mapping) and choice.get("type") == ALLOWED_TOOLS and not is_older:
            mode, names = _allowed(choice.get(ALLOWED_TOOLS))
            wanted = dataclasses.replace(use, must_call=mode == "required", allowed=names)
        elif choice != "required" or is_older:
            name = _named(choice, field, is_older=is_older)
            wanted = dataclasses.replace(wanted, allowed=(name,), parallel=False)
        if not definitions:
            raise RequestError(field, f"wanted tools with {choice!r:.80}, got none")
        known = frozenset(use.names)
        for name in wanted.names:
            if name not in known:
                raise RequestError(field, f"wanted one of {use.names}, got {name!r:.80}")
        return wanted


def call_id(form: CallForm) -> str:
    """A new id of a call; Mistral's templates want nine characters."""
    return uuid.uuid4().hex[:9] if form == "mistral" else f"call_{uuid.uuid4().hex[:24]}"


def _schema_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments. Without parameters there are none; an object has no properties but those of
    its schema, unless that says so."""
    parameters = function.get("parameters") or {"properties": {}}
    closed = {"additionalProperties": False} if parameters.keys() <= _OF_OBJECTS and "properties" in parameters else {}
    return {"type": "object", **closed, **parameters}


def _json_rule(schema: Mapping[str, Any]) -> str:
    try:
        return Constraint.json(schema).grammar.removeprefix("start: ")
    except RequestError as error:
        raise RequestError("tools", str(error).partition(": ")[2]) from error


def _allowed(given: Any) -> tuple[str, tuple[str, ...]]:
    """The mode and the names in `{"mode": ..., "tools": [{"type": "function", "function": {"name": ...}}]}`."""
    place = f"tool_choice.{ALLOWED_TOOLS}"
    if not isinstance(given, Mapping):
        raise RequestError(place, f"wanted an object with mode and tools, got {given!r:.80}")
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{place}.mode", f"wanted 'auto' or 'required', got {mode!r:.80}")
    if not isinstance(tools, list) or not tools:
        raise RequestError(f"{place}.tools", f"wanted a list of functions, got {tools!r:.80}")
    names = [_named(tool, f"{place}.tools[{number}]", is_older=False) for number, tool in enumerate(tools)]
    return mode, tuple(dict.fromkeys(names))


def _named(choice: Any, field: str, *, is_older: bool) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in the older `{"name": ...}`."""
    function = choice if is_older else None
    if isinstance(choice, Mapping) and not is_older and choice.get("type") == "function":
        function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        words = "'none', 'auto'" if is_older else "'none', 'auto', 'required', 'allowed_tools'"
        shape = '{"name": ...}' if is_older else '{"type": "function", "function": {"name": ...}}'
        raise RequestError(field, f"wanted {words} or {shape}, got {choice!r:.80}")
    return name

"""The fields of request bodies that constrain the answer: OpenAI's, and vLLM's newer and older ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ccjax.engine import Constraint
from ccjax.errors import RequestError


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class JsonSchemaFormat(_Fields):
    """OpenAI's schema with its name; it is followed whether `strict` or not."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("wanted json_schema beside the type 'json_schema', and only there")
        return self


class StructuredOutputs(_Fields):
    """vLLM's `structured_outputs`; one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, False):
                raise ValueError(f"wanted json, regex, choice, grammar or json_object, got {name}")
        return self


class ConstraintFields(_Fields):
    """Fields that constrain the answer, of which a body may have one."""

    response_format: ResponseFormat | None = Field(None, description="JSON that a schema accepts, or any JSON object")
    structured_outputs: StructuredOutputs | None = Field(None, description="what the answer must match")
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema for the answer")
    guided_regex: str | None = Field(None, description="a regular expression for the whole answer")
    guided_choice: list[str] | None = Field(None, description="the possible answers")
    guided_grammar: str | None = Field(None, description="a grammar for the answer: GBNF, or llguidance's Lark")
    json_schema: dict[str, Any] | str | None = Field(None, description="guided_json in SGLang and llama.cpp")
    regex: str | None = Field(None, description="guided_regex in SGLang")
    ebnf: str | None = Field(None, description="guided_grammar in SGLang")
    grammar: str | None = Field(None, description="guided_grammar in llama.cpp")

    def constraint(self) -> Constraint | None:
        """The constraint of the answer.

        Raises:
          RequestError: there are two, or it is none. It names "constraint"; `constraint_names` has the field.
        """
        found = self._constraints()
        if len(found) > 1:
            raise RequestError("constraint", f"wanted at most one constraint, got {' and '.join(found)}")
        return next(iter(found.values()))() if found else None

    def constraint_names(self) -> dict[str, str]:
        """Engine argument -> field of this body."""
        return dict.fromkeys(["constraint"], next(iter(self._constraints()))) if self._constraints() else {}

    def _constraints(self) -> dict[str, Callable[[], Constraint]]:
        """Field -> what makes a constraint of it."""
        found: dict[str, Callable[[], Constraint]] = {}
        if self.response_format is not None and self.response_format.type == "json_object":
            found["response_format"] = Constraint.json
        if self.response_format is not None and self.response_format.json_schema is not None:
            schema = self.response_format.json_schema.schema_
            found["response_format.json_schema.schema"] = lambda: Constraint.json(schema)
        if self.structured_outputs is not None:
            one = self.structured_outputs
            if one.json_object:
                found["structured_outputs.json_object"] = Constraint.json
            found |= _named("structured_outputs.", one.json_, one.regex, one.choice, one.grammar)
        found |= _named("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        others = _named("", self.json_schema, self.regex, None, self.grammar)
        if "json" in others:
            others["json_schema"] = others.pop("json")
        if self.ebnf is not None:
            others["ebnf"] = _named("", None, None, None, self.ebnf)["grammar"]
        return found | others


def _named(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> dict[str, Callable[[], Constraint]]:
    made: dict[str, tuple[Any, Callable[[Any], Constraint]]] = {
        "json": (schema, _from_schema),
        "regex": (regex, Constraint.regex),
        "choice": (choice, Constraint.choice),
        "grammar": (grammar, Constraint),
    }
    return {
        prefix + name: lambda make=make, value=value: make(value)
        for name, (value, make) in made.items()
        if value is not None
    }


def _from_schema(schema: dict[str, Any] | str) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError("constraint", f"wanted a JSON schema, got {error}") from error
    return Constraint.json(schema)  # type: ignore[arg-type]  # checked there

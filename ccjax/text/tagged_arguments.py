"""Arguments that a model writes as texts between tags, as JSON; their schemas say which of them are texts."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from ccjax.text.python_arguments import literal

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
TEXT = frozenset({"string"})


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it leaves that open or says it elsewhere."""
    if not isinstance(schema, Mapping) or "$ref" in schema:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else map(str, given))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(map(_type_of, values))
    for key in ("anyOf", "oneOf"):
        given = schema.get(key)
        parts = [types_of(part) for part in given] if isinstance(given, list) else []
        if parts:
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of an argument: a value of one of the types (`types_of`), in JSON or as Python writes it, or else a
    string."""
    value, written = _value(text)
    kind = _type_of(value)
    if kind == "integer" and "number" in types:
        kind = "number"
    is_text = kind == "string" or types == TEXT or ("string" in types and kind not in types)
    return json.dumps(text, ensure_ascii=False) if is_text else written


def _value(text: str) -> tuple[Any, str]:
    """What a text says in JSON or Python, and that as JSON; itself if nothing."""
    try:
        return json.loads(text, parse_constant=_refuse), text.strip()
    except (ValueError, RecursionError):
        pass
    try:
        value = literal(ast.parse(text.strip(), mode="eval").body)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, ""


def _refuse(constant: str) -> None:
    raise ValueError(f"wanted JSON, got {constant}")


def _type_of(value: Any) -> str:
    return _NAMES.get(type(value), "null")

"""Grammars of arguments that are not one JSON object: Qwen3-Coder's between tags, and Python's keywords."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ccjax.text.python_arguments import arguments_of_python
from ccjax.text.tagged_arguments import as_json, types_of

JsonRule = Callable[[Mapping[str, Any]], str]
"""The right side of a rule for the JSON that a schema accepts."""
Rules = list[str]

TEXT_TO_TAG = r"text_to_tag[lazy]: /(.|\n)*<\/parameter>/"
"""A rule for a text and the tag behind it."""
_NOTES = frozenset("type description title default examples".split())
_SHARED = frozenset(("$defs", "definitions"))
_OF_OBJECTS = _NOTES | _SHARED | frozenset("properties required additionalProperties strict $schema".split())
_SCALARS = frozenset("string integer number boolean null".split())
_TAG_NAME = re.compile(r"[^<>\n]+")
_ANY_TAGS = r'(/<parameter=[^<>\n]+>\n/ text_to_tag "\n")*'
_PYTHON_WORDS = r""""True" | "False" | "None" | /'([^'\\\n]|\\['"\\nrt])*'/"""
_NOTHING, _LINE_END, _PARAMETER_END = '""', '"\\n"', '"\\n</parameter>"'


def in_tags(name: str, parameters: Mapping[str, Any] | None, json_rule: JsonRule) -> Rules | None:
    """Rules, of which the first has this name, for arguments in tags.

    Args:
      parameters: their schema; None for any.

    Returns: None if tags cannot express the schema: it has more than properties, or one of them is a text that has to
      match something.
    """
    if _is_any(parameters):
        return [f"{name}: {_ANY_TAGS}"]
    properties = _properties(parameters)
    if properties is None:
        return None
    parts = []
    for key, (schema, is_required) in properties.items():
        value = _tagged_value(schema, json_rule)
        if value is None or not _TAG_NAME.fullmatch(key):
            return None
        opening = _quoted(f"<parameter={key}>\n")
        part = f"{opening} {value} {_LINE_END}"
        parts.append(part if is_required else f"({part})?")
    return [f"{name}: {' '.join(parts) or _NOTHING}"]


def in_python(name: str, parameters: Mapping[str, Any] | None, json_rule: JsonRule) -> Rules | None:
    """The same for keyword arguments of Python; None also if a name is none in Python."""
    if _is_any(parameters):
        pair = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {name}_value'
        return [f'{name}: ({pair} (", " {pair})*)?', f"{name}_value: {_PYTHON_WORDS} | {json_rule({})}"]
    properties = _properties(parameters)
    if properties is None or not all(_is_keyword(key) for key in properties):
        return None
    if not properties:
        return [f"{name}: {_NOTHING}"]
    needed = [is_required for _, is_required in properties.values()]
    values = [
        f"{name}_{place}: {_quoted(key + '=')} ({_python_value(schema, json_rule)})"
        for place, (key, (schema, _)) in enumerate(properties.items())
    ]

    def behind(first: int) -> str:
        pairs = ((place, f'", " {name}_{place}') for place in range(first, len(needed)))
        return " ".join(pair if needed[place] else f"({pair})?" for place, pair in pairs)

    # The first one is that which is needed, or one before it.
    last = needed.index(True) if True in needed else len(needed) - 1
    starts = [f"{name}_{place} {behind(place + 1)}" for place in range(last + 1)]
    return [f"{name}: ({' | '.join(starts)}){'' if True in needed else '?'}", *values]


def _is_any(parameters: Mapping[str, Any] | None) -> bool:
    """True if the schema lets arguments be any."""
    return parameters is None or (
        parameters.keys() <= {*_NOTES, "additionalProperties", "$schema"}
        and parameters.get("type", "object") == "object"
        and parameters.get("additionalProperties", True) is True
    )


def _properties(parameters: Mapping[str, Any] | None) -> dict[str, tuple[Mapping[str, Any], bool]] | None:
    """Name -> schema of an argument, and whether it is required; None if the schema says more than that."""
    assert parameters is not None
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not parameters.keys() <= _OF_OBJECTS or parameters.get("type", "object") != "object":
        return None
    if not isinstance(required, list) or not all(name in [*properties] for name in required):
        return None
    if isinstance(parameters.get("additionalProperties"), Mapping):
        return None
    if not all(place.startswith(("$defs/", "definitions/")) for place in _references(parameters)):
        return None
    shared = {name: parameters[name] for name in _SHARED & parameters.keys()}
    if not all(isinstance(schemas, Mapping) for schemas in shared.values()):
        return None
    found = {name: {} if schema is True else schema for name, schema in properties.items()}
    if not all(isinstance(schema, Mapping) for schema in found.values()):
        return None
    return {name: ({**schema, **shared}, name in required) for name, schema in found.items()}


def _references(value: Any) -> Iterator[str]:
    """What `$ref`s below `#/` name; "" for other ones."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "$ref":
                yield inner.removeprefix("#/") if isinstance(inner, str) and inner.startswith("#/") else ""
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _tagged_value(schema: Mapping[str, Any], json_rule: JsonRule) -> str | None:
    """The right side for a value and the tag behind it; None if there is none."""
    target = _target(schema)
    types, read_types = types_of(target), types_of(schema)
    values = target.get("enum", [target["const"]] if "const" in target else None)
    if isinstance(values, list) and target.keys() <= {*_NOTES, *_SHARED, "enum", "const"}:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        pairs = zip(values, texts, strict=True)
        if all("</parameter>" not in text and json.loads(as_json(text, read_types)) == value for value, text in pairs):
            return f"({' | '.join(map(_quoted, texts))}) {_PARAMETER_END}"
        return None
    if types and "string" not in types:
        return f"{json_rule(schema)} {_PARAMETER_END}"
    return "text_to_tag" if types and types <= _SCALARS and _is_free(schema) else None


def _target(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a property refers to, if it does nothing else; itself otherwise."""
    _, shared, name = (*str(schema.get("$ref", "")).split("/"), "", "")[:3]
    target = schema.get(shared, {}).get(name) if schema.keys() <= {*_NOTES, *_SHARED, "$ref"} else None
    return target if isinstance(target, Mapping) else schema


def _is_free(schema: Any) -> bool:
    """True if every value of the types in the schema is right."""
    if not isinstance(schema, Mapping) or not schema.keys() <= {*_NOTES, *_SHARED, "anyOf", "oneOf"}:
        return False
    parts = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    return all(isinstance(part, list) and all(map(_is_free, part)) for part in parts)


def _python_value(schema: Mapping[str, Any], json_rule: JsonRule) -> str:
    """A value in JSON, which Python's parser takes, too, but for the words that models write otherwise in Python."""
    if types_of(schema) == {"boolean"} and _is_free(schema):
        return '"True" | "False"'
    return json_rule(schema)


def _is_keyword(name: str) -> bool:
    return name.isascii() and arguments_of_python(f"{name}=1") == json.dumps({name: 1})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""JSON schemas drawn at random, in which no answer is long."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "price", "größe", "タグ", "is open", 'a"b', "city")
PATTERNS = ("^[A-Z][a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(left|right)$", "^[äöü]{1,3}$", "^x+y?$|^z$")


def draw(seed: int) -> dict[str, Any]:
    """A schema, the same for the same seed: always an object, as OpenAI wants it."""
    source = random.Random(seed)
    definitions = {name: _value(source, 1, ()) for name in ("one", "two")} if source.random() < 0.4 else {}
    schema = _object(source, 2, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _value(source: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    leaves = [_string, _pattern, _integer, _number, _chosen, _plain]
    more = [_object, _array, _any_of] if depth > 0 else []
    if names and source.random() < 0.25:
        return {"$ref": f"#/$defs/{source.choice(names)}"}
    make = source.choice([*leaves, *more, *more])
    return make(source, depth - 1, names) if make in more else make(source)  # type: ignore[operator]


def _object(source: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    chosen = source.sample(NAMES, source.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(source, depth, names) for name in chosen},
        "required": source.sample(chosen, source.randint(0, len(chosen))),
        "additionalProperties": False,
    }
    if source.random() < 0.1:
        keys = {"^[a-z]{1,4}$": _integer(source)}
        return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": 2}
    return schema


def _array(source: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    least = source.randint(0, 2)
    if source.random() < 0.2:
        items = [_value(source, 0, names), _value(source, 0, names)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    return {
        "type": "array",
        "items": _value(source, depth, names),
        "minItems": least,
        "maxItems": least + source.randint(0, 2),
    }


def _any_of(source: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_value(source, depth, names) for _ in range(source.randint(2, 3))]}


def _string(source: random.Random) -> dict[str, Any]:
    least = source.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + source.randint(0, 6)}


def _pattern(source: random.Random) -> dict[str, Any]:
    pattern = source.choice(PATTERNS)
    return {"type": "string", "pattern": pattern} | ({"maxLength": 8} if "+" in pattern else {})


def _integer(source: random.Random) -> dict[str, Any]:
    least = source.randint(-50, 50)
    schema = {"type": "integer", "minimum": least, "maximum": least + source.randint(0, 200)}
    return schema | ({"multipleOf": 1} if source.random() < 0.2 else {})


def _number(source: random.Random) -> dict[str, Any]:
    least = source.randint(-5, 5)
    bound = source.choice(["maximum", "exclusiveMaximum"])
    return {"type": "number", "minimum": least, bound: least + source.randint(1, 30), "multipleOf": 0.25}


def _chosen(source: random.Random) -> dict[str, Any]:
    values = [3, "rot", None, "grün", True, 2.5, ["a", 1], {"k": "v"}]
    if source.random() < 0.4:
        return {"const": source.choice(values)}
    return {"enum": source.sample(values, source.randint(2, 4))}


def _plain(source: random.Random) -> dict[str, Any]:
    return {"type": source.choice(["boolean", "null", ["null", "boolean"]])}

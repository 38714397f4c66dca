"""Keyword arguments of a call in Python as JSON; nothing is executed."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

_CONSTANTS = {"true": True, "false": False, "null": None}


def arguments_of_python(text: str) -> str | None:
    """The JSON text of keyword arguments; None if they are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes
            call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: literal(keyword.value) for keyword in call.keywords if keyword.arg is not None}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) if len(values) == len(call.keywords) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def literal(node: ast.expr) -> Any:
    """The value of an expression; raises ValueError if it has none in JSON."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {literal(key): literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"wanted a JSON value, got {type(value).__name__}")
    return value

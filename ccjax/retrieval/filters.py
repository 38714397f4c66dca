"""Filters over the metadata of documents, in the format of OpenAI's file search.

A comparison is `{"type": "eq", "key": "year", "value": 2020}` with type eq, ne, gt, gte, lt, lte, in or nin (a list of
values); `{"type": "and", "filters": [...]}` and `"or"` join several. The key `document_id` means the document's own id.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

METADATA_TYPES = (str, int, float, bool)
_COMPARISONS = {"eq": "=", "ne": "!=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<=", "in": "IN", "nin": "NOT IN"}
_JOINS = {"and": " AND ", "or": " OR "}
_DEEPEST = 16
_MOST_VALUES = 500


@dataclasses.dataclass(frozen=True)
class Filter:
    """A filter as an SQL condition on the table `documents`. Equal filters compare equal.

    As in SQL, a comparison of different types is never an error: text is never equal to a number. Of a list, one value
    has to match; `ne` and `nin` are the opposite of `eq` and `in`, and match documents without the key too.
    """

    sql: str
    parameters: tuple[str | int | float, ...]


def parse_filter(value: Any) -> Filter:
    """Parses a filter from a JSON value.

    Raises:
      ValueError: it is invalid; the message says where and what was wanted.
    """
    sql, parameters = _parse(value, "filters", 1)
    if len(parameters) > _MOST_VALUES:
        raise ValueError(f"filters: wanted at most {_MOST_VALUES} keys and values together, got {len(parameters)}")
    return Filter(sql, tuple(parameters))


def _parse(value: Any, where: str, depth: int) -> tuple[str, list[Any]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: wanted an object with type, got {_short(value)}")
    if depth > _DEEPEST:
        raise ValueError(f"{where}: wanted at most {_DEEPEST} levels of filters")
    kind = value.get("type")
    if isinstance(kind, str) and kind in _JOINS:
        _check_names(value, {"type", "filters"}, where)
        parts = value.get("filters")
        if not isinstance(parts, list) or not parts:
            raise ValueError(f"{where}.filters: wanted a list with at least one filter, got {_short(parts)}")
        parsed = [_parse(part, f"{where}.filters[{index}]", depth + 1) for index, part in enumerate(parts)]
        return f"({_JOINS[kind].join(sql for sql, _ in parsed)})", [
            parameter for _, many in parsed for parameter in many
        ]
    if not isinstance(kind, str) or kind not in _COMPARISONS:
        raise ValueError(f"{where}.type: wanted one of {', '.join([*_COMPARISONS, *_JOINS])}, got {_short(kind)}")
    _check_names(value, {"type", "key", "value"}, where)
    return _comparison(kind, value.get("key"), value.get("value"), where)


def _comparison(kind: str, key: Any, wanted: Any, where: str) -> tuple[str, list[Any]]:
    if not isinstance(key, str) or not key or '"' in key or "\\" in key or "\x00" in key:
        raise ValueError(f"{where}.key: wanted a name without quotes and backslashes, got {_short(key)}")
    if kind in ("in", "nin"):
        if not isinstance(wanted, list) or not wanted:
            raise ValueError(f"{where}.value: wanted a list with at least one value, got {_short(wanted)}")
        values, right = wanted, f"({', '.join('?' * len(wanted))})"
    else:
        values, right = [wanted], "?"
    for value in values:
        if not isinstance(value, METADATA_TYPES) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{where}.value: wanted text, numbers or truth values, got {_short(value)}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{where}.value: wanted an integer of 64 bits, got {_short(value)}")
    is_negated, kind = kind in ("ne", "nin"), {"ne": "eq", "nin": "in"}.get(kind, kind)
    left, parameters = ("document_id", []) if key == "document_id" else ("item.value", [f'$."{key}"'])
    sql = f"{left} {_COMPARISONS[kind]} {right}"
    if kind in ("gt", "gte", "lt", "lte"):  # SQL orders numbers before text; a filter does not compare them
        kinds = "('text')" if isinstance(wanted, str) else "('integer', 'real')"
        sql = f"({sql} AND typeof({left}) IN {kinds})"
    if parameters:
        sql = f"EXISTS (SELECT 1 FROM json_each(metadata, ?) AS item WHERE {sql})"
    return f"NOT {sql}" if is_negated else sql, [*parameters, *values]


def _check_names(value: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(map(str, set(value) - known)):
        raise ValueError(f"{where}: wanted {', '.join(sorted(known))} only, got {', '.join(unknown)}")


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

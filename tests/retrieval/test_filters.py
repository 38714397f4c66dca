"""Filters over metadata, against Python's own comparison of the same values."""

from __future__ import annotations

import json
import re
import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.retrieval.filters import parse_filter

DOCUMENTS = [
    {},
    {"n": 1, "s": "a", "b": True},
    {"n": 2.5, "s": "b", "b": False},
    {"n": -3, "s": "", "x.y": 7},
    {"n": "1", "s": "it's; DROP TABLE documents --"},
    {"n": 2**60, "s": "ü", "$.s": "odd"},
]


def matching(value: Any) -> list[int]:
    where = parse_filter(value)
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE documents (id INTEGER, document_id TEXT, metadata TEXT)")
    for number, metadata in enumerate(DOCUMENTS):
        connection.execute("INSERT INTO documents VALUES (?, ?, ?)", (number, f"d/{number}", json.dumps(metadata)))
    found = connection.execute(f"SELECT id FROM documents WHERE {where.sql} ORDER BY id", where.parameters)
    return [number for (number,) in found]


def obeys(metadata: dict[str, Any], value: dict[str, Any]) -> bool:
    """The same in Python."""
    kind = value["type"]
    if kind in ("and", "or"):
        return (all if kind == "and" else any)(obeys(metadata, part) for part in value["filters"])
    own, wanted = metadata.get(value["key"]), value["value"]
    if kind in ("ne", "nin"):
        return own not in (wanted if kind == "nin" else [wanted])
    if own is None:
        return False
    if kind in ("eq", "in"):
        return own in (wanted if kind == "in" else [wanted])
    if isinstance(own, str) != isinstance(wanted, str):
        return False
    return {"gt": own > wanted, "gte": own >= wanted, "lt": own < wanted, "lte": own <= wanted}[kind]


Keys = st.sampled_from(["n", "s", "b", "x.y", "$.s", "absent", "$"])
Values = st.sampled_from(
    [1, 2, 2.5, -3, 0, True, False, "a", "b", "", "1", "it's; DROP TABLE documents --", "ü", 2**60]
)
Comparisons = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"]), "key": Keys, "value": Values}
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["in", "nin"]), "key": Keys, "value": st.lists(Values, min_size=1, max_size=3)}
    ),
)
Filters = st.recursive(
    Comparisons,
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["and", "or"]), "filters": st.lists(inner, min_size=1, max_size=3)}
    ),
    max_leaves=6,
)


@given(value=Filters)
def test_filters_match_python_comparisons(value: dict[str, Any]) -> None:
    assert matching(value) == [number for number, metadata in enumerate(DOCUMENTS) if obeys(metadata, value)]


def test_documents_can_be_filtered_by_id() -> None:
    assert matching({"type": "in", "key": "document_id", "value": ["d/2", "d/9"]}) == [2]
    assert matching({"type": "ne", "key": "document_id", "value": "d/2"}) == [0, 1, 3, 4, 5]


def test_equal_filters_are_equal() -> None:
    value = {"type": "eq", "key": "n", "value": 1}
    assert parse_filter(value) == parse_filter(dict(value)) != parse_filter({**value, "value": 2})
    assert len({parse_filter(value), parse_filter(dict(value))}) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "filters: wanted an object with type, got []"),
        ({"key": "n"}, "filters.type: wanted one of eq, ne, gt, gte, lt, lte, in, nin, and, or, got null"),
        ({"type": ["eq"]}, 'filters.type: wanted one of eq, ne, gt, gte, lt, lte, in, nin, and, or, got ["eq"]'),
        ({"type": "and", "filters": []}, "filters.filters: wanted a list with at least one filter, got []"),
        (
            {"type": "or", "filters": [{"type": "eq", "key": "n", "value": 1}, 3]},
            "filters.filters[1]: wanted an object",
        ),
        ({"type": "eq", "value": 1}, "filters.key: wanted a name without quotes and backslashes, got null"),
        ({"type": "eq", "key": 'a"', "value": 1}, "filters.key: wanted a name without quotes and backslashes"),
        ({"type": "eq", "key": "n"}, "filters.value: wanted text, numbers or truth values, got null"),
        ({"type": "eq", "key": "n", "value": [1]}, "filters.value: wanted text, numbers or truth values, got [1]"),
        ({"type": "eq", "key": "n", "value": float("nan")}, "filters.value: wanted text, numbers or truth values"),
        ({"type": "eq", "key": "n", "value": 2**63}, "filters.value: wanted an integer of 64 bits"),
        ({"type": "in", "key": "n", "value": 1}, "filters.value: wanted a list with at least one value, got 1"),
        ({"type": "eq", "key": "n", "value": 1, "vlaue": 2}, "filters: wanted key, type, value only, got vlaue"),
        (
            {"type": "in", "key": "n", "value": [1] * 500},
            "filters: wanted at most 500 keys and values together, got 501",
        ),
    ],
)
def test_invalid_filter_is_rejected(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_filter(value)


def test_deeply_nested_filter_is_rejected() -> None:
    value: dict[str, Any] = {"type": "eq", "key": "n", "value": 1}
    for _ in range(5000):
        value = {"type": "and", "filters": [value]}
    with pytest.raises(ValueError, match="wanted at most 16 levels"):
        parse_filter(value)


def test_one_value_of_a_list_has_to_match(monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = [{"tags": ["sea", "moon"]}, {"tags": []}, {"tags": "sea"}, {"tags": ["Sea"]}, {"tags": [1, 5]}, {}]
    monkeypatch.setattr("tests.retrieval.test_filters.DOCUMENTS", tagged)
    wanted = {
        ("eq", "sea"): [0, 2],
        ("in", ("moon", "Sea")): [0, 3],
        ("gte", 5): [4],
        ("lt", 1): [],
        ("ne", "sea"): [1, 3, 4, 5],
        ("nin", ("sea", 1)): [1, 3, 5],
    }
    for (kind, value), found in wanted.items():
        value = list(value) if isinstance(value, tuple) else value
        assert matching({"type": kind, "key": "tags", "value": value}) == found, kind

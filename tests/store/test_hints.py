"""Hints: JSON that outlives the process, is replaced as a whole and may be lost. They never fail a store."""

import logging
from types import MappingProxyType
from unittest.mock import Mock

import pytest

from ccjax.store.files import FileRoot
from ccjax.store.notes import Hints
from tests.store.kv import OTHERS, OURS, assert_same_bytes, get, make_kv, open_store, put


def test_hints_outlive_the_process_and_are_replaced_as_a_whole(place):
    with open_store(place.url) as store:
        assert store.read_hints() == {}
        store.write_hints({"a": 1.5, "b": [1, 2]})
        assert store.read_hints() == {"a": 1.5, "b": [1, 2]}
        store.write_hints({"c": None})
    with open_store(place.url) as store:
        assert store.read_hints() == {"c": None}
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))
    assert not [key for key in place.keys() if key.endswith(".tmp")]


def test_hints_belong_to_their_identity(place):
    with open_store(place.url) as ours, open_store(place.url, identity=OTHERS) as theirs:
        ours.write_hints({"whose": "ours"})
        theirs.write_hints({"whose": "theirs"})
        assert ours.read_hints() == {"whose": "ours"}


def test_memory_only_store_keeps_no_hints():
    with open_store(None) as store:
        store.write_hints({"a": 1})
        assert store.read_hints() == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_hints_count_as_none(place, content):
    with open_store(place.url) as store:
        put(store, "v")
        place.write(f"{OURS.namespace}/hints.json", content)
    with open_store(place.url) as store:
        assert store.read_hints() == {} and store.tier_of("v") == "disk"
        store.write_hints({"a": 1})
        assert store.read_hints() == {"a": 1}


def test_failed_hint_write_is_logged_and_keeps_the_old_hints(tmp_path, monkeypatch, caplog):
    with open_store(tmp_path) as store:
        store.write_hints({"a": 1})
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="ccjax.store"):
            patch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
            store.write_hints({"a": 2})
        assert "cannot write the hints" in caplog.text and "No space left" in caplog.text
        assert store.read_hints() == {"a": 1}
    assert not list(tmp_path.rglob("*.tmp"))


def test_failed_hint_read_is_reported_and_any_mapping_can_be_written(tmp_path, monkeypatch):
    root, told = FileRoot(tmp_path.as_uri()), []
    hints = Hints(root, "hints.json", lambda *values: told.append(values[1:]))
    hints.write(MappingProxyType({"x": 1}))
    assert hints.read() == {"x": 1} and told == []
    error = OSError(5, "Input/output error")
    monkeypatch.setattr(root, "read", Mock(side_effect=error))
    assert hints.read() == {} and told == [("hints.json", error)]

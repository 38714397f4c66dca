"""A store that is opened while its bucket does not answer: used once it does."""

from __future__ import annotations

import logging

import pytest

import ccjax.store.buckets
from ccjax.store import StoreUnavailableError
from tests.polling import wait_until
from tests.store.gate import Gate
from tests.store.kv import assert_same_bytes, get, make_kv, open_store, put


@pytest.fixture
def gate(bucket_kind, port_of, monkeypatch):
    for name, seconds in (("START_S", 1.0), ("ANSWER_S", 1.0), ("TRANSFER_S", 1.0), ("PROBE_INTERVAL_S", 0.2)):
        monkeypatch.setattr(ccjax.store.buckets, name, seconds)
    gate = Gate(port_of(bucket_kind))
    yield gate
    gate.shut()


@pytest.fixture
def place(bucket_kind, make_place, gate):
    return make_place(bucket_kind, gate.port)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("fail", ["shut", "silence"])
def test_a_store_is_opened_during_an_outage_and_used_after_it(place, gate, fail, read_only, caplog) -> None:
    with open_store(place.url) as store:
        put(store, "before")
    getattr(gate, fail)()
    with pytest.raises(StoreUnavailableError):
        open_store(place.url, read_only=read_only).close()
    with caplog.at_level(logging.INFO, logger="ccjax.store"):
        store = open_store(place.url, read_only=read_only, is_optional=True)
        assert list(store.records()) == []
        if not read_only:
            put(store, "early")
            assert store.tiers_of("early") == ("host",)
            assert_same_bytes(get(store, "early"), make_kv("early"))
        assert store.refresh() == store.refresh() == ((), ())
        logged = [entry.getMessage() for entry in caplog.records]
        assert sum("cannot open" in message for message in logged) == 1
        assert not any("refresh of" in message for message in logged) and len(logged) <= 2, logged
        gate.open()
        added: list[str] = []
        wait_until(lambda: added.extend(store.refresh()[0]) or "succeeds again" in caplog.text)
    with store:
        added.extend(store.refresh()[0])
        assert added == ["before"]
        assert_same_bytes(get(store, "before"), make_kv("before"))
        if not read_only:
            put(store, "late")
            assert store.tiers_of("late") == ("host", "disk")


def test_an_optional_store_that_is_not_there_is_refused_as_any_other(place) -> None:
    with pytest.raises(StoreUnavailableError, match="there is no bucket 'others'"):
        open_store(place.url.replace("//chunks/", "//others/"), is_optional=True)

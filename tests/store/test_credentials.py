"""S3 credentials that are replaced while a store is open: read again when access is denied."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ccjax.store.buckets
from ccjax.store import StoreUnavailableError, TieredStore
from tests.polling import wait_until
from tests.store import servers
from tests.store.kv import assert_same_bytes, get, make_kv, open_store, put
from tests.store.places import s3_bucket

SetKey = Callable[[str], None]


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server whose accepted key a test changes."""
    with servers.double("s3_double") as port:
        yield port


@pytest.fixture
def accept(port: int) -> SetKey:
    """Makes a key the only one that the server accepts."""

    def set_key(key: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/.key/{key}", data=b"", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()

    return set_key


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetKey:
    """Puts a key into the file of credentials, which is named by the environment."""
    file, settings = tmp_path / "credentials", tmp_path / "config"
    settings.write_text("")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(ccjax.store.buckets, "PROBE_INTERVAL_S", 0.2)

    def set_key(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secretsecret12345678\n")

    return set_key


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records]


def test_replaced_credentials_are_used_at_once(port, accept, write, caplog) -> None:
    write("FIRST")
    accept("FIRST")
    with open_store(s3_bucket("s3", port, "x").url) as store, caplog.at_level(logging.INFO, logger="ccjax.store"):
        put(store, "before")
        store.evict("host", ["before"])
        caplog.clear()
        for key in ("SECOND", "THIRD"):
            time.sleep(0.25)
            write(key)
            accept(key)
            put(store, key)
            assert store.tiers_of(key) == ("host", "disk")
            store.evict("host", [key])
            assert_same_bytes(get(store, key), make_kv(key))
        assert_same_bytes(get(store, "before"), make_kv("before"))
        assert store.usage()["disk"].failed_writes == 0 and messages(caplog) == []


def test_the_variable_of_a_key_is_read_again(port, accept, write, monkeypatch) -> None:
    for name, value in (("AWS_ACCESS_KEY_ID", "FIRST"), ("AWS_SECRET_ACCESS_KEY", "secretsecret12345678")):
        monkeypatch.setenv(name, value)
    accept("FIRST")
    with open_store(s3_bucket("s3", port, "x").url) as store:
        accept("SECOND")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SECOND")
        put(store, "a")
        assert store.tiers_of("a") == ("host", "disk")


def test_denied_access_is_an_outage_that_is_logged_once(port, accept, write, caplog) -> None:
    write("FIRST")
    accept("FIRST")
    with open_store(s3_bucket("s3", port, "x").url) as store, caplog.at_level(logging.INFO, logger="ccjax.store"):
        put(store, "before")
        store.evict("host", ["before"])
        caplog.clear()
        accept("SECOND")
        for variant_id in ("a", "b", "c"):
            put(store, variant_id)
            store.notes.put(variant_id, {})
            assert store.tiers_of(variant_id) == ("host",)
        store.notes.flush()
        assert store.refresh() == store.refresh() == ((), ())
        with pytest.raises(StoreUnavailableError, match="refused access: .*ExpiredToken"):
            get(store, "before")
        logged = messages(caplog)
        assert len(logged) <= 2 and all("ExpiredToken" in message for message in logged), logged
        write("SECOND")
        wait_until(lambda: store.refresh() == ((), ()) and "succeeds again" in caplog.text)
        assert_same_bytes(get(store, "before"), make_kv("before"))
        put(store, "d")
        assert store.tiers_of("d") == ("host", "disk") and store.notes.refresh() == ({}, ())
        found = [message for message in messages(caplog) if "again" in message and "until" not in message]
        assert len(found) == 2, found


def test_a_read_that_is_denied_is_no_damage(port, accept, write) -> None:
    write("FIRST")
    accept("FIRST")
    with open_store(s3_bucket("s3", port, "x").url) as store:
        put(store, "a")
        store.evict("host", ["a"])
        accept("SECOND")
        with pytest.raises(StoreUnavailableError):
            get(store, "a")
        write("SECOND")
        wait_until(lambda: store.refresh() == ((), ()) and store.usage()["disk"].num_variants == 1)
        wait_until(lambda: _is_read(store))
        assert store.usage()["disk"].corrupt == 0


def _is_read(store: TieredStore) -> bool:
    try:
        assert_same_bytes(get(store, "a"), make_kv("a"))
    except StoreUnavailableError:
        return False
    return True


def test_a_start_without_access_says_what_is_missing(port, accept, write) -> None:
    write("FIRST")
    accept("SECOND")
    with pytest.raises(StoreUnavailableError, match="access to bucket 'chunks' was refused .*AWS_PROFILE"):
        open_store(s3_bucket("s3", port, "x").url)

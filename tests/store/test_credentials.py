"""S3 credentials that are replaced while a store is open: read again when access is denied. The double only compares
key ids; moto checks the signatures of users whose keys come and go."""

from __future__ import annotations

import contextlib
import json
import logging
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ccjax.store.buckets
from ccjax.store import StoreUnavailableError, TieredStore
from tests.polling import wait_until
from tests.store import servers
from tests.store.kv import assert_same_bytes, get, make_kv, open_store, put
from tests.store.places import s3_bucket

SetKey = Callable[[str], None]
SetPair = Callable[[str, str], None]
SECRET = "secretsecret12345678"
EVERYTHING_IN_S3 = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
}


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
def write_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetPair:
    """Puts a key and its secret into the file of credentials, which is named by the environment."""
    file, settings = tmp_path / "credentials", tmp_path / "config"
    settings.write_text("")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(ccjax.store.buckets, "PROBE_INTERVAL_S", 0.2)

    def set_pair(key: str, secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    return set_pair


@pytest.fixture
def write(write_pair: SetPair) -> SetKey:
    """Puts a key, of which the double looks at nothing else, into the file."""
    return lambda key: write_pair(key, SECRET)


class Users:
    """moto with its checks of keys, signatures and rights; each user has one key."""

    def __init__(self, port: int) -> None:
        import boto3

        self.port, url = port, f"http://127.0.0.1:{port}"
        root = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
        self._iam: Any = boto3.client("iam", endpoint_url=url, region_name="us-east-1", **root)

    def add(self, name: str) -> tuple[str, str]:
        """A user's key and its secret."""
        with self._unchecked():
            self._iam.create_user(UserName=name)
            document = json.dumps(EVERYTHING_IN_S3)
            self._iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=document)
            made = self._iam.create_access_key(UserName=name)["AccessKey"]
        return made["AccessKeyId"], made["SecretAccessKey"]

    def remove(self, name: str, key: str) -> None:
        """Takes a user's key away."""
        with self._unchecked():
            self._iam.delete_access_key(UserName=name, AccessKeyId=key)

    @contextlib.contextmanager
    def _unchecked(self) -> Iterator[None]:
        self._check_after("inf")
        yield
        self._check_after("0")

    def _check_after(self, num_requests: str) -> None:
        """Has all requests but the next few checked."""
        url = f"http://127.0.0.1:{self.port}/moto-api/reset-auth"
        request = urllib.request.Request(url, num_requests.encode(), {"Content-Type": "text/plain"}, method="POST")
        urllib.request.urlopen(request, timeout=60).close()


@pytest.fixture
def users() -> Iterator[Users]:
    with servers.moto() as port:
        yield Users(port)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records]


def test_replaced_credentials_are_used_at_once(port, accept, write, caplog, monkeypatch) -> None:
    monkeypatch.setattr(ccjax.store.buckets, "PROBE_INTERVAL_S", 0.0)  # as if long had passed between two of them
    write("FIRST")
    accept("FIRST")
    with open_store(s3_bucket("s3", port, "x").url) as store, caplog.at_level(logging.INFO, logger="ccjax.store"):
        put(store, "before")
        store.evict("host", ["before"])
        caplog.clear()
        for key in ("SECOND", "THIRD"):
            write(key)
            accept(key)
            put(store, key)
            assert store.tiers_of(key) == ("host", "disk")
            store.evict("host", [key])
            assert_same_bytes(get(store, key), make_kv(key))
        assert_same_bytes(get(store, "before"), make_kv("before"))
        assert store.usage()["disk"].failed_writes == 0 and messages(caplog) == []


def test_replaced_keys_are_used_where_signatures_are_checked(users, write_pair, monkeypatch) -> None:
    monkeypatch.setattr(ccjax.store.buckets, "PROBE_INTERVAL_S", 0.0)
    first, second = users.add("first"), users.add("second")
    write_pair(*first)
    with open_store(s3_bucket("s3", users.port, "x").url) as store:
        put(store, "before")
        store.evict("host", ["before"])
        users.remove("first", first[0])
        write_pair(second[0], first[1])  # a key with the secret of another one
        with pytest.raises(StoreUnavailableError, match="PERMISSION_DENIED"):
            get(store, "before")
        with pytest.raises(StoreUnavailableError, match="was refused .*SignatureDoesNotMatch"):
            open_store(s3_bucket("s3", users.port, "x").url)
        write_pair(*second)
        wait_until(lambda: store.refresh() == ((), ()) and _is_read(store, "before"))
        put(store, "after")
        assert store.tiers_of("after") == ("host", "disk") and store.usage()["disk"].corrupt == 0
        third = users.add("third")
        write_pair(*third)
        users.remove("second", second[0])
        put(store, "last")
        assert store.tiers_of("last") == ("host", "disk") and store.usage()["disk"].failed_writes == 0
    write_pair(*second)
    with pytest.raises(StoreUnavailableError, match="was refused .*InvalidAccessKeyId"):
        open_store(s3_bucket("s3", users.port, "x").url)


def test_the_variable_of_a_key_is_read_again(port, accept, write, monkeypatch) -> None:
    for name, value in (("AWS_ACCESS_KEY_ID", "FIRST"), ("AWS_SECRET_ACCESS_KEY", SECRET)):
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
        wait_until(lambda: _is_read(store, "a"))
        assert store.usage()["disk"].corrupt == 0


def _is_read(store: TieredStore, variant_id: str) -> bool:
    try:
        assert_same_bytes(get(store, variant_id), make_kv(variant_id))
    except StoreUnavailableError:
        return False
    return True


def test_a_start_without_access_says_what_is_missing(port, accept, write) -> None:
    write("FIRST")
    accept("SECOND")
    with pytest.raises(StoreUnavailableError, match="access to bucket 'chunks' was refused .*AWS_PROFILE"):
        open_store(s3_bucket("s3", port, "x").url)

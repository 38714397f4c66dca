"""Bucket URLs, and what `open` says of buckets that cannot be used: missing, forbidden, unreachable, unsafe."""

import os

import pytest

import ccjax.store.buckets
from ccjax.store import StoreUnavailableError, TensorStoreTier
from ccjax.store.buckets import TRANSFER_S
from ccjax.store.objects import open_root
from tests.store.kv import OURS, SPEC, assert_same_bytes, get, make_kv, open_store, put
from tests.store.servers import free_port

ON_MOTO = True


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://", "wanted s3://bucket/prefix, got 's3://'"),
        ("s3:/bucket/kv", "wanted s3://bucket/prefix"),
        ("gs:///kv", "wanted gs://bucket/prefix"),
        ("s3://bucket/kv#x", "wanted s3://bucket/prefix"),
        ("s3://bucket/a/../kv", "wanted s3://bucket/prefix"),
        ("gs://bucket/a//kv", "wanted gs://bucket/prefix"),
        ("s3://bucket/kv?endpont=http://x", r"wanted \?endpoint=http://host:port and region=NAME, each once"),
        ("s3://bucket/kv?endpoint=http://x&endpoint=http://y", "each once"),
        ("s3://bucket/kv?region=", "each once"),
        ("s3://bucket/kv?endpoint=localhost:9000", "endpoint: wanted http://host:port or https://host, got"),
        ("gs://bucket/kv?endpoint=http://x", "wanted none as options of gs://bucket/prefix"),
        ("s3://No_Bucket!/kv", "cannot parse"),
        ("gs://x/kv", "cannot parse"),
    ],
)
def test_invalid_bucket_url_is_rejected(url, wanted):
    with pytest.raises(ValueError, match=wanted):
        open_root(url)


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        open_root("s3://AKID:hush@bucket/kv")
    assert "hush" not in str(caught.value)


def test_store_root_may_be_the_whole_bucket(bucket):
    url, mark, options = bucket.url.partition("?")
    whole = open_root(f"s3://chunks?{options}" if mark else "gs://chunks")
    root = open_root(bucket.url)
    root.create("a", b"1")
    prefix = bucket.spec["path"]
    assert whole.read(f"{prefix}a") == b"1" and "a b" in whole.names("")
    whole.delete(prefix.rstrip("/"))
    assert root.names("") == []


def test_region_is_optional(make_place):
    place = make_place("s3")
    url = place.url.replace("&region=us-east-1", "")
    assert url != place.url
    with open_store(url, host_bytes=0) as store:
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_missing_bucket_is_reported(bucket):
    with pytest.raises(StoreUnavailableError, match="there is no bucket 'chunky'. Create it first"):
        TensorStoreTier(bucket.url.replace("chunks", "chunky", 1), SPEC, OURS)


def test_missing_s3_credentials_are_reported(make_place, monkeypatch):
    url = make_place("s3").url
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    wanted = "access to bucket 'chunks' was refused .PERMISSION_DENIED.*Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    with pytest.raises(StoreUnavailableError, match=wanted):
        TensorStoreTier(url, SPEC, OURS)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half of a pair")
    with pytest.raises(StoreUnavailableError, match="Failed to get credentials.*Set AWS_ACCESS_KEY_ID and AWS_SECRET"):
        TensorStoreTier(url, SPEC, OURS)


def test_forbidden_google_bucket_is_reported(make_place):
    url = make_place("gs").url.replace("chunks", "forbidden", 1)
    with pytest.raises(StoreUnavailableError, match="was refused .PERMISSION_DENIED.*GOOGLE_APPLICATION_CREDENTIALS"):
        TensorStoreTier(url, SPEC, OURS)


def test_server_without_conditional_writes_is_refused(make_place):
    """It would let two writers commit the same variant, each believing that it was alone."""
    url = make_place("gs").url.replace("chunks", "lax", 1)
    with pytest.raises(StoreUnavailableError, match="the server ignores the condition of a write"):
        TensorStoreTier(url, SPEC, OURS)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_unreachable_server_is_reported(kind, make_place):
    with pytest.raises(StoreUnavailableError, match="cannot use .*Could not connect.*Wanted a bucket that this"):
        TensorStoreTier(make_place(kind, free_port()).url, SPEC, OURS)


def test_timeouts_and_retries_are_shorter_than_tensorstore_defaults(bucket):
    """Its default of 32 tries takes minutes, and it waits for ever where a server takes a request and says nothing."""
    root = open_root(bucket.url)
    assert root.context is not None and root.longest_wait_s == ccjax.store.buckets.TRANSFER_S and TRANSFER_S <= 60
    resource = root.context[f"{root.kvstore('x')['driver']}_request_retries"].to_json()
    assert resource == {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}
    assert 1 <= int(os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"]) <= 30
    assert 1 <= int(os.environ["TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS"]) <= 30

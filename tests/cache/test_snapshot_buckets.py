"""Snapshots in buckets: a mock of S3 and the double of Google Cloud Storage."""

import contextlib

import pytest

from ccjax.cache.snapshot import inspect_snapshot, restore_snapshot, save_snapshot
from ccjax.cache.snapshot import packs as packs_module
from ccjax.cache.snapshot.index import KEY
from ccjax.errors import SnapshotError
from ccjax.store import StoreUnavailableError
from tests.cache.snapshots import BYTES, contents, open_cache, put, save_ten
from tests.store import servers
from tests.store.places import KEYS, gs_bucket, s3_bucket


@pytest.fixture(scope="module")
def ports():
    with servers.moto() as s3, servers.gcs_double() as gs:
        yield {"s3": s3, "gs": gs}


@pytest.fixture(params=["s3", "gs"])
def bucket(request, ports, monkeypatch, small_packs):
    """An empty prefix of a bucket."""
    prefix, port = f"a b/{request.node.name}", ports[request.param]
    for name, value in {**KEYS, "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    return gs_bucket(prefix) if request.param == "gs" else s3_bucket("s3", port, prefix)


def test_round_trip(bucket, monkeypatch):
    staged = []
    staging = packs_module._staging

    @contextlib.contextmanager
    def watched():
        with staging() as directory:
            staged.append(directory)
            yield directory

    monkeypatch.setattr(packs_module, "_staging", watched)
    ids, expected = save_ten(bucket.url)
    with open_cache() as cache:
        report = restore_snapshot(cache, bucket.url)
        assert contents(cache) == expected and report.num_restored == len(ids)
    assert len(staged) == 2 * 3 and not any(directory.exists() for directory in staged)


def test_max_bytes_limits_downloads_to_the_hottest_variants(bucket):
    ids, expected = save_ten(bucket.url)
    for key in bucket.keys():
        if "/pack-" in key and "/pack-00000/" not in key:
            bucket.delete(key)
    with open_cache() as cache:
        report = restore_snapshot(cache, bucket.url, max_bytes=2 * BYTES)
        assert contents(cache) == {key: expected[key] for key in ids[:2]}
        assert (report.num_left_out, report.num_damaged) == (8, 0)
        assert restore_snapshot(cache, bucket.url).num_damaged == 8


def test_inspect_and_restore_write_nothing(bucket):
    save_ten(bucket.url)
    before = {key: bucket.read(key) for key in bucket.keys()}
    assert len(inspect_snapshot(bucket.url).variants) == 10
    with open_cache() as cache:
        restore_snapshot(cache, bucket.url)
    assert {key: bucket.read(key) for key in bucket.keys()} == before


def test_existing_snapshot_is_kept_unless_overwrite_is_set(bucket):
    save_ten(bucket.url)
    with open_cache() as cache:
        new = put(cache, 50)
        with pytest.raises(SnapshotError, match="holds a snapshot already"):
            save_snapshot(cache, bucket.url)
        save_snapshot(cache, bucket.url, overwrite=True)
    index = inspect_snapshot(bucket.url)
    assert [variant.record.variant_id for variant in index.variants] == [new]
    assert all(key == KEY or key.startswith(f"parts/{index.folder}/") for key in bucket.keys())


def test_failed_upload_leaves_no_objects_behind(bucket, monkeypatch):
    put_file, calls = packs_module._put, []

    def fail_late(store, key, path):
        calls.append(key)
        if len(calls) == 9:
            raise ValueError("UNAVAILABLE: the network is down [response]")
        put_file(store, key, path)

    monkeypatch.setattr(packs_module, "_put", fail_late)
    with pytest.raises(StoreUnavailableError, match="cannot write parts/.*: UNAVAILABLE: the network is down$"):
        save_ten(bucket.url)
    monkeypatch.undo()


def test_unrequested_or_unsafe_object_names_are_not_fetched(bucket, tmp_path):
    """Names that would lead out of the staging directory, and packs that nobody asked for."""
    wanted = {"pack-00000"}
    for key in ("_METADATA", "pack-00000/.zarray", "pack-00000/0.0.0.0.0"):
        assert packs_module._is_wanted(key, wanted)
    for key in ("../x", "pack-00000/../../x", "pack-00001/.zarray", "/etc/x", "pack-00000//x", ".."):
        assert not packs_module._is_wanted(key, wanted)

"""Snapshots sealed with keys: what somebody without them put in the place of one is not restored."""

import dataclasses

import pytest

from ccjax.cache.snapshot import restore_snapshot, save_snapshot
from ccjax.cache.snapshot.index import KEY, decode_index, inspect_snapshot
from ccjax.errors import SnapshotError
from ccjax.store import StoreIdentity, StoreKeys
from ccjax.store.arrays import checksum
from tests.cache.snapshots import contents, fill, make_kv, open_cache

SEALED = StoreIdentity("model-a", keys=StoreKeys((b"k" * 32,)))
TURNED = StoreIdentity("model-a", keys=StoreKeys((b"n" * 32, b"k" * 32)))
STRANGER = StoreIdentity("model-a", keys=StoreKeys((b"t" * 32,)))


@pytest.fixture
def saved(tmp_path):
    """A sealed snapshot of three variants, and what it holds."""
    with open_cache(identity=SEALED) as cache:
        fill(cache, 3)
        save_snapshot(cache, tmp_path / "snapshot")
        return tmp_path / "snapshot", contents(cache)


@pytest.mark.parametrize("identity", [SEALED, TURNED])
def test_sealed_snapshot_is_restored_with_its_key_even_after_rotation(saved, identity):
    place, expected = saved
    with open_cache(identity=identity) as cache:
        assert restore_snapshot(cache, place).num_restored == 3
        assert contents(cache) == expected
    assert len(inspect_snapshot(place).variants) == 3  # for who only looks no key is needed


def test_sealed_snapshot_is_refused_without_its_key(saved):
    place, _ = saved
    with open_cache(identity=STRANGER) as cache, pytest.raises(SnapshotError, match="no valid seal"):
        restore_snapshot(cache, place)
    with open_cache(identity=StoreIdentity("model-a")) as cache, pytest.raises(SnapshotError, match="key"):
        restore_snapshot(cache, place)


@pytest.mark.parametrize("seal", ["none", "old", "another key's", "as a record"])
def test_index_forged_without_the_key_is_refused(saved, seal):
    """Other KV's digest in the index, with its own checksum right."""
    place, _ = saved
    raw = (place / KEY).read_bytes()
    index = decode_index(raw, "here")
    first = dataclasses.replace(index.variants[0], checksum=checksum(make_kv(9), "sha256"))
    forged = dataclasses.replace(index, variants=(first, *index.variants[1:])).encode()
    assert decode_index(forged, "here").variants[0] == first
    forged = {
        "none": forged,
        "old": forged + raw[-len(SEALED.seal("", "", b"")) :],
        "another key's": STRANGER.seal("snapshot", "", forged),
        "as a record": SEALED.seal("record", "", forged),
    }[seal]
    (place / KEY).write_bytes(forged)
    with open_cache(identity=SEALED) as cache, pytest.raises(SnapshotError, match="no valid seal"):
        restore_snapshot(cache, place)


def test_cache_with_keys_refuses_an_unsealed_snapshot(tmp_path):
    plain = StoreIdentity("model-a")
    with open_cache(identity=plain) as cache:
        fill(cache, 1)
        save_snapshot(cache, tmp_path / "snapshot")
    raw = (tmp_path / "snapshot" / KEY).read_bytes()
    index = dataclasses.replace(decode_index(raw, "here"), namespace=SEALED.namespace)
    (tmp_path / "snapshot" / KEY).write_bytes(index.encode())
    with open_cache(identity=SEALED) as cache, pytest.raises(SnapshotError, match="no valid seal"):
        restore_snapshot(cache, tmp_path / "snapshot")


def test_sealed_index_uses_sha256_checksums_for_kv(saved):
    place, _ = saved
    assert all(variant.checksum.bit_length() > 64 for variant in inspect_snapshot(place).variants)

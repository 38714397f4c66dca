"""Engines on an encrypted store: each reuses what the other computed, and the files reveal nothing."""

import json

import numpy as np
import pytest

from ccjax.cache.identity import identity_for
from ccjax.cache.snapshot import save_snapshot
from ccjax.engine import EngineConfig, Request
from ccjax.errors import ConfigError, SnapshotError
from ccjax.requests import SamplingParams
from ccjax.store import StoreCipher, StoreIdentity, StoreKeys
from tests.cache.snapshots import open_cache
from tests.engine.helpers import TinyModel, draw_segments

SEGMENTS = draw_segments(np.random.default_rng(5), [40, 60, 50])


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("k" * 64)
    path.chmod(0o600)
    return str(path)


def traces_of(segments, place) -> set[str]:
    """The encodings in which the ids of a passage occur in files below a directory."""
    forms = {
        "bytes": np.asarray(segments[1], "<i4").tobytes()[:64],
        "json": json.dumps(list(segments[1][:8]), separators=(",", ":"))[:-1].encode(),
    }
    contents = [file.read_bytes() for file in place.rglob("*") if file.is_file()]
    return {name for name, secret in forms.items() if any(secret in raw for raw in contents)}


@pytest.mark.parametrize("encrypt_store", [False, True])
def test_second_engine_with_the_key_reuses_encrypted_kv(model, tmp_path, keys, encrypt_store):
    place = tmp_path / "store"
    how = {"store": place.as_uri(), "store_key_file": keys, "encrypt_store": encrypt_store}
    request = Request(segments=SEGMENTS, sampling=SamplingParams(max_new_tokens=3), reuse="exact")
    with model.engine(**how) as engine:
        first = engine.run(request)
    assert traces_of(SEGMENTS, place) == (set() if encrypt_store else {"json"})
    with model.engine(**how) as engine:
        again = engine.run(request)
        assert [one.tier for one in again.reuse.per_document[1:]] == ["disk"] * 3
        assert again.token_ids == first.token_ids
    with model.engine(**how | {"encrypt_store": not encrypt_store}) as engine:
        assert [one.tier for one in engine.run(request).reuse.per_document] == [None] * 4


def test_conflicting_encryption_settings_are_rejected(tmp_path, keys):
    store = tmp_path.as_uri()
    with pytest.raises(ConfigError, match="encrypt_store: wanted a store_key_file"):
        EngineConfig(store=store, encrypt_store=True)
    with pytest.raises(ConfigError, match="encrypt_store: wanted True or False, got 'yes'"):
        EngineConfig(store=store, store_key_file=keys, encrypt_store="yes")
    with pytest.raises(ConfigError, match="disk_compression: wanted 'none' with encrypt_store, got 'zstd'"):
        config = EngineConfig(store=store, store_key_file=keys, encrypt_store=True, disk_compression="zstd")
        identity_for(config, "m")


def test_snapshot_of_an_encrypted_store_is_refused(tmp_path):
    keys = StoreKeys((b"k" * 32,))
    identity = StoreIdentity("model-a", keys=keys, cipher=StoreCipher(keys))
    with open_cache(identity=identity) as cache, pytest.raises(SnapshotError, match="not encrypted"):
        save_snapshot(cache, tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()

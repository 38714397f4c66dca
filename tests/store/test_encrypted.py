"""An encrypted store, and an attacker without its keys who can read and write everything in it: they find no text and
no KV, and their changes are never used."""

import builtins
import hashlib
import json

import numpy as np
import pytest

from ccjax.store import KVSpec, ShardCorruptError, StorageFormat, StoreCipher, StoreIdentity, StoreKeys, TensorStoreTier
from ccjax.store.encryption import OVERHEAD_BYTES
from ccjax.store.formats import object_bytes
from ccjax.store.signing import SealError
from tests.store.kv import (
    OURS,
    SPEC,
    assert_same_bytes,
    encrypted,
    get,
    make_kv,
    make_record,
    object_of,
    open_store,
    put,
    sealed,
    url_of,
)

KEY, THEIR_KEY = b"k" * 32, b"t" * 32
HEAD_BYTES = OVERHEAD_BYTES - 16


HIDDEN = encrypted(KEY)
SEALED = sealed(KEY)


def opened(place, identity=HIDDEN, **options):
    return open_store(place.url, identity=identity, host_bytes=0, **options)


# -- what is hidden ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_encrypted_variants_can_be_loaded_by_other_processes(place, kv_dtype):
    with opened(place, kv_dtype=kv_dtype) as store:
        put(store, "v", 40)
        np.testing.assert_allclose(get(store, "v"), make_kv("v", 40), atol=0 if kv_dtype == "auto" else 0.3)
    with opened(place) as again:  # in another format itself, which decides what it writes only
        np.testing.assert_allclose(get(again, "v"), make_kv("v", 40), atol=0 if kv_dtype == "auto" else 0.3)
        assert again.usage()["disk"].corrupt == 0 and again.records() == [make_record("v", 40)]
        keys = (place.record_key("v", HIDDEN), *place.object_keys(HIDDEN))
        assert again.usage()["disk"].used_bytes == sum(len(place.read(key)) for key in keys)


def secrets_of(kv: np.ndarray) -> dict[str, bytes]:
    """Bytes that must not occur: text, ids as JSON, and the beginning of each layer."""
    rows = {f"row {layer}": kv[layer].tobytes()[:64] for layer in range(len(kv))}
    return {"ids": b"[0,1,2,3,4", "ids of a note": b"[17, 4711, 9", "text": b"Sesame", "hint": b"open-word", **rows}


@pytest.mark.parametrize(("identity", "is_found"), [(HIDDEN, False), (SEALED, True), (OURS, True)])
def test_no_file_contains_text_or_kv(tmp_path, monkeypatch, identity, is_found):
    monkeypatch.setattr("ccjax.store.commits.LEAST_CHANGES", 1)
    index = f"sqlite://{tmp_path}/index.db"
    with open_store(tmp_path / "store", identity=identity, host_bytes=0, index=index) as store:
        put(store, "v")
        put(store, "w")
        store.notes.put("n", {"document": "Sesame", "ids": [17, 4711, 9]}, wait=True)
        store.write_hints({"word": "open-word"})
        assert store.claims is not None and store.claims.claim(["x"], 60) == ("x",)
        store.tidy()
        assert store.change_feed is not None and store.change_feed.flush(5)
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        contents = {file: file.read_bytes() for file in files}
    kinds = {"records", "data", "notes", "catalog", "hints.json", "index.db"}
    assert all(any(kind in str(file) for file in files) for kind in kinds)
    found = {
        name for name, secret in secrets_of(make_kv("v")).items() if any(secret in raw for raw in contents.values())
    }
    assert found == (set(secrets_of(make_kv("v"))) if is_found else set())
    catalog = [raw for file, raw in contents.items() if "catalog" in str(file)]
    assert any(b"chunk-of-v" in raw for raw in catalog) == is_found  # the catalog's own table is hidden as well


def test_each_layer_is_read_and_decrypted_independently(tmp_path):
    """A layer is a frame of its own: nothing else is read for it, and the rest may be damaged."""
    spec = KVSpec(6, 2, 4, "float32")
    tier = TensorStoreTier(url_of(tmp_path), spec, HIDDEN)
    tier.write(make_record("v", 40, spec), make_kv("v", 40, spec))
    (file,) = (file for file in (tmp_path / HIDDEN.namespace / "data").rglob("*") if file.is_file())
    raw = bytearray(file.read_bytes())
    assert len(raw) == object_bytes(spec, 40, 1, StorageFormat(is_encrypted=True)) == 6 * (2560 + OVERHEAD_BYTES + 16)
    raw[3 * (2560 + OVERHEAD_BYTES) + 100] ^= 1
    file.write_bytes(raw)
    reader = tier.open("v")
    assert_same_bytes(reader.wait(1, 3), make_kv("v", 40, spec)[1:3])
    assert reader.bytes_there == reader.bytes_read == 2 * 2560
    with pytest.raises(ShardCorruptError):
        reader.wait(3, 4)


def test_layer_with_several_head_groups_is_encrypted_as_one_frame(place):
    with opened(place, head_groups=2) as store:
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_encrypting_twice_gives_different_bytes():
    first, second = (HIDDEN.seal("note", "a", b"the same") for _ in range(2))
    assert first[:16] == second[:16] and first[16:HEAD_BYTES] != second[16:HEAD_BYTES]  # the key's id, the nonce
    assert first[HEAD_BYTES:] != second[HEAD_BYTES:] and len(first) == len(b"the same") + OVERHEAD_BYTES
    assert HIDDEN.unseal("note", "a", first) == HIDDEN.unseal("note", "a", second) == b"the same"


# -- what somebody who can write may do --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["magic", "bit", "nonce", "key id", "tag", "truncated", "longer", "empty", "plain"])
def test_changed_record_misses_and_is_quarantined(place, how):
    with opened(place) as store:
        put(store, "v")
        put(store, "w")
    key = place.record_key("v", HIDDEN)
    raw = bytearray(place.read(key))
    at = {"magic": 0, "bit": HEAD_BYTES + 9, "nonce": 20, "key id": 9, "tag": len(raw) - 1}.get(how)
    if at is not None:
        raw[at] ^= 1
    other = {"truncated": raw[:-1], "longer": raw + b"x", "empty": b"", "plain": b"{}"}
    place.write(key, bytes(other.get(how, raw)))
    with opened(place) as store:
        assert [record.variant_id for record in store.records()] == ["w"]
        usage = store.usage()["disk"]
        assert usage.corrupt == usage.forged == 1
        assert key not in place.keys() and any("/quarantine/v." in name for name in place.keys())
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))


@pytest.mark.parametrize("how", ["magic", "bit", "nonce", "key id", "tag", "truncated", "plain"])
def test_tampered_kv_is_corrupt_and_counted(place, how):
    with opened(place) as store:
        key = object_of(place, "v", store, HIDDEN)
        raw = bytearray(place.read(key))
        frame = make_kv("v")[0].nbytes + OVERHEAD_BYTES
        at = {"magic": 0, "bit": HEAD_BYTES + 9, "nonce": 20, "key id": 9, "tag": frame - 1}.get(how)
        if at is not None:
            raw[at] ^= 1
        elif how == "plain":
            raw[HEAD_BYTES : frame - 16] = make_kv("v")[0].tobytes()
        place.write(key, bytes(raw[:-1] if how == "truncated" else raw))
        with pytest.raises(ShardCorruptError):
            get(store, "v")
        assert store.usage()["disk"].corrupt == 1


def test_encrypted_data_are_bound_to_their_identity(monkeypatch):
    """Each layer is bound to its object and number, whatever the digests in the record are."""
    from ccjax.store.encryption import KVCipher

    monkeypatch.setattr("ccjax.store.arrays.ShardReader._is_sound", lambda self, layer: True)
    kv = make_kv("v")
    assert HIDDEN.cipher is not None
    vault = KVCipher(HIDDEN.cipher, HIDDEN.namespace)
    frames, out = vault.encrypt("object", kv), np.empty_like(kv[0])
    vault.decrypt("object", 1, frames[1], out)
    assert_same_bytes(out, kv[1])
    other = KVCipher(HIDDEN.cipher, SEALED.namespace)
    for cipher, name, number in ((vault, "object", 0), (vault, "other", 1), (other, "object", 1)):
        with pytest.raises(SealError):
            cipher.decrypt(name, number, frames[1], out)
    raw = HIDDEN.seal("record", "v", b"data")
    for kind, name in (("note", "v"), ("record", "w")):
        with pytest.raises(SealError):
            HIDDEN.unseal(kind, name, raw)
    with pytest.raises(SealError):
        encrypted(KEY, model="model-b").unseal("record", "v", raw)


def test_changed_catalog_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("ccjax.store.commits.LEAST_CHANGES", 1)
    tier = TensorStoreTier(url_of(tmp_path), SPEC, HIDDEN)
    tier.write(make_record("v"), make_kv("v"))
    tier.tidy()
    (part,) = (tmp_path / HIDDEN.namespace / "catalog").iterdir()
    raw = bytearray(part.read_bytes())
    raw[HEAD_BYTES + 5] ^= 1
    part.write_bytes(raw)
    again = TensorStoreTier(url_of(tmp_path), SPEC, HIDDEN)
    assert again.records() == [make_record("v")] and again.num_corrupt == 0


# -- keys ----------------------------------------------------------------------------------------------------------


def test_keys_are_never_shown():
    raw = HIDDEN.seal("note", "a", b"x")
    assert KEY.decode() not in repr(HIDDEN) + repr(HIDDEN.cipher) and KEY[:8] not in raw


def test_cipher_of_other_keys_is_refused():
    with pytest.raises(ValueError, match="cipher: wanted one of the same keys"):
        StoreIdentity("model-a", keys=StoreKeys((THEIR_KEY,)), cipher=HIDDEN.cipher)
    with pytest.raises(ValueError, match="cipher"):
        StoreIdentity("model-a", cipher=HIDDEN.cipher)


def test_compression_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compression: wanted none in a store that is encrypted, got 'zstd'"):
        open_store(tmp_path, identity=HIDDEN, compression="zstd")


def test_missing_encryption_package_is_named_in_the_error(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"encrypt_store: .*pip install 'ccjax\[encryption\]'"):
        StoreCipher(StoreKeys((KEY,)))


def test_record_with_another_encryption_setting_is_refused(tmp_path):
    """An encrypted record of an object that is not encrypted: a program that forgot to encrypt it would be noticed."""
    from ccjax.store.records import decode_record

    tier = TensorStoreTier(url_of(tmp_path), SPEC, HIDDEN)
    tier.write(make_record("v"), make_kv("v"))
    body = json.loads(HIDDEN.unseal("record", "v", (tmp_path / HIDDEN.namespace / "records/v.json").read_bytes()))
    assert body["is_encrypted"] is True
    del body["is_encrypted"], body["checksum"]
    how = {"sort_keys": True, "separators": (",", ":")}
    body["checksum"] = hashlib.sha256(json.dumps(body, **how).encode()).hexdigest()
    raw = HIDDEN.seal("record", "v", json.dumps(body, **how).encode())
    with pytest.raises(ShardCorruptError, match="is_encrypted"):
        decode_record(raw, variant_id="v", identity=HIDDEN, kv_spec=SPEC)

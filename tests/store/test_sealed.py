"""A store whose entries are sealed by keys, and an attacker without these keys who can write everything in it: their
entries are never read as KV, never trusted, and are counted."""

import dataclasses
import hashlib
import json
import zlib

import numpy as np
import pytest

from ccjax.store import KVSpec, ShardCorruptError, StoreIdentity, StoreKeys, TensorStoreTier
from ccjax.store.arrays import checksum
from ccjax.store.catalog import decode_part, encode_part
from ccjax.store.index.api import StoreChanges
from ccjax.store.leases import Leases
from ccjax.store.notes import Notes
from ccjax.store.objects import open_root
from ccjax.store.records import decode_record, encode_record
from ccjax.store.signing import SEAL_BYTES, SealError
from tests.store.kv import (
    OURS,
    SPEC,
    assert_same_bytes,
    assert_swapped_objects_are_refused,
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

KEY, OLD_KEY, THEIR_KEY = b"k" * 32, b"o" * 32, b"t" * 32
SEALED, HIDDEN, STRANGER = sealed(KEY), encrypted(KEY), sealed(THEIR_KEY)
BOTH = pytest.mark.parametrize("identity", [SEALED, HIDDEN], ids=["sealed", "encrypted"])
SIZE = SPEC.num_bytes(5)


def opened(place, identity=SEALED, **options):
    return open_store(place.url, identity=identity, host_bytes=0, **options)


def record_of(place, variant_id) -> str:
    return place.record_key(variant_id, SEALED)


def forged_record(raw: bytes, kv: np.ndarray | None = None, **changes) -> bytes:
    """A record with other contents and valid checksums without a key, as an attacker who knows this program makes."""
    body = json.loads(raw[:-SEAL_BYTES]) | changes
    if kv is not None:
        body["checksums"] = [f"{checksum(layer, 'sha256'):064x}" for layer in kv]
    del body["checksum"]
    canonical = {"sort_keys": True, "separators": (",", ":")}
    digest = hashlib.sha256(json.dumps(body, **canonical).encode()).hexdigest()
    return json.dumps({**body, "checksum": digest}, **canonical).encode()


def test_sealed_variants_can_be_loaded_by_other_processes(place):
    with opened(place) as store:
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))
    with opened(place) as again:
        assert_same_bytes(get(again, "v"), make_kv("v"))
        assert again.usage()["disk"].corrupt == 0 and again.records() == [make_record("v")]
        assert again.usage()["disk"].used_bytes == sum(
            len(place.read(key)) for key in (record_of(place, "v"), *place.object_keys(SEALED))
        )


@pytest.mark.parametrize(("kv_dtype", "compression"), [("int8", "none"), ("auto", "zstd"), ("fp8", "zstd")])
def test_compressed_and_quantised_formats_are_sealed(tmp_path, kv_dtype, compression):
    how = {"identity": SEALED, "host_bytes": 0, "kv_dtype": kv_dtype, "compression": compression}
    with open_store(tmp_path, **how) as store:
        put(store, "v", 40)
        np.testing.assert_allclose(get(store, "v"), make_kv("v", 40), atol=0.3)
        (folder,) = (tmp_path / SEALED.namespace / "data").iterdir()
        (file,) = folder.iterdir()
        raw = bytearray(file.read_bytes())
        raw[30] ^= 1
        file.write_bytes(raw)
        with pytest.raises(ShardCorruptError):
            get(store, "v")


def test_stores_with_and_without_keys_share_a_root_but_no_data(place):
    with opened(place) as ours, opened(place, OURS) as plain, opened(place, HIDDEN) as hidden:
        stores = {"v": ours, "w": plain, "x": hidden}
        for variant_id, store in stores.items():
            put(store, variant_id)
        for variant_id, store in stores.items():
            store.refresh()
            assert [summary.variant_id for summary in store.summaries()] == [variant_id]
    assert SEALED.namespace == STRANGER.namespace and HIDDEN.namespace == encrypted(THEIR_KEY).namespace


# -- what somebody who can write may do --------------------------------------------------------------------------


def test_record_without_a_seal_is_quarantined_and_counted(place):
    with opened(place) as store:
        put(store, "v")
        put(store, "w")
    key = record_of(place, "v")
    place.write(key, place.read(key)[:-SEAL_BYTES])
    with opened(place) as store:
        assert [record.variant_id for record in store.records()] == ["w"]
        usage = store.usage()["disk"]
        assert usage.corrupt == usage.forged == 1
        assert key not in place.keys() and any("/quarantine/v." in name for name in place.keys())
        put(store, "v")  # and the place is free again
        assert_same_bytes(get(store, "v"), make_kv("v"))


@pytest.mark.parametrize("sealed_by", ["nobody", "another key", "the seal that was there"])
def test_forged_kv_with_matching_checksums_is_not_read(place, sealed_by):
    """An attacker without keys can still write other KV and a matching record."""
    bad = make_kv("v", writer=7)
    with opened(place) as store:
        key = object_of(place, "v", store, SEALED)
    raw = place.read(record_of(place, "v"))
    place.write(key, bad.tobytes() + place.read(key)[SIZE:])
    forged = forged_record(raw, bad)
    if sealed_by == "another key":
        forged = STRANGER.seal("record", "v", forged)
    elif sealed_by != "nobody":
        forged += raw[-SEAL_BYTES:]
    place.write(record_of(place, "v"), forged)
    with opened(place) as store:
        assert store.prepare_load(["v"]).missing == {"v"}
        assert store.usage()["disk"].forged == 1
    # The forgery is a good one: without the check of seals it would be read.
    plain = StoreIdentity("model-a")
    body = forged_record(forged if sealed_by != "nobody" else forged + bytes(SEAL_BYTES), namespace=plain.namespace)
    body = json.loads(body) | {"checksums": [f"{checksum(layer, 'xxh3'):016x}" for layer in bad]}
    del body["digest"]
    good = forged_record(json.dumps(body).encode() + bytes(SEAL_BYTES))
    assert decode_record(good, variant_id="v", identity=plain, kv_spec=SPEC).record == make_record("v")


def test_forged_kv_with_colliding_xxh3_is_not_read(place, monkeypatch):
    """xxh3 can be made to collide; here it always does. The record binds the KV by sha256."""
    with opened(place) as store:
        key = object_of(place, "v", store, SEALED)
        place.write(key, make_kv("v", writer=7).tobytes() + place.read(key)[SIZE:])
        monkeypatch.setattr("ccjax.store.signing.xxhash.xxh3_64_intdigest", lambda data: 5)
        with pytest.raises(ShardCorruptError, match="not the one that the record commits"):
            get(store, "v")


@BOTH
def test_swapped_objects_of_two_variants_are_rejected(place, identity):
    with opened(place, identity) as store:
        assert_swapped_objects_are_refused(place, store, identity)


def test_swapped_records_of_two_variants_are_rejected(place):
    with opened(place) as store:
        put(store, "v")
        put(store, "w")
    raw = place.read(record_of(place, "v"))
    place.write(record_of(place, "v"), place.read(record_of(place, "w")))
    place.write(record_of(place, "w"), raw)
    with opened(place) as store:
        assert store.records() == [] and store.usage()["disk"].forged == 2


def test_old_record_restored_over_a_new_one_is_corrupt(place):
    with opened(place) as store:
        put(store, "v")
        old = place.read(record_of(place, "v"))
        store.discard("v")
        put(store, "v")
        assert place.read(record_of(place, "v")) != old
    place.write(record_of(place, "v"), old)
    with opened(place) as store, pytest.raises(ShardCorruptError):  # it commits an object that is gone
        get(store, "v")


def test_old_record_does_not_accept_another_object_under_its_name(place):
    """The new object, here another variant's, moved to the name that the old record commits."""
    with opened(place) as store:
        old_object = object_of(place, "v", store, SEALED)
        old = place.read(record_of(place, "v"))
        store.discard("v")
        other = place.read(object_of(place, "w", store, SEALED))
    place.write(old_object, other)
    place.write(record_of(place, "v"), old)
    with opened(place) as store, pytest.raises(ShardCorruptError):
        get(store, "v")


@pytest.mark.parametrize(
    "source", [StoreIdentity("model-b", keys=SEALED.keys), StoreIdentity("model-a", "t", SEALED.keys)]
)
def test_variant_copied_from_another_model_or_tenant_is_rejected(place, source):
    """Sealed by the same key, but as something else."""
    with opened(place, source) as store:
        put(store, "v")
    with opened(place):
        pass
    for key in place.keys():
        if key.startswith((f"{source.namespace}/records/", f"{source.namespace}/data/")):
            place.write(key.replace(source.namespace, SEALED.namespace), place.read(key))
    with opened(place) as store:
        assert store.records() == [] and store.usage()["disk"].forged == 1


def test_seal_binds_a_record_to_its_kind_name_and_identity(place):
    """The namespace is in the record, too; this tests the seal alone."""
    with opened(place) as store:
        put(store, "v")
    data = place.read(record_of(place, "v"))[:-SEAL_BYTES]
    for kind, name in (("note", "v"), ("record", "w")):
        with pytest.raises(SealError):
            SEALED.unseal("record", "v", SEALED.seal(kind, name, data))
    other = dataclasses.replace(SEALED, model_fingerprint="model-b")
    with pytest.raises(SealError):
        SEALED.unseal("record", "v", other.seal("record", "v", data))


def test_forged_record_in_a_change_notification_is_checked_against_the_store(tmp_path):
    """A process that can write to the shared index cannot seal either."""
    tier = TensorStoreTier(url_of(tmp_path), SPEC, SEALED)
    writer = TensorStoreTier(url_of(tmp_path), SPEC, SEALED)
    writer.write(make_record("v"), make_kv("v"))
    raw = (tmp_path / SEALED.namespace / "records" / "v.json").read_bytes()
    forged = forged_record(raw, make_kv("v", writer=7))
    assert tier.apply_commits({"v": forged, "gone": forged}) == ("v",)
    shard = tier._commits.details("v")
    assert shard is not None and shard.layout.checksums == tuple(checksum(layer, "sha256") for layer in make_kv("v"))
    assert StoreChanges("", {"v": forged}, {}, True).added["v"] == forged


def test_forged_catalog_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("ccjax.store.commits.LEAST_CHANGES", 1)
    tier = TensorStoreTier(url_of(tmp_path), SPEC, SEALED)
    tier.write(make_record("v"), make_kv("v"))
    tier.tidy()
    (part,) = (tmp_path / SEALED.namespace / "catalog").iterdir()
    (known,) = decode_part(part.read_bytes()[:-SEAL_BYTES], SEALED.namespace)
    raw = forged_record(known.raw, make_kv("v", writer=7), chunk_id="another") + known.raw[-SEAL_BYTES:]
    bad = known._replace(raw=raw, chunk_id="another", charge_bytes=known.charge_bytes - 9, crc32=zlib.crc32(raw))
    part.write_bytes(encode_part([bad], SEALED.namespace))
    again = TensorStoreTier(url_of(tmp_path), SPEC, SEALED)
    assert [shard.chunk_id for shard in again.summaries()] == ["chunk-of-v"] and again.records() == [make_record("v")]
    monkeypatch.setattr(type(SEALED), "unseal", lambda self, kind, name, raw: raw)  # the catalog would have been used
    fooled = TensorStoreTier(url_of(tmp_path), SPEC, SEALED)
    assert [shard.chunk_id for shard in fooled.summaries()] == ["another"]


@BOTH
def test_forged_notes_hints_and_leases_are_ignored(place, identity):
    with opened(place, identity) as store:
        store.notes.put("a", {"x": 1}, wait=True)
        store.notes.put("b", {"x": 2}, wait=True)
        store.write_hints({"x": 1})
    space = identity.namespace
    raw = place.read(f"{space}/notes/a.json")
    place.write(f"{space}/notes/c.json", raw)  # a sound note under another name
    place.write(f"{space}/notes/b.json", b'{"x": 3}')
    place.write(f"{space}/hints.json", b'{"x": 3}' + place.read(f"{space}/hints.json")[-SEAL_BYTES:])
    place.write(f"{space}/leases/v.00000001", b'{"expires_s": 9e9, "holder": "me"}')
    with opened(place, identity) as store:
        store.notes.refresh()
        assert store.notes.items() == {"a": {"x": 1}, "b": {}, "c": {}}
        assert store.read_hints() == {}
        assert store.claims is not None and store.claims.taken(["v"]) == frozenset()
        assert store.claims.claim(["v"], 60) == ("v",)


def test_forged_note_is_replaced_by_the_genuine_one(tmp_path):
    root = open_root(url_of(tmp_path))
    root.make_prefix("notes")
    root.create("notes/a.json", b"{}")
    ours = Notes(root, "notes", SEALED, run=lambda work: work())
    ours.put("a", {"x": 1}, wait=True)
    later = Notes(root, "notes", SEALED)
    later.refresh()
    assert later.items() == {"a": {"x": 1}}
    Notes(root, "notes", SEALED, run=lambda work: work()).put("a", {"x": 2}, wait=True)  # a sound one stays
    again = Notes(root, "notes", SEALED)
    again.refresh()
    assert again.items() == {"a": {"x": 1}}


def test_lease_of_another_epoch_is_ignored(tmp_path):
    root = open_root(url_of(tmp_path))
    leases = Leases(root, SEALED)
    (lease,) = leases.acquire(["v"], 60)
    raw = root.read(f"{SEALED.namespace}/leases/v.00000001")
    leases.release(lease)
    root.create(f"{SEALED.namespace}/leases/v.00000007", raw)
    assert Leases(root, SEALED).held(["v"]) == frozenset()


# -- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_keys", [sealed, encrypted])
def test_key_rotation_keeps_newly_written_variants_readable(place, with_keys):
    """Old key, then both, then the new one in front, then the new one alone: nothing that was written anew is lost."""
    with opened(place, with_keys(OLD_KEY)) as store:
        put(store, "v")
    with opened(place, with_keys(KEY, OLD_KEY)) as first, opened(place, with_keys(OLD_KEY, KEY)) as second:
        put(first, "w")
        second.refresh()
        for store in (first, second):
            assert_same_bytes(get(store, "v"), make_kv("v"))
            assert_same_bytes(get(store, "w"), make_kv("w"))
    with opened(place, with_keys(KEY)) as store:
        assert [summary.variant_id for summary in store.summaries()] == ["w"] and store.usage()["disk"].forged == 1
        assert_same_bytes(get(store, "w"), make_kv("w"))


def test_key_file_is_parsed_and_loose_permissions_are_logged(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n  {KEY.decode()}  \n{OLD_KEY.decode()}\n")
    path.chmod(0o600)
    assert StoreKeys.of_file(path) == StoreKeys((KEY, OLD_KEY)) and not caplog.records
    path.chmod(0o640)
    StoreKeys.of_file(path)
    assert "wanted mode 600" in caplog.text
    assert KEY.decode() not in caplog.text + repr(StoreKeys((KEY,))) + repr(SEALED)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "at least one, got none"),
        (b"# a comment\n", "at least one, got none"),
        (b"hush-too-short\n", "at least 32 characters, number 1 has 14"),
        (KEY + b"\n" + KEY + b"\n", "got one twice"),
        (KEY + b"\xff\n", "it is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_invalid_key_file_error_names_the_file_without_its_contents(tmp_path, content, wanted):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=wanted) as caught:
        StoreKeys.of_file(path)
    assert str(path) in str(caught.value) and "store_key_file" in str(caught.value)
    assert "hush" not in str(caught.value) and KEY.decode() not in str(caught.value)


@BOTH
def test_size_of_a_record_is_known_beforehand(tmp_path, identity):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, identity)
    record = make_record("v")
    wanted = tier.charge_bytes(record)
    tier.write(record, make_kv("v"))
    assert tier.charged("v") == wanted


def test_sealed_record_with_weak_digests_is_rejected():
    """One that was sealed says sha256; a program that forgot to would be noticed."""
    kv_spec = KVSpec(1, 1, 2, "float32")
    from ccjax.store.formats import AS_IT_IS, expected_layout

    layout = expected_layout(kv_spec, 5, 1, AS_IT_IS)
    record = dataclasses.replace(make_record("v"), num_bytes=kv_spec.num_bytes(5))
    raw = encode_record(record, identity=SEALED, kv_spec=kv_spec, object_id="0" * 32, layout=layout)
    with pytest.raises(ShardCorruptError, match="digests by sha256"):
        decode_record(raw, variant_id="v", identity=SEALED, kv_spec=kv_spec)

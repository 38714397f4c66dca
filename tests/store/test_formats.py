"""Formats of the disk tier: what is read, what it takes, which copies are lossy, mixed stores, records."""

import hashlib
import json

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from ccjax.store import (
    KVSpec,
    ShardCorruptError,
    ShardRecord,
    StorageFormat,
    TensorStoreTier,
    TieredStore,
    TierFullError,
)
from ccjax.store.arrays import ArrayDriver
from ccjax.store.formats import AS_IT_IS, ObjectLayout, object_bytes
from ccjax.store.quantize import SCALE_ROWS, dequantize
from ccjax.store.records import decode_record
from tests.store.kv import (
    BF16,
    OURS,
    SPEC,
    assert_same_bytes,
    bytes_on_disk,
    get,
    make_kv,
    make_record,
    object_files,
    open_store,
    put,
    record_file,
    url_of,
)
from tests.store.places import Place, directory
from tests.store.test_quantize import bound, error

LOSSY = [("int8", "none"), ("int8", "zstd"), ("fp8", "none"), ("fp8", "zstd")]
FORMATS = [("auto", "zstd"), *LOSSY]
TOKENS = 16


def options(kv_dtype: str, compression: str = "none") -> dict[str, str]:
    return {"kv_dtype": kv_dtype, "compression": compression}


def assert_close(kv_dtype: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Within the bound of `kv_dtype`, but not exactly equal."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if kv_dtype == "auto":
        assert_same_bytes(actual, expected)
    else:
        assert (error(expected, actual) <= bound(expected, kv_dtype)).all() and (actual != expected).any()


def store_one(store: TieredStore, kv: np.ndarray, variant_id: str = "v") -> tuple[str, ...]:
    record = ShardRecord(variant_id, "c", kv.shape[2], kv.nbytes)
    took = store.complete_store(store.prepare_store(record), kv)
    assert store.flush(120)
    return took


@pytest.mark.parametrize(("kv_dtype", "compression"), FORMATS)
@pytest.mark.parametrize("spec", [SPEC, BF16], ids=lambda spec: spec.dtype)
def test_variants_round_trip_within_budget_in_every_format(tmp_path, spec, kv_dtype, compression):
    check_round_trip(directory(tmp_path), spec, kv_dtype, compression)


def test_variants_round_trip_within_budget_in_buckets(bucket):
    check_round_trip(bucket, BF16, "int8", "zstd")


def check_round_trip(place: Place, spec: KVSpec, kv_dtype: str, compression: str) -> None:
    settings = {"kv_spec": spec, "host_bytes": 0, **options(kv_dtype, compression)}
    with open_store(place.url, **settings) as store:
        for number, num_tokens in enumerate([1, 6, TOKENS, 33]):
            record = make_record(f"v{number}", num_tokens, spec)
            most = TensorStoreTier(place.url, spec, OURS, storage=StorageFormat(kv_dtype, compression)).charge_bytes(
                record
            )
            before = place.num_bytes()
            assert put(store, f"v{number}", num_tokens) == ("disk",)
            true_bytes = place.num_bytes() - before
            assert true_bytes <= most and (compression == "zstd" or true_bytes == most)
        usage = store.usage()["disk"]
        assert usage.used_bytes == place.num_bytes() == usage.bytes_written
        first = [get(store, f"v{number}") for number in range(4)]
    for again in (settings, {**settings, **options("auto")}, {**settings, **options("fp8", "zstd")}):
        with open_store(place.url, **again) as store:
            assert store.usage()["disk"].used_bytes == place.num_bytes()
            for number, num_tokens in enumerate([1, 6, TOKENS, 33]):
                loaded = get(store, f"v{number}")
                assert_same_bytes(loaded, first[number])
                is_coded = kv_dtype != "auto" and num_tokens > 1  # one token: the scales would take more than it saves
                assert store.is_lossy(f"v{number}") == is_coded
                assert_close(kv_dtype if is_coded else "auto", loaded, make_kv(f"v{number}", num_tokens, spec))


def test_variant_size_matches_hand_computed_bytes(tmp_path):
    spec = KVSpec(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
    # 4 layers in 2 groups of heads: codes and 4 rows of scales, 16 bytes of index each
    assert object_bytes(spec, 100, 2, StorageFormat("int8")) == 8 * (2 * 104 * 8 + 16)
    assert object_bytes(spec, 100, 2, AS_IT_IS) == 8 * (2 * 100 * 8 * 4 + 16)
    with open_store(tmp_path, kv_spec=spec, head_groups=2, **options("int8")) as store:
        put(store, "v", 100)
    (file,) = object_files(tmp_path)
    assert file.stat().st_size == object_bytes(spec, 100, 2, StorageFormat("int8"))


@pytest.mark.parametrize(("num_tokens", "is_coded"), [(4, False), (5, True)])
def test_variant_too_short_to_shrink_is_stored_unquantised(tmp_path, num_tokens, is_coded):
    with open_store(tmp_path, kv_spec=BF16, host_bytes=0, **options("int8")) as store:
        put(store, "v", num_tokens)
        assert store.is_lossy("v") == is_coded


@given(data=st.data())
def test_compressed_object_never_exceeds_its_size_bound(data):
    shape = [data.draw(st.integers(1, top)) for top in (3, 40, 2, 16)]
    spec = KVSpec(shape[0], 2 * shape[2], shape[3], "float32")
    seed, kind = data.draw(st.integers(0, 99)), data.draw(st.sampled_from(["auto", "int8"]))
    noise = np.random.default_rng(seed).bytes(spec.num_bytes(shape[1]))
    kv = np.frombuffer(noise, np.float32).reshape(spec.shape(shape[1]))
    storage = StorageFormat(kind, "zstd")
    layout, packed = ArrayDriver(spec, None, None).prepare(kv, 2, storage)
    assert layout.num_bytes == len(packed) <= object_bytes(spec, shape[1], 2, layout.storage)


def test_compression_shrinks_variants_and_updates_the_budget(tmp_path):
    with open_store(tmp_path, **options("auto", "zstd")) as store:
        store_one(store, np.zeros(SPEC.shape(64), np.float32))
        size = bytes_on_disk(tmp_path)
        assert store.usage()["disk"].used_bytes == size < 0.2 * SPEC.num_bytes(64)
        assert_same_bytes(get(store, "v"), np.zeros(SPEC.shape(64), np.float32))
        store.evict("disk", ["v"])
        assert store.usage()["disk"].used_bytes == 0


@pytest.mark.parametrize("finds_it_by", ["refresh", "losing the race"])
def test_other_processes_charge_the_actual_compressed_size(tmp_path, finds_it_by):
    ours, theirs = (TensorStoreTier(url_of(tmp_path), SPEC, OURS, storage=StorageFormat("int8", "zstd")) for _ in "ab")
    theirs.write(make_record("v", 64), np.zeros(SPEC.shape(64), np.float32))
    if finds_it_by == "refresh":
        ours.refresh()
    else:
        assert ours.write(make_record("v", 64), make_kv("v", 64)) is False
    assert ours.budget.used_bytes == theirs.budget.used_bytes > 0
    assert ours.remove(["v"]) == ("v",) and ours.budget.used_bytes == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("kv_dtype", "compression"), LOSSY)
def test_non_finite_kv_is_stored_unquantised(tmp_path, kv_dtype, compression, value):
    kv = make_kv("v", TOKENS)
    kv[1, 0, 3, 1, 2] = value
    with open_store(tmp_path, host_bytes=0, **options(kv_dtype, compression)) as store:
        store_one(store, kv)
        assert not store.is_lossy("v")
        assert_same_bytes(get(store, "v"), kv)
        size = bytes_on_disk(tmp_path)
        assert store.usage()["disk"].used_bytes == size
        store.evict("disk", ["v"])
        assert store.usage()["disk"].used_bytes == 0


def test_non_finite_kv_must_fit_the_budget_unquantised(tmp_path):
    storage = StorageFormat("int8")
    record, kv = make_record("v", TOKENS), np.full(SPEC.shape(TOKENS), np.nan, np.float32)
    room = TensorStoreTier(url_of(tmp_path), SPEC, OURS, storage=storage).charge_bytes(record)
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS, room + 10, storage=storage)
    with pytest.raises(TierFullError):
        tier.write(record, kv)
    assert tier.budget.used_bytes == 0 and object_files(tmp_path) == [] and "v" not in tier
    assert tier.write(record, make_kv("v", TOKENS)) and tier.budget.used_bytes == room


# -- reading no more than needed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_dtype", "compression"), FORMATS)
def test_a_reader_of_one_layer_or_head_group_needs_no_other_bytes(tmp_path, kv_dtype, compression):
    with open_store(tmp_path, host_bytes=0, head_groups=2, **options(kv_dtype, compression)) as store:
        put(store, "v", TOKENS)
        whole = get(store, "v")
        (file,) = object_files(tmp_path)
        raw = bytearray(file.read_bytes())
        index = np.frombuffer(raw[-6 * 16 :], "<u8").reshape(3, 2, 2)
        for layer, group in np.ndindex(3, 2):
            if (layer, group) not in ((0, 0), (0, 1), (2, 1)):
                start, length = (int(value) for value in index[layer, group])
                raw[start : start + length] = bytes(length)
        file.write_bytes(raw)
        ticket = store.prepare_load(["v"])
        assert_same_bytes(ticket.read_layers("v", 0, 1), whole[:1])
        with pytest.raises(ShardCorruptError):
            ticket.read_layers("v", 2, 3)  # all heads of it
        store.complete_load(ticket)
    storage = StorageFormat(kv_dtype, compression)
    kvstore = {"driver": "file", "path": f"{file.parent}/"}
    layout = ObjectLayout(2, storage, 0, ())
    array = ArrayDriver(SPEC, None, None)._open(kvstore, storage.shape(SPEC, TOKENS), layout, {"read": True})
    part = np.asarray(array[2, :, :, 1:2].read().result())
    out = np.empty((2, TOKENS, 1, SPEC.head_dim), np.float32)
    if storage.is_lossy:
        dequantize(np.ascontiguousarray(part), kv_dtype, out)
    else:
        out = part
    np.testing.assert_array_equal(out, whole[2, :, :, 1:2])


def test_the_stored_array_can_be_read_without_our_code(tmp_path):
    with open_store(tmp_path, host_bytes=0, **options("int8", "zstd")) as store:
        put(store, "v", TOKENS)
        whole = get(store, "v")
    (file,) = object_files(tmp_path)
    bytes_codec, crc = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    shape = [3, 2, TOKENS + SCALE_ROWS, 2, 4]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, *shape[1:]],
                    "codecs": [bytes_codec, {"name": "zstd", "configuration": {"level": 1}}, crc],
                    "index_codecs": [bytes_codec],
                    "index_location": "end",
                },
            }
        ],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{file.parent}/"}, "metadata": metadata}
    stored = ts.open(spec, open=True, assume_metadata=True).result().read().result()
    scales = np.ascontiguousarray(np.moveaxis(stored[:, :, TOKENS:], 2, -1)).view("<f4")[..., 0]
    np.testing.assert_array_equal(stored[:, :, :TOKENS].view(np.int8) * scales[:, :, None], whole)


# -- lossy copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_variant_is_lossy_if_the_copy_to_be_loaded_is_lossy(tmp_path, kv_dtype):
    with open_store(tmp_path, **options(kv_dtype)) as store:
        put(store, "v", TOKENS)
        assert store.tiers_of("v") == ("host", "disk") and not store.is_lossy("v")  # the host's copy is read
        ticket = store.prepare_load(["v"])
        assert ticket.lossy == frozenset()
        store.complete_load(ticket)
        store.evict("host", ["v"])
        assert store.is_lossy("v")
        ticket = store.prepare_load(["v", "nothing"])
        assert ticket.lossy == {"v"}
        ticket.read_layers("v", 0, 3)
        assert store.complete_load(ticket) == {"host": ("v",)} and store.tier_of("v") == "host"
        assert store.is_lossy("v")  # promoted
        ticket = store.prepare_load(["v"])
        assert ticket.tiers == {"v": "host"} and ticket.lossy == {"v"}
        store.complete_load(ticket)
        assert not store.is_lossy("nothing")


def test_only_an_exact_copy_replaces_a_lossy_one_in_memory(tmp_path):
    kv = make_kv("v", TOKENS)
    with open_store(tmp_path, host_bytes=kv.nbytes, **options("int8")) as store:
        put(store, "v", TOKENS)
        (file,) = object_files(tmp_path)
        written = file.stat()
        store.evict("host", ["v"])
        promoted = get(store, "v").copy()
        assert store.is_lossy("v") and store.usage()["host"].used_bytes == kv.nbytes
        ticket = store.prepare_store(make_record("v", TOKENS))
        assert not ticket.exists and ticket.charge_bytes == {"host": 0} and ticket.shortfall_bytes == {}
        assert store.complete_store(ticket, kv) == ("host",)
        assert not store.is_lossy("v") and store.usage()["host"].used_bytes == kv.nbytes
        assert_same_bytes(get(store, "v"), kv)
        assert (promoted != kv).any()
        again = store.prepare_store(make_record("v", TOKENS))
        assert again.exists and store.complete_store(again, kv) == ()
        assert object_files(tmp_path) == [file] and file.stat().st_mtime_ns == written.st_mtime_ns


def test_lossy_read_does_not_replace_an_exact_copy_stored_meanwhile(tmp_path):
    with open_store(tmp_path, **options("int8")) as store:
        put(store, "v", TOKENS)
        store.evict("host", ["v"])
        ticket = store.prepare_load(["v"])
        ticket.read_layers("v", 0, 3)
        put(store, "v", TOKENS)
        assert store.complete_load(ticket) == {} and not store.is_lossy("v")
        assert_same_bytes(get(store, "v"), make_kv("v", TOKENS))


def test_queued_writes_are_exact(tmp_path, monkeypatch):
    write = TensorStoreTier.write
    seen = []

    def look(tier, *args, **kwargs):
        seen.append((store.is_lossy("v"), store.prepare_load(["v"]).lossy))
        is_written = write(tier, *args, **kwargs)
        seen.append((store.is_lossy("v"), store.prepare_load(["v"]).lossy))  # on disk, and in the queue's memory still
        return is_written

    monkeypatch.setattr(TensorStoreTier, "write", look)
    with open_store(tmp_path, host_bytes=0, **options("int8")) as store:
        put(store, "v", TOKENS)
        assert seen == [(False, frozenset())] * 2 and store.is_lossy("v")


def test_a_lossless_store_replaces_lossy_copies_of_others(place):
    with open_store(place.url, **options("int8")) as store:
        put(store, "v", TOKENS)
        put(store, "w", TOKENS)
    with open_store(place.url, host_bytes=0) as store:
        assert store.is_lossy("v") and store.is_lossy("w")
        assert put(store, "v", TOKENS) == ("disk",)
        assert not store.is_lossy("v") and store.is_lossy("w")
        assert_same_bytes(get(store, "v"), make_kv("v", TOKENS))
        assert_close("int8", get(store, "w"), make_kv("w", TOKENS))
        assert store.usage()["disk"].used_bytes == place.num_bytes() and len(place.object_keys()) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype: wanted one of auto, int8, fp8, got 'int4'"),
        ({"kv_dtype": None}, "kv_dtype: wanted"),
        ({"compression": "gzip"}, "compression: wanted one of none, zstd, got 'gzip'"),
    ],
)
def test_invalid_format_options_are_rejected_before_creating_anything(tmp_path, wrong, message):
    for where in (tmp_path / "kv", None):
        with pytest.raises(ValueError, match=message):
            open_store(where, **wrong)
    assert list(tmp_path.iterdir()) == []


# -- damage ----------------------------------------------------------------------------------------------------------


def test_scales_of_another_layer_are_detected_despite_valid_checksums(tmp_path):
    """zarr's own checksums would accept them; the record's do not."""
    with open_store(tmp_path, host_bytes=0, **options("int8")) as store:
        put(store, "v", TOKENS)
        (file,) = object_files(tmp_path)
        storage = StorageFormat("int8")
        shape, layout = storage.shape(SPEC, TOKENS), ObjectLayout(1, storage, 0, ())
        kvstore = {"driver": "file", "path": f"{file.parent}/"}
        driver = ArrayDriver(SPEC, None, None)
        stored = np.array(driver._open(kvstore, shape, layout, {"read": True}).read().result())
        stored[1, :, TOKENS:] = stored[0, :, TOKENS:]
        driver._open(kvstore, shape, layout, {"write": True}).write(stored).result()
        ticket = store.prepare_load(["v"])
        ticket.read_layers("v", 0, 1)
        with pytest.raises(ShardCorruptError, match="not the one that the record commits"):
            ticket.read_layers("v", 1, 2)


# -- records ---------------------------------------------------------------------------------------------------------


def reseal(raw: bytes, **changes: object) -> bytes:
    """The record with other fields and a valid checksum; None removes a field."""
    body = {**json.loads(raw), **changes}
    body = {name: value for name, value in body.items() if value is not None and name != "checksum"}

    def canonical(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    return canonical({**body, "checksum": hashlib.sha256(canonical(body)).hexdigest()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format_version": 1}, "format_version is 1, wanted 2"),
        ({"format_version": 3}, "format_version is 3, wanted 2"),
        ({"format_version": None}, "format_version"),
        ({"kv_dtype": "int4"}, "kv_dtype: wanted one of auto, int8, fp8, got 'int4'"),
        ({"compression": "lzma"}, "compression"),
    ],
)
def test_record_in_an_unknown_format_is_quarantined_and_its_bytes_are_deleted(place, caplog, changes, reason):
    with open_store(place.url, **options("int8")) as store:
        put(store, "v", TOKENS)
        put(store, "w", TOKENS)
    raw = reseal(place.read(place.record_key("v")), **changes)
    with pytest.raises(ShardCorruptError, match=reason):
        decode_record(raw, variant_id="v", identity=OURS, kv_spec=SPEC)
    place.write(place.record_key("v"), raw)
    with open_store(place.url, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["w"] and store.usage()["disk"].corrupt == 1
        assert store.prepare_load(["v"]).missing == {"v"} and reason in caplog.text
        assert put(store, "v", TOKENS) == ("disk",)
        assert store.erase([], uncommitted=True) == () and len(place.object_keys()) == 2
        assert store.usage()["disk"].used_bytes == place.num_bytes()


def test_mismatch_between_record_format_and_object_is_detected(tmp_path):
    with open_store(tmp_path, host_bytes=0, **options("int8")) as store:
        put(store, "v", TOKENS)
    file = record_file(tmp_path, "v")
    raw = file.read_bytes()
    for changes in ({"kv_dtype": "auto"}, {"compression": "zstd"}):
        file.write_bytes(reseal(raw, **changes))
        with open_store(tmp_path, host_bytes=0) as store:
            with pytest.raises(ShardCorruptError):
                get(store, "v")

"""Formats of the disk tier: 8-bit codes and their error, sizes, which copies are lossy, records."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ccjax.store import KVSpec, ShardCorruptError, ShardRecord, TensorStoreTier, TieredStore, TierFullError
from ccjax.store.formats import KV_DTYPES, SCALE_ROWS, ObjectLayout, dequantize, quantize
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

TOKENS = 16

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
TINY = float(np.finfo(np.float32).tiny)

SHAPES = st.tuples(st.integers(1, 2), st.just(2), st.integers(1, 7), st.integers(1, 3), st.integers(1, 4))
LIMIT = 2.0**126
VALUES = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-LIMIT, LIMIT, width=32),  # huge
    st.floats(-(2.0**-120), 2.0**-120, width=32),  # around the least scale, and denormal
    st.sampled_from([0.0, -0.0, 1.0, 127.0, LIMIT, 2.0**-149]),
)


def decoded(stored: np.ndarray, like: np.ndarray) -> np.ndarray:
    out = np.full(like.shape, 7, like.dtype)
    for layer, target in zip(stored, out, strict=True):
        dequantize(layer, target)
    return out


def bound(kv: np.ndarray) -> np.ndarray:
    """The stated bound in float64, with the rounding of float32 (2^-24 of 127, and of each product) on top."""
    x = np.abs(kv.astype(np.float64))
    largest = x.max(axis=2, keepdims=True)  # over tokens: a channel has a scale of its own
    limit = np.broadcast_to(np.maximum(largest / 127, TINY) / 2, x.shape) * (1 + 2.0**-14)
    if kv.dtype != np.float32:
        limit = limit + (x + limit) / 256 + 2.0**-133  # bfloat16's own rounding, and its least denormal
    return limit


def error(kv: np.ndarray, back: np.ndarray) -> np.ndarray:
    return np.abs(kv.astype(np.float64) - back.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(kv=SHAPES.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=VALUES)))
def test_decoded_values_are_within_the_error_bound_of_their_channel(dtype, kv):
    kv = kv.astype(dtype)
    stored = quantize(kv)
    assert stored is not None and stored.dtype == np.uint8
    assert stored.shape == (*kv.shape[:2], kv.shape[2] + SCALE_ROWS, *kv.shape[3:])
    back = decoded(stored, kv)
    assert (error(kv, back) <= bound(kv)).all()
    assert (back[kv == 0] == 0).all()


def test_error_bound_is_tight():
    kv = np.random.default_rng(0).standard_normal((2, 2, 64, 2, 8), dtype=np.float32)
    stored = quantize(kv)
    assert stored is not None
    limit = bound(kv)
    assert (error(kv, decoded(stored, kv)) / limit).max() > 0.93
    codes = stored[:, :, :64].view(np.int8)
    inner = np.abs(codes) < 100  # where one more is no overflow
    for step in (1, -1):
        mutant = stored.copy()
        mutant[:, :, :64] = np.where(inner, codes + step, codes).astype(np.int8).view(np.uint8)
        assert (error(kv, decoded(mutant, kv)) > limit).mean() > 0.3


def test_a_large_channel_does_not_affect_its_neighbours():
    """Keys without RoPE have such channels; a scale for the whole head would lose the others."""
    kv = np.random.default_rng(1).standard_normal((1, 2, 32, 2, 8), dtype=np.float32)
    alone = decoded(quantize(kv), kv)
    kv[..., 3] *= 1000
    beside = decoded(quantize(kv), kv)
    np.testing.assert_array_equal(np.delete(beside, 3, axis=-1), np.delete(alone, 3, axis=-1))


def test_encoded_layout_matches_hand_computed_bytes():
    """One layer, token, head: K = [1, -2, 0, 8], V = [448, 0.5, -0.25, 127]; the scales are little-endian float32."""
    kv = np.array([[[[[1.0, -2.0, 0.0, 8.0]]], [[[448.0, 0.5, -0.25, 127.0]]]]], np.float32)
    stored = quantize(kv)
    assert stored is not None
    assert stored[0, 0, 0, 0].tolist() == [127, 129, 0, 127]  # 129 is -127
    for which in (0, 1):
        scales = np.frombuffer(stored[0, which, 1:, 0].T.tobytes(), "<f4")
        wanted = np.maximum(np.abs(kv[0, which, 0, 0]) / np.float32(127), np.float32(TINY))
        np.testing.assert_array_equal(scales, wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_values_that_cannot_be_quantised_give_none(value):
    kv = np.ones((2, 2, 3, 1, 2), np.float32)
    kv[1, 1, 2, 0, 1] = value
    assert quantize(kv) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7e-3, 1e30, 2.0**-149])
def test_constant_values_decode_almost_exactly(value):
    kv = np.full((1, 2, 4, 2, 2), value, np.float32)
    back = decoded(quantize(kv), kv)
    np.testing.assert_allclose(back, kv, rtol=2.0**-23, atol=TINY / 2)


# -- objects ---------------------------------------------------------------------------------------------------------


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Within the bound of int8, but not exactly equal."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert (error(expected, actual) <= bound(expected)).all() and (actual != expected).any()


def store_one(store: TieredStore, kv: np.ndarray, variant_id: str = "v") -> tuple[str, ...]:
    record = ShardRecord(variant_id, "c", kv.shape[2], kv.nbytes)
    took = store.complete_store(store.prepare_store(record), kv)
    assert store.flush(120)
    return took


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("spec", [SPEC, BF16], ids=lambda spec: spec.dtype)
def test_variants_round_trip_within_budget_in_every_format(tmp_path, spec, kv_dtype):
    check_round_trip(directory(tmp_path), spec, kv_dtype)


def test_variants_round_trip_within_budget_in_buckets(bucket):
    check_round_trip(bucket, BF16, "int8")


def check_round_trip(place: Place, spec: KVSpec, kv_dtype: str) -> None:
    settings = {"kv_spec": spec, "host_bytes": 0, "kv_dtype": kv_dtype}
    with open_store(place.url, **settings) as store:
        for number, num_tokens in enumerate([1, 6, TOKENS, 33]):
            record = make_record(f"v{number}", num_tokens, spec)
            expected = TensorStoreTier(place.url, spec, OURS, kv_dtype=kv_dtype).charge_bytes(record)
            before = place.num_bytes()
            assert put(store, f"v{number}", num_tokens) == ("disk",)
            assert place.num_bytes() - before == expected
        usage = store.usage()["disk"]
        assert usage.used_bytes == place.num_bytes() == usage.bytes_written
        first = [get(store, f"v{number}") for number in range(4)]
    for again in KV_DTYPES:
        with open_store(place.url, **settings | {"kv_dtype": again}) as store:
            assert store.usage()["disk"].used_bytes == place.num_bytes()
            for number, num_tokens in enumerate([1, 6, TOKENS, 33]):
                loaded = get(store, f"v{number}")
                assert_same_bytes(loaded, first[number])
                is_coded = kv_dtype != "auto" and num_tokens > 1  # one token: the scales would take more than it saves
                assert store.is_lossy(f"v{number}") == is_coded
                same = assert_close if is_coded else assert_same_bytes
                same(loaded, make_kv(f"v{number}", num_tokens, spec))


def test_variant_size_matches_hand_computed_bytes(tmp_path):
    spec = KVSpec(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
    # 4 layers: codes and 4 rows of scales, 16 bytes of index each
    assert ObjectLayout("int8", ()).num_bytes(spec, 100) == 4 * (2 * 104 * 2 * 8 + 16)
    assert ObjectLayout("auto", ()).num_bytes(spec, 100) == 4 * (2 * 100 * 2 * 8 * 4 + 16)
    with open_store(tmp_path, kv_spec=spec, kv_dtype="int8") as store:
        put(store, "v", 100)
    (file,) = object_files(tmp_path)
    assert file.stat().st_size == 4 * (2 * 104 * 2 * 8 + 16)


@pytest.mark.parametrize(("num_tokens", "is_coded"), [(4, False), (5, True)])
def test_variant_too_short_to_shrink_is_stored_unquantised(tmp_path, num_tokens, is_coded):
    with open_store(tmp_path, kv_spec=BF16, host_bytes=0, kv_dtype="int8") as store:
        put(store, "v", num_tokens)
        assert store.is_lossy("v") == is_coded


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_kv_is_stored_unquantised(tmp_path, value):
    kv = make_kv("v", TOKENS)
    kv[1, 0, 3, 1, 2] = value
    with open_store(tmp_path, host_bytes=0, kv_dtype="int8") as store:
        store_one(store, kv)
        assert not store.is_lossy("v")
        assert_same_bytes(get(store, "v"), kv)
        size = bytes_on_disk(tmp_path)
        assert store.usage()["disk"].used_bytes == size
        store.evict("disk", ["v"])
        assert store.usage()["disk"].used_bytes == 0


def test_non_finite_kv_must_fit_the_budget_unquantised(tmp_path):
    record, kv = make_record("v", TOKENS), np.full(SPEC.shape(TOKENS), np.nan, np.float32)
    room = TensorStoreTier(url_of(tmp_path), SPEC, OURS, kv_dtype="int8").charge_bytes(record)
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS, room + 10, kv_dtype="int8")
    with pytest.raises(TierFullError):
        tier.write(record, kv)
    assert tier.budget.used_bytes == 0 and object_files(tmp_path) == [] and "v" not in tier
    assert tier.write(record, make_kv("v", TOKENS)) and tier.budget.used_bytes == room


# -- reading no more than needed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_reader_of_one_layer_needs_no_other_bytes(tmp_path, kv_dtype):
    with open_store(tmp_path, host_bytes=0, kv_dtype=kv_dtype) as store:
        put(store, "v", TOKENS)
        whole = get(store, "v")
        (file,) = object_files(tmp_path)
        raw = bytearray(file.read_bytes())
        index = np.frombuffer(raw[-3 * 16 :], "<u8").reshape(3, 2)
        for start, length in index[1:].tolist():
            raw[start : start + length] = bytes(length)
        file.write_bytes(raw)
        ticket = store.prepare_load(["v"])
        assert_same_bytes(ticket.read_layers("v", 0, 1), whole[:1])
        with pytest.raises(ShardCorruptError):
            ticket.read_layers("v", 2, 3)
        store.complete_load(ticket)


def test_the_stored_array_can_be_read_without_our_code(tmp_path):
    with open_store(tmp_path, host_bytes=0, kv_dtype="int8") as store:
        put(store, "v", TOKENS)
        whole = get(store, "v")
    (file,) = object_files(tmp_path)
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
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
                    "codecs": [bytes_codec],
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


def test_variant_is_lossy_if_the_copy_to_be_loaded_is_lossy(tmp_path):
    with open_store(tmp_path, kv_dtype="int8") as store:
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
    with open_store(tmp_path, host_bytes=kv.nbytes, kv_dtype="int8") as store:
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
    with open_store(tmp_path, kv_dtype="int8") as store:
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
    with open_store(tmp_path, host_bytes=0, kv_dtype="int8") as store:
        put(store, "v", TOKENS)
        assert seen == [(False, frozenset())] * 2 and store.is_lossy("v")


def test_a_lossless_store_replaces_lossy_copies_of_others(place):
    with open_store(place.url, kv_dtype="int8") as store:
        put(store, "v", TOKENS)
        put(store, "w", TOKENS)
    with open_store(place.url, host_bytes=0) as store:
        assert store.is_lossy("v") and store.is_lossy("w")
        assert put(store, "v", TOKENS) == ("disk",)
        assert not store.is_lossy("v") and store.is_lossy("w")
        assert_same_bytes(get(store, "v"), make_kv("v", TOKENS))
        assert_close(get(store, "w"), make_kv("w", TOKENS))
        assert store.usage()["disk"].used_bytes == place.num_bytes() and len(place.object_keys()) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype: wanted one of auto, int8, got 'int4'"),
        ({"kv_dtype": None}, "kv_dtype: wanted"),
    ],
)
def test_invalid_format_options_are_rejected_before_creating_anything(tmp_path, wrong, message):
    for where in (tmp_path / "kv", None):
        with pytest.raises(ValueError, match=message):
            open_store(where, **wrong)
    assert list(tmp_path.iterdir()) == []


# -- damage ----------------------------------------------------------------------------------------------------------


def test_scales_of_another_layer_are_detected(tmp_path):
    with open_store(tmp_path, host_bytes=0, kv_dtype="int8") as store:
        put(store, "v", TOKENS)
        (file,) = object_files(tmp_path)
        raw = np.fromfile(file, np.uint8)
        stored = raw[: -3 * 16].reshape(ObjectLayout("int8", ()).shape(SPEC, TOKENS))
        stored[1, :, TOKENS:] = stored[0, :, TOKENS:]
        raw.tofile(file)
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
        ({"kv_dtype": "fp8"}, "kv_dtype: wanted one of auto, int8, got 'fp8'"),
    ],
)
def test_record_in_an_unknown_format_is_quarantined_and_its_bytes_are_deleted(place, caplog, changes, reason):
    with open_store(place.url, kv_dtype="int8") as store:
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
    with open_store(tmp_path, host_bytes=0, kv_dtype="int8") as store:
        put(store, "v", TOKENS)
    file = record_file(tmp_path, "v")
    file.write_bytes(reseal(file.read_bytes(), kv_dtype="auto"))
    with open_store(tmp_path, host_bytes=0) as store, pytest.raises(ShardCorruptError):
        get(store, "v")

"""Specs, identities and records: arithmetic by hand, bad arguments, every flipped byte of a record."""

import dataclasses
import math

import pytest

from ccjax.store import KVSpec, ShardCorruptError, ShardRecord, StoreIdentity
from ccjax.store.formats import ObjectLayout
from ccjax.store.records import decode_record, encode_record
from tests.store.kv import BF16, OTHERS, OURS, SPEC, make_record


def test_shape_and_byte_counts_match_hand_computed_values():
    llama3_8b = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert llama3_8b.shape(512) == (32, 2, 512, 8, 128)
    assert llama3_8b.num_bytes(512) == 64 * 2**20  # 128 KiB a token
    assert KVSpec(32, 8, 128, "float32").num_bytes(1) == 256 * 2**10


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None])
def test_spec_rejects_invalid_dimensions_by_name(field, bad):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(SPEC, **{field: bad})


def test_spec_refuses_other_dtypes():
    with pytest.raises(ValueError, match="float16"):
        KVSpec(1, 1, 1, "float16")


def test_namespace_depends_on_every_identity_part_and_is_stable():
    parts = [
        StoreIdentity("a"),
        StoreIdentity("b"),
        StoreIdentity("a", "b"),
        StoreIdentity("ab"),
        StoreIdentity("a", "c"),
    ]
    assert len({identity.namespace for identity in parts}) == len(parts)
    # Fixed for ever: a change orphans every store on disk, and needs a new FORMAT_VERSION.
    assert OURS.namespace == "d7f76bd5519eb925b0a8449ec6d69efa1999c8c5bdf5598cc93d87b83b8bde78"
    with pytest.raises(ValueError, match="model_fingerprint"):
        StoreIdentity("")


@pytest.mark.parametrize("bad", ["", "../x", "a/b", "a.b", "a" * 129, "ü", None, 3])
def test_record_rejects_ids_that_are_not_file_names(bad):
    with pytest.raises(ValueError, match="variant_id"):
        ShardRecord(bad, "c", 1, 1)
    with pytest.raises(ValueError, match="chunk_id"):
        ShardRecord("v", bad, 1, 1)


def test_meta_is_normalised_to_json_types():
    assert ShardRecord("v", "c", 1, 1, {"ids": ("a", "b"), "none": None}).meta == {"ids": ["a", "b"], "none": None}


@pytest.mark.parametrize("bad", [{"x": math.nan}, {"x": object()}, ["x"], None])
def test_meta_rejects_values_not_representable_in_json(bad):
    with pytest.raises(ValueError, match="meta"):
        ShardRecord("v", "c", 1, 1, bad)


def encoded(variant_id="v", identity=OURS, kv_spec=SPEC, checksums=(1, 2, 3)) -> bytes:
    return encode_record(
        make_record(variant_id, kv_spec=kv_spec),
        identity=identity,
        kv_spec=kv_spec,
        object_id="0" * 32,
        layout=ObjectLayout("auto", checksums),
    )


def test_record_round_trip():
    raw = encoded(checksums=(0, 0xFFFFFFFFFFFFFFFF, 7))
    shard = decode_record(raw, variant_id="v", identity=OURS, kv_spec=SPEC)
    assert shard.record == make_record("v")
    assert shard.layout == ObjectLayout("auto", (0, 0xFFFFFFFFFFFFFFFF, 7))
    # by hand: 3 layers of 2*5*2*4 float32, and 16 bytes of index each
    assert shard.charge_bytes == len(raw) + 3 * (2 * 5 * 2 * 4 * 4 + 16)


def test_every_flipped_bit_and_every_truncation_of_a_record_is_found():
    raw = encoded()
    damaged = [
        raw[:position] + bytes([raw[position] ^ 1 << bit]) + raw[position + 1 :]
        for position in range(len(raw))
        for bit in range(8)
    ]
    damaged += [raw[:length] for length in range(len(raw))] + [
        raw + b" ",
        raw + b"\n",
        b" " + raw,
        b"[]",
        b"null",
        b"3",
    ]
    for bad in damaged:
        with pytest.raises(ShardCorruptError):
            decode_record(bad, variant_id="v", identity=OURS, kv_spec=SPEC)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (encoded(variant_id="w"), "variant_id"),
        (encoded(identity=OTHERS), "namespace"),
        (encoded(identity=StoreIdentity("model-a", "tenant")), "namespace"),
        (encoded(kv_spec=BF16), "dtype"),
        (encoded(kv_spec=dataclasses.replace(SPEC, head_dim=8)), "shape"),
    ],
)
def test_valid_record_of_another_variant_or_identity_is_rejected(raw, reason):
    with pytest.raises(ShardCorruptError, match=reason):
        decode_record(raw, variant_id="v", identity=OURS, kv_spec=SPEC)

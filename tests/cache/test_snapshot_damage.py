"""Damage to a snapshot: whatever file, whatever byte, no wrong KV and no wrong metadata ever enters a cache."""

import json
import os
import shutil

import pytest

from ccjax.cache.snapshot import restore_snapshot, save_snapshot
from ccjax.cache.snapshot.index import KEY, decode_index, inspect_snapshot
from ccjax.errors import SnapshotError
from tests.cache.snapshots import BYTES, changed, contents, data_files, open_cache, put, save_ten

KINDS = {
    "data": ("pack-*/0.0.0.0.0", 7),
    "array metadata": ("pack-*/.zarray", 2),
    "tree metadata": ("_METADATA", 13),
    "checkpoint metadata": ("_CHECKPOINT_METADATA", 13),
    "commit note": ("commit_success.txt", 13),
}
"""Every class of file of a part; every so many bytes are flipped."""


def restored(place, expected):
    """Restores into an empty cache and holds every variant that came through against what was saved."""
    with open_cache() as cache:
        report = restore_snapshot(cache, place)
        held = contents(cache)
    assert held == {key: expected[key] for key in held}
    assert report.num_restored == len(held) and report.num_restored + report.num_damaged == len(expected)
    return report


@pytest.fixture
def saved(place, small_packs):
    """A snapshot of ten, in five packs of three parts, and what it holds."""
    return place, save_ten(place)[1]


def test_damage_tests_cover_every_file_of_a_snapshot(saved):
    place, _ = saved
    files = {path for path in place.rglob("*") if path.is_file()}
    listed = {path for pattern, _ in KINDS.values() for path in place.glob(f"parts/*/*/{pattern}")}
    assert files == listed | {place / KEY} and len(data_files(place)) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_never_gives_a_wrong_variant(saved, kind):
    place, expected = saved
    pattern, step = KINDS[kind]
    file = sorted(place.glob(f"parts/*/00000/{pattern}"))[0]
    whole = file.read_bytes()
    num_damaged = 0
    for position in range(0, min(len(whole), 20 * step), step):
        raw = bytearray(whole)
        raw[position] ^= 1 << position % 8
        file.write_bytes(raw)
        report = restored(place, expected)
        num_damaged += report.num_damaged
        assert report.num_damaged == 1 if kind == "data" else report.num_damaged <= 4  # those of this part
    file.write_bytes(whole)
    assert restored(place, expected).num_damaged == 0
    assert num_damaged > 0 or kind in ("checkpoint metadata", "commit note")  # those are not read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "zeroed", "longer"])
def test_damaged_file_loses_at_most_its_own_variants(saved, kind, damage):
    place, expected = saved
    file = sorted(place.glob(f"parts/*/00000/{KINDS[kind][0]}"))[0]
    raw = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        half = len(raw) // 2
        file.write_bytes(
            {"empty": b"", "cut": raw[:half], "zeroed": bytes(len(raw)), "longer": raw + raw[:half]}[damage]
        )
    report = restored(place, expected)
    assert report.num_damaged <= (2 if kind in ("data", "array metadata") else 4)
    if kind == "data" and damage != "longer":
        assert report.num_damaged == 2


def test_swapped_packs_are_detected(saved):
    place, expected = saved
    first, second = data_files(place)[:2]
    raw = first.read_bytes()
    assert len(raw) == second.stat().st_size == 2 * BYTES
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    assert restored(place, expected).num_damaged == 4


def test_missing_part_loses_only_its_own_variants(saved):
    place, expected = saved
    shutil.rmtree(next(place.glob("parts/*/00001")))
    assert restored(place, expected).num_damaged == 4


def test_flipping_any_bit_of_the_index_is_detected(place):
    with open_cache() as cache:
        put(cache, 1, 2.5)
        save_snapshot(cache, place)
    whole = (place / KEY).read_bytes()
    decode_index(whole, "here")
    for position in range(len(whole)):
        for bit in range(8):
            raw = bytearray(whole)
            raw[position] ^= 1 << bit
            with pytest.raises(SnapshotError, match="snapshot.json|format version"):
                decode_index(bytes(raw), "here")
    for raw in (b"", b"null", b"[]", whole[:-1], whole + b"\n", b"[" * 100_000):
        with pytest.raises(SnapshotError, match="damaged"):
            decode_index(raw, "here")


def test_variants_with_swapped_ids_or_invalid_metadata_are_not_restored(saved):
    place, expected = saved

    def exchange(body):
        first, second = (variant["record"] for variant in body["variants"][:2])
        first["variant_id"], second["variant_id"] = second["variant_id"], first["variant_id"]
        body["variants"][2]["record"]["meta"]["fidelity"] = "approx"
        del body["variants"][3]["record"]["meta"]["prefix_ids"]
        body["variants"][4]["record"]["meta"]["token_ranking"][0] = -1

    changed(place, exchange)
    assert restored(place, expected).num_damaged == 5


@pytest.mark.parametrize(
    ("field", "value"), [("first_token", 3), ("first_token", 500), ("pack", 1), ("checksum", 0)], ids=str
)
def test_index_entry_with_wrong_values_loses_only_its_own_variant(saved, field, value):
    place, expected = saved
    changed(place, lambda body: body["variants"][1].update({field: value}))
    assert restored(place, expected).num_damaged == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pack", 5, "pack: wanted less than 5, got 5"),
        ("pack", -1, "pack: wanted an int >= 0"),
        ("first_token", -2, "first_token: wanted an int >= 0"),
        ("frequency_reuse", -1.0, "frequency_reuse: wanted a finite number >= 0"),
        ("frequency_reuse", "much", "damaged"),
        ("surprise", 1, "surprise"),
        ("folder", "../../elsewhere", "folder: wanted 32 hex digits"),
        ("format_version", 3, "has format version 3 and this program reads 2: upgrade this program"),
        ("format_version", 1, "has format version 1 and this program reads 2: save it again"),
    ],
)
def test_an_index_with_impossible_values_is_refused(saved, field, value, message):
    place, _ = saved
    is_whole = field in ("folder", "format_version")
    changed(place, lambda body: (body if is_whole else body["variants"][1]).update({field: value}))
    with pytest.raises(SnapshotError, match=message):
        inspect_snapshot(place)


def test_snapshot_omits_variants_lost_or_damaged_in_the_store(tmp_path, place):
    with open_cache((tmp_path / "kv").as_uri(), host_bytes=0) as cache:
        ids = [put(cache, number) for number in range(4)]
        namespace = tmp_path / "kv" / cache.identity.namespace
        objects = {key: json.loads((namespace / "records" / f"{key}.json").read_bytes())["object_id"] for key in ids}
        broken = next(path for path in (namespace / "data" / objects[ids[1]]).rglob("*") if path.is_file())
        raw = bytearray(broken.read_bytes())
        raw[10] ^= 4
        broken.write_bytes(raw)
        os.unlink(namespace / "records" / f"{ids[2]}.json")
        shutil.rmtree(namespace / "data" / objects[ids[2]])
        report = save_snapshot(cache, place)
    assert (report.num_variants, report.num_damaged, report.num_evicted) == (2, 1, 1)
    assert {variant.record.variant_id for variant in inspect_snapshot(place).variants} == {ids[0], ids[3]}

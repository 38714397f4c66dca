"""Damage done to the files behind the store's back: every kind is found on load, and no read ever gives wrong data."""

import os
import shutil
import time
from pathlib import Path

import pytest

from store import ShardCorruptError, ShardNotFoundError, TensorStoreTier
from store.disk import ORPHAN_AGE_S, QUARANTINE_AGE_S
from tests.store.kv import (
    OTHERS,
    OURS,
    SPEC,
    assert_same_bytes,
    bytes_on_disk,
    get,
    make_kv,
    make_record,
    namespace_of,
    object_files,
    open_store,
    put,
    record_file,
    url_of,
)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path, host_bytes=0) as store:
        yield store


def flip(file: Path, position: int, mask: int = 1) -> None:
    raw = bytearray(file.read_bytes())
    raw[position] ^= mask
    file.write_bytes(raw)


def object_of(path: Path, variant_id: str, store) -> Path:
    """Stores a variant and returns the data object that this made."""
    before = set(object_files(path))
    put(store, variant_id)
    (new,) = set(object_files(path)) - before
    return new


def test_every_flipped_byte_of_an_object_is_found(tmp_path, store):
    file = object_of(tmp_path, "v", store)
    sound = file.read_bytes()
    for position in range(len(sound)):
        flip(file, position, 1 << position % 8)
        with pytest.raises(ShardCorruptError, match="variant v"):
            get(store, "v")
        file.write_bytes(sound)
    assert_same_bytes(get(store, "v"), make_kv("v"))
    assert store.usage()["disk"].corrupt == len(sound)


def test_damage_in_one_layer_spares_layers_read_before(tmp_path, store):
    file = object_of(tmp_path, "v", store)
    flip(file, SPEC.num_bytes(5) // 3 + 10)  # in layer 1
    ticket = store.prepare_load(["v"])
    assert_same_bytes(ticket.read_layers("v", 0, 1), make_kv("v")[:1])
    for _ in range(2):
        with pytest.raises(ShardCorruptError):
            ticket.read_layers("v", 0, 2)
    assert store.complete_load(ticket) == () and store.usage()["disk"].corrupt == 1


@pytest.mark.parametrize("keep", [0, 1, 100, 900, -1])
def test_truncated_object(tmp_path, store, keep):
    file = object_of(tmp_path, "v", store)
    os.truncate(file, keep % file.stat().st_size)
    with pytest.raises(ShardCorruptError):
        get(store, "v")


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: shutil.rmtree(file.parent)])
def test_deleted_object(tmp_path, store, damage):
    damage(object_of(tmp_path, "v", store))
    with pytest.raises(ShardCorruptError):
        get(store, "v")


def test_zeroed_object(tmp_path, store):
    file = object_of(tmp_path, "v", store)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ShardCorruptError):
        get(store, "v")


def test_swapped_objects_of_two_variants(tmp_path, store):
    first, second = object_of(tmp_path, "v", store), object_of(tmp_path, "w", store)
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    for variant_id in ("v", "w"):
        with pytest.raises(ShardCorruptError, match="not the one that the record commits"):
            get(store, variant_id)


def test_swapped_layers_of_one_object(tmp_path, store):
    file = object_of(tmp_path, "v", store)
    raw, size = file.read_bytes(), SPEC.num_bytes(5) // 3 + 4
    file.write_bytes(raw[size : 2 * size] + raw[:size] + raw[2 * size :])
    with pytest.raises(ShardCorruptError, match="not the one"):
        get(store, "v")


def test_discarded_is_a_miss_now_and_after_a_restart_and_can_be_stored_again(tmp_path, store):
    flip(object_of(tmp_path, "v", store), 0)
    with pytest.raises(ShardCorruptError):
        get(store, "v")
    store.discard("v")
    assert store.prepare_load(["v"]).missing == {"v"}
    assert object_files(tmp_path) == [] and store.usage()["disk"].used_bytes == 0
    assert not record_file(tmp_path, "v").exists()
    with open_store(tmp_path, host_bytes=0) as again:
        assert again.records() == []
        put(again, "v")
        assert_same_bytes(get(again, "v"), make_kv("v"))


@pytest.mark.parametrize("position", [0, 1, 40, 200, -40, -1])
def test_damaged_record_is_quarantined_at_open_and_its_object_swept(tmp_path, position):
    with open_store(tmp_path) as store:
        put(store, "v")
        put(store, "w")
    flip(record_file(tmp_path, "v"), position)
    with open_store(tmp_path, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["w"]
        assert store.usage()["disk"].corrupt == 1 and not record_file(tmp_path, "v").exists()
        (kept,) = (namespace_of(tmp_path) / "quarantine").iterdir()
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))
        assert len(object_files(tmp_path)) == 3  # the orphan is young: its record might be about to come
    make_old(tmp_path)
    with open_store(tmp_path):
        assert len(object_files(tmp_path)) == 2 and kept.exists()
    make_old(tmp_path, QUARANTINE_AGE_S)
    with open_store(tmp_path):
        assert len(object_files(tmp_path)) == 2 and not kept.exists()


def test_record_that_is_damaged_while_we_write_does_not_hold_its_name(tmp_path, store):
    record_file(tmp_path, "v").write_bytes(b"{}")  # appears after open
    put(store, "v")
    assert_same_bytes(get(store, "v"), make_kv("v"))
    assert store.usage()["disk"].corrupt == 1


def test_record_of_another_variant_under_our_name(tmp_path):
    with open_store(tmp_path) as store:
        put(store, "v")
    os.link(record_file(tmp_path, "v"), record_file(tmp_path, "w"))
    with open_store(tmp_path, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["v"] and store.usage()["disk"].corrupt == 1
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_variant_copied_from_another_model_is_refused(tmp_path):
    with open_store(tmp_path, identity=OTHERS) as store:
        put(store, "v")
    with open_store(tmp_path, exclusive=False) as store:
        put(store, "w")
    shutil.copytree(tmp_path / OTHERS.namespace / "data", namespace_of(tmp_path) / "data", dirs_exist_ok=True)
    shutil.copytree(tmp_path / OTHERS.namespace / "records", namespace_of(tmp_path) / "records", dirs_exist_ok=True)
    with open_store(tmp_path) as store:
        assert [record.variant_id for record in store.records()] == ["w"] and store.usage()["disk"].corrupt == 1
        assert store.prepare_load(["v"]).missing == {"v"}


def make_old(path: Path, age_s: float = ORPHAN_AGE_S) -> None:
    long_ago = time.time() - age_s - 60
    for file in [*path.rglob("*")]:
        os.utime(file, (long_ago, long_ago))


def test_sweep_takes_old_left_overs_and_nothing_else(tmp_path):
    with open_store(tmp_path) as store:
        put(store, "v")
    space = namespace_of(tmp_path)
    (space / "data" / ("a" * 32)).mkdir()
    left_overs = [
        space / "data" / ("a" * 32) / "c.0.0.0.0.0.__lock",
        space / "records" / "w.json.0123.tmp",
        space / "identity.json.0123.tmp",
        tmp_path / ".probe-0123.tmp",
    ]
    for file in left_overs:
        file.write_bytes(b"half")
    with open_store(tmp_path):
        assert all(file.exists() for file in left_overs)
    make_old(tmp_path)
    with open_store(tmp_path, host_bytes=0) as store:
        assert not any(file.exists() for file in left_overs)
        assert_same_bytes(get(store, "v"), make_kv("v"))
        assert store.usage()["disk"].used_bytes == bytes_on_disk(tmp_path)


# -- two stores on one directory ------------------------------------------------------------------------------------


def two_tiers(path: Path) -> tuple[TensorStoreTier, TensorStoreTier]:
    return TensorStoreTier(url_of(path), SPEC, OURS), TensorStoreTier(url_of(path), SPEC, OURS)


def test_refresh_shows_what_others_did(tmp_path):
    ours, theirs = two_tiers(tmp_path)
    assert theirs.write(make_record("v"), make_kv("v")) and theirs.write(make_record("w"), make_kv("w"))
    assert "v" not in ours
    assert ours.refresh() == (("v", "w"), ())
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v"))
    theirs.remove(["v"])
    assert ours.refresh() == ((), ("v",)) and ours.refresh() == ((), ())
    assert ours.records() == [make_record("w")] and ours.budget.used_bytes == bytes_on_disk(tmp_path)


def test_evicted_by_another_process_is_a_miss_not_corruption(tmp_path):
    ours, theirs = two_tiers(tmp_path)
    theirs.write(make_record("v"), make_kv("v"))
    ours.refresh()
    reader = ours.open("v")
    assert_same_bytes(reader.wait(0, 1), make_kv("v")[:1])
    theirs.remove(["v"])
    with pytest.raises(ShardNotFoundError, match="evicted"):
        reader.wait(1, 3)
    assert "v" not in ours and ours.num_corrupt == 0 and ours.budget.used_bytes == 0


def test_evicted_and_written_again_by_another_process(tmp_path):
    ours, theirs = two_tiers(tmp_path)
    theirs.write(make_record("v"), make_kv("v"))
    ours.refresh()
    theirs.remove(["v"])
    theirs.write(make_record("v"), make_kv("v", writer=1))
    with pytest.raises(ShardNotFoundError):
        ours.open("v").wait(0, 3)
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v", writer=1))
    ours.remove(["v"])
    assert theirs.refresh() == ((), ("v",)) and bytes_on_disk(tmp_path) == 0


def test_removing_a_stale_variant_spares_the_new_one(tmp_path):
    ours, theirs = two_tiers(tmp_path)
    theirs.write(make_record("v"), make_kv("v"))
    ours.refresh()
    theirs.remove(["v"])
    theirs.write(make_record("v"), make_kv("v", writer=1))
    assert ours.remove(["v"]) == ("v",) and ours.budget.used_bytes == 0
    assert_same_bytes(theirs.open("v").wait(0, 3), make_kv("v", writer=1))


def test_commit_during_a_refresh_is_no_removal(tmp_path, monkeypatch):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    names = tier._root.names

    def names_then_commit(prefix):
        listed = names(prefix)
        monkeypatch.undo()
        tier.write(make_record("v"), make_kv("v"))
        return listed

    monkeypatch.setattr(tier._root, "names", names_then_commit)
    assert tier.refresh() == ((), ()) and "v" in tier
    assert tier.refresh() == ((), ()) and tier.budget.used_bytes == bytes_on_disk(tmp_path)


def test_refresh_between_the_halves_of_an_eviction_keeps_the_books(tmp_path):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))
    hidden = tier.hide(["v"])
    assert tier.refresh() == (("v",), ())  # its record is still there
    assert tier.erase(hidden) == ("v",)
    assert "v" not in tier and tier.budget.used_bytes == 0 == bytes_on_disk(tmp_path)


def test_variant_that_cannot_be_deleted_stays_unless_condemned(tmp_path):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))
    record_file(tmp_path, "v").unlink()
    record_file(tmp_path, "v").symlink_to(record_file(tmp_path, "v"))  # ELOOP: cannot even be read
    assert tier.remove(["v"]) == () and "v" in tier and tier.budget.used_bytes > 0
    assert_same_bytes(tier.open("v").wait(0, 3), make_kv("v"))
    assert tier.erase(tier.hide(["v"]), condemned=True) == ("v",)
    assert "v" not in tier and object_files(tmp_path) == [] and tier.budget.used_bytes == 0


def test_writer_that_comes_second_gets_the_first_ones_variant(tmp_path):
    ours, theirs = two_tiers(tmp_path)
    assert theirs.write(make_record("v"), make_kv("v", writer=1)) is True
    assert ours.write(make_record("v"), make_kv("v")) is False
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v", writer=1))
    assert ours.budget.used_bytes == bytes_on_disk(tmp_path) and len(object_files(tmp_path)) == 1

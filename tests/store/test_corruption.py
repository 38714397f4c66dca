"""Damaged objects: every kind of damage is found on load, and no read ever gives wrong data."""

import time
from unittest.mock import Mock

import pytest

from ccjax.store import ShardCorruptError, ShardNotFoundError, StoreUnavailableError, TensorStoreTier
from ccjax.store.commits import CommittedShards
from ccjax.store.formats import KV_DTYPES
from ccjax.store.namespaces import ORPHAN_AGE_S, QUARANTINE_AGE_S
from tests.store.kv import (
    OTHERS,
    OURS,
    SPEC,
    assert_same_bytes,
    assert_swapped_objects_are_refused,
    bytes_on_disk,
    get,
    make_kv,
    make_record,
    namespace_of,
    object_files,
    object_of,
    open_store,
    put,
    record_file,
    url_of,
)
from tests.store.places import Place, directory


@pytest.fixture
def store(place):
    with open_store(place.url, host_bytes=0) as store:
        yield store


@pytest.fixture(params=KV_DTYPES)
def any_format(request, place):
    with open_store(place.url, host_bytes=0, kv_dtype=request.param) as store:
        yield store


def test_every_flipped_byte_of_an_object_is_found(place, any_format, stride):
    """Each with a new store: after damage in one layer, reads of the others may still be in progress when the next byte
    is flipped, and they do not reread the object's index (objects never change)."""
    key = object_of(place, "v", any_format)
    sound, whole = place.read(key), get(any_format, "v")
    # Over a network, only a few of each kind (data, scales, checksums, index).
    for position in range(0, len(sound), stride(11) if place.kind == "file" else 97):
        place.flip(key, position, 1 << position % 8)
        with open_store(place.url, host_bytes=0) as store:
            with pytest.raises(ShardCorruptError, match="variant v"):
                get(store, "v")
            assert store.usage()["disk"].corrupt == 1
        place.write(key, sound)
    assert_same_bytes(get(any_format, "v"), whole)


def test_damage_in_one_layer_spares_layers_read_before(place, store):
    key = object_of(place, "v", store)
    place.flip(key, SPEC.num_bytes(5) // 3 + 10)  # in layer 1
    ticket = store.prepare_load(["v"])
    assert_same_bytes(ticket.read_layers("v", 0, 1), make_kv("v")[:1])
    for _ in range(2):
        with pytest.raises(ShardCorruptError):
            ticket.read_layers("v", 0, 2)
    assert store.complete_load(ticket) == {} and store.usage()["disk"].corrupt == 1


@pytest.mark.parametrize("keep", [0, 1, 100, -100, -1])
def test_truncated_object_is_corrupt(place, any_format, keep):
    key = object_of(place, "v", any_format)
    place.write(key, place.read(key)[:keep])
    with pytest.raises(ShardCorruptError):
        get(any_format, "v")


def test_deleted_object_is_corrupt(place, store):
    place.delete(object_of(place, "v", store))
    with pytest.raises(ShardCorruptError):
        get(store, "v")


def test_swapped_objects_of_two_variants_are_corrupt(place, any_format):
    assert_swapped_objects_are_refused(place, any_format, match="not the one that the record commits")


def test_swapped_layers_and_zeros_are_corrupt(place, store):
    key = object_of(place, "v", store)
    raw, size = place.read(key), SPEC.num_bytes(5) // 3
    for changed, message in (
        (raw[size : 2 * size] + raw[:size] + raw[2 * size :], "not the one"),
        (bytes(len(raw)), "variant v"),
    ):
        place.write(key, changed)
        with pytest.raises(ShardCorruptError, match=message):
            get(store, "v")


def test_discarded_variant_stays_missing_until_stored_again(place, store):
    place.flip(object_of(place, "v", store), 0)
    with pytest.raises(ShardCorruptError):
        get(store, "v")
    store.discard("v")
    assert store.prepare_load(["v"]).missing == {"v"}
    assert place.object_keys() == [] and store.usage()["disk"].used_bytes == 0
    assert place.record_key("v") not in place.keys()
    with open_store(place.url, host_bytes=0) as again:
        assert again.records() == []
        put(again, "v")
        assert_same_bytes(get(again, "v"), make_kv("v"))


@pytest.mark.parametrize("position", [0, 1, 40, 200, -40, -1])
def test_damaged_record_is_quarantined_at_open_and_its_object_swept(place, position, monkeypatch):
    with open_store(place.url) as store:
        put(store, "v")
        put(store, "w")
    place.flip(place.record_key("v"), position)
    with open_store(place.url, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["w"]
        assert store.usage()["disk"].corrupt == 1 and place.record_key("v") not in place.keys()
        (kept,) = [key for key in place.keys() if "/quarantine/" in key]
        put(store, "v")
        assert_same_bytes(get(store, "v"), make_kv("v"))
        assert len(place.object_keys()) == 3  # the orphan is young: its record might be about to come
    place.let_pass(ORPHAN_AGE_S, monkeypatch)
    with open_store(place.url):
        assert len(place.object_keys()) == 2 and kept in place.keys()
    place.let_pass(QUARANTINE_AGE_S, monkeypatch)
    with open_store(place.url):
        assert len(place.object_keys()) == 2 and kept not in place.keys()


def test_a_damaged_record_is_not_announced_as_new(place, store):
    with open_store(place.url) as theirs:
        put(theirs, "v")
        put(theirs, "w")
    place.flip(place.record_key("v"), 40)
    assert store.refresh() == (("w",), ()) and store.usage()["disk"].corrupt == 1


def test_record_damaged_during_our_write_does_not_block_its_name(place, store):
    place.write(place.record_key("v"), b"{}")  # appears after open
    put(store, "v")
    assert_same_bytes(get(store, "v"), make_kv("v"))
    assert store.usage()["disk"].corrupt == 1


def test_record_copied_from_another_variant_is_corrupt(place):
    with open_store(place.url) as store:
        put(store, "v")
    place.write(place.record_key("w"), place.read(place.record_key("v")))
    with open_store(place.url, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["v"] and store.usage()["disk"].corrupt == 1
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_variant_copied_from_another_model_is_refused(place):
    with open_store(place.url, identity=OTHERS) as store:
        put(store, "v")
    with open_store(place.url) as store:
        put(store, "w")
    for key in (*place.object_keys(OTHERS), place.record_key("v", OTHERS)):
        place.write(key.replace(OTHERS.namespace, OURS.namespace), place.read(key))
    with open_store(place.url) as store:
        assert [record.variant_id for record in store.records()] == ["w"] and store.usage()["disk"].corrupt == 1
        assert store.prepare_load(["v"]).missing == {"v"}


def test_unread_record_keeps_its_object_from_the_sweep(place, monkeypatch, caplog):
    with open_store(place.url) as store:
        put(store, "v")
    place.let_pass(ORPHAN_AGE_S, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(CommittedShards, "read", Mock(side_effect=StoreUnavailableError("no answer")))
        with open_store(place.url) as store:
            assert store.records() == [] and "cannot read the record of variant v" in caplog.text
    with open_store(place.url, host_bytes=0) as store:
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_sweep_deletes_old_left_overs_and_nothing_else(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        put(store, "v")
    space = namespace_of(tmp_path)
    (space / "data" / ("a" * 32)).mkdir()
    left_overs = [
        space / "data" / ("a" * 32) / "c.0.0.0.0.0.__lock",
        *(space / folder / "w.json.0123.tmp" for folder in ("records", "notes", "catalog", "leases")),
        space / "identity.json.0123.tmp",
        tmp_path / ".probe-0123.tmp",
    ]
    for file in left_overs:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"half")
    with open_store(tmp_path):
        assert all(file.exists() for file in left_overs)
    directory(tmp_path).let_pass(ORPHAN_AGE_S, monkeypatch)
    with open_store(tmp_path, host_bytes=0) as store:
        assert not any(file.exists() for file in left_overs)
        assert_same_bytes(get(store, "v"), make_kv("v"))
        assert store.usage()["disk"].used_bytes == bytes_on_disk(tmp_path)


def test_sweep_in_a_bucket_deletes_old_left_overs_and_nothing_else(bucket, monkeypatch):
    with open_store(bucket.url) as store:
        put(store, "v")
    # What a process killed in its first second, or between data and record, leaves; and keys of others.
    young = f"{time.time_ns() // 1_000_000:012x}{'0' * 20}"
    left_overs = [f".probe-{young}", f"{OURS.namespace}/data/{young}/c.0.0.0.0.0"]
    others = [f"{OURS.namespace}/data/not-ours/c.0.0.0.0.0", ".profile", "readme.txt"]
    for key in (*left_overs, *others):
        bucket.write(key, b"half")
    with open_store(bucket.url):
        assert {*left_overs, *others} <= set(bucket.keys())
    bucket.let_pass(ORPHAN_AGE_S, monkeypatch)
    with open_store(bucket.url, host_bytes=0) as store:
        assert not set(left_overs) & set(bucket.keys()) and set(others) <= set(bucket.keys())
        assert_same_bytes(get(store, "v"), make_kv("v"))


# -- two stores on one place ------------------------------------------------------------------------------------


def two_tiers(place: Place) -> tuple[TensorStoreTier, TensorStoreTier]:
    return TensorStoreTier(place.url, SPEC, OURS), TensorStoreTier(place.url, SPEC, OURS)


def test_refresh_applies_changes_of_others(place):
    ours, theirs = two_tiers(place)
    assert theirs.write(make_record("v"), make_kv("v")) and theirs.write(make_record("w"), make_kv("w"))
    assert "v" not in ours
    assert ours.refresh() == (("v", "w"), ())
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v"))
    theirs.remove(["v"])
    assert ours.refresh() == ((), ("v",)) and ours.refresh() == ((), ())
    assert ours.records() == [make_record("w")] and ours.budget.used_bytes == place.num_bytes()


def test_variant_evicted_by_another_process_is_a_miss_not_corruption(place):
    ours, theirs = two_tiers(place)
    theirs.write(make_record("v"), make_kv("v"))
    ours.refresh()
    begun, reader = ours.open("v"), ours.open("v")
    assert_same_bytes(begun.wait(0, 1), make_kv("v")[:1])
    theirs.remove(["v"])
    with pytest.raises(ShardNotFoundError, match="evicted"):
        reader.wait(1, 3)
    if place.kind == "file":  # a file that is open outlives its name
        assert_same_bytes(begun.wait(1, 3), make_kv("v")[1:])
    else:
        with pytest.raises(ShardNotFoundError, match="evicted"):
            begun.wait(1, 3)
    assert "v" not in ours and ours.num_corrupt == 0 and ours.budget.used_bytes == 0


def test_variant_rewritten_by_another_process_misses_once_then_loads(place):
    ours, theirs = two_tiers(place)
    theirs.write(make_record("v"), make_kv("v"))
    ours.refresh()
    theirs.remove(["v"])
    theirs.write(make_record("v"), make_kv("v", writer=1))
    with pytest.raises(ShardNotFoundError):
        ours.open("v").wait(0, 3)
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v", writer=1))
    ours.remove(["v"])
    assert theirs.refresh() == ((), ("v",)) and place.num_bytes() == 0


def test_variant_evicted_by_another_process_is_rewritten_and_charged_once(place):
    ours, theirs = (TensorStoreTier(place.url, SPEC, OURS) for _ in range(2))
    assert ours.write(make_record("v"), make_kv("v"))
    theirs.refresh()
    assert theirs.remove(["v"]) == ("v",)
    assert ours.write(make_record("v"), make_kv("v", writer=1))
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v", writer=1))
    assert ours.budget.used_bytes == place.num_bytes()


def test_failed_eviction_does_not_charge_the_variant_twice(place, monkeypatch):
    """A refresh meanwhile has found the record."""
    tier = TensorStoreTier(place.url, SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))

    def refuse(key):
        assert tier.refresh() == (("v",), ())
        raise StoreUnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(tier._root, "delete", refuse)
        assert tier.remove(["v"]) == ()
    assert tier.budget.used_bytes == place.num_bytes() and tier.remove(["v"]) == ("v",) and not tier.budget.used_bytes


def test_commit_during_a_refresh_is_not_taken_for_a_removal(place, monkeypatch):
    tier = TensorStoreTier(place.url, SPEC, OURS)
    names = tier._root.names

    def names_then_commit(prefix):
        listed = names(prefix)
        monkeypatch.setattr(tier._root, "names", names)
        tier.write(make_record("v"), make_kv("v"))
        return listed

    monkeypatch.setattr(tier._root, "names", names_then_commit)
    assert tier.refresh() == ((), ()) and "v" in tier
    assert tier.refresh() == ((), ()) and tier.budget.used_bytes == place.num_bytes()


def test_commit_during_a_sweep_is_not_taken_for_an_orphan(place, monkeypatch):
    tier, other = TensorStoreTier(place.url, SPEC, OURS), TensorStoreTier(place.url, SPEC, OURS)
    refresh = tier.refresh

    def refresh_then_commit():
        found = refresh()
        other.write(make_record("v"), make_kv("v"))
        return found

    monkeypatch.setattr(tier, "refresh", refresh_then_commit)
    assert tier.sweep(0.0, 0.0) == ()
    later = TensorStoreTier(place.url, SPEC, OURS)
    later.refresh()
    assert_same_bytes(later.open("v").wait(0, 3), make_kv("v"))


def test_refresh_during_an_eviction_keeps_the_budget_correct(place):
    tier = TensorStoreTier(place.url, SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))
    hidden = tier.hide(["v"])
    assert tier.refresh() == (("v",), ())  # its record is still there
    assert tier.erase(hidden) == ("v",)
    assert "v" not in tier and tier.budget.used_bytes == 0 == place.num_bytes()


def test_variant_that_cannot_be_deleted_stays_unless_covered(tmp_path):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    tier.write(make_record("v"), make_kv("v"))
    record_file(tmp_path, "v").unlink()
    record_file(tmp_path, "v").symlink_to(record_file(tmp_path, "v"))  # ELOOP: cannot even be read
    assert tier.remove(["v"]) == () and "v" in tier and tier.budget.used_bytes > 0
    assert_same_bytes(tier.open("v").wait(0, 3), make_kv("v"))
    assert tier.erase(tier.hide(["v"]), covered=True) == ("v",)
    assert "v" not in tier and object_files(tmp_path) == [] and tier.budget.used_bytes == 0


def test_second_writer_adopts_the_variant_of_the_first(place):
    ours, theirs = two_tiers(place)
    assert theirs.write(make_record("v"), make_kv("v", writer=1)) is True
    assert ours.write(make_record("v"), make_kv("v")) is False
    assert_same_bytes(ours.open("v").wait(0, 3), make_kv("v", writer=1))
    assert ours.budget.used_bytes == place.num_bytes() and len(place.object_keys()) == 1

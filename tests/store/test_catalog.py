"""The catalog: its savings, that it is never authoritative, and every way in which it can be wrong."""

import json
import logging
import random
import threading
import time
from unittest.mock import Mock

import pytest

import ccjax.store.catalog
import ccjax.store.commits
from ccjax.store import ShardNotFoundError, StoreUnavailableError, TensorStoreTier
from ccjax.store.commits import CommittedShards
from ccjax.store.erasure import erase_from_disk
from ccjax.store.namespaces import ORPHAN_AGE_S
from tests.store.kv import (
    OTHERS,
    OURS,
    SPEC,
    assert_same_bytes,
    bytes_on_disk,
    make_kv,
    make_record,
    namespace_of,
    open_store,
    put,
    url_of,
)
from tests.store.places import Place, directory
from tests.store.test_processes import spawn
from tests.store.worker import WIDE, WIDE_TOKENS

IDS = ("a", "b", "c", "d", "e")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts have two records, and one change causes a new catalog."""
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 1)
    monkeypatch.setattr(ccjax.store.catalog, "RECORDS_PER_PART", 2)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Variants whose own record was read, in order."""
    seen: list[str] = []
    read = CommittedShards.read

    def spy(self, variant_id):
        seen.append(variant_id)
        return read(self, variant_id)

    monkeypatch.setattr(CommittedShards, "read", spy)
    return seen


def tier_at(place: Place) -> TensorStoreTier:
    return TensorStoreTier(place.url, SPEC, OURS)


def filled(place: Place, ids=IDS) -> TensorStoreTier:
    tier = tier_at(place)
    for variant_id in ids:
        assert tier.write(make_record(variant_id), make_kv(variant_id))
    return tier


def catalog_keys(place: Place) -> list[str]:
    return [key for key in place.keys() if "/catalog/" in key]


def assert_holds(tier: TensorStoreTier, place: Place, ids=IDS) -> None:
    """The tier's view of its variants equals the records in the place."""
    assert sorted(tier.records(), key=lambda record: record.variant_id) == [make_record(key) for key in sorted(ids)]
    assert sorted(tier.summaries()) == [make_record(key).summary for key in sorted(ids)]
    for variant_id in ids:
        assert_same_bytes(tier.open(variant_id).wait(0, 3), make_kv(variant_id))
    assert tier.budget.used_bytes == place.num_bytes()


def test_a_store_with_a_catalog_opens_without_reading_a_record(place, reads):
    filled(place).tidy()
    assert len(catalog_keys(place)) == 4  # five variants, about two in each part
    reads.clear()
    tier = tier_at(place)
    assert_holds(tier, place)
    assert reads == []


def test_records_missing_from_the_catalog_are_read_and_deleted_ones_dropped(place, reads):
    tier = filled(place)
    tier.tidy()
    tier.write(make_record("f"), make_kv("f"))
    tier.remove(["b"])
    reads.clear()
    again = tier_at(place)
    assert reads == ["f"]
    assert_holds(again, place, ("a", "c", "d", "e", "f"))


def test_refresh_reads_the_catalog_of_others(place, reads):
    ours = tier_at(place)
    filled(place).tidy()
    reads.clear()
    assert ours.refresh() == (IDS, ()) and reads == []
    assert_holds(ours, place)


def test_few_new_records_are_read_directly_and_many_from_the_catalog(place, reads, monkeypatch):
    tiers = [tier_at(place) for _ in range(2)]
    theirs = filled(place, IDS[:2])
    theirs.tidy()
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 3)
    reads.clear()
    assert tiers[0].refresh() == (IDS[:2], ()) and sorted(reads) == ["a", "b"]
    theirs.write(make_record("c"), make_kv("c"))
    theirs._commits.renew_catalog()
    theirs.tidy()
    reads.clear()
    assert tiers[1].refresh() == (IDS[:3], ()) and reads == []


@pytest.mark.parametrize(("share", "is_read"), [(0.75, False), (0.5, True)])
def test_small_share_of_new_records_is_read_without_the_catalog(place, reads, monkeypatch, share, is_read):
    theirs = filled(place, IDS[:2])
    ours = tier_at(place)
    for variant_id in IDS[2:4]:
        theirs.write(make_record(variant_id), make_kv(variant_id))
    theirs.tidy()
    reads.clear()
    monkeypatch.setattr(ccjax.store.commits, "COPIED_SHARE", share)
    assert ours.refresh() == (IDS[2:4], ()) and (reads == []) == is_read


def test_other_files_are_not_read_as_records(place, reads):
    filled(place).tidy()
    place.write(f"{place.record_key('a')}.{'0' * 32}.tmp", b"")  # a writer is at work
    reads.clear()
    assert_holds(tier_at(place), place)
    assert reads == []


def test_few_changes_write_no_new_catalog(place, monkeypatch):
    tier = filled(place)
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 6)
    tier.tidy()
    assert catalog_keys(place) == []
    tier.write(make_record("f"), make_kv("f"))
    tier.tidy()
    before = {key: place.read(key) for key in catalog_keys(place)}
    assert before
    tier.remove(["a", "b", "c"])
    tier.tidy()
    assert {key: place.read(key) for key in catalog_keys(place)} == before
    tier.remove(["d", "e", "f"])
    tier.tidy()
    assert catalog_keys(place) == [f"{OURS.namespace}/catalog/0-of-1.bin"]


@pytest.fixture
def catalogs(monkeypatch) -> list[list[str]]:
    """The variants in each catalog that was written."""
    seen: list[list[str]] = []
    write = ccjax.store.commits.write_catalog

    def spy(root, namespace, shards):
        seen.append(sorted(shard.variant_id for shard in shards))
        write(root, namespace, shards)

    monkeypatch.setattr(ccjax.store.commits, "write_catalog", spy)
    return seen


def test_an_unchanged_part_is_not_written_again(place, catalogs):
    tier = filled(place)
    tier.tidy()
    tier.tidy()
    assert catalogs == [list(IDS)]
    again = tier_at(place)  # has read it
    again.tidy()
    assert again.write(make_record("f"), make_kv("f")) and again.remove(["f"])
    again.tidy()
    assert catalogs == [list(IDS)]
    place.write(catalog_keys(place)[0], b"")
    again = tier_at(place)
    again.tidy()
    again.tidy()
    assert catalogs == [list(IDS)] * 2


def test_a_large_catalog_waits_for_its_share_of_changes(place, catalogs, monkeypatch):
    tier = filled(place)
    tier.tidy()
    monkeypatch.setattr(ccjax.store.commits, "CHANGED_SHARE", 0.5)
    for variant_id in "fgh":  # 3 of 8
        tier.write(make_record(variant_id), make_kv(variant_id))
    tier.tidy()
    assert len(catalogs) == 1
    tier.remove(["h"])
    tier.write(make_record("i"), make_kv("i"))
    tier.write(make_record("j"), make_kv("j"))  # 4 of 9
    tier.tidy()
    assert len(catalogs) == 2


def test_variants_evicted_by_another_process_are_not_copied(place, catalogs):
    tier = filled(place)
    tier_at(place).remove(["a"])
    tier.renew_catalog()
    tier.tidy()
    assert catalogs == [["b", "c", "d", "e"]]


def test_catalog_is_rewritten_after_an_erasure(place, catalogs, monkeypatch):
    tier = filled(place)
    tier.tidy()
    assert erase_from_disk(tier, ["a"], uncommitted=True) == () and catalog_keys(place) == []
    tier.tidy()
    assert catalogs[1:] == [["b", "c", "d", "e"]]
    delete = tier._root.delete

    def refuse(key):
        if "/catalog/" in key:
            raise StoreUnavailableError("no answer")
        delete(key)

    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 64)
    with monkeypatch.context() as patch:
        patch.setattr(tier._root, "delete", refuse)
        assert set(erase_from_disk(tier, ["b"], uncommitted=True)) == set(catalog_keys(place)) != set()
    tier.tidy()  # what could not be deleted is replaced, however little that is
    assert catalogs[2:] == [["c", "d", "e"]]


@pytest.mark.parametrize("is_first", [True, False])
def test_catalog_write_and_deletion_exclude_each_other(place, monkeypatch, is_first):
    """Writing and deleting exclude each other."""
    tier = filled(place)
    tier.tidy()
    tier.renew_catalog()
    calls = {"write_catalog": tier.tidy, "delete_catalog": tier.drop_catalog}
    slow, other = calls if is_first else reversed(calls)
    call, entered, gate = getattr(ccjax.store.commits, slow), threading.Event(), threading.Event()

    def waiting(*arguments):
        entered.set()
        assert gate.wait(120)
        return call(*arguments)

    monkeypatch.setattr(ccjax.store.commits, slow, waiting)
    threads = [threading.Thread(target=calls[name]) for name in (slow, other)]
    threads[0].start()
    assert entered.wait(120)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    gate.set()
    for thread in threads:
        thread.join(120)
    assert (catalog_keys(place) == []) == is_first


def test_failed_replacement_of_a_damaged_catalog_is_retried(tmp_path, catalogs, monkeypatch):
    place = directory(tmp_path)
    filled(place).tidy()
    place.write(catalog_keys(place)[0], b"")
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 64)
    tier = tier_at(place)
    tier._commits._copies(set())  # a refresh that finds many new ones
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
        tier.tidy()
    tier.tidy()
    tier.tidy()
    assert catalogs[1:] == [list(IDS)] * 2


def test_parts_of_a_larger_catalog_are_deleted_when_a_smaller_one_is_written(place, reads):
    tier = filled(place)
    tier.tidy()
    tier.remove(["a", "b", "c"])
    tier.tidy()
    assert catalog_keys(place) == [f"{OURS.namespace}/catalog/0-of-1.bin"]
    reads.clear()
    assert_holds(tier_at(place), place, ("d", "e"))
    assert reads == []


# -- outdated entries ---------------------------------------------------------------------------------------------


def written_anew(place: Place, writer: int = 1) -> None:
    """A catalog with an outdated entry of "a", which another process evicted and rewrote since."""
    filled(place).tidy()
    other = tier_at(place)
    other.remove(["a"])
    assert other.write(make_record("a", 7), make_kv("a", 7, writer=writer))


def test_outdated_entry_misses_once_and_then_loads_the_new_variant(place):
    written_anew(place)
    tier = tier_at(place)
    with pytest.raises(ShardNotFoundError, match="evicted"):
        tier.open("a").wait(0, 3)
    assert_same_bytes(tier.open("a").wait(0, 3), make_kv("a", 7, writer=1))
    assert tier.num_corrupt == 0 and tier.get_record("a") == make_record("a", 7)
    assert tier.budget.used_bytes == place.num_bytes()


def test_evicting_an_outdated_entry_spares_the_new_variant(place):
    written_anew(place)
    tier = tier_at(place)
    assert tier.remove(["a"]) == ("a",) and "a" not in tier
    assert tier._commits.load_record("a")
    assert_same_bytes(tier.open("a").wait(0, 3), make_kv("a", 7, writer=1))


@pytest.mark.parametrize("at_once", [1000, 0])
def test_the_sweep_does_not_trust_an_outdated_entry(place, monkeypatch, at_once):
    written_anew(place)
    kept = set(place.object_keys())
    place.write(f"{OURS.namespace}/data/{'0' * 32}/c.0.0.0.0.0", b"an orphan")
    place.let_pass(ORPHAN_AGE_S, monkeypatch)
    monkeypatch.setattr(ccjax.store.commits, "_VERIFY_AT_ONCE", at_once or 1)
    tier = tier_at(place)
    assert (set(place.object_keys()) == kept) == (at_once > 1)  # many records to read are left to idle time
    tier.tidy(is_cancelled=lambda: True)
    assert (set(place.object_keys()) == kept) == (at_once > 1)
    tier.tidy()
    assert set(place.object_keys()) == kept
    assert_same_bytes(tier.open("a").wait(0, 3), make_kv("a", 7, writer=1))  # no miss first: it was verified
    assert tier.num_corrupt == 0


def test_a_record_that_cannot_be_read_stops_the_sweep(place, monkeypatch):
    written_anew(place)
    place.write(f"{OURS.namespace}/data/{'0' * 32}/c.0.0.0.0.0", b"an orphan")
    place.let_pass(ORPHAN_AGE_S, monkeypatch)
    before = place.object_keys()
    with monkeypatch.context() as patch:
        patch.setattr(CommittedShards, "read", Mock(side_effect=StoreUnavailableError("no answer")))
        tier = tier_at(place)
        tier.tidy()
    assert place.object_keys() == before and len(tier) == 5
    tier.tidy()
    assert len(place.object_keys()) == 5


# -- damage -------------------------------------------------------------------------------------------------------


def test_flipped_bits_in_the_catalog_never_give_a_wrong_record(tmp_path, monkeypatch, stride):
    """Head, table and records, byte by byte."""
    monkeypatch.setattr(ccjax.store.catalog, "RECORDS_PER_PART", 1024)
    url = url_of(tmp_path)
    tier = TensorStoreTier(url, SPEC, OURS)
    for variant_id in ("a", "b"):
        tier.write(make_record(variant_id), make_kv(variant_id))
    tier.tidy()
    (part,) = (namespace_of(tmp_path) / "catalog").iterdir()
    sound = part.read_bytes()
    expected = [make_record("a"), make_record("b")]
    chance = random.Random(0)
    for position in range(0, len(sound), stride(11)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << chance.randrange(8)
        part.write_bytes(damaged)
        again = TensorStoreTier(url, SPEC, OURS)
        assert again.budget.used_bytes == bytes_on_disk(tmp_path)
        assert sorted(again.summaries()) == [record.summary for record in expected]
        assert sorted(again.records(), key=lambda record: record.variant_id) == expected, position
        assert again.num_corrupt == 0 and again.budget.used_bytes == bytes_on_disk(tmp_path)
    part.write_bytes(sound)
    for variant_id in ("a", "b"):
        assert_same_bytes(again.open(variant_id).wait(0, 3), make_kv(variant_id))
    assert not list((namespace_of(tmp_path) / "quarantine").iterdir())


def _head_with(**changes):
    def change(raw: bytes) -> bytes:
        head, _, rest = raw.partition(b"\n")
        return json.dumps(json.loads(head) | changes).encode() + b"\n" + rest

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "cannot be parsed"),
        (lambda raw: raw[: len(raw) // 4], "checksum"),
        (lambda raw: raw[:-1], "wanted"),
        (lambda raw: raw + b" ", "wanted"),
        (lambda raw: bytes(len(raw)), "cannot be parsed"),
        (lambda raw: b"[" * 100_000 + b"\n", "cannot be parsed"),
        (_head_with(namespace=OTHERS.namespace), f"namespace '{OTHERS.namespace}'"),
        (_head_with(table_bytes=-1), "checksum"),
        (_head_with(table_bytes="many"), "cannot be parsed"),
    ],
)
def test_an_unusable_part_is_logged_and_rewritten(place, reads, caplog, change, message):
    filled(place).tidy()
    key = catalog_keys(place)[0]
    before = place.read(key)
    place.write(key, change(before))
    reads.clear()
    with caplog.at_level(logging.WARNING, logger="ccjax.store"):
        tier = tier_at(place)
    assert message in caplog.text and key.rpartition("/")[2] in caplog.text
    assert 0 < len(reads) < len(IDS)  # the variants of this part, no others
    assert_holds(tier, place)
    tier.tidy()
    assert sorted(place.read(key)) == sorted(before)


def test_damaged_catalog_entry_causes_a_new_catalog_once_read(place):
    filled(place).tidy()
    before = {key: place.read(key) for key in catalog_keys(place)}
    key = next(iter(before))
    place.flip(key, len(before[key]) - 2)
    tier = tier_at(place)
    tier.tidy()
    assert place.read(key) != before[key], "nobody has looked at it yet"
    assert_holds(tier, place)
    tier.tidy()
    assert {key: place.read(key) for key in catalog_keys(place)} == before


def test_the_catalog_of_another_model_is_ignored(place):
    with open_store(place.url, identity=OTHERS) as theirs:
        put(theirs, "a")
        theirs.tidy()
    with open_store(place.url) as ours:
        put(ours, "a")
    for key in [key for key in place.keys() if key.startswith(f"{OTHERS.namespace}/catalog/")]:
        place.write(key.replace(OTHERS.namespace, OURS.namespace), place.read(key))
    assert_holds(tier_at(place), place, ("a",))


def test_damaged_record_with_an_intact_catalog_copy_is_detected_on_read(place, monkeypatch):
    filled(place).tidy()
    place.flip(place.record_key("a"), 40)
    tier = tier_at(place)
    assert_holds(tier, place)  # the copy is what was committed, and so is the data
    place.write(f"{OURS.namespace}/data/{'0' * 32}/c.0.0.0.0.0", b"an orphan: the sweep reads originals")
    place.let_pass(ORPHAN_AGE_S, monkeypatch)
    again = tier_at(place)
    assert "a" not in again and again.num_corrupt == 1 and len(place.object_keys()) == 5  # of "a" there is one still
    assert_holds(tier_at(place), place, ("b", "c", "d", "e"))


def test_damaged_catalog_entry_without_its_record_is_a_miss(place):
    filled(place).tidy()
    for key in catalog_keys(place):
        raw = place.read(key)
        place.write(key, raw[:-1] + b" ")
    tier = tier_at(place)
    for variant_id in IDS:
        place.delete(place.record_key(variant_id))
    held = [record.variant_id for record in tier.records()]
    assert 0 < len(held) < len(IDS) and sorted(summary.variant_id for summary in tier.summaries()) == sorted(held)


def test_a_failing_disk_is_logged_and_retried_after_more_changes(tmp_path, monkeypatch, caplog):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    tier.write(make_record("a"), make_kv("a"))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="ccjax.store"):
        patch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
        for _ in range(3):
            tier.tidy()
    assert caplog.text.count("cannot write the catalog") == 1
    tier.write(make_record("b"), make_kv("b"))
    tier.tidy()
    assert len(list((namespace_of(tmp_path) / "catalog").iterdir())) == 1 and not list(tmp_path.rglob("*.tmp"))


def test_a_killed_catalog_writer_leaves_an_intact_store(process_place):
    place = process_place
    chance = random.Random(7)
    for number in range(2 if place.kind == "file" else 1):
        process = spawn("catalog_forever", place.url, f"p{number}")
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        time.sleep(chance.uniform(0.05, 0.3))
        process.kill()
        process.communicate()
        tier = TensorStoreTier(place.url, WIDE, OURS)
        names = [key.rpartition("/")[2] for key in place.keys() if "/records/" in key]
        listed = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        assert sorted(record.variant_id for record in tier.records()) == sorted(listed) and listed
        assert all(record == make_record(record.variant_id, WIDE_TOKENS, WIDE) for record in tier.records())
        sample = chance.sample(listed, min(5, len(listed)))
        for variant_id in sample:
            expected = make_kv(variant_id, WIDE_TOKENS, WIDE)
            assert_same_bytes(tier.open(variant_id).wait(0, WIDE.num_layers), expected)
        assert tier.num_corrupt == 0
        assert tier.budget.used_bytes == sum(tier.charge_bytes(record) for record in tier.records())

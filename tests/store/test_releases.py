"""Two releases on one store, as processes: each uses the records that it can read, and leaves the others alone."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

import pytest

import ccjax.store.commits
from ccjax.store import ShardCorruptError, StoreIdentityError, TensorStoreTier
from ccjax.store.errors import UnknownFormatError
from ccjax.store.namespaces import ORPHAN_AGE_S
from ccjax.store.records import decode_record
from tests.store.kv import OURS, SPEC, assert_same_bytes, get, make_kv, open_store, put
from tests.store.places import Place, directory
from tests.store.releases import output_of, spawn, with_later_records, with_later_store
from tests.store.test_formats import reseal
from tests.store.worker import WIDE

WORKER = "tests.store.worker"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_later_records(tmp_path_factory.mktemp("later"))


@pytest.fixture
def root(tmp_path: Path) -> Place:
    return directory(tmp_path / "kv")


@pytest.fixture(scope="module")
def theirs(later: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store written by the other release: variants a and b."""
    path = tmp_path_factory.mktemp("theirs") / "kv"
    run(later, "save", directory(path).url, "a", "b")
    return path


@pytest.fixture
def their_root(theirs: Path, root: Place, tmp_path: Path) -> Place:
    shutil.copytree(theirs, tmp_path / "kv", dirs_exist_ok=True)
    return root


def run(release: Path, *arguments: object) -> str:
    return output_of(spawn(release, WORKER, *arguments))


def digest(variant_id: str) -> str:
    return hashlib.sha256(make_kv(variant_id).tobytes()).hexdigest()


def read_by(release: Path, place: Place) -> dict[str, str]:
    """Variant -> digest of its KV."""
    return {key: found for key, (found, _) in json.loads(run(release, "dump", place.url)).items()}


def quarantine(place: Place) -> list[str]:
    return [key for key in place.keys() if "/quarantine/" in key]


def test_each_release_leaves_unreadable_records_of_the_other_alone(root, later, monkeypatch, caplog):
    with open_store(root.url) as ours:
        put(ours, "a")
        put(ours, "b")
    run(later, "save", root.url, "c", "d", "e")
    theirs = {key: root.read(key) for key in root.keys() if key.endswith((*(f"/{name}.json" for name in "cde"),))}
    assert [json.loads(raw)["format_version"] for raw in theirs.values()] == [3] * 3
    theirs |= {key: root.read(key) for raw in theirs.values() for key in root.keys() if _object(raw) in key}
    assert len(theirs) == 6
    assert read_by(later, root) == {name: digest(name) for name in "abcde"}  # it reads the older one, too

    root.let_pass(ORPHAN_AGE_S, monkeypatch)  # apparent left-overs would be deleted now
    with caplog.at_level(logging.WARNING), open_store(root.url, host_bytes=0) as ours:
        assert sorted(record.variant_id for record in ours.records()) == ["a", "b"]
        assert caplog.text.count("records of another release") == 1 and "format_version 3" in caplog.text
        assert ours.prepare_load(["c"]).missing == {"c"}
        assert put(ours, "c") == ()  # its place is taken
        ours.evict("disk", ["a"])
        assert ours.refresh() == ((), ()) and ours.usage()["disk"].corrupt == 0
        ours._disk.tidy()
        assert ours._disk.sweep(0.0, 0.0) == ()
        assert_same_bytes(get(ours, "b"), make_kv("b"))
    assert quarantine(root) == [] and {key: root.read(key) for key in theirs} == theirs
    assert read_by(later, root) == {name: digest(name) for name in "bcde"}


def _object(raw: bytes) -> str:
    return json.loads(raw)["object_id"]


def test_two_releases_can_use_one_store_concurrently(root, later):
    names = [f"t{number}" for number in range(12)]
    theirs = spawn(later, WORKER, "save", root.url, *names)
    with open_store(root.url) as ours:
        number = 0
        while theirs.poll() is None:
            put(ours, f"o{number}")
            ours.refresh()
            number += 1
        output_of(theirs)
        ours.refresh()
        assert number > 0 and sorted(record.variant_id for record in ours.records()) == sorted(
            f"o{n}" for n in range(number)
        )
        assert ours.usage()["disk"].corrupt == 0
    assert quarantine(root) == []
    assert read_by(later, root) == {name: digest(name) for name in (*names, *(f"o{n}" for n in range(number)))}


def test_evicting_our_variant_spares_its_rewrite_by_another_release(root, later):
    """The other release evicted ours and rewrote the variant, and we do not know yet."""
    with open_store(root.url) as ours:
        put(ours, "a")
        old = _object(root.read(root.record_key("a")))
        root.delete(root.record_key("a"))
        run(later, "save", root.url, "a")
        ours.evict("disk", ["a"])
        assert old not in "".join(root.keys())
    assert read_by(later, root) == {"a": digest("a")}


def test_variant_id_is_free_once_the_unreadable_record_is_deleted(their_root):
    root = their_root
    with open_store(root.url, host_bytes=0) as ours:
        assert put(ours, "a") == ()
        root.delete(root.record_key("a"))
        ours.refresh()
        assert put(ours, "a") == ("disk",)
        assert_same_bytes(get(ours, "a"), make_kv("a"))


def test_changes_by_another_release_are_not_treated_as_damage(their_root, caplog):
    root = their_root
    with open_store(root.url) as ours, caplog.at_level(logging.WARNING):
        caplog.clear()
        assert ours._disk.apply_commits({"a": root.read(root.record_key("a")), "b": None}) == ()
        ours._disk.forget_removed("b", None)
        assert ours._disk.takes("b") and not ours._disk.takes("a")
    assert caplog.text == "" and quarantine(root) == []


def test_catalog_of_another_release_adopts_no_variants(root, later, monkeypatch):
    writer = spawn(later, WORKER, "catalog_forever", root.url, "t")
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "started\n"
    finally:
        writer.kill()
        writer.communicate()
    assert [key for key in root.keys() if "/catalog/" in key]
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 1)  # else so few are read one by one
    ours = TensorStoreTier(root.url, WIDE, OURS)
    assert len(ours) == 0 and ours.num_corrupt == 0 and quarantine(root) == []


def test_only_an_erasure_deletes_records_in_unknown_formats(their_root, later):
    root = their_root
    with open_store(root.url) as ours:
        put(ours, "c")
        assert ours.erase(["c"], uncommitted=False) == ()
        assert read_by(later, root) == {name: digest(name) for name in "ab"}
        assert ours.erase([], uncommitted=True) == ()
        assert root.object_keys() == [] and not [key for key in root.keys() if "/records/" in key]


@pytest.mark.parametrize(
    ("changes", "is_sound"),
    [
        ({"format_version": 3}, True),
        ({"format_version": 0}, True),
        ({"format_version": 3, "num_tokens": None, "meta": None}, True),
        ({"format_version": "3"}, False),
        ({"format_version": 3.0}, False),
        ({"format_version": 3, "object_id": None}, False),
        ({"format_version": 3, "object_id": "../x"}, False),
        ({"format_version": 3, "variant_id": "w"}, False),
        ({"format_version": 3, "namespace": "0" * 64}, False),
    ],
    ids=str,
)
def test_only_sound_records_of_our_namespace_count_as_another_releases(root, changes, is_sound):
    with open_store(root.url) as ours:
        put(ours, "v")
    raw = reseal(root.read(root.record_key("v")), **changes)
    with pytest.raises(ShardCorruptError) as caught:
        decode_record(raw, variant_id="v", identity=OURS, kv_spec=SPEC)
    assert isinstance(caught.value, UnknownFormatError) == is_sound
    root.write(root.record_key("v"), raw)
    with open_store(root.url) as ours:
        assert ours.usage()["disk"].corrupt == (not is_sound) and len(quarantine(root)) == (not is_sound)
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 1
    with pytest.raises(ShardCorruptError) as caught:
        decode_record(bytes(flipped), variant_id="v", identity=OURS, kv_spec=SPEC)
    assert not isinstance(caught.value, UnknownFormatError)


def test_a_store_of_another_version_is_refused_and_unchanged(tmp_path, tmp_path_factory):
    later = with_later_store(tmp_path_factory.mktemp("later_store"))
    old, new = directory(tmp_path / "old"), directory(tmp_path / "new")
    with open_store(old.url) as ours:
        put(ours, "a")
    run(later, "save", new.url, "a")
    before = [{key: place.read(key) for key in place.keys()} for place in (old, new)]
    with pytest.raises(StoreIdentityError, match="format version 2 and this program reads 1: upgrade this program"):
        open_store(new.url)
    theirs = spawn(later, WORKER, "dump", old.url)
    _, errors = theirs.communicate(timeout=120)
    assert theirs.returncode != 0 and "format version 1 and this program reads 2" in errors
    assert [{key: place.read(key) for key in place.keys()} for place in (old, new)] == before

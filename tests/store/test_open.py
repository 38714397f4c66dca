"""Refusals of `open` and their messages: foreign models, other versions, bad URLs, unusable directories."""

import dataclasses
import errno
import hashlib
import json
import re
import shutil

import pytest

from ccjax.store import FORMAT_VERSION, StoreIdentity, StoreIdentityError, StoreUnavailableError, TensorStoreTier
from ccjax.store.files import FileRoot
from tests.store.kv import (
    BF16,
    OTHERS,
    OURS,
    SPEC,
    assert_same_bytes,
    get,
    make_kv,
    make_record,
    namespace_of,
    open_store,
    put,
    url_of,
)
from tests.store.places import directory


@pytest.mark.parametrize("url", ["S4://bucket/kv", "http://x/kv", "ftp://x", "/tmp/kv", "kv", ""])
def test_unknown_scheme_lists_the_known_ones(url):
    with pytest.raises(ValueError, match=re.escape("file:///absolute/path")) as caught:
        TensorStoreTier(url, SPEC, OURS)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("url", ["file://host/kv", "file:kv", "file:///kv?x=1", "file:///kv#x"])
def test_invalid_file_url_is_rejected(url):
    with pytest.raises(ValueError, match="wanted file:///absolute/path"):
        TensorStoreTier(url, SPEC, OURS)


def test_url_with_escaped_characters_is_accepted(tmp_path):
    path = tmp_path / "a b%c#é"
    with open_store(path) as store:
        put(store, "v")
    assert namespace_of(path).is_dir()


def test_path_that_is_a_file_is_rejected(tmp_path):
    path = tmp_path / "kv"
    path.write_text("not a directory")
    with pytest.raises(StoreUnavailableError, match=f"store: cannot use {path}"):
        open_store(path)
    assert path.read_text() == "not a directory"


def test_path_below_a_file_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match=f"store: cannot use {tmp_path}/file/kv.*Not a directory"):
        open_store(tmp_path / "file" / "kv")


def test_unwritable_path_is_rejected():
    with pytest.raises(StoreUnavailableError, match="store: cannot use /proc/kv"):
        TensorStoreTier("file:///proc/kv", SPEC, OURS)  # not even root may


def test_store_of_another_model_is_used_like_an_empty_one_with_a_warning(place, caplog):
    with open_store(place.url, identity=OTHERS) as store:
        put(store, "v")
    assert not caplog.records
    with open_store(place.url) as store:
        assert store.prepare_load(["v"]).missing == {"v"}
        put(store, "v")
    (warning,) = caplog.messages
    assert "holds the KV of model-b and none of this model, model-a" in warning
    caplog.clear()
    with open_store(place.url) as ours, open_store(place.url, identity=OTHERS) as theirs:  # both have variants now
        ours.evict("disk", ["v"])
        assert_same_bytes(get(theirs, "v"), make_kv("v"))
    assert not caplog.records


def test_store_without_variants_of_another_model_is_opened_without_a_warning(place, caplog):
    open_store(place.url, identity=OTHERS).close()
    open_store(place.url).close()
    assert not caplog.records


def test_tenants_of_one_model_share_a_directory_but_no_variant(place):
    tenant = StoreIdentity(OURS.model_fingerprint, tenant_salt="secret-salt")
    with open_store(place.url, identity=tenant) as theirs, open_store(place.url) as ours:
        put(theirs, "v")
        ours.refresh()
        assert ours.prepare_load(["v"]).missing == {"v"}
    assert not [key for key in place.keys() if b"secret-salt" in place.read(key)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"format_version": FORMAT_VERSION + 1}), "format version 3.*reads 2: upgrade this program"),
        (json.dumps({"format_version": 0}), "format version 0.*damaged"),
    ],
)
def test_store_of_a_newer_or_unreadable_format_version_is_rejected(place, content, message):
    open_store(place.url).close()
    place.write("store.json", content.encode())
    with pytest.raises(StoreIdentityError, match=message):
        open_store(place.url)
    assert place.read("store.json") == content.encode()


def make_old(place) -> list[str]:
    """A store of format version 1 with two models' KV, among files of others; the keys that are not ours to delete."""
    for identity in (OURS, OTHERS):
        namespace = hashlib.sha256(json.dumps([1, identity.model_fingerprint, ""]).encode()).hexdigest()
        owner = {"model_fingerprint": identity.model_fingerprint, "kv_spec": dataclasses.asdict(SPEC)}
        place.write(f"{namespace}/identity.json", json.dumps(owner).encode())
        for name in ("records/v.json", "data/0123/c.0.0.0.0.0", "data/4567/c.0.0.0.0.0", "notes/n.json", "hints.json"):
            place.write(f"{namespace}/{name}", bytes(10_000))
    theirs = ["readme.txt", f"{'a' * 64}/file", f"{'b' * 63}/identity.json"]
    for key in theirs:
        place.write(key, b"{}")
    place.write("store.json", json.dumps({"format_version": 1}).encode())
    return theirs


def test_store_of_an_older_format_version_is_emptied(place, tmp_path, caplog):
    theirs = make_old(place)
    limit = 2 * TensorStoreTier(url_of(tmp_path / "other"), SPEC, OURS).charge_bytes(make_record("v"))
    with open_store(place.url, host_bytes=0, disk_bytes=limit) as store:
        assert "deleting the KV of format version 1" in caplog.text
        assert store.records() == [] and store.usage()["disk"].used_bytes == 0
        assert put(store, "v") == ("disk",)
    keys = place.keys()
    assert {*theirs} <= {*keys}
    assert sum(len(place.read(key)) for key in keys if key not in theirs) < limit  # two variants would fit
    assert json.loads(place.read("store.json"))["format_version"] == FORMAT_VERSION
    caplog.clear()
    with open_store(place.url, host_bytes=0) as store:
        assert_same_bytes(get(store, "v"), make_kv("v"))
    assert caplog.text == "" and place.keys() == keys


def test_interrupted_emptying_of_an_older_store_is_finished_by_the_next_start(tmp_path, monkeypatch, caplog):
    place = directory(tmp_path / "kv")
    make_old(place)
    delete, deleted = FileRoot.delete, []

    def fail_later(root, key):
        if len(deleted) == 3:
            raise OSError(errno.EIO, "the disk")
        deleted.append(key)
        delete(root, key)

    with monkeypatch.context() as patch:
        patch.setattr(FileRoot, "delete", fail_later)
        with open_store(place.url) as store:  # it works nevertheless
            put(store, "v")
    assert "the next start tries again" in caplog.text
    assert sum("/data/" in key for key in place.keys()) > 1
    with open_store(place.url, host_bytes=0) as store:
        assert_same_bytes(get(store, "v"), make_kv("v"))
    assert sum("/data/" in key for key in place.keys()) == 1
    assert sum(key.endswith("identity.json") for key in place.keys()) == 2  # ours, and one that only looks like it


@pytest.mark.parametrize("other", [BF16, dataclasses.replace(SPEC, num_layers=4)])
def test_different_kv_shape_under_the_same_fingerprint_is_rejected(place, other):
    with open_store(place.url) as store:
        put(store, "v")
    with pytest.raises(StoreIdentityError, match="one identity must mean one KV shape"):
        open_store(place.url, kv_spec=other)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_damaged_identity_file_is_written_again(place, content):
    with open_store(place.url) as store:
        put(store, "v")
    identity = f"{OURS.namespace}/identity.json"
    place.write(identity, content)
    with open_store(place.url, host_bytes=0) as store:
        assert_same_bytes(get(store, "v"), make_kv("v"))
    assert json.loads(place.read(identity))["model_fingerprint"] == "model-a"


@pytest.mark.parametrize("key", ["store.json", f"{OURS.namespace}/identity.json"])
def test_any_flipped_bit_in_the_files_that_describe_a_store_is_mended(tmp_path, key):
    place = directory(tmp_path)
    with open_store(place.url) as store:
        put(store, "v")
    sound = place.read(key)
    for position in range(len(sound)):
        for bit in (1, 16):
            place.write(key, sound[:position] + bytes([sound[position] ^ bit]) + sound[position + 1 :])
            with open_store(place.url, host_bytes=0) as store:
                assert len(store.records()) == 1
            found = json.loads(place.read(key))
            assert {name: found[name] for name in json.loads(sound) if name != "checksum"} == {
                name: value for name, value in json.loads(sound).items() if name != "checksum"
            }


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_an_unreadable_format_version_is_taken_from_the_models(place, content, caplog):
    with open_store(place.url) as store:
        put(store, "v")
    place.write("store.json", content)
    with open_store(place.url, host_bytes=0) as store:
        assert_same_bytes(get(store, "v"), make_kv("v"))
    assert "store.json is damaged" in caplog.text
    caplog.clear()
    open_store(place.url).close()
    assert not caplog.text


def test_files_without_a_checksum_are_those_of_an_earlier_release(place):
    with open_store(place.url) as store:
        put(store, "v")
    for key in ("store.json", f"{OURS.namespace}/identity.json"):
        value = json.loads(place.read(key))
        del value["checksum"]
        place.write(key, json.dumps(value).encode())
    with open_store(place.url, host_bytes=0) as store:
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_a_read_only_store_writes_nothing(place, monkeypatch):
    with open_store(place.url) as store:
        put(store, "v")
    keys = place.keys()

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    root = type(open_store(place.url, read_only=True)._disk._root)
    with monkeypatch.context() as patch:
        for name in ("create", "replace", "delete", "make_prefix"):
            patch.setattr(root, name, refuse)
        with open_store(place.url, host_bytes=0, read_only=True) as store:
            assert_same_bytes(get(store, "v"), make_kv("v"))
        with pytest.raises((OSError, StoreUnavailableError)):  # a bucket's own errors do not get here
            open_store(place.url)
    assert place.keys() == keys


def test_a_read_only_store_may_be_empty_and_must_fit(place):
    if place.kind != "file":
        with open_store(place.url, read_only=True) as store:
            assert not store.records()
    with open_store(place.url) as store:
        put(store, "v")
    with pytest.raises(StoreIdentityError, match="one identity must mean one KV shape"):
        open_store(place.url, kv_spec=BF16, read_only=True)
    place.write("store.json", json.dumps({"format_version": FORMAT_VERSION - 1}).encode())
    with pytest.raises(StoreIdentityError, match=f"format version {FORMAT_VERSION - 1}"):
        open_store(place.url, read_only=True)
    assert f"{OURS.namespace}/records/v.json" in place.keys()


def test_store_over_its_budget_opens_and_reports_the_excess(place):
    with open_store(place.url) as store:
        for variant_id in ("a", "b", "c"):
            put(store, variant_id)
        room = store.usage()["disk"].used_bytes // 3
    with open_store(place.url, host_bytes=0, disk_bytes=2 * room) as store:
        assert store.usage()["disk"].used_bytes == 3 * room
        assert store.prepare_store(make_record("d")).shortfall_bytes == {"disk": 2 * room}
        assert_same_bytes(get(store, "a"), make_kv("a"))


def test_a_directory_that_is_removed_meanwhile_is_made_again(tmp_path, caplog):
    path = tmp_path / "kv"
    with open_store(path, host_bytes=0) as store:
        put(store, "v")
        for variant_id in ("w", "x"):
            shutil.rmtree(path)
            assert put(store, variant_id) == ("disk",)
            assert_same_bytes(get(store, variant_id), make_kv(variant_id))
            store.refresh()
            assert [record.variant_id for record in store.records()] == [variant_id]
    assert caplog.text.count("made again") == 2
    with open_store(path, host_bytes=0) as store:
        assert_same_bytes(get(store, "x"), make_kv("x"))

"""Notes: small facts that are written once, survive, and are shared; and erasing what lies beside the records."""

import threading
import time

import pytest

from store.files import FileRoot
from tests.store.kv import OTHERS, OURS, bytes_on_disk, namespace_of, open_store, put


def test_notes_outlive_the_process_and_stay_as_they_were_put(place):
    with open_store(place.url) as store:
        assert store.notes.items() == {}
        store.notes.put("a", {"x": [1, None]})
        store.notes.put("a", {"x": 2})
        store.notes.put("b", {}, wait=True)
        assert store.notes.items() == {"a": {"x": [1, None]}, "b": {}}
    with open_store(place.url) as store, open_store(place.url, identity=OTHERS) as theirs:
        assert store.notes.refresh() == ({"a": {"x": [1, None]}, "b": {}}, ())
        assert theirs.notes.refresh() == ({}, ())
        store.notes.delete("a")
        store.notes.delete("never there")
        assert store.notes.items() == {"b": {}}
        assert [key for key in place.keys() if "/notes/" in key] == [f"{OURS.namespace}/notes/b.json"]


def test_processes_follow_each_other_and_overwrite_nothing(place):
    with open_store(place.url) as one, open_store(place.url) as two:
        one.notes.put("a", {"by": 1}, wait=True)
        two.notes.put("a", {"by": 2}, wait=True)  # lost the race
        two.notes.put("b", {"by": 2}, wait=True)
        assert one.notes.refresh() == ({"b": {"by": 2}}, ())
        one.notes.delete("b")
        assert two.notes.refresh() == ({}, ("b",)) and "b" not in two.notes.items()
        assert two.notes.refresh() == ({}, ()) == one.notes.refresh()
    with open_store(place.url) as store:
        store.notes.refresh()
        assert store.notes.items() == {"a": {"by": 1}}


def test_a_store_in_memory_keeps_notes_in_memory():
    with open_store(None) as store:
        store.notes.put("a", {}, wait=True)
        assert store.notes.items() == {"a": {}} and store.notes.refresh() == ({}, ())
        store.notes.delete("a")
        assert store.notes.items() == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_damaged_note_is_empty(place, content):
    with open_store(place.url) as store:
        place.write(f"{OURS.namespace}/notes/a.json", content)
        assert store.notes.refresh() == ({"a": {}}, ())


def test_what_the_disk_refused_is_written_later(tmp_path, monkeypatch, caplog):
    with open_store(tmp_path) as store:

        def refuse(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(FileRoot, "create", refuse)
            store.notes.put("a", {"x": 1})
            store.flush(30)
            assert "No space left" in caplog.text and store.notes.refresh() == ({}, ())
            with pytest.raises(OSError, match="No space left"):
                store.notes.put("b", {}, wait=True)
            assert store.notes.items().keys() == {"a", "b"}
        assert store.notes.refresh() == ({}, ())
    with open_store(tmp_path) as store:
        assert store.notes.refresh()[0] == {"a": {"x": 1}, "b": {}}


def test_many_writers_and_refreshes_lose_no_note(tmp_path):
    """A write in the background and the same one by a refresh must not undo each other."""
    with open_store(tmp_path) as store:
        stop = threading.Event()

        def look():
            while not stop.is_set():
                store.notes.refresh()

        thread = threading.Thread(target=look)
        thread.start()
        for number in range(60):
            store.notes.put(f"n{number}", {"n": number})
        store.flush(30)
        stop.set()
        thread.join(30)
        assert len(list((namespace_of(tmp_path) / "notes").glob("*.json"))) == 60 == len(store.notes.items())


def test_erase_takes_variants_and_what_no_record_commits_of_any_age(place):
    with open_store(place.url) as store:
        for key in ("a", "b"):
            put(store, key)
        space = OURS.namespace
        fresh = f"{time.time_ns() // 1_000_000:012x}{'0' * 20}"
        place.write(f"{space}/data/{fresh}/c", b"part of a killed write")
        place.write(f"{space}/quarantine/x.{fresh}.json", b"damaged")
        assert store.erase(["a", "never there"], uncommitted=False) == ()
        assert [key for key in place.keys() if "quarantine" in key] and store.tier_of("a") is None
        assert store.erase([], uncommitted=True) == ()
        assert not [key for key in place.keys() if "quarantine" in key or fresh in key]
        assert store.tiers_of("b") == ("host", "disk") and len(place.object_keys()) == 1
        put(store, "a")
        assert store.tiers_of("a") == ("host", "disk")


def test_erase_names_what_stays_and_leaves_budgets_right(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        for key in ("a", "b"):
            put(store, key)
        delete = FileRoot.delete

        def refuse(root, key):
            if "/records/a" in key or "/data/" in key:
                raise OSError(5, "Input/output error")
            return delete(root, key)

        with monkeypatch.context() as patch:
            patch.setattr(FileRoot, "delete", refuse)
            left = store.erase(["a", "b"], uncommitted=True)
        assert "a" in left and len(left) == 2 and any("/data/" in key for key in left)  # b's data has no record now
        assert store.tier_of("a") is None and store.usage()["disk"].used_bytes == 0
        assert store.erase(["a"], uncommitted=True) == ()
        assert bytes_on_disk(tmp_path) == 0 == store.usage()["disk"].used_bytes

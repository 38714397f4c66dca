"""Notes: small facts that are written once, survive, and are shared; and erasing uncommitted objects."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

import pytest

from ccjax.store.files import FileRoot
from ccjax.store.notes import Notes
from tests.store.kv import OTHERS, OURS, bytes_on_disk, namespace_of, open_store, put


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_notes_persist_and_are_never_overwritten(place):
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


def test_processes_share_notes_without_overwriting_them(place):
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
        assert store.claims is None
        store.notes.put("a", {}, wait=True)
        assert store.notes.items() == {"a": {}} and store.notes.refresh() == ({}, ())
        store.notes.delete("a")
        assert store.notes.items() == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_damaged_note_reads_as_empty(place, content):
    with open_store(place.url) as store:
        place.write(f"{OURS.namespace}/notes/a.json", content)
        assert store.notes.refresh() == ({"a": {}}, ())


def test_notes_refused_by_the_disk_are_written_later(tmp_path, monkeypatch, caplog):
    with open_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(FileRoot, "create", refuse)
            store.notes.put("a", {"x": 1})
            store.flush(120)
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
        store.flush(120)
        stop.set()
        thread.join(120)
        assert len(list((namespace_of(tmp_path) / "notes").glob("*.json"))) == 60 == len(store.notes.items())


class Queue:
    """Runs functions when the test says so."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], None], Future[None]]] = []

    def __call__(self, write: Callable[[], None]) -> Future[None]:
        self._waiting.append((write, Future()))
        return self._waiting[-1][1]

    def run(self) -> None:
        for write, future in self._waiting:
            future.set_result(write())
        self._waiting.clear()


@pytest.fixture
def root(tmp_path) -> FileRoot:
    root = FileRoot(tmp_path.as_uri())
    root.make_prefix("notes")
    return root


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def notes(root, queue) -> Notes:
    return Notes(root, "notes", run=queue)


def test_a_note_deleted_before_its_turn_is_never_written(notes, root, queue, monkeypatch):
    notes.put("a", {})
    notes.delete("a")
    queue.run()
    with monkeypatch.context() as patch:
        patch.setattr(root, "create", refuse)
        with pytest.raises(OSError):
            notes.put("b", {}, wait=True)
    notes.delete("b")
    assert notes.refresh() == ({}, ()) and notes.items() == {} and root.names("notes") == []


def test_note_that_cannot_be_deleted_is_kept(notes, root, monkeypatch):
    notes.put("a", {"x": 1}, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(root, "delete", refuse)
        with pytest.raises(OSError):
            notes.delete("a")
    before = notes.items()
    assert before == {"a": {"x": 1}}
    notes.delete("a")
    assert notes.items() == {} and before == {"a": {"x": 1}}


def test_deletion_waits_for_a_note_write_in_progress(notes, root, monkeypatch):
    create, entered, gate = root.create, threading.Event(), threading.Event()

    def slow(*arguments):
        entered.set()
        assert gate.wait(120)
        return create(*arguments)

    monkeypatch.setattr(root, "create", slow)
    threads = [threading.Thread(target=lambda: notes.put("a", {}, wait=True))]
    threads.append(threading.Thread(target=lambda: notes.delete("a")))
    threads[0].start()
    assert entered.wait(120)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    gate.set()
    for thread in threads:
        thread.join(120)
    assert root.names("notes") == [] and notes.items() == {}


def test_a_flush_waits_for_the_queue_but_not_for_a_failing_disk(notes, root, queue, monkeypatch):
    notes.put("a", {})
    flushed: list[bool] = []
    flush = threading.Thread(target=lambda: flushed.append(notes.flush()))
    flush.start()
    flush.join(0.1)
    assert flush.is_alive()
    monkeypatch.setattr(root, "create", refuse)
    queue.run()
    flush.join(120)
    assert flushed == [True] and root.names("notes") == []


def test_note_deleted_during_refresh_is_not_reported_as_new(notes, root, monkeypatch):
    root.create("notes/a.json", b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(root, "read", lambda key: None)
        assert notes.refresh() == ({}, ()) and notes.items() == {}
    assert notes.refresh() == ({"a": {}}, ())


def test_erase_deletes_variants_and_uncommitted_objects_of_any_age(place):
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


def test_erase_reports_undeleted_variants_and_keeps_budgets_correct(tmp_path, monkeypatch):
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

"""What is noted of documents, pins and erasures: by one process, by several, and by one that ends in the middle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ccjax.cache.document_registry import ERASURE_AGE_S, PIN_NOTE_S, DocumentRegistry, Origin, Pin
from ccjax.errors import RequestError, UnknownDocumentError
from ccjax.store.files import FileRoot
from ccjax.store.notes import Notes
from ccjax.types import Chunk, ChunkId

A, B, C = (ChunkId(letter) for letter in "abc")


def at_once(write: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    future.set_result(write())
    return future


@pytest.fixture
def root(tmp_path) -> FileRoot:
    root = FileRoot(tmp_path.as_uri())
    root.make_prefix("notes")
    return root


@pytest.fixture
def start(root):
    """`start()` is one more process on the same notes; all have one clock, `start.now[0]`."""

    def make() -> DocumentRegistry:
        registry = DocumentRegistry(Notes(root, "notes", run=at_once))
        registry.clock = lambda: make.now[0]
        return registry

    make.now = [1000.0]
    return make


@pytest.fixture
def registry(start) -> DocumentRegistry:
    return start()


def chunk(chunk_id: ChunkId, document: str | None, version: str | None = None, source: str | None = None) -> Chunk:
    return Chunk(chunk_id, (1,), document_id=document, version=version, source_id=source)


def names(root: FileRoot, kind: str) -> list[str]:
    return [name for name in root.names("notes") if name.startswith(kind)]


def follow(registry: DocumentRegistry) -> bool:
    return registry.apply_changes(*registry.fetch())


def chosen(registry: DocumentRegistry, document_id: str, version: str | None = None) -> set[ChunkId]:
    return {link.chunk_id for link in registry.select(document_id, version).values()}


# -- links ------------------------------------------------------------------------------------------------------


def test_documents_are_selected_by_id_version_or_passage(registry, root):
    registry.learn([chunk(A, "x", "1"), chunk(B, "x", "2"), chunk(B, "y"), chunk(C, None)])
    assert chosen(registry, "x") == {A, B} and chosen(registry, "x", "2") == chosen(registry, "y") == {B}
    registry.learn([chunk(C, "f#1", "1", "f"), chunk(A, "f#2", "1", "f")])
    assert chosen(registry, "f") == {A, C} and chosen(registry, "f#1", "1") == {C}
    for wrong, argument in ((("z", None), "document_id"), (("x", "3"), "version"), (("y", "1"), "version")):
        with pytest.raises(UnknownDocumentError, match=f"^{argument}: "):
            registry.select(*wrong)
    assert len(names(root, "link-")) == 5


@pytest.mark.parametrize(
    ("value", "is_good"), [("", False), ("x" * 1024, True), ("x" * 1025, False), (None, False), (5, False)]
)
def test_names_have_1_to_1024_characters(registry, value, is_good):
    registry.learn([chunk(A, "x" * 1024, "x" * 1024)])
    if is_good:
        assert chosen(registry, value) == chosen(registry, value, value) == {A}
        return
    with pytest.raises(RequestError, match="document_id: wanted a text"):
        registry.select(value, None)
    if value is not None:
        with pytest.raises(RequestError, match="version: wanted a text"):
            registry.select("x" * 1024, value)


def test_chunk_shared_by_two_documents_is_removed_with_the_second(registry):
    one, two = registry.learn([chunk(A, "x"), chunk(B, "x")]), registry.learn([chunk(A, "y")])
    assert registry.without_others(one) == {B} and registry.without_others(one | two) == {A, B}
    registry.begin({B}, one, whole=True)  # not finished yet, so its links are still there
    assert registry.without_others(two) == {A}


def test_old_links_of_unpinned_documents_can_be_forgotten(registry, start, root):
    (one,), (two,) = registry.learn([chunk(A, "x")]), registry.learn([chunk(B, "y")])
    start.now[0] += ERASURE_AGE_S
    assert registry.passing() == {} and registry.last_used(A) == 1000.0
    registry.pin(Pin("y", None, start.now[0] + 9, False))
    start.now[0] += 1
    assert registry.passing() == {one: A}
    registry.forget_links([one])
    assert not registry.knows(A) and registry.last_used(A) is None and registry.passing() == {}
    assert registry.knows(B) and names(root, "link-") == [f"{two}.json"]
    assert registry.without_others([two]) == {B}
    other = start()
    registry.forget_links([two])
    follow(other)
    assert not other.knows(B) and list(other.links()) == []


def test_used_link_forgotten_by_another_process_is_recorded_again(registry, start, root):
    registry.learn([chunk(A, "x"), chunk(B, "y"), chunk(C, "z")])
    other = start()
    start.now[0] += ERASURE_AGE_S + 1
    registry.learn([chunk(A, "x")])  # its KV may be on its way to the disk: the link is known, so no note is written
    other.forget_links(list(other.passing()))  # which finds no variant of it
    assert names(root, "link-") == []
    follow(registry)
    assert chosen(registry, "x") == {A} and len(names(root, "link-")) == 1
    with pytest.raises(UnknownDocumentError):
        registry.select("y", None)  # nobody used it
    follow(other)
    assert chosen(other, "x") == {A} and not other.passing()  # so it is not soon forgotten again
    assert registry.last_used(A) == start.now[0]


@pytest.mark.parametrize("whole", [True, False])
def test_link_removed_by_an_erasure_is_not_recorded_again(registry, start, root, whole):
    registry.learn([chunk(A, "x")])
    other = start()
    erasure = other.begin([A], other.select("x", None), whole=whole)
    other.note(erasure)
    other.finish(erasure)
    follow(registry)
    assert names(root, "link-") == []
    with pytest.raises(UnknownDocumentError):
        registry.select("x", None)


def test_link_stays_known_if_the_disk_fails_to_delete_it(registry, root, monkeypatch):
    (name,) = registry.learn([chunk(A, "x")])

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(root, "delete", refuse)
        with pytest.raises(OSError):
            registry.forget_links([name])
    assert registry.knows(A) and chosen(registry, "x") == {A}
    registry.forget_links([name])
    assert not registry.knows(A)


# -- pins -------------------------------------------------------------------------------------------------------


def test_pin_expires_on_time_and_its_note_is_dropped_an_hour_later(registry, start, root):
    registry.learn([chunk(A, "x", "1"), chunk(B, "x", "2")])
    until = start.now[0] + 10
    registry.pin(Pin("x", "1", until, True))
    registry.pin(Pin("x", None, until + 5, False))
    assert registry.pinned_chunks() == {A: True, B: False}
    start.now[0] = until - 0.5
    registry.drop_expired_pins()
    assert len(registry.pins()) == len(names(root, "pin-")) == 2
    start.now[0] = until
    assert registry.pins() == [Pin("x", None, until + 5, False)] and registry.pinned_chunks() == {A: False, B: False}
    registry.drop_expired_pins()
    assert len(names(root, "pin-")) == 2  # the clock of whoever pinned it may be behind
    start.now[0] = until + PIN_NOTE_S
    registry.drop_expired_pins()
    assert len(names(root, "pin-")) == 1


@pytest.mark.parametrize("first", [True, False])
def test_either_of_two_pins_on_a_chunk_can_keep_it_in_host_memory(registry, start, first):
    registry.learn([chunk(A, "x")])
    registry.learn([chunk(A, "y")])
    registry.pin(Pin("x", None, start.now[0] + 9, first))
    extra = Pin("y", None, start.now[0] + 9, not first)
    assert registry.pinned_chunks() == {A: first} and registry.pinned_chunks(extra) == {A: True}
    assert len(registry.pins()) == 1


def test_repeated_pin_replaces_the_earlier_one_in_every_process(registry, start, root):
    registry.learn([chunk(A, "x", "1")])
    for version, until in ((None, 2000.0), ("1", 3000.0), ("1", 4000.0)):
        registry.pin(Pin("x", version, until, False))
    other = start()
    assert sorted(pin.until for pin in other.pins()) == [2000.0, 4000.0] and len(names(root, "pin-")) == 2
    assert registry.unpin("x", "1") and not registry.unpin("x", "1") and not registry.unpin("x", "2")
    follow(other)
    assert [pin.version for pin in other.pins()] == [None]


def test_pin_or_erasure_not_written_to_disk_raises_but_applies_locally(registry, root, monkeypatch, start):
    registry.learn([chunk(A, "x")])

    def refuse(*_: Any, **__: Any) -> bool:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(root, "create", refuse)
        with pytest.raises(OSError):
            registry.pin(Pin("x", None, start.now[0] + 9, False))
        with pytest.raises(OSError):
            registry.note(registry.begin({B}, [], whole=True))
    assert registry.pinned_chunks() == {A: False} and registry.is_erased(B, Origin(frozenset({B})))


def test_pins_are_removed_only_with_the_last_document_they_pin(registry, start):
    one, _ = registry.learn([chunk(A, "x", "1")]), registry.learn([chunk(B, "x", "2")])
    for document_id, version in (("x", None), ("x", "1"), ("later", None)):  # the last one has nothing yet
        registry.pin(Pin(document_id, version, start.now[0] + 9, False))
    registry.finish(registry.begin({A}, one, whole=True))
    assert {(pin.document_id, pin.version) for pin in registry.pins()} == {("x", None), ("later", None)}


# -- erasures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_erasure_covers_kv_computed_behind_the_text_but_invalidation_does_not(registry, whole):
    erasure = registry.begin({A}, [], whole=whole)
    behind, itself = Origin(frozenset({A, B})), Origin(frozenset({A}))
    assert registry.is_erased(A, itself) and registry.is_erased(B, behind) == whole
    assert not registry.is_erased(B, Origin(frozenset({B})))
    assert registry.after(A, itself.seen) == {erasure.id} and registry.after(C, frozenset({B, C})) == frozenset()
    assert registry.after(B, behind.seen) == ({erasure.id} if whole else frozenset())
    assert not registry.is_erased(A, Origin(itself.seen, registry.after(A, itself.seen)))  # computed after it


def test_another_process_follows_an_erasure_from_start_to_expiry(registry, start, root):
    registry.learn([chunk(A, "x"), chunk(B, "y")])
    other = start()
    assert not follow(other)
    registry.learn([chunk(C, "z")])
    assert not follow(other) and other.knows(C)  # news, but no erasure
    erasure = registry.begin({A}, registry.select("x", None), whole=True)
    registry.note(erasure)
    assert follow(other) and [one.id for one in other.unfinished()] == [erasure.id]
    registry.finish(erasure)
    follow(other)
    for one in (registry, other, start()):
        assert one.has_erasures and one.unfinished() == [] and one.is_erased(A, Origin(frozenset({A})))
    assert names(root, "erasing-") == [] and len(names(root, "erased-")) == 1
    start.now[0] += ERASURE_AGE_S
    assert registry.outdated() == []
    start.now[0] += 1
    (done,) = registry.outdated()
    registry.forget(done)
    follow(other)
    for one in (registry, other, start()):
        assert not one.has_erasures and not one.is_erased(A, Origin(frozenset({A})))
    assert names(root, "eras") == []


def test_an_unfinished_erasure_is_never_too_old(registry, start):
    registry.begin({A}, [], whole=True)
    start.now[0] += 100 * ERASURE_AGE_S
    assert registry.outdated() == [] and len(registry.unfinished()) == 1


def test_note_of_a_finished_erasure_names_no_document(registry, root):
    links = registry.learn([chunk(A, "x")])
    erasure = registry.begin({A}, links, whole=True)
    registry.note(erasure)
    registry.finish(erasure)
    (name,) = root.names("notes")
    raw = root.read(f"notes/{name}") or b""
    assert b"link-" not in raw and b'"x"' not in raw and b'["a"]' in raw


@pytest.mark.parametrize("num_done", range(5))
def test_erasure_survives_a_crash_at_any_step_of_finishing(registry, start, root, monkeypatch, num_done):
    """A pin and a link to delete, "erased" to write, "erasing" to delete."""
    registry.pin(Pin("x", None, start.now[0] + 9, False))
    erasure = registry.begin({A}, registry.learn([chunk(A, "x")]), whole=True)
    registry.note(erasure)
    left = [num_done]

    def until_the_end(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("the process is no more")
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patch:
        for name in ("create", "delete"):
            patch.setattr(root, name, until_the_end(getattr(root, name)))
        try:
            registry.finish(erasure)
        except OSError:
            assert num_done < 4
        else:
            assert num_done == 4
    fresh = start()
    assert fresh.is_erased(A, Origin(frozenset({A})))
    assert bool(fresh.unfinished()) == (num_done < 3)  # with both notes there it is done
    for erasure in fresh.unfinished():
        fresh.finish(erasure)
    assert not fresh.knows(A) and fresh.pins() == start().pins() == start().unfinished() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"document_id": 5}',
        b'{"chunk_ids": ["a"], "links": [], "whole": true}',
        b'{"chunk_ids": ["a"], "links": [], "whole": true, "at": "soon"}',
        b'{"chunk_ids": 5, "links": [], "whole": true, "at": 1}',
        b'{"chunk_ids": ["a"], "links": 5, "whole": true, "at": 1}',
        b'{"document_id": "x", "version": null, "until": "late", "host": true}',
        b'{"document_id": "x", "version": null, "chunk_id": "a", "passage_id": null, "at": "soon"}',
        b'{"document_id": "x", "version": null, "chunk_id": [], "passage_id": "p", "at": 1}',
        b'{"document_id": ["x"], "version": null, "chunk_id": "a", "passage_id": null, "at": 1}',
        b'{"document_id": "x", "version": {}, "chunk_id": "a", "passage_id": 5, "until": 1e20, "host": true, "at": 1}',
        b'{"chunk_ids": ["a", 5], "links": [], "whole": true, "at": 1}',
        b'{"chunk_ids": ["a"], "links": [["b"]], "whole": true, "at": 1}',
    ],
)
@pytest.mark.parametrize("kind", ["link", "pin", "erasing", "erased", "other"])
def test_unusable_notes_are_ignored(start, root, kind, content):
    root.create(f"notes/{kind}-{'0' * 32}.json", content)
    registry = start()
    assert list(registry.links()) == registry.pins() == registry.unfinished() == [] and not registry.has_erasures

"""Which documents the cached chunks belong to, which documents are pinned, and what was invalidated or erased.

Every fact is a note of the store (`store.notes.Notes`), written once under its own name and never changed, so that
facts survive restarts and processes on one store never overwrite each other's. Records of variants cannot hold these
facts: they are immutable, and the same text may appear in a second document long after its KV was stored.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import time
import uuid
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ccjax.errors import RequestError, UnknownDocumentError
from ccjax.store.notes import Notes
from ccjax.types import LONGEST_ID, Chunk, ChunkId

ERASURE_AGE_S = 3600.0
"""How long the note of a finished erasure is kept, for variants that other processes computed before it and store
later."""

PIN_NOTE_S = 3600.0
"""How long the note of an expired pin is kept: by the clock of the host that pinned, it may still be valid."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A chunk that occurred as a version of a document, or as a passage of one."""

    document_id: str
    version: str | None
    chunk_id: ChunkId
    passage_id: str | None = None

    def is_of(self, document_id: str, version: str | None) -> bool:
        """True if the chunk belongs to that document, or is that passage; `version` None matches every version."""
        return document_id in (self.document_id, self.passage_id) and version in (None, self.version)


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A document that eviction keeps until `until` (wall clock, seconds); with `host`, also in host memory if it is
    there."""

    document_id: str
    version: str | None
    until: float
    host: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Erasure:
    """Chunks whose earlier variants must not be used any more.

    Attributes:
      chunk_ids: the chunks, which no other document has.
      links: names of the links to delete with them.
      whole: True for an erasure, which covers every variant whose KV depends on one of the chunks; False for an
        invalidation, which covers only the chunks' own variants.
      at: when it was requested, wall clock.
      is_done: everything that could be found was deleted.
    """

    id: str
    chunk_ids: frozenset[ChunkId]
    links: tuple[str, ...]
    whole: bool
    at: float
    is_done: bool = False

    def covers(self, chunk_id: ChunkId, origin: Origin) -> bool:
        """True if it covers a variant of that chunk and origin, which must then be deleted."""
        if self.id in origin.after:
            return False
        if self.whole or origin.is_run:
            return not self.chunk_ids.isdisjoint(origin.seen)
        return chunk_id in self.chunk_ids


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What a variant's KV was computed from.

    Attributes:
      seen: every chunk that influenced it: its own, its prefix, and for KV reused from other variants and repaired, the
        `seen` of those.
      after: erasures of these chunks that were known when it was computed, and so do not cover it.
      is_run: it is the KV of a whole prompt, and so of all these chunks.
    """

    seen: frozenset[ChunkId]
    after: frozenset[str] = frozenset()
    is_run: bool = False


class DocumentRegistry:
    """The facts, in memory and as notes. Except for `fetch` not thread-safe: needs exclusive access to the engine
    (`Exclusive`).

    Attributes:
      clock: seconds since the epoch, for expiry times.
    """

    def __init__(self, notes: Notes) -> None:
        self.clock = time.time
        self._notes = notes
        self._links: dict[str, Link] = {}
        self._linked_at: dict[str, float] = {}
        self._by_chunk: dict[ChunkId, set[str]] = collections.defaultdict(set)
        self._pins: dict[str, Pin] = {}
        self._erasures: dict[str, Erasure] = {}
        self._last_used: dict[ChunkId, float] = {}
        self.apply_changes(*self.fetch())

    # -- documents ---------------------------------------------------------------------------------------------

    def learn(self, chunks: Iterable[Chunk]) -> set[str]:
        """Notes which documents a prompt's chunks belong to, and that they are used now; returns the links' names."""
        now, names = self.clock(), set()
        for chunk in chunks:
            self._last_used[chunk.chunk_id] = now
            document_id = chunk.source_id if chunk.source_id is not None else chunk.document_id
            if document_id is None:
                continue
            passage_id = chunk.document_id if chunk.source_id is not None else None
            link = Link(document_id, chunk.version, chunk.chunk_id, passage_id)
            value = dataclasses.asdict(link)
            name = "link-" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
            names.add(name)
            if name not in self._links:
                self._notes.put(name, value | {"at": now})
                self._add_link(name, link, now)
        return names

    def select(self, document_id: str, version: str | None) -> dict[str, Link]:
        """Name -> link of a document, or of one version of it; never empty.

        Raises:
          RequestError: an argument is not a string, empty or too long.
          UnknownDocumentError: there is no such document, or version of it.
        """
        check_id("document_id", document_id)
        if version is not None:
            check_id("version", version)
        found = {name: link for name, link in self._links.items() if link.is_of(document_id, None)}
        if not found:
            raise UnknownDocumentError("document_id", f"nothing is cached of a document {document_id!r}")
        chosen = {name: link for name, link in found.items() if link.is_of(document_id, version)}
        if not chosen:
            versions = ", ".join(sorted({repr(link.version) for link in found.values()}))
            raise UnknownDocumentError("version", f"wanted one that is cached ({versions}), got {version!r}")
        return chosen

    def select_known(self, document_ids: Container[str]) -> dict[str, dict[str, Link]]:
        """Of those of these documents that are known, their id and the result of `select`."""
        found: dict[str, dict[str, Link]] = collections.defaultdict(dict)
        for name, link in self.links():
            for document_id in (link.document_id, link.passage_id):
                if document_id is not None and document_id in document_ids:
                    found[document_id][name] = link
        return found

    def links(self) -> Iterator[tuple[str, Link]]:
        """Every name and link."""
        return iter(tuple(self._links.items()))

    def knows(self, chunk_id: ChunkId) -> bool:
        """True if the chunk belongs to some document."""
        return chunk_id in self._by_chunk

    def last_used(self, chunk_id: ChunkId) -> float | None:
        """When a request of this process last contained the chunk, wall clock; None if none did."""
        return self._last_used.get(chunk_id)

    def without_others(self, names: Collection[str]) -> frozenset[ChunkId]:
        """The chunks of these links that no other document or version has, not counting links that are being erased."""
        going = {name for erasure in self.unfinished() for name in erasure.links}.union(names)
        return frozenset(self._links[n].chunk_id for n in names if self._by_chunk[self._links[n].chunk_id] <= going)

    def passing(self) -> dict[str, ChunkId]:
        """Name -> chunk of old links to unpinned chunks: to be forgotten if the chunk influenced no stored variant."""
        pinned, now = self.pinned_chunks(), self.clock()
        return {
            name: link.chunk_id
            for name, link in self.links()  # the variant of a recent link may not be stored yet
            if now - self._linked_at[name] > ERASURE_AGE_S and link.chunk_id not in pinned
        }

    def forget_links(self, names: Collection[str]) -> None:
        """Drops links. Raises OSError."""
        for name in names:
            self._drop(name)

    # -- pins --------------------------------------------------------------------------------------------------

    def pin(self, pin: Pin) -> None:
        """Adds a pin, replacing that of the same document and version. Raises OSError: it is not on disk yet."""
        self.unpin(pin.document_id, pin.version)
        name = f"pin-{uuid.uuid4().hex}"
        self._pins[name] = pin
        self._notes.put(name, dataclasses.asdict(pin), wait=True)

    def unpin(self, document_id: str, version: str | None) -> bool:
        """Removes a pin; False if there was none. Raises OSError."""
        names = [n for n, pin in self._pins.items() if (pin.document_id, pin.version) == (document_id, version)]
        for name in names:
            self._drop(name)
        return bool(names)

    def pins(self) -> list[Pin]:
        """The pins that have not expired."""
        now = self.clock()
        return [pin for pin in tuple(self._pins.values()) if pin.until > now]  # a copy: metrics use another thread

    def drop_expired_pins(self) -> None:
        """Deletes the notes of pins that expired `PIN_NOTE_S` ago. Raises OSError."""
        now = self.clock()
        for name in [name for name, pin in self._pins.items() if pin.until + PIN_NOTE_S <= now]:
            self._drop(name)

    def pinned_chunks(self, extra: Pin | None = None) -> dict[ChunkId, bool]:
        """Chunk of a pinned document -> whether it is also pinned in host memory. `extra` is one more pin."""
        pins = [*self.pins(), extra] if extra is not None else self.pins()
        chunks: dict[ChunkId, bool] = {}
        for link in self._links.values() if pins else ():
            for pin in pins:
                if link.is_of(pin.document_id, pin.version):
                    chunks[link.chunk_id] = chunks.get(link.chunk_id, False) or pin.host
        return chunks

    # -- erasures ----------------------------------------------------------------------------------------------

    def begin(self, chunk_ids: Collection[ChunkId], links: Collection[str], *, whole: bool) -> Erasure:
        """Starts an erasure, unfinished until `finish`; it is only in memory until `note`."""
        erasure = Erasure(uuid.uuid4().hex, frozenset(chunk_ids), tuple(sorted(links)), whole, self.clock())
        self._erasures[erasure.id] = erasure
        return erasure

    def note(self, erasure: Erasure) -> None:
        """Writes the note of an erasure. Raises OSError: it is not on disk yet."""
        self._notes.put(f"erasing-{erasure.id}", _as_note(erasure), wait=True)

    def finish(self, erasure: Erasure) -> None:
        """Deletes the links of an erasure whose variants are deleted, and notes that it is done. Raises OSError."""
        going = [link for name in erasure.links if (link := self._links.get(name)) is not None]
        left = [link for name, link in self._links.items() if name not in erasure.links]
        for pin in tuple(self._pins.values()):  # before the links, by which a repetition finds the pins
            had, has = (any(link.is_of(pin.document_id, pin.version) for link in links) for links in (going, left))
            if had and not has:
                self.unpin(pin.document_id, pin.version)
        for name in erasure.links:
            self._drop(name)
        done = dataclasses.replace(erasure, links=(), is_done=True)  # no links: their names are hashes of document ids
        self._notes.put(f"erased-{erasure.id}", _as_note(done), wait=True)
        self._notes.delete(f"erasing-{erasure.id}")
        self._erasures[erasure.id] = done

    def unfinished(self) -> list[Erasure]:
        """Erasures that may not have deleted everything yet."""
        return [erasure for erasure in tuple(self._erasures.values()) if not erasure.is_done]

    def outdated(self) -> list[Erasure]:
        """Finished erasures that no process needs to learn of any more."""
        now = self.clock()
        return [erasure for erasure in self._erasures.values() if erasure.is_done and now - erasure.at > ERASURE_AGE_S]

    def forget(self, erasure: Erasure) -> None:
        """Deletes the note of a finished erasure. Raises OSError."""
        self._notes.delete(f"erased-{erasure.id}")
        self._erasures.pop(erasure.id, None)

    def after(self, chunk_id: ChunkId, seen: frozenset[ChunkId], *, is_run: bool = False) -> frozenset[str]:
        """The known erasures that cover earlier variants of this chunk and origin, but not one computed now."""
        erasures = tuple(self._erasures.items())
        return frozenset(key for key, erasure in erasures if erasure.covers(chunk_id, Origin(seen, is_run=is_run)))

    @property
    def erasure_ids(self) -> frozenset[str]:
        """The known erasures."""
        return frozenset(self._erasures)

    def is_erased(self, chunk_id: ChunkId, origin: Origin) -> bool:
        """True if an erasure covers the variant."""
        erasures = tuple(self._erasures.values())  # a copy: preloads call this from another thread
        return any(erasure.covers(chunk_id, origin) for erasure in erasures)

    @property
    def has_erasures(self) -> bool:
        """True while an erasure is known that could cover a variant."""
        return bool(self._erasures)

    # -- other processes ---------------------------------------------------------------------------------------

    def fetch(self) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Reads other processes' notes from disk, for `apply_changes`; changes nothing here. Raises OSError."""
        return self._notes.refresh()

    def apply_changes(self, added: Mapping[str, Mapping[str, Any]], removed: Sequence[str]) -> bool:
        """Applies what `fetch` returned; True if it contained a new erasure."""
        before = self._erasures.keys() | set()
        lost = [(name, link) for name in removed if (link := self._links.get(name)) is not None]
        used = [self._last_used.get(link.chunk_id) for _, link in lost]
        for name in removed:
            if name.startswith("erased-"):
                self._erasures.pop(name.removeprefix("erased-"), None)
            elif not name.startswith("erasing-"):  # the end of an erasure has its own note
                self._forget(name)
        for name, value in added.items():
            self._apply(name, value)
        for (name, link), used_at in zip(lost, used, strict=True):
            if used_at is not None:
                self._restore(name, link, used_at)
        return not self._erasures.keys() <= before

    def _restore(self, name: str, link: Link, used_at: float) -> None:
        """Notes a link again that another process removed as unused while this one was storing KV of its chunk."""
        now = self.clock()
        is_erased = any(link.chunk_id in erasure.chunk_ids for erasure in self._erasures.values())
        if not is_erased and now - used_at <= ERASURE_AGE_S:
            self._notes.put(name, dataclasses.asdict(link) | {"at": now})
            self._add_link(name, link, now)
            self._last_used[link.chunk_id] = used_at

    def _apply(self, name: str, value: Mapping[str, Any]) -> None:
        kind, _, key = name.partition("-")
        try:
            if kind == "link":
                chunk_id, passage_id = ChunkId(_text(value["chunk_id"])), _text(value["passage_id"], or_none=True)
                self._add_link(name, Link(*_document(value), chunk_id, passage_id), float(value["at"]))
            elif kind == "pin":
                self._pins[name] = Pin(*_document(value), float(value["until"]), bool(value["host"]))
            elif kind in ("erasing", "erased") and not (kind == "erasing" and key in self._erasures):
                chunk_ids = frozenset(ChunkId(_text(chunk)) for chunk in value["chunk_ids"])
                links, whole, at = tuple(map(_text, value["links"])), bool(value["whole"]), float(value["at"])
                self._erasures[key] = Erasure(key, chunk_ids, links, whole, at, kind == "erased")
        except (KeyError, TypeError, ValueError):  # damaged, or from a later release: ignored
            pass

    def _add_link(self, name: str, link: Link, at: float) -> None:
        self._links[name], self._linked_at[name] = link, at
        self._by_chunk[link.chunk_id].add(name)

    def _drop(self, name: str) -> None:
        self._notes.delete(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._pins.pop(name, None)
        self._linked_at.pop(name, None)
        link = self._links.pop(name, None)
        if link is not None:
            self._by_chunk[link.chunk_id].discard(name)
            if not self._by_chunk[link.chunk_id]:
                del self._by_chunk[link.chunk_id]
                self._last_used.pop(link.chunk_id, None)


def check_id(argument: str, value: Any) -> None:
    """Raises RequestError unless `value` is a string of 1 to 1,024 characters."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID:
        shown = f"{len(value)} characters" if isinstance(value, str) else repr(value)
        raise RequestError(argument, f"wanted a text of 1 to {LONGEST_ID} characters, got {shown}")


def _document(note: Mapping[str, Any]) -> tuple[str, str | None]:
    return _text(note["document_id"]), _text(note["version"], or_none=True)


def _text(value: Any, *, or_none: bool = False) -> Any:
    if not isinstance(value, str) and not (or_none and value is None):
        raise TypeError(f"wanted a text, got {value!r}")
    return value


def _as_note(erasure: Erasure) -> dict[str, Any]:
    fields = {"chunk_ids": sorted(erasure.chunk_ids), "links": list(erasure.links)}
    return {**fields, "whole": erasure.whole, "at": erasure.at}

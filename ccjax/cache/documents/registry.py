"""Which documents the cached chunks belong to, which documents are pinned, and what was invalidated or erased.

Every fact is a note of the store (`store.notes.Notes`): written once under a name of its own and never changed, so that
processes that share a store never overwrite each other's facts, and known again after a restart. Records of variants
cannot hold this: they never change, and the same text may turn up under a second document long after its KV was stored.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ccjax.errors import RequestError, UnknownDocumentError
from ccjax.store.notes import Notes
from ccjax.types import Chunk, ChunkId

ERASURE_AGE_S = 3600.0
"""How long a finished erasure stays noted, for variants that other processes computed before it and store later."""

PIN_NOTE_S = 3600.0
"""How long the note of a pin stays after it ran out: by the clock of the host that pinned it may still last."""

_LONGEST_ID = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A chunk that was seen as (a passage of) a version of a document."""

    document_id: str
    version: str | None
    chunk_id: ChunkId
    passage_id: str | None = None

    def is_of(self, document_id: str, version: str | None) -> bool:
        """True if it belongs to that document, or is that passage; `version` None stands for every version."""
        return document_id in (self.document_id, self.passage_id) and version in (None, self.version)


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A document that stays until `until`, a wall clock's seconds; `host`: in host memory, too, where it is there."""

    document_id: str
    version: str | None
    until: float
    host: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Erasure:
    """Chunks of which no variant from before may be used any more.

    Attributes:
      chunk_ids: that no other document has.
      links: names of the links that go with them.
      whole: an erasure, which takes every variant that was computed while looking at one of the chunks; else an
        invalidation, which takes the chunks' own variants.
      at: when it was ordered, wall clock.
      is_done: everything was deleted that could be found.
    """

    id: str
    chunk_ids: frozenset[ChunkId]
    links: tuple[str, ...]
    whole: bool
    at: float
    is_done: bool = False

    def takes(self, chunk_id: ChunkId, origin: Origin) -> bool:
        """True if a variant of that chunk has to go."""
        if self.id in origin.after:
            return False
        return not self.chunk_ids.isdisjoint(origin.seen) if self.whole else chunk_id in self.chunk_ids


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a variant's KV comes from.

    Attributes:
      seen: every chunk whose text had a part in it: its own, its prefix, and for KV that was taken over from other
        variants and repaired, what those had seen.
      after: erasures of these chunks that were carried out before it was computed.
    """

    seen: frozenset[ChunkId]
    after: frozenset[str] = frozenset()


class DocumentRegistry:
    """The facts, in memory and as notes; not thread-safe but for `fetch`, it wants the engine for itself (`Exclusive`).

    Attributes:
      clock: seconds since the epoch, for times to live.
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
        """Notes which documents the chunks of a prompt belong to, and that they are used now; names of the links."""
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
          RequestError: an argument is no text, empty or too long.
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

    def links(self) -> Iterator[tuple[str, Link]]:
        """Every name and link."""
        return iter(tuple(self._links.items()))

    def knows(self, chunk_id: ChunkId) -> bool:
        """True if the chunk belongs to some document."""
        return chunk_id in self._by_chunk

    def last_used(self, chunk_id: ChunkId) -> float | None:
        """When a request of this process last had the chunk, wall clock; None if none had."""
        return self._last_used.get(chunk_id)

    def without_others(self, names: Collection[str]) -> frozenset[ChunkId]:
        """The chunks of these links that no other document, or version, has, but such as are being erased."""
        going = {name for erasure in self.unfinished() for name in erasure.links}.union(names)
        return frozenset(self._links[n].chunk_id for n in names if self._by_chunk[self._links[n].chunk_id] <= going)

    def passing(self) -> dict[str, ChunkId]:
        """Name -> chunk of old links to chunks that are not pinned: forgotten once no variant has seen the chunk."""
        pinned, now = self.pinned_chunks(), self.clock()
        return {
            name: link.chunk_id
            for name, link in self.links()  # a younger one's variant may be on its way
            if now - self._linked_at[name] > ERASURE_AGE_S and link.chunk_id not in pinned
        }

    def forget_links(self, names: Collection[str]) -> None:
        """Drops links. Raises OSError."""
        for name in names:
            self._drop(name)

    # -- pins --------------------------------------------------------------------------------------------------

    def pin(self, pin: Pin) -> None:
        """Adds a pin, in place of the one of the same document and version. Raises OSError: it is not on disk yet."""
        self.unpin(pin.document_id, pin.version)
        name = f"pin-{uuid.uuid4().hex}"
        self._pins[name] = pin
        self._notes.put(name, dataclasses.asdict(pin), wait=True)

    def unpin(self, document_id: str, version: str | None) -> bool:
        """Takes back a pin; False if there was none. Raises OSError."""
        names = [n for n, pin in self._pins.items() if (pin.document_id, pin.version) == (document_id, version)]
        for name in names:
            self._drop(name)
        return bool(names)

    def pins(self) -> list[Pin]:
        """Those that have not run out."""
        now = self.clock()
        return [pin for pin in tuple(self._pins.values()) if pin.until > now]  # metrics ask from another thread

    def drop_expired_pins(self) -> None:
        """Deletes the notes of pins that have long run out. Raises OSError."""
        now = self.clock()
        for name in [name for name, pin in self._pins.items() if pin.until + PIN_NOTE_S <= now]:
            self._drop(name)

    def pinned_chunks(self, extra: Pin | None = None) -> dict[ChunkId, bool]:
        """Chunk of a pinned document -> whether it is to stay in host memory, too. `extra` is one more pin."""
        pins = [*self.pins(), extra] if extra is not None else self.pins()
        chunks: dict[ChunkId, bool] = {}
        for link in self._links.values() if pins else ():
            for pin in pins:
                if link.is_of(pin.document_id, pin.version):
                    chunks[link.chunk_id] = chunks.get(link.chunk_id, False) or pin.host
        return chunks

    # -- erasures ----------------------------------------------------------------------------------------------

    def begin(self, chunk_ids: Collection[ChunkId], links: Collection[str], *, whole: bool) -> Erasure:
        """An erasure that lasts until `finish`; in memory alone until `note`."""
        erasure = Erasure(uuid.uuid4().hex, frozenset(chunk_ids), tuple(sorted(links)), whole, self.clock())
        self._erasures[erasure.id] = erasure
        return erasure

    def note(self, erasure: Erasure) -> None:
        """Writes the note of an erasure. Raises OSError: it is not on disk yet."""
        self._notes.put(f"erasing-{erasure.id}", _as_note(erasure), wait=True)

    def finish(self, erasure: Erasure) -> None:
        """Deletes the links of an erasure whose variants are gone, and notes that it is done. Raises OSError."""
        going = [link for name in erasure.links if (link := self._links.get(name)) is not None]
        for name in erasure.links:
            self._drop(name)
        left = list(self._links.values())
        for pin in tuple(self._pins.values()):
            had, has = (any(link.is_of(pin.document_id, pin.version) for link in links) for links in (going, left))
            if had and not has:
                self.unpin(pin.document_id, pin.version)
        done = dataclasses.replace(erasure, links=(), is_done=True)  # a link's name is a hash of the document's
        self._notes.put(f"erased-{erasure.id}", _as_note(done), wait=True)
        self._notes.delete(f"erasing-{erasure.id}")
        self._erasures[erasure.id] = done

    def unfinished(self) -> list[Erasure]:
        """Erasures of which something may be left."""
        return [erasure for erasure in tuple(self._erasures.values()) if not erasure.is_done]

    def outdated(self) -> list[Erasure]:
        """Finished ones that no process needs to hear of any more."""
        now = self.clock()
        return [erasure for erasure in self._erasures.values() if erasure.is_done and now - erasure.at > ERASURE_AGE_S]

    def forget(self, erasure: Erasure) -> None:
        """Deletes what is noted of a finished erasure. Raises OSError."""
        self._notes.delete(f"erased-{erasure.id}")
        self._erasures.pop(erasure.id, None)

    def after(self, chunk_id: ChunkId, seen: frozenset[ChunkId]) -> frozenset[str]:
        """The erasures that a variant computed now comes after."""
        erasures = tuple(self._erasures.items())
        return frozenset(key for key, erasure in erasures if erasure.takes(chunk_id, Origin(seen)))

    def is_erased(self, chunk_id: ChunkId, origin: Origin) -> bool:
        """True for a variant that an erasure has to take."""
        erasures = tuple(self._erasures.values())  # those who read ahead ask from another thread
        return any(erasure.takes(chunk_id, origin) for erasure in erasures)

    @property
    def has_erasures(self) -> bool:
        """True while any variant could be erased."""
        return bool(self._erasures)

    # -- other processes ---------------------------------------------------------------------------------------

    def fetch(self) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """What other processes noted, for `apply_changes`; reads the disk and changes nothing here. Raises OSError."""
        return self._notes.refresh()

    def apply_changes(self, added: Mapping[str, Mapping[str, Any]], removed: Sequence[str]) -> bool:
        """Applies what `fetch` returned; True if that brought an erasure."""
        before = self._erasures.keys() | set()
        lost = [(name, link) for name in removed if (link := self._links.get(name)) is not None]
        used = [self._last_used.get(link.chunk_id) for _, link in lost]
        for name in removed:
            if name.startswith("erased-"):
                self._erasures.pop(name.removeprefix("erased-"), None)
            elif not name.startswith("erasing-"):  # its end has a note of its own
                self._forget(name)
        for name, value in added.items():
            self._apply(name, value)
        for (name, link), used_at in zip(lost, used, strict=True):
            if used_at is not None:
                self._restore(name, link, used_at)
        return not self._erasures.keys() <= before

    def _restore(self, name: str, link: Link, used_at: float) -> None:
        """Notes a link again that another process took for unused, while this one was storing KV of its chunk."""
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
                chunk_id = ChunkId(value["chunk_id"])
                link = Link(value["document_id"], value["version"], chunk_id, value["passage_id"])
                self._add_link(name, link, float(value["at"]))
            elif kind == "pin":
                self._pins[name] = Pin(value["document_id"], value["version"], float(value["until"]), value["host"])
            elif kind in ("erasing", "erased") and not (kind == "erasing" and key in self._erasures):
                chunk_ids = frozenset(ChunkId(chunk) for chunk in value["chunk_ids"])
                whole, at = bool(value["whole"]), float(value["at"])
                self._erasures[key] = Erasure(key, chunk_ids, tuple(value["links"]), whole, at, kind == "erased")
        except (KeyError, TypeError, ValueError):  # damaged, or of a later release: as if it were not there
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
    """Raises RequestError unless `value` is a text of 1 to 1,024 characters."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_ID:
        shown = f"{len(value)} characters" if isinstance(value, str) else repr(value)
        raise RequestError(argument, f"wanted a text of 1 to {_LONGEST_ID} characters, got {shown}")


def _as_note(erasure: Erasure) -> dict[str, Any]:
    fields = {"chunk_ids": sorted(erasure.chunk_ids), "links": list(erasure.links)}
    return {**fields, "whole": erasure.whole, "at": erasure.at}

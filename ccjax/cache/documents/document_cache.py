"""Invalidates, erases and lists documents across all tiers and variants.

An erasure is recorded before anything is deleted, and its record remains until everything is deleted. If a disk refuses
to delete an object, `tend` retries, also in the next process.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ccjax.cache.document_registry import Erasure, Link, Origin
from ccjax.cache.documents.unprepared import UnpreparedPassages
from ccjax.cache.variant_records import origin_of_record
from ccjax.cache.variants import VariantIndex
from ccjax.errors import EraseIncompleteError
from ccjax.prompts import chunk_id, tenant_of
from ccjax.store.spec import ShardRecord
from ccjax.store.tiered import TieredStore
from ccjax.types import Chunk, ChunkId, VariantMeta

logger = logging.getLogger(__name__)

_TEND_INTERVAL_S = 600.0
_ERASE_PAUSES_S = (0.05, 0.1, 0.2)  # other processes learn of an erasure within a few polls of the index


@dataclasses.dataclass(frozen=True, slots=True)
class CachedDocument:
    """One version of a document and its cached variants.

    Attributes:
      chunks, variants: counts; a chunk is one wording of a passage, a variant its KV behind one prefix.
      num_bytes: tier -> bytes of KV. Chunks shared by two documents count for both.
      frequency_reuse: CacheCraft sec. 3.3 `f_r`, summed over the variants.
      last_used: time of the last request in this process that contained it, seconds since the epoch; None if none did.
      pinned_until: end of its pin, seconds since the epoch; None if it is not pinned.
      erasing: no longer used, but some of its data could not be deleted yet.
    """

    document_id: str
    version: str | None
    chunks: int
    variants: int
    num_bytes: dict[str, int]
    frequency_reuse: float
    last_used: float | None
    pinned_until: float | None
    erasing: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """Result of an invalidation or an erasure.

    Attributes:
      chunks: number of the document's chunks that were removed.
      kept_chunks: number of chunks that stay because another document contains them as well.
      variants: number of variants deleted from every tier.
      num_bytes: tier -> bytes of KV of these variants.
    """

    document_id: str
    version: str | None
    chunks: int
    kept_chunks: int
    variants: int
    num_bytes: dict[str, int]


class DocumentCache:
    """Lists and removes the documents of one engine's cache; every method needs exclusive access (`Exclusive`), except
    `fetch`.

    An erasure needs the origin of each variant's KV, so it reads the records of all variants that no request has asked
    for yet: some 50 us each.
    """

    def __init__(self, unprepared: UnpreparedPassages, variants: VariantIndex, store: TieredStore) -> None:
        self.registry = variants.documents
        self._unprepared = unprepared
        self._variants = variants
        self._store = store
        self._next_tend = 0.0

    def remove(self, document_id: str, version: str | None, *, whole: bool, keep: Sequence[Chunk] = ()) -> Removal:
        """Removes a document's variants from the index and from every tier, except those of chunks in `keep`, which
        belong to another version of it.

        Args:
          keep: without a tenant; their chunks of every tenant are kept.
          whole: also remove variants whose KV attended to the document, and uncommitted files on disk.

        Raises:
          RequestError, UnknownDocumentError: as `DocumentRegistry.select`.
          EraseIncompleteError: not everything could be deleted or recorded; nothing of it is used from now on.
        """
        self.apply_all()
        links = self._old(self.registry.select(document_id, version), keep)
        counts = self._remove(links, whole=whole, what=f"document {document_id!r}")
        return Removal(document_id, version, *counts)

    def remove_old(self, keep: Mapping[str, Sequence[Chunk]]) -> None:
        """As `remove` of each of many documents, but reads the records once. Unknown documents are ignored.

        Args:
          keep: document id -> its chunks as in `remove`.
        """
        self.apply_all()
        links: dict[str, Link] = {}
        for document_id, found in self.registry.select_known(keep).items():
            links |= self._old(found, keep[document_id])
        if links:
            self._remove(links, whole=False, what=f"{len(keep)} documents")

    def _old(self, links: Mapping[str, Link], keep: Sequence[Chunk]) -> dict[str, Link]:
        """The links of a document that `keep` does not have, once those of `keep` are noted."""
        tenants = {tenant_of(link.chunk_id) for link in links.values()}
        own = [
            dataclasses.replace(chunk, chunk_id=chunk_id(chunk.token_ids, tenant))
            for chunk in keep
            for tenant in tenants
        ]
        stays = self.registry.learn([chunk for chunk in own if self.registry.knows(chunk.chunk_id)])
        return {name: link for name, link in links.items() if name not in stays}

    def _remove(self, links: Mapping[str, Link], *, whole: bool, what: str) -> tuple[int, int, int, dict[str, int]]:
        """Removes what has these links; returns the counts of a `Removal`."""
        self._variants.load_all_records()  # once the erasure has begun, covered variants are dropped uncounted
        chunk_ids = self.registry.without_others(links)
        kept = {link.chunk_id for link in links.values()} - chunk_ids
        erasure = self.registry.begin(chunk_ids, list(links), whole=whole)
        failure = ""
        try:
            self.registry.note(erasure)
        except OSError as error:
            failure = f"the erasure could not be recorded and would be lost in a crash: {error}"
        variants, num_bytes, remaining = self._carry_out(erasure)
        if failure:
            remaining = (failure, *remaining)
        elif not remaining:
            remaining = self._finish(erasure)
        if remaining:
            raise EraseIncompleteError(
                f"{what}: {len(remaining)} objects could not be deleted or noted yet; nothing of it "
                "is used any more, and the rest is tried again",
                remaining,
            )
        return len(chunk_ids), len(kept), variants, num_bytes

    def needs_tending(self) -> bool:
        """True if `tend` has work."""
        return bool(self.registry.unfinished()) or self.registry.clock() >= self._next_tend

    def tend(self) -> None:
        """Retries unfinished deletions and deletes records that are no longer needed."""
        self._next_tend = self.registry.clock() + _TEND_INTERVAL_S
        self.tend_erasures()
        try:
            self.registry.drop_expired_pins()
            # A variant's own chunk is known without its record; all records are read only if a link may be dropped.
            held = self._variants.chunk_ids()
            passing = {name: chunk for name, chunk in self.registry.passing().items() if chunk not in held}
            seen = self._variants.seen() if passing else frozenset()
            self.registry.forget_links([name for name, chunk in passing.items() if chunk not in seen])
        except OSError as error:
            logger.warning("documents: notes that are no longer needed cannot be deleted: %s", error)

    def tend_erasures(self) -> None:
        """The part of `tend` that an engine must do when it opens; does nothing if nothing was erased."""
        for erasure in self.registry.unfinished():
            try:
                self.registry.note(erasure)
            except OSError:
                continue
            if not self._carry_out(erasure)[2]:
                self._finish(erasure)
        for erasure in self.registry.outdated():
            if not self._carry_out(erasure)[2]:  # other processes may have stored something since
                self._forget(erasure)

    def fetch(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        """Reads what other processes recorded, for `apply_changes`; changes nothing. Empty if the disk does not
        respond."""
        try:
            return self.registry.fetch()
        except OSError as error:
            logger.debug("documents: cannot read what other processes noted: %s", error)
            return {}, ()

    def apply_changes(self, added: Mapping[str, Mapping[str, Any]], removed: Sequence[str]) -> None:
        """Applies the result of `fetch`: drops what other processes erased from every tier, memory included."""
        if self.registry.apply_changes(added, removed):
            self._variants.discard_erased()
            self._drop_unprepared()

    def list(self, document_id: str | None = None, version: str | None = None) -> tuple[CachedDocument, ...]:
        """Lists cached documents by document and version. Reads the records of their variants that no request has asked
        for yet.

        Raises:
          RequestError, UnknownDocumentError: as `DocumentRegistry.select`.
        """
        links = dict(self.registry.links()) if document_id is None else self.registry.select(document_id, version)
        by_version: dict[tuple[str, str | None], list[tuple[str, Link]]] = collections.defaultdict(list)
        for name, link in links.items():
            by_version[link.document_id, link.version].append((name, link))
        going = {name for erasure in self.registry.unfinished() for name in erasure.links}
        order = sorted(by_version, key=lambda key: (key[0], key[1] is not None, key[1] or ""))
        return tuple(self._describe(*key, by_version[key], going) for key in order)

    def _describe(
        self, document_id: str, version: str | None, links: Sequence[tuple[str, Link]], going: Collection[str]
    ) -> CachedDocument:
        chunk_ids = {link.chunk_id for _, link in links}
        metas = [meta for found in self._variants.of_chunks(chunk_ids).values() for meta in found]
        used = [at for chunk in chunk_ids if (at := self.registry.last_used(chunk)) is not None]
        pins = [
            pin.until
            for pin in self.registry.pins()
            if any(link.is_of(pin.document_id, pin.version) for _, link in links)
        ]
        return CachedDocument(
            document_id=document_id,
            version=version,
            chunks=len(chunk_ids),
            variants=len(metas),
            num_bytes=self._bytes_by_tier(metas),
            frequency_reuse=sum(meta.frequency_reuse for meta in metas),
            last_used=max(used, default=None),
            pinned_until=max(pins, default=None),
            erasing=any(name in going for name, _ in links),
        )

    def _bytes_by_tier(self, metas: Sequence[VariantMeta]) -> dict[str, int]:
        num_bytes = dict.fromkeys(self._store.usage(), 0)
        for meta in metas:
            for tier in self._store.tiers_of(meta.variant_id):
                num_bytes[tier] += meta.num_bytes
        return num_bytes

    def apply_all(self) -> None:
        """Applies what other processes recorded and stored, as far as the disk responds."""
        self.apply_changes(*self.fetch())
        self._store.refresh()
        self._reconcile()

    def _reconcile(self) -> None:
        gone = [variant_id for variant_id in self._variants.ids() if self._store.tier_of(variant_id) is None]
        stored = (summary.variant_id for summary in self._store.summaries())
        self._variants.apply_changes([key for key in stored if key not in self._variants], gone)

    def _carry_out(self, erasure: Erasure) -> tuple[int, dict[str, int], tuple[str, ...]]:
        """Deletes everything that an erasure covers; returns the number of variants, their bytes by tier, and the names
        that could not be deleted. Variants whose records were not read before the erasure began are not counted."""
        self._drop_unprepared()
        held = [
            meta for meta in self._variants if erasure.covers(meta.chunk_id, self._variants.origin_of(meta.variant_id))
        ]
        num_bytes = self._bytes_by_tier(held)
        covered = {str(meta.variant_id) for meta in held}
        covered |= self._covered_by(erasure)  # left by an earlier attempt, no longer in the index
        try:
            remaining = self._erase(erasure, covered)
        except OSError as error:
            remaining = (f"the disk cannot be listed: {error}",)
        for meta in held:
            self._variants.forget(meta.variant_id)
        self._reconcile()
        self._variants.save_hints()
        return len(held), num_bytes, remaining

    def _drop_unprepared(self) -> None:
        """Drops erased passages from those that idle time would compute."""
        self._unprepared.drop(lambda chunk_id: self.registry.is_erased(chunk_id, Origin(frozenset({chunk_id}))))

    def _erase(self, erasure: Erasure, covered: set[str]) -> tuple[str, ...]:
        """Deletes these variants and any others on disk that the erasure covers: other processes write until they learn
        of it, and an earlier attempt may have failed. Returns the names that could not be deleted. Raises OSError if
        the disk cannot be listed."""

        is_covered = functools.partial(_covers, erasure)  # processes that know of it compute the same variants again
        for pause_s in (*_ERASE_PAUSES_S, 0.0):
            self._store.request_relisting()
            uncommitted = erasure.whole and not erasure.is_done
            remaining = self._store.erase(sorted(covered), uncommitted=uncommitted, is_covered=is_covered)
            found = self._covered_by(erasure)
            if remaining or not found:
                break
            covered = covered | found
            time.sleep(pause_s)
        return (*remaining, *sorted(found))

    def _covered_by(self, erasure: Erasure) -> set[str]:
        """Ids of stored variants that an erasure covers; reads all records."""
        return {record.variant_id for record in self._store.records() if _covers(erasure, record)}

    def _forget(self, erasure: Erasure) -> None:
        try:
            self.registry.forget(erasure)
        except OSError as error:
            logger.warning("documents: the note of an erasure cannot be deleted: %s", error)

    def _finish(self, erasure: Erasure) -> tuple[str, ...]:
        """Ends a complete erasure; returns the records that could not be deleted."""
        try:
            self.registry.finish(erasure)
        except OSError as error:
            return (f"its notes: {error}",)
        self._store.request_relisting()  # other processes must see that the document's records are gone
        return ()


def _covers(erasure: Erasure, record: ShardRecord) -> bool:
    return erasure.covers(ChunkId(record.chunk_id), origin_of_record(record))

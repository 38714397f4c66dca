"""Restores a snapshot, or its hottest part, into a chunk-cache while the engine serves."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.cache.snapshot.cache import IndexedStore
from ccjax.cache.snapshot.index import PARTS, SnapshotIndex, SnapshotVariant, read_index, url_of
from ccjax.cache.snapshot.packs import PackFolder
from ccjax.cache.variant_records import meta_from_record
from ccjax.errors import SnapshotError
from ccjax.loading.model import Progress
from ccjax.policy.capture import make_variant_id
from ccjax.store.formats import checksum
from ccjax.store.objects import open_root
from ccjax.store.spec import KVSpec, ShardRecord
from ccjax.store.tickets import StoreTicket

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class RestoreReport:
    """Outcome for the variants of a snapshot; the six counts add up to all of them.

    Attributes:
      num_restored, restored_bytes: stored in memory or on disk (written in the background), or both.
      num_present: already in the cache, left unchanged; the greater `f_r` is kept.
      num_left_out: beyond `max_bytes`.
      num_no_room: no tier had room without eviction, or `max_variants` was reached; usually not read.
      num_damaged: failed their check or could not be read; logged, never stored.
      num_erased: of documents that were erased or invalidated after the variants were computed.
    """

    url: str
    num_restored: int = 0
    restored_bytes: int = 0
    num_present: int = 0
    num_left_out: int = 0
    num_no_room: int = 0
    num_damaged: int = 0
    num_erased: int = 0


def restore_snapshot(
    cache: IndexedStore, where: str | Path, *, max_bytes: int | None = None, progress: Progress | None = None
) -> RestoreReport:
    """Stores the variants of a snapshot that the cache does not have, hottest first, each in every tier that has room.

    Nothing is evicted or overwritten. Every variant's KV is checked before it is stored.

    Args:
      where: a path, or a URL in the store's format.
      max_bytes: restore only the hottest variants whose KV fits into this. Of the others, only those that share a pack
        with restored ones are read.
      progress: called with ("restore", bytes done, bytes in all).

    Raises:
      SnapshotError: no snapshot, a damaged one, a newer format version; another model, dtype, KV shape or tenant.
      ValueError, StoreUnavailableError: a bad URL or `max_bytes`; the directory or bucket cannot be read.
    """
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
        raise ValueError(f"max_bytes: wanted an int >= 0, got {max_bytes!r}")
    url = url_of(where)
    root = open_root(url, read_only=True)
    index = read_index(root, url)
    _check_identity(index, cache, url)
    wanted = list(_hottest(index.variants, max_bytes))
    report = RestoreReport(url, num_left_out=len(index.variants) - len(wanted))
    restorer = _Restorer(cache, PackFolder(root, f"{PARTS}/{index.folder}"), report, index.uses)
    total_bytes, seen_bytes = sum(variant.record.num_bytes for variant in wanted), 0
    for part, variants in itertools.groupby(wanted, key=lambda variant: index.parts[variant.pack]):
        if progress is not None:
            progress("restore", seen_bytes, total_bytes)
        seen_bytes += restorer.restore_part(part, list(variants))
    if progress is not None:
        progress("restore", seen_bytes, total_bytes)
    return report


class _Restorer:
    """Restores part by part."""

    def __init__(self, cache: IndexedStore, folder: PackFolder, report: RestoreReport, uses: Any) -> None:
        self._cache = cache
        self._folder = folder
        self._report = report
        self._uses = uses

    def restore_part(self, part: int, variants: list[SnapshotVariant]) -> int:
        """Restores the variants of one part; returns the bytes of their KV."""
        tickets: dict[str, StoreTicket] = {}
        try:
            for variant in self._absent(variants):
                ticket = self._announce(variant, len(tickets))
                if ticket is not None:
                    tickets[variant.record.variant_id] = ticket
            announced = [variant for variant in variants if variant.record.variant_id in tickets]
            packs = self._folder.read(part, sorted({variant.pack for variant in announced})) if announced else {}
            stored = [variant for variant in announced if self._store(variant, packs, tickets)]
        finally:
            for ticket in tickets.values():  # none are left unless something was raised
                self._cache.store.complete_store(ticket, None)
        with self._cache.exclusive():
            taken = ((variant.record, variant.frequency_reuse) for variant in stored)
            self._cache.variants.restore(taken, self._uses)
        return sum(variant.record.num_bytes for variant in variants)

    def _absent(self, variants: Sequence[SnapshotVariant]) -> list[SnapshotVariant]:
        """The variants that the index does not have, without erased ones; adopts the `f_r` of those it has."""
        index, limit = self._cache.variants, self._cache.max_variants
        with self._cache.exclusive():
            present = [variant for variant in variants if variant.record.variant_id in index]
            absent = [variant for variant in variants if variant.record.variant_id not in index]
            new = [variant for variant in absent if not index.is_erased(variant.record)]
            index.restore((variant.record, variant.frequency_reuse) for variant in present)
            self._num_free = None if limit is None else limit - len(index)
        self._report.num_present += len(present)
        self._report.num_erased += len(absent) - len(new)
        return new

    def _announce(self, variant: SnapshotVariant, num_announced: int) -> StoreTicket | None:
        """A ticket to store the variant; None if there is no room, or nothing to store."""
        store = self._cache.store
        if not _is_whole(variant.record):
            logger.warning("snapshot: variant %s: its metadata is invalid, or of another id", variant.record.variant_id)
            self._report.num_damaged += 1
            return None
        if self._num_free is not None and num_announced >= self._num_free:
            self._report.num_no_room += 1
            return None
        ticket = store.prepare_store(variant.record)
        if ticket.exists:  # a request has computed it meanwhile
            self._report.num_present += 1
        elif set(ticket.tiers) <= ticket.shortfall_bytes.keys():
            self._report.num_no_room += 1
        else:
            return ticket
        store.complete_store(ticket, None)
        return None

    def _store(
        self, variant: SnapshotVariant, packs: Mapping[int, np.ndarray], tickets: dict[str, StoreTicket]
    ) -> bool:
        record, report = variant.record, self._report
        kv = _cut(packs, variant, self._cache.store.kv_spec)
        took = self._cache.store.complete_store(tickets.pop(record.variant_id), kv, wait=True)
        if kv is None:
            logger.warning("snapshot: variant %s: damaged, left out", record.variant_id)
            report.num_damaged += 1
        elif took:
            report.num_restored += 1
            report.restored_bytes += record.num_bytes
        else:  # the space was taken meanwhile
            report.num_no_room += 1
        return bool(took)


def _check_identity(index: SnapshotIndex, cache: IndexedStore, url: str) -> None:
    ours, theirs = cache.store.kv_spec, index.kv_spec
    if theirs.dtype != ours.dtype:
        raise SnapshotError(f"snapshot: {url} holds KV in {theirs.dtype}, this is for {ours.dtype}")
    if theirs != ours:
        raise SnapshotError(f"snapshot: {url} holds KV of another shape, {theirs}, this is for {ours}")
    if index.model_fingerprint != cache.identity.model_fingerprint:
        raise SnapshotError(
            f"snapshot: {url} is of model {index.model!r}, {index.model_fingerprint}; this is for {cache.model!r}, "
            f"{cache.identity.model_fingerprint}: other weights, tokenizer or configuration"
        )
    if index.namespace != cache.identity.namespace:
        raise SnapshotError(f"snapshot: {url} is of this model, but was taken under another tenant salt")


def _hottest(variants: Iterable[SnapshotVariant], max_bytes: int | None) -> Iterator[SnapshotVariant]:
    """Yields, in the given order, each variant that still fits into `max_bytes`."""
    left = max_bytes
    for variant in variants:
        if left is None:
            yield variant
        elif variant.record.num_bytes <= left:
            left -= variant.record.num_bytes
            yield variant


def _is_whole(record: ShardRecord) -> bool:
    """True if an index can use the record, and its id matches its content."""
    meta = meta_from_record(record, 0.0)
    return meta is not None and meta.variant_id == make_variant_id(meta.chunk_id, meta.prefix_ids, meta.fidelity)


def _cut(packs: Mapping[int, np.ndarray], variant: SnapshotVariant, kv_spec: KVSpec) -> np.ndarray | None:
    """The variant's KV `[L, 2, T, K, H]`; None unless it has the saved shape, dtype and checksum."""
    pack, shape = packs.get(variant.pack), kv_spec.shape(variant.record.num_tokens)
    if pack is None or pack.ndim != len(shape) or pack.dtype != kv_spec.np_dtype:
        return None
    last_token = variant.first_token + variant.record.num_tokens
    kv = np.ascontiguousarray(pack[:, :, variant.first_token : last_token])
    return kv if kv.shape == shape and checksum(kv) == variant.checksum else None

"""The engine's index of chunk variants: which are stored, and how useful each has been.

Holds metadata and token ids; the store holds the KV, and `placement` decides what is evicted. There may be hundreds of
thousands of variants, so a record is read only when its chunk is first asked for. Only the record tells whether an
erasure covers the variant, so no variant is returned before its record was read.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any

from ccjax.cache.causes import EvictedChunks
from ccjax.cache.changes import Changes
from ccjax.cache.chunk_tokens import ChunkTokens
from ccjax.cache.document_registry import DocumentRegistry, Origin
from ccjax.cache.known_text import KnownText
from ccjax.cache.placement import Costs, Pinned, Placement
from ccjax.cache.prefix_runs import PrefixRuns, is_run, is_run_record
from ccjax.cache.variant_records import (
    KnownVariant,
    is_frequency,
    meta_from_record,
    origin_of_record,
    parent_id,
    record_from_meta,
    token_ids,
    with_origin,
)
from ccjax.policy.capture import make_variant_id
from ccjax.policy.variants import choose_victims, reuse_credit
from ccjax.prompts import Prompt
from ccjax.store.bulk import uncollected
from ccjax.store.copies import KV
from ccjax.store.spec import ShardRecord, ShardSummary
from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE, DISK
from ccjax.types import REUSED_ANYWHERE, ChunkId, Fidelity, Segment, VariantId, VariantMeta

logger = logging.getLogger(__name__)
_RECORDS_AT_START = 10_000
"""Half a second: the first prompt finds all text of most stores. Later prompts and idle time read the others."""


class VariantIndex:
    """Variants by chunk, rebuilt from the store at start. Except for `peek` not thread-safe; guarded by the batch loop.

    Attributes:
      tokens: token ids of the chunks of variants whose records were read, as far as they are known.
      runs: those of these variants that are runs of conversations.
      known: the text of all passages whose records were read, to be found in prompts. Thread-safe.
      documents: which documents the chunks belong to, and which of these were erased.
      changes: counts the variants added and removed.
      evicted: the chunks of which variants were evicted lately.
    """

    def __init__(
        self,
        store: TieredStore,
        costs: Costs,
        *,
        policy: str,
        max_variants: int | None,
        expected_share: Callable[[float], float] = lambda cci: cci,
    ) -> None:
        """
        Args:
          policy: eviction policy of every tier.
          max_variants: CacheCraft sec. 3.3 `N x M`; None for no limit but space.
          expected_share: maps a variant's CCI to the share that a later use is likely to recompute.
        """
        self.tokens = ChunkTokens()
        self.runs = PrefixRuns(self.tokens)
        self.known = KnownText()
        self.documents = DocumentRegistry(store.notes)
        self._store = store
        self._expected_share = expected_share
        self._max_variants = max_variants
        self._placement = Placement(store, costs, policy=policy, on_gone=self._evicted, parent_of=parent_id)
        self._by_id: dict[VariantId, VariantMeta | KnownVariant] = {}
        self._by_chunk: dict[ChunkId, dict[VariantId, VariantMeta | KnownVariant]] = {}
        self._by_chunk_lock = threading.Lock()
        self._origins: dict[VariantId, Origin] = {}
        self._unexamined: dict[VariantId, None] = {}
        self.changes = Changes()
        self.evicted = EvictedChunks()
        hints = store.read_hints()
        frequencies = _frequencies(hints)
        with uncollected():
            self._put_known(store.summaries(), frequencies)
            self._placement.adopt(self._by_id.values(), hints.get("eviction"))
        if self.documents.has_erasures:  # delete what they cover now, not only when a request asks for it
            self.load_all_records()
        self.examine(_RECORDS_AT_START)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, variant_id: object) -> bool:
        return variant_id in self._by_id

    def __iter__(self) -> Iterator[VariantMeta]:
        """Every variant; reads records that were not read yet, without keeping them."""
        return filter(None, map(self._peek, tuple(self._by_id.values())))

    def ids(self) -> tuple[VariantId, ...]:
        """The ids of all variants; reads no records."""
        return tuple(self._by_id)

    def chunk_ids(self) -> KeysView[ChunkId]:
        """The chunks that have variants; reads no records."""
        return self._by_chunk.keys()

    def seen(self) -> frozenset[ChunkId]:
        """Every chunk that influenced the KV of some variant; reads all records."""
        self.load_all_records()
        return frozenset().union(*(origin.seen for origin in self._origins.values()))

    def of_chunks(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """The variants of each chunk; chunks without any are left out. The first call with a chunk reads the records of
        its variants; a variant whose record is unreadable, or that an erasure covers, is dropped."""
        return self._of_chunks(chunk_ids, self._load_record)

    def peek(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """What `of_chunks` would return now. May be called from any thread while another one uses the index: records
        that it reads are not kept, so that only the batch loop changes the index."""
        return self._of_chunks(chunk_ids, self._peek)

    def load_all_records(self) -> None:
        """Reads and keeps all records that were not read yet, some 50 us each; drops variants that an erasure covers.
        For rare calls that need the origin of every variant."""
        with uncollected():
            for entry in tuple(self._by_id.values()):
                self._load_record(entry)

    def approximate(self, is_cancelled: Callable[[], bool] | None = None) -> list[VariantMeta]:
        """The approximate variants; learns the token ids of their chunks, and the text of all passages, as far as
        possible. Work for idle time: reads each variant's record once, until `is_cancelled` returns True."""
        self.examine(is_cancelled=is_cancelled)
        metas = [meta for meta in self._by_id.values() if isinstance(meta, VariantMeta) and meta.fidelity == "approx"]
        self._learn_tokens({key for meta in metas for key in meta.prefix_ids})
        return metas

    def examine(self, limit: int | None = None, *, is_cancelled: Callable[[], bool] | None = None) -> None:
        """Reads the records of at most `limit` variants that were on disk at the start, each once, and keeps what no
        chunk leads to: runs, approximate variants, and the text of passages."""
        for variant_id in tuple(itertools.islice(self._unexamined, limit)):
            if is_cancelled is not None and is_cancelled():
                return
            del self._unexamined[variant_id]
            record = self._store.get_record(variant_id)
            if record is None:
                continue
            self._learn_text(record)
            if record.meta.get("fidelity") != "exact" or is_run_record(record):
                self._load_record(self._by_id[variant_id])

    def prompt_of(self, meta: VariantMeta) -> Prompt:
        """The prompt that recomputes a held variant: its prefix, its chunk, and one token in place of a question.

        Raises:
          KeyError: the token ids of one of these chunks are not known.
        """
        self._learn_tokens((*meta.prefix_ids, meta.chunk_id))
        chunks = tuple(self.tokens.chunk(key) for key in (*meta.prefix_ids, meta.chunk_id))
        return Prompt.of_chunks([Segment(role, chunk) for role, chunk in zip(meta.roles, chunks, strict=True)])

    def origin_of(self, variant_id: VariantId) -> Origin:
        """Which chunks influenced a variant's KV; reads its record. Empty if the variant is not held."""
        entry = self._by_id.get(variant_id)
        if entry is not None:
            self._load_record(entry)
        return self._origins.get(variant_id, Origin(frozenset()))

    def discard_erased(self) -> None:
        """Drops variants that an erasure covers from every tier, after the registry applied new erasures; reads all
        records."""
        self.load_all_records()
        for variant_id, origin in tuple(self._origins.items()):
            if self.documents.is_erased(self._by_id[variant_id].chunk_id, origin):
                self._discard_erased(variant_id)

    def spare(self, pins: Pinned) -> None:
        """Excludes the variants that `pins` names from eviction from now on."""
        self._placement.pins = pins

    def protect(self, variant_ids: Collection[VariantId]) -> Callable[[], None]:
        """Keeps variants that a request waits for, stored yet or not, from being evicted for what others store; returns
        the function that ends that."""
        awaited = self._placement.awaited
        awaited.update(variant_ids)

        def end() -> None:
            for variant_id in variant_ids:
                awaited[variant_id] -= 1
                if not awaited[variant_id]:
                    del awaited[variant_id]

        return end

    def describe_prefill(self, cached_tokens: int, new_tokens: int) -> None:
        """The following uses and variants belong to a prefill that computed `new_tokens` behind `cached_tokens`."""
        self._placement.describe_prefill(cached_tokens, new_tokens)

    def credit(self, uses: Sequence[tuple[VariantId, float]]) -> None:
        """Adds `reuse_credit` to the `f_r` of each variant that one request used.

        Args:
          uses: variants, with the share of the variant that the request recomputed.
        """
        self._placement.next_request()
        for variant_id, share in uses:
            meta = self._by_id.get(variant_id)
            if meta is not None:
                gain = reuse_credit(share, meta.num_tokens)
                self._update(dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + gain))
                self._placement.use(meta, share)

    def add(
        self,
        meta: VariantMeta,
        kv: KV,
        prompt: Prompt,
        *,
        pinned: Collection[VariantId],
        seen: frozenset[ChunkId] = frozenset(),
        erasures: frozenset[str] | None = None,
        wait: bool = False,
    ) -> bool:
        """Stores a variant computed in `prompt`, evicting what is worth less; False if no tier took it.

        An exact variant replaces the approximate one behind the same prefix, keeping its `f_r` and uses, or a lossy
        copy of itself.

        Args:
          pinned: never evicted for it.
          seen: chunks besides its own and its prefix that influenced its KV.
          erasures: those known when it was computed; it is not stored if one since then covers it. None: all.
          wait: wait for room in the disk's queue instead of leaving the disk out.
        """
        seen = seen.union((meta.chunk_id, *meta.prefix_ids))
        after = self.documents.after(meta.chunk_id, seen, is_run=is_run(meta))
        origin = Origin(seen, after if erasures is None else after & erasures, is_run(meta))
        if self.documents.is_erased(meta.chunk_id, origin):
            return False
        meta = self._in_place_of_approximate(meta)
        known = self._by_id.get(meta.variant_id)
        if known is not None:
            meta = dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + known.frequency_reuse)
        if self._max_variants is not None:
            excess = max(0, len(self._by_id) + (known is None) - self._max_variants)
            protected = {*pinned, *self._placement.spared_ids(None)}
            victims = choose_victims(self._by_id.values(), excess, pinned=protected)
            if victims is None:
                self.evicted.note(meta.chunk_id)
                return False
            self._placement.evict(victims)
        record = self._record(meta, prompt, origin)
        is_passage = not meta.roles or meta.roles[-1] in REUSED_ANYWHERE
        expected_share = self._expected_share(meta.cci) if is_passage else 0.0
        if not self._placement.store(record, kv, expected_share=expected_share, pinned=pinned, wait=wait):
            self.evicted.note(meta.chunk_id)
            return False
        self.changes.note(meta.chunk_id)
        self._put(meta, origin=origin)
        for chunk in prompt.chunks:
            self.tokens.learn(chunk.chunk_id, chunk.token_ids)
        self._note_run(meta)
        self._learn_text(record)
        return True

    def _record(self, meta: VariantMeta, prompt: Prompt, origin: Origin) -> ShardRecord:
        return with_origin(record_from_meta(meta, prompt), origin)

    def make_room(self, tier: str, num_bytes: int) -> bool:
        """Evicts from one tier until it has room for `num_bytes`; False if too little can be evicted."""
        return self._placement.make_room(tier, num_bytes)

    def add_to_device(self, variant_id: VariantId, kv: KV) -> bool:
        """Adds a copy in pages of the device to the device tier; False if it is not wanted there."""
        meta = self._by_id.get(variant_id)
        return meta is not None and self._placement.adopt_copy(DEVICE, meta, kv)

    def lose(self, tier: str) -> None:
        """Removes all variants from a tier that lost its contents."""
        self._placement.lose(tier)

    def complete_load(self, ticket: LoadTicket, *, ok: bool = True) -> None:
        """Unpins what was loaded; with `ok`, variants that are worth it are copied to a faster tier."""
        self._placement.complete_load(ticket, self._by_id, ok=ok)

    def discard(self, variant_id: VariantId) -> None:
        """Removes a damaged or replaced variant from every tier and from the index."""
        self._store.discard(variant_id)
        self.forget(variant_id)

    def forget(self, variant_id: VariantId) -> None:
        """Removes a variant that no tier holds any more from the index."""
        self._placement.forget(variant_id)
        self._drop(variant_id)

    def _evicted(self, variant_id: VariantId) -> None:
        meta = self._by_id.get(variant_id)
        if meta is not None:
            self.evicted.note(meta.chunk_id)
        self._drop(variant_id)

    def _drop(self, variant_id: VariantId) -> None:
        meta = self._by_id.pop(variant_id, None)
        if meta is not None:
            self.changes.note(meta.chunk_id)
            self._origins.pop(variant_id, None)
            self._unexamined.pop(variant_id, None)
            if isinstance(meta, VariantMeta):
                self.runs.forget(meta)
                self.tokens.release(meta)
            with self._by_chunk_lock:
                of_chunk = self._by_chunk[meta.chunk_id]
                del of_chunk[variant_id]
                if not of_chunk:
                    del self._by_chunk[meta.chunk_id]
            if not of_chunk:
                self.known.remove(meta.chunk_id)

    def replaces_approximate(self, meta: VariantMeta) -> bool:
        """True if `add` of this exact variant would replace an approximate one."""
        return meta.fidelity == "exact" and _twin_id(meta, "approx") in self._by_id

    def drop_if_replaced(self, meta: VariantMeta) -> bool:
        """Removes an approximate variant if an exact one exists behind the same prefix, for example from another
        process; False if there is none."""
        known = self._by_id.get(_twin_id(meta, "exact"))
        exact = None if known is None else self._load_record(known)
        if exact is None:
            return False
        self._update(self._in_place_of_approximate(exact))
        return True

    def apply_changes(self, added: Collection[str], removed: Collection[str]) -> tuple[int, int]:
        """Applies what other processes added to and removed from the disk; returns how many variants were added to and
        removed from the index."""
        before = {key: key in self._by_id for key in (*added, *removed)}
        for key in added:
            self._learn_origin(VariantId(key))
        self._adopt(added)
        for key in added if self.documents.has_erasures else ():
            if key in self._by_id:
                self._load_record(self._by_id[VariantId(key)])
        for variant_id in removed:
            self._placement.apply_changes(variant_id)
            if self._store.tier_of(variant_id) is None:
                self.forget(VariantId(variant_id))
        changed = [was_known for key, was_known in before.items() if was_known != (key in self._by_id)]
        return changed.count(False), changed.count(True)

    def shrink(self, most_bytes: int) -> int:
        """See `Placement.shrink`."""
        return self._placement.shrink(most_bytes)

    def is_erased(self, record: ShardRecord) -> bool:
        """True if an erasure covers the variant, held or not."""
        return self.documents.is_erased(ChunkId(record.chunk_id), origin_of_record(record))

    def uses(self) -> dict[str, Any]:
        """The uses that eviction ranks by, as JSON values for `restore`."""
        return self._placement.uses(self._by_id.keys())

    def restore(self, restored: Iterable[tuple[ShardRecord, float]], uses: Any = None) -> None:
        """Adds variants that were copied into the store, with their `f_r` and `uses()` at the source; discards those
        that an erasure covers. A known variant only gets the `f_r`, if it is greater."""
        added = []
        for record, frequency_reuse in restored:
            known = self._by_id.get(VariantId(record.variant_id))
            if known is None:
                meta = self._restore(record, frequency_reuse)
                added += [] if meta is None else [meta]
            elif frequency_reuse > known.frequency_reuse:
                self._update(dataclasses.replace(known, frequency_reuse=frequency_reuse))
        self._placement.adopt(added, uses)

    def save_hints(self) -> None:
        """Saves `f_r` and the state of eviction with the store, so that after a restart the least used variants are
        still evicted first."""
        hints = self._store.read_hints()
        earlier = _frequencies(hints)  # possibly from another process on the store; `f_r` only grows
        known = self._by_id.values()
        held = {entry.variant_id: max(entry.frequency_reuse, earlier.get(entry.variant_id, 0.0)) for entry in known}
        frequencies = {key: value for key, value in held.items() if value}
        eviction = self._placement.state(hints.get("eviction"), held)
        self._store.write_hints({"frequency_reuse": frequencies, "eviction": eviction})

    def _in_place_of_approximate(self, meta: VariantMeta) -> VariantMeta:
        if not self.replaces_approximate(meta):
            return meta
        # Removed before the exact one is stored, which needs its room. If no tier takes that one, both are gone, which
        # costs a computation but no correctness.
        twin = self._by_id[_twin_id(meta, "approx")]
        self._placement.inherit(twin.variant_id, meta.variant_id)
        self.discard(twin.variant_id)
        return dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + twin.frequency_reuse)

    def _of_chunks(
        self,
        chunk_ids: Collection[ChunkId],
        meta_of: Callable[[VariantMeta | KnownVariant], VariantMeta | None],
    ) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        with self._by_chunk_lock:
            held = {chunk: tuple(self._by_chunk[chunk].values()) for chunk in chunk_ids if chunk in self._by_chunk}
        found = {chunk: tuple(filter(None, map(meta_of, of_chunk))) for chunk, of_chunk in held.items()}
        return {chunk: metas for chunk, metas in found.items() if metas}

    def _peek(self, entry: VariantMeta | KnownVariant) -> VariantMeta | None:
        """The metadata of a held variant, from its record if necessary; None if `_load_record` would drop it."""
        if isinstance(entry, VariantMeta):
            return entry
        record = self._store.get_record(entry.variant_id)
        if record is None or self.is_erased(record):
            return None
        return meta_from_record(record, entry.frequency_reuse)

    def _load_record(self, entry: VariantMeta | KnownVariant) -> VariantMeta | None:
        """The metadata of a held variant, read and kept if necessary; None if the record cannot be read or an erasure
        covers the variant, which is then dropped."""
        if isinstance(entry, VariantMeta):
            return entry
        record = self._store.get_record(entry.variant_id)
        if record is None:  # another process evicted it
            self.forget(entry.variant_id)
            return None
        return self._restore(record, entry.frequency_reuse)

    def _restore(self, record: ShardRecord, frequency_reuse: float) -> VariantMeta | None:
        """Keeps the metadata of a record; discards the variant and returns None if that is invalid or erased."""
        meta = meta_from_record(record, frequency_reuse)
        if meta is None:
            logger.warning("variant %s: unreadable metadata, dropped from the store", record.variant_id)
            self.discard(VariantId(record.variant_id))
            return None
        if self.is_erased(record):
            self._discard_erased(meta.variant_id)
            return None
        self._put(meta, origin=origin_of_record(record))
        self.tokens.learn(meta.chunk_id, token_ids(record))
        self._note_run(meta)
        self._learn_text(record)
        return meta

    def _learn_text(self, record: ShardRecord) -> None:
        """Indexes the text of a passage that is held, so that prompts can reuse slices of it."""
        roles = record.meta.get("roles")
        if isinstance(roles, list) and roles and roles[-1] in REUSED_ANYWHERE and not self.is_erased(record):
            self.known.add(ChunkId(record.chunk_id), token_ids(record))

    def _discard_erased(self, variant_id: VariantId) -> None:
        """Drops every copy of the variant that an erasure covers; keeps copies that were computed after it."""
        self._store.discard(variant_id, self.is_erased)
        self.forget(variant_id)
        self._store.renew_catalog()  # it may contain the record
        self._adopt([variant_id])

    def _learn_tokens(self, chunk_ids: Collection[ChunkId]) -> None:
        """Reads the token ids of these chunks from the records of held variants, where they have them."""
        self.of_chunks([key for key in chunk_ids if key not in self.tokens.known()])

    def _note_run(self, meta: VariantMeta) -> None:
        if is_run(meta) and meta.chunk_id in self.tokens.known():
            self.runs.note(meta)

    def _put(self, meta: VariantMeta, *, origin: Origin) -> None:
        if not isinstance(self._by_id.get(meta.variant_id), VariantMeta):
            self.tokens.hold(meta)
            self._origins[meta.variant_id] = origin
        self._unexamined.pop(meta.variant_id, None)
        self._update(meta)

    def _put_known(self, summaries: Sequence[ShardSummary], frequencies: Mapping[str, float]) -> None:
        known = [KnownVariant.of(summary, frequencies.get(summary.variant_id, 0.0)) for summary in summaries]
        self.changes.note_each([entry.chunk_id for entry in known])
        self._by_id.update((entry.variant_id, entry) for entry in known)
        self._unexamined.update(dict.fromkeys(entry.variant_id for entry in known))
        with self._by_chunk_lock:
            for entry in known:
                self._by_chunk.setdefault(entry.chunk_id, {})[entry.variant_id] = entry

    def _adopt(self, variant_ids: Iterable[str]) -> None:
        """Adds those of these variants that the store has."""
        found = [summary for key in variant_ids if (summary := self._store.get_summary(key)) is not None]
        self._put_known([summary for summary in found if summary.variant_id not in self._by_id], {})
        self._placement.adopt([self._by_id[VariantId(summary.variant_id)] for summary in found])

    def _learn_origin(self, variant_id: VariantId) -> None:
        """Merges the origin of a known variant with that of the copy that another process stored."""
        origin = self._origins.get(variant_id)
        record = None if origin is None else self._store.get_record(variant_id, DISK)
        if origin is not None and record is not None:
            theirs = origin_of_record(record)
            self._origins[variant_id] = Origin(origin.seen | theirs.seen, origin.after & theirs.after, origin.is_run)

    def _update(self, meta: VariantMeta | KnownVariant) -> None:
        self._by_id[meta.variant_id] = meta
        with self._by_chunk_lock:
            self._by_chunk.setdefault(meta.chunk_id, {})[meta.variant_id] = meta


def _twin_id(meta: VariantMeta, fidelity: Fidelity) -> VariantId:
    return make_variant_id(meta.chunk_id, meta.prefix_ids, fidelity)


def _frequencies(hints: Mapping[str, Any]) -> dict[str, float]:
    """The valid `f_r` values that `save_hints` saved."""
    values = hints.get("frequency_reuse")
    items = values.items() if isinstance(values, dict) else ()
    return {key: float(value) for key, value in items if is_frequency(value)}

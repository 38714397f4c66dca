"""The engine's index of chunk variants: what is stored, and how useful each has been.

Keeps metadata and token ids, no KV. Bytes are the store's, what goes when room is needed is for placement to say.
A variant's record is looked into when its chunk is first asked for: there may be hundreds of thousands. Only then is it
known whether an erasure has to take it, so nothing hands out a variant that was not looked into.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any

import numpy as np

from ccjax.cache.changes import Changes
from ccjax.cache.chunk_tokens import ChunkTokens
from ccjax.cache.documents.registry import DocumentRegistry, Origin
from ccjax.cache.placement import Costs, Pinned, Placement
from ccjax.cache.variant_records import (
    KnownVariant,
    has_system,
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
from ccjax.store.spec import ShardRecord, ShardSummary
from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DISK
from ccjax.types import ChunkId, Fidelity, VariantId, VariantMeta

logger = logging.getLogger(__name__)


class VariantIndex:
    """Variants by chunk, rebuilt from the store's records at start; not thread-safe but for `peek`, the batch loop
    guards it.

    Attributes:
      tokens: token ids of the chunks that the variants looked into are made of, as far as they are known.
      documents: which documents the chunks belong to, and which of these were erased.
      changes: counts the variants that come and go.
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
          max_variants: CacheCraft sec. 3.3 `N x M`; None for as many as there is room for.
          expected_share: from a variant's CCI to the share that a later use of it is likely to recompute.
        """
        self.tokens = ChunkTokens()
        self.documents = DocumentRegistry(store.notes)
        self._store = store
        self._expected_share = expected_share
        self._max_variants = max_variants
        self._placement = Placement(store, costs, policy=policy, on_gone=self._drop, parent_of=parent_id)
        self._by_id: dict[VariantId, VariantMeta | KnownVariant] = {}
        self._by_chunk: dict[ChunkId, dict[VariantId, VariantMeta | KnownVariant]] = {}
        self._by_chunk_lock = threading.Lock()
        self._with_system: set[VariantId] = set()
        self._origins: dict[VariantId, Origin] = {}
        self._maybe_approximate: dict[VariantId, None] = {}
        self.changes = Changes()
        hints = store.read_hints()
        frequencies = _frequencies(hints)
        with uncollected():
            self._put_known(store.summaries(), frequencies)
            self._placement.adopt(self._by_id.values(), hints.get("eviction"))
        if self.documents.has_erasures:  # what they take goes now, and is not left on disk until a request asks for it
            self.look_into_all()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, variant_id: object) -> bool:
        return variant_id in self._by_id

    def __iter__(self) -> Iterator[VariantMeta]:
        """Every variant; reads the records of those that were never asked for, and does not keep what it read."""
        return filter(None, map(self._peek, tuple(self._by_id.values())))

    def ids(self) -> tuple[VariantId, ...]:
        """Of every variant, looked into or not; reads nothing."""
        return tuple(self._by_id)

    def chunk_ids(self) -> KeysView[ChunkId]:
        """The chunks that the variants are of; reads nothing."""
        return self._by_chunk.keys()

    def seen(self) -> frozenset[ChunkId]:
        """Every chunk that has a part in the KV of some variant; looks into all."""
        self.look_into_all()
        return frozenset().union(*(origin.seen for origin in self._origins.values()))

    def of_chunks(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """Known variants of each chunk; chunks without any are left out. The first call with a chunk reads the records
        of its variants; one that cannot be read, or that an erasure takes, is dropped."""
        return self._of_chunks(chunk_ids, self._look_into)

    def peek(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """What `of_chunks` would return now. May be asked from any thread while another one uses the index: what was
        not looked into yet is read and not kept, so that nothing changes but by the batch loop."""
        return self._of_chunks(chunk_ids, self._peek)

    def look_into_all(self) -> None:
        """Reads the records of all variants that were never asked for, some 50 us each, and keeps what they say; drops
        what an erasure takes. For rare calls, which must know what each variant was computed from."""
        with uncollected():
            for held in tuple(self._by_id.values()):
                self._look_into(held)

    def approximate(self, is_cancelled: Callable[[], bool] | None = None) -> list[VariantMeta]:
        """The approximate variants, with the token ids of their chunks as far as these are known. Work for idle time:
        reads the records of all variants once, until `is_cancelled` returns True."""
        while self._maybe_approximate and not (is_cancelled is not None and is_cancelled()):
            variant_id = next(iter(self._maybe_approximate))
            del self._maybe_approximate[variant_id]
            record = self._store.get_record(variant_id)
            if record is not None and record.meta.get("fidelity") != "exact":
                self._look_into(self._by_id[variant_id])
        metas = [meta for meta in self._by_id.values() if isinstance(meta, VariantMeta) and meta.fidelity == "approx"]
        self._learn_tokens({key for meta in metas for key in meta.prefix_ids})
        return metas

    def prompt_of(self, meta: VariantMeta) -> Prompt:
        """The prompt that computes a held variant anew: its prefix, its chunk, and one token in place of a question.

        Raises:
          KeyError: the token ids of one of these chunks are not known.
        """
        self._learn_tokens((*meta.prefix_ids, meta.chunk_id))
        chunks = tuple(self.tokens.chunk(key) for key in (*meta.prefix_ids, meta.chunk_id))
        return Prompt(chunks, meta.variant_id in self._with_system, chunks[-1].token_ids[-1:], max_new_tokens=1)

    def origin(self, meta: VariantMeta) -> Origin:
        """Which texts a held variant was computed while looking at; looks into it."""
        return self.origin_of(meta.variant_id)

    def origin_of(self, variant_id: VariantId) -> Origin:
        """`origin` by id; of none where the variant is not held."""
        held = self._by_id.get(variant_id)
        if held is not None:
            self._look_into(held)
        return self._origins.get(variant_id, Origin(frozenset()))

    def discard_erased(self) -> None:
        """Drops what an erasure takes from every tier, after the registry learnt of new ones; looks into all."""
        self.look_into_all()
        for variant_id, origin in tuple(self._origins.items()):
            if self.documents.is_erased(self._by_id[variant_id].chunk_id, origin):
                self._discard_erased(variant_id)

    def spare(self, pins: Pinned) -> None:
        """From now on eviction leaves alone what `pins` names."""
        self._placement.pins = pins

    def describe_prefill(self, cached_tokens: int, new_tokens: int) -> None:
        """What is credited and added next comes from a prefill that computed so many tokens behind so many cached."""
        self._placement.describe_prefill(cached_tokens, new_tokens)

    def credit(self, uses: Sequence[tuple[VariantId, float]]) -> None:
        """The uses of one request with the share of the variant that each recomputed: `reuse_credit` to `f_r`."""
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
        kv: np.ndarray,
        prompt: Prompt,
        *,
        pinned: Collection[VariantId],
        seen: frozenset[ChunkId] = frozenset(),
        wait: bool = False,
    ) -> bool:
        """Stores a variant computed in `prompt`, evicting what is worth less; False if no tier took it. An exact
        variant takes the place of the approximate one behind the same prefix, its `f_r` and its uses, or of a lossy
        copy of itself. `seen` are chunks besides its own and its prefix that had a part in its KV. `wait` for room in
        the disk's queue, instead of leaving the disk out."""
        meta = self._in_place_of_approximate(meta)
        known = self._by_id.get(meta.variant_id)
        if known is not None:
            meta = dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + known.frequency_reuse)
        if self._max_variants is not None:
            excess = max(0, len(self._by_id) + (known is None) - self._max_variants)
            protected = {*pinned, *self._placement.pinned_ids(None)}
            victims = choose_victims(self._by_id.values(), excess, pinned=protected)
            if victims is None:
                return False
            self._placement.evict(victims)
        seen = seen.union((meta.chunk_id, *meta.prefix_ids))
        origin = Origin(seen, self.documents.after(meta.chunk_id, seen))
        record = self._record(meta, prompt, origin)
        if not self._placement.store(
            record, kv, expected_share=self._expected_share(meta.cci), pinned=pinned, wait=wait
        ):
            return False
        self.changes.note(meta.chunk_id)
        self._put(meta, has_system=prompt.has_system, origin=origin)
        for chunk in prompt.chunks:
            self.tokens.learn(chunk.chunk_id, chunk.token_ids)
        return True

    def _record(self, meta: VariantMeta, prompt: Prompt, origin: Origin) -> ShardRecord:
        return with_origin(record_from_meta(meta, prompt), origin)

    def make_room(self, tier: str, num_bytes: int) -> bool:
        """Evicts from one tier until it has room for so many bytes; False if what may go is less."""
        return self._placement.make_room(tier, num_bytes)

    def lose(self, tier: str) -> None:
        """One tier lost all that it held."""
        self._placement.lose(tier)

    def complete_load(self, ticket: LoadTicket, *, ok: bool = True) -> None:
        """Unpins what was loaded; with `ok`, what is worth it moves into a faster tier."""
        self._placement.complete_load(ticket, self._by_id, ok=ok)

    def discard(self, variant_id: VariantId) -> None:
        """Removes a damaged or replaced variant from every tier and from the index."""
        self._store.discard(variant_id)
        self.forget(variant_id)

    def forget(self, variant_id: VariantId) -> None:
        """Removes a variant that no tier holds any more from the index."""
        self._placement.forget(variant_id)
        self._drop(variant_id)

    def _drop(self, variant_id: VariantId) -> None:
        meta = self._by_id.pop(variant_id, None)
        if meta is not None:
            self.changes.note(meta.chunk_id)
            self._with_system.discard(variant_id)
            self._origins.pop(variant_id, None)
            self._maybe_approximate.pop(variant_id, None)
            if isinstance(meta, VariantMeta):
                self.tokens.release(meta)
            with self._by_chunk_lock:
                of_chunk = self._by_chunk[meta.chunk_id]
                del of_chunk[variant_id]
                if not of_chunk:
                    del self._by_chunk[meta.chunk_id]

    def replaces_approximate(self, meta: VariantMeta) -> bool:
        """True if `add` of this exact variant would replace an approximate one."""
        return meta.fidelity == "exact" and _twin_id(meta, "approx") in self._by_id

    def drop_if_replaced(self, meta: VariantMeta) -> bool:
        """Removes an approximate variant for which there is an exact one behind the same prefix, say of another
        process; False if there is none."""
        known = self._by_id.get(_twin_id(meta, "exact"))
        exact = None if known is None else self._look_into(known)
        if exact is None:
            return False
        self._update(self._in_place_of_approximate(exact))
        return True

    def apply_changes(self, added: Collection[str], removed: Collection[str]) -> tuple[int, int]:
        """Applies what the disk gained and lost by other processes; the numbers of variants that became known and
        unknown here by that."""
        before = {key: key in self._by_id for key in (*added, *removed)}
        for key in added:
            self._learn_origin(VariantId(key))
        self._adopt(added)
        for key in added if self.documents.has_erasures else ():
            if key in self._by_id:
                self._look_into(self._by_id[VariantId(key)])
        for variant_id in removed:
            self._placement.apply_changes(variant_id)
            if self._store.tier_of(variant_id) is None:
                self.forget(VariantId(variant_id))
        changed = [was_known for key, was_known in before.items() if was_known != (key in self._by_id)]
        return changed.count(False), changed.count(True)

    def is_erased(self, record: ShardRecord) -> bool:
        """True for a variant, held or not, that an erasure has to take."""
        return self.documents.is_erased(ChunkId(record.chunk_id), origin_of_record(record))

    def uses(self) -> dict[str, Any]:
        """What eviction goes by, as JSON values that `restore` takes."""
        return self._placement.uses(self._by_id.keys())

    def restore(self, restored: Iterable[tuple[ShardRecord, float]], uses: Any = None) -> None:
        """Adds variants that were brought into the store from elsewhere, with their `f_r` and `uses()` there, but
        discards those that an erasure takes; of those that are known already, the `f_r` if it is greater."""
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
        """Writes `f_r` and what eviction goes by beside the store, so that after a restart the least used variants
        still go first."""
        hints = self._store.read_hints()
        earlier = _frequencies(hints)  # of another process on the same store; `f_r` only grows
        known = self._by_id.values()
        held = {one.variant_id: max(one.frequency_reuse, earlier.get(one.variant_id, 0.0)) for one in known}
        frequencies = {key: value for key, value in held.items() if value}
        eviction = self._placement.state(hints.get("eviction"), held)
        self._store.write_hints({"frequency_reuse": frequencies, "eviction": eviction})

    def _in_place_of_approximate(self, meta: VariantMeta) -> VariantMeta:
        if not self.replaces_approximate(meta):
            return meta
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

    def _peek(self, held: VariantMeta | KnownVariant) -> VariantMeta | None:
        """The metadata of a held variant, read if it has to be; None where `_look_into` would drop it."""
        if isinstance(held, VariantMeta):
            return held
        record = self._store.get_record(held.variant_id)
        if record is None or self.is_erased(record):
            return None
        return meta_from_record(record, held.frequency_reuse)

    def _look_into(self, held: VariantMeta | KnownVariant) -> VariantMeta | None:
        """The metadata of a held variant, read and kept if it was not; one that cannot be read, or that an erasure
        takes, is dropped: None."""
        if isinstance(held, VariantMeta):
            return held
        record = self._store.get_record(held.variant_id)
        if record is None:  # another process evicted it
            self.forget(held.variant_id)
            return None
        return self._restore(record, held.frequency_reuse)

    def _restore(self, record: ShardRecord, frequency_reuse: float) -> VariantMeta | None:
        """Keeps what a record says; None, and the variant is discarded, where that makes no sense or it is erased."""
        meta = meta_from_record(record, frequency_reuse)
        if meta is None:
            logger.warning("variant %s: unreadable metadata, dropped from the store", record.variant_id)
            self.discard(VariantId(record.variant_id))
            return None
        if self.is_erased(record):
            self._discard_erased(meta.variant_id)
            return None
        self._put(meta, has_system=has_system(record), origin=origin_of_record(record))
        self.tokens.learn(meta.chunk_id, token_ids(record))
        return meta

    def _discard_erased(self, variant_id: VariantId) -> None:
        """Drops every copy of the variant that an erasure takes; what was computed anew after it is still there."""
        self._store.discard(variant_id, self.is_erased)
        self.forget(variant_id)
        self._store.renew_catalog()  # it may have a copy of the record
        self._adopt([variant_id])

    def _learn_tokens(self, chunk_ids: Collection[ChunkId]) -> None:
        """Makes the ids of these chunks known, where a held variant's record has them."""
        self.of_chunks([key for key in chunk_ids if key not in self.tokens.known()])

    def _put(self, meta: VariantMeta, *, has_system: bool, origin: Origin) -> None:
        if not isinstance(self._by_id.get(meta.variant_id), VariantMeta):
            self.tokens.hold(meta)
            self._origins[meta.variant_id] = origin
            if has_system:
                self._with_system.add(meta.variant_id)
        self._maybe_approximate.pop(meta.variant_id, None)
        self._update(meta)

    def _put_known(self, summaries: Sequence[ShardSummary], frequencies: Mapping[str, float]) -> None:
        known = [KnownVariant.of(one, frequencies.get(one.variant_id, 0.0)) for one in summaries]
        self.changes.note_each([one.chunk_id for one in known])
        self._by_id.update((one.variant_id, one) for one in known)
        self._maybe_approximate.update(dict.fromkeys(one.variant_id for one in known))
        with self._by_chunk_lock:
            for one in known:
                self._by_chunk.setdefault(one.chunk_id, {})[one.variant_id] = one

    def _adopt(self, variant_ids: Iterable[str]) -> None:
        """Makes known what the store has of these."""
        found = [summary for key in variant_ids if (summary := self._store.get_summary(key)) is not None]
        self._put_known([one for one in found if one.variant_id not in self._by_id], {})
        self._placement.adopt([self._by_id[VariantId(one.variant_id)] for one in found])

    def _learn_origin(self, variant_id: VariantId) -> None:
        """Another process stored a variant that is known here: what its KV comes from counts from now on, too."""
        origin = self._origins.get(variant_id)
        record = None if origin is None else self._store.get_record(variant_id, DISK)
        if origin is not None and record is not None:
            theirs = origin_of_record(record)
            self._origins[variant_id] = Origin(origin.seen | theirs.seen, origin.after & theirs.after)

    def _update(self, meta: VariantMeta | KnownVariant) -> None:
        self._by_id[meta.variant_id] = meta
        with self._by_chunk_lock:
            self._by_chunk.setdefault(meta.chunk_id, {})[meta.variant_id] = meta


def _twin_id(meta: VariantMeta, fidelity: Fidelity) -> VariantId:
    return make_variant_id(meta.chunk_id, meta.prefix_ids, fidelity)


def _frequencies(hints: Mapping[str, Any]) -> dict[str, float]:
    """The sound ones of the `f_r` that `save_hints` noted."""
    values = hints.get("frequency_reuse")
    items = values.items() if isinstance(values, dict) else ()
    return {key: float(value) for key, value in items if is_frequency(value)}

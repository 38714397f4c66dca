"""The engine's index of chunk variants: what is stored, how useful each has been, what goes when room is needed.

Keeps metadata only. Bytes are the store's, choices are policy's; this class carries one to the other.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ccjax.policy.variants import choose_victims, reuse_credit
from ccjax.types import ChunkId, VariantId, VariantMeta
from store.spec import ShardRecord
from store.tiered import TieredStore

logger = logging.getLogger(__name__)


class VariantIndex:
    """Variants by chunk, rebuilt from the store's records at start; not thread-safe, the engine's lock guards it."""

    def __init__(self, store: TieredStore, *, max_variants: int) -> None:
        self._store = store
        self._max_variants = max_variants
        self._by_id: dict[VariantId, VariantMeta] = {}
        self._by_chunk: dict[ChunkId, dict[VariantId, VariantMeta]] = {}
        for record in store.records():
            meta = _meta_from_record(record)
            if meta is None:
                logger.warning("variant %s: unreadable metadata, dropped from the store", record.variant_id)
                store.discard(record.variant_id)
            else:
                self._put(meta)

    def __len__(self) -> int:
        return len(self._by_id)

    def of_chunks(self, chunk_ids: Collection[ChunkId]) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """Known variants of each chunk; chunks without any are left out."""
        return {chunk: tuple(self._by_chunk[chunk].values()) for chunk in chunk_ids if chunk in self._by_chunk}

    def credit(self, variant_id: VariantId, cfo: float) -> None:
        """CacheCraft sec. 3.3: one more use of a variant, worth 1/CFO."""
        meta = self._by_id.get(variant_id)
        if meta is not None:
            gain = reuse_credit(cfo, meta.num_tokens)
            self._put(dataclasses.replace(meta, frequency_reuse=meta.frequency_reuse + gain))

    def add(self, meta: VariantMeta, kv: np.ndarray, *, pinned: Collection[VariantId]) -> bool:
        """Stores a variant, evicting the least reused ones where it needs room; False if it found none."""
        excess = max(0, len(self._by_id) + 1 - self._max_variants)
        victims = choose_victims(self._by_id.values(), count_over=excess, pinned=pinned)
        if victims is None:
            return False
        for tier in self._store.usage() if victims else ():
            self._evict(tier, victims)
        ticket = self._store.prepare_store(_record_from_meta(meta))
        for tier, num_bytes in ticket.shortfall_bytes.items():
            held = [other for other in self._by_id.values() if tier in self._store.tiers_of(other.variant_id)]
            self._evict(tier, choose_victims(held, bytes_needed=num_bytes, pinned=pinned) or ())
        if not self._store.complete_store(ticket, kv):
            return False
        self._put(meta)
        return True

    def discard(self, variant_id: VariantId) -> None:
        """Removes a damaged variant from every tier and from the index."""
        self._store.discard(variant_id)
        self.forget(variant_id)

    def _evict(self, tier: str, victims: Sequence[VariantId]) -> None:
        for variant_id in self._store.evict(tier, victims):
            if self._store.tier_of(variant_id) is None:
                self.forget(VariantId(variant_id))

    def _put(self, meta: VariantMeta) -> None:
        self._by_id[meta.variant_id] = meta
        self._by_chunk.setdefault(meta.chunk_id, {})[meta.variant_id] = meta

    def forget(self, variant_id: VariantId) -> None:
        """Removes a variant that no tier holds any more from the index."""
        meta = self._by_id.pop(variant_id, None)
        if meta is not None:
            siblings = self._by_chunk[meta.chunk_id]
            del siblings[variant_id]
            if not siblings:
                del self._by_chunk[meta.chunk_id]

    def __iter__(self) -> Iterator[VariantMeta]:
        return iter(tuple(self._by_id.values()))


_STORED_FIELDS = ("prefix_ids", "inter_by_prefix", "a_mean", "b_mean", "cci", "token_ranking", "fidelity")
"""Metadata that lasts; `frequency_reuse` steers eviction only and starts anew."""


def _record_from_meta(meta: VariantMeta) -> ShardRecord:
    lasting = {name: getattr(meta, name) for name in _STORED_FIELDS}
    return ShardRecord(
        variant_id=meta.variant_id,
        chunk_id=meta.chunk_id,
        num_tokens=meta.num_tokens,
        num_bytes=meta.num_bytes,
        meta={name: list(value) if isinstance(value, tuple) else value for name, value in lasting.items()},
    )


def _meta_from_record(record: ShardRecord) -> VariantMeta | None:
    try:
        meta = record.meta
        prefix_ids = tuple(ChunkId(chunk) for chunk in meta["prefix_ids"])
        inter = tuple(float(value) for value in meta["inter_by_prefix"])
        ranking = tuple(int(offset) for offset in meta["token_ranking"])
        fidelity = meta["fidelity"]
        if len(inter) != len(prefix_ids) or sorted(ranking) != list(range(record.num_tokens)):
            return None
        if fidelity not in ("exact", "approx"):
            return None
        return VariantMeta(
            variant_id=VariantId(record.variant_id),
            chunk_id=ChunkId(record.chunk_id),
            prefix_ids=prefix_ids,
            inter_by_prefix=inter,
            a_mean=float(meta["a_mean"]),
            b_mean=float(meta["b_mean"]),
            cci=float(meta["cci"]),
            token_ranking=ranking,
            num_tokens=record.num_tokens,
            num_bytes=record.num_bytes,
            fidelity=fidelity,
        )
    except (KeyError, TypeError, ValueError):
        return None

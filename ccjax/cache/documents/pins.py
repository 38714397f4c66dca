"""Which variants of pinned documents are excluded from eviction, within a share of the budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ccjax.cache.document_registry import Pin
from ccjax.cache.variants import VariantIndex
from ccjax.errors import PinLimitError
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import HOST
from ccjax.types import ChunkId, VariantId, VariantMeta


class DocumentPins:
    """A `ccjax.cache.placement.Pinned`. Not thread-safe: needs exclusive access to the engine (`Exclusive`)."""

    def __init__(self, variants: VariantIndex, store: TieredStore, *, max_variants: int | None, share: float) -> None:
        """
        Args:
          share: share of every tier's budget, and of `max_variants`, that pinned documents may occupy.
        """
        self._variants = variants
        self._store = store
        self._max_variants = max_variants
        self._share = share

    def pinned_ids(self, tier: str | None) -> frozenset[VariantId]:
        """Variants that must not leave `tier`, or (None) the last tier that holds them.

        A document pinned within the limit may later exceed it with new variants. Within the limit are first the best
        variant of every chunk (exact before approximate, then the most used), then the second best of every chunk, and
        so on.
        """
        chunks = self._variants.documents.pinned_chunks()
        if not chunks:
            return frozenset()
        kept, num_bytes = set(), 0
        limit = self._limit_bytes(tier)
        for meta in self._ranked(chunks):
            if tier is not None and not self._stays_in(tier, meta, chunks[meta.chunk_id]):
                continue
            if len(kept) + 1 > self._limit_count or num_bytes + meta.num_bytes > limit:
                break
            kept.add(meta.variant_id)
            num_bytes += meta.num_bytes
        return frozenset(kept)

    def check(self, pin: Pin) -> None:
        """Raises PinLimitError if all pins and `pin` together keep more than the limit."""
        chunks = self._variants.documents.pinned_chunks(extra=pin)
        metas = list(self._ranked(chunks))
        in_host = sum(meta.num_bytes for meta in metas if chunks[meta.chunk_id])
        for name, got, limit in (
            ("variants", len(metas), self._limit_count),
            ("bytes", sum(meta.num_bytes for meta in metas), self._limit_bytes(None)),
            ("bytes of host memory", in_host, self._limit_bytes(HOST)),
        ):
            if got > limit:
                raise PinLimitError(
                    "document_id",
                    f"wanted at most {math.floor(limit)} {name} pinned in all (pin_share: {self._share:g} of the "
                    f"budget), got {got} with {pin.document_id!r}",
                )

    def _ranked(self, chunks: Iterable[ChunkId]) -> list[VariantMeta]:
        ranked = []
        for metas in self._variants.of_chunks(set(chunks)).values():
            best = sorted(metas, key=lambda meta: (meta.fidelity != "exact", -meta.frequency_reuse, meta.variant_id))
            ranked += [(rank, -meta.frequency_reuse, meta.variant_id, meta) for rank, meta in enumerate(best)]
        return [meta for *_, meta in sorted(ranked, key=lambda entry: entry[:3])]

    def _stays_in(self, tier: str, meta: VariantMeta, in_host: bool) -> bool:
        tiers = self._store.tiers_of(meta.variant_id)
        return tier in tiers and (tier == tiers[-1] or (in_host and tier == HOST))

    @property
    def _limit_count(self) -> float:
        return math.inf if self._max_variants is None else self._share * self._max_variants

    def _limit_bytes(self, tier: str | None) -> float:
        usage = self._store.usage()
        budget = usage[tier if tier is not None else list(usage)[-1]].budget_bytes
        return math.inf if budget is None else self._share * budget

"""The engine's tiers and variant index without KV: contents, evictions and counters of variants that have only a
size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ccjax.cache.documents.registry import Origin
from ccjax.cache.variants import VariantIndex
from ccjax.prompts import Prompt
from ccjax.store.budget import ByteBudget
from ccjax.store.memory import MemoryTier
from ccjax.store.spec import KVSpec, ShardRecord
from ccjax.store.tickets import LoadTicket, StoreTicket
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.store.write_behind import MAX_PENDING_BYTES
from ccjax.types import VariantMeta

NO_KV = np.empty(0, np.uint8)
"""Stands for the KV of every variant."""


class SizedTier(MemoryTier[None]):
    """A tier with nothing but a budget."""

    def __init__(self, name: str, kv_spec: KVSpec, budget_bytes: int | None) -> None:
        super().__init__(name, ByteBudget(name, budget_bytes))
        self._token_bytes = kv_spec.num_bytes(1)

    def charge_bytes(self, num_tokens: int) -> int:
        """See `MemoryTier`."""
        return num_tokens * self._token_bytes

    def _hold(self, kv: np.ndarray) -> None:
        return None


class SizedTicket(LoadTicket):
    """The tiers of a plan's variants; reads nothing.

    Args:
      fastest: the tier from which nothing can be promoted.
    """

    def __init__(self, tiers: Mapping[str, str], wanted: Collection[str], fastest: str) -> None:
        self.tiers = dict(tiers)
        self._fastest = fastest
        self.missing = frozenset(wanted) - tiers.keys()
        self.lossy = frozenset()

    @property
    def bytes_read(self) -> dict[str, int]:
        """See `LoadTicket`."""
        return {}

    def whole(self) -> dict[str, np.ndarray]:
        """See `LoadTicket`; every load is taken to be complete."""
        return dict.fromkeys((key for key, tier in self.tiers.items() if tier not in (DEVICE, self._fastest)), NO_KV)

    def copies(self, variant_ids: Collection[str]) -> dict[str, np.ndarray]:
        """See `LoadTicket`."""
        return {key: NO_KV for key in variant_ids if self.tiers.get(key) == DEVICE}

    def close(self) -> None:
        """See `LoadTicket`."""


class SizedStore(TieredStore):
    """A `TieredStore` over `SizedTier`s: with tickets, pins, promotion and budgets, but without data.

    The disk is one of them, and writes to it complete at once; a real store serves variants from the moment they are
    queued. Tiers with a budget of 0 are left out, except host memory.
    """

    def __init__(self, kv_spec: KVSpec, *, device_bytes: int, host_bytes: int, disk_bytes: int | None) -> None:
        budgets = {DEVICE: device_bytes, HOST: host_bytes, DISK: disk_bytes}
        tiers = [SizedTier(name, kv_spec, size) for name, size in budgets.items() if size != 0 or name == HOST]
        super().__init__(kv_spec, tiers, None, MAX_PENDING_BYTES)
        self.memory_tiers = tuple(tier.name for tier in tiers if tier.name != DISK)

    def prepare_load(self, variant_ids: Iterable[str], *, counted: bool = True) -> LoadTicket:
        """See `TieredStore`."""
        wanted = tuple(dict.fromkeys(variant_ids))
        found = {key: tier for key in wanted if (tier := self.tier_of(key)) is not None}
        if counted:
            for key in wanted:
                self._count_look_up(found.get(key))
        self._pins.update(found.keys())
        return SizedTicket(found, wanted, self.memory_tiers[0])

    def complete_store(
        self, ticket: StoreTicket, kv: np.ndarray | None, *, wait: bool = False, tiers: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """See `TieredStore`; `kv` is not kept."""
        ticket.close()
        self._withdraw(ticket)
        if ticket.exists:
            return ()
        allowed = self._memory if tiers is None else [tier for tier in self._memory if tier in tiers]
        return tuple(tier for tier in allowed if self._fits(tier, self._put, tier, ticket.record, NO_KV))

    def unread_bytes(self, variant_id: str) -> int:
        """See `TieredStore`."""
        summary = self.get_summary(variant_id) if self.tier_of(variant_id) == DISK else None
        return 0 if summary is None else summary.num_bytes


class SizedIndex(VariantIndex):
    """The engine's index; its records are as small as eviction and erasure allow."""

    def _record(self, meta: VariantMeta, prompt: Prompt, origin: Origin) -> ShardRecord:
        kept: dict[str, Any] = {"prefix_ids": list(meta.prefix_ids), "fidelity": meta.fidelity}
        return ShardRecord.of_json(meta.variant_id, meta.chunk_id, meta.num_tokens, meta.num_bytes, kept)

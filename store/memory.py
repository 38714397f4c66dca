"""Tiers in memory: variants by id within a byte budget, and whether a copy is exact; and the tier in host memory."""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

import numpy as np

from ccjax.store.budget import ByteBudget
from ccjax.store.copies import HostCopy
from ccjax.store.errors import ShardNotFoundError
from ccjax.store.spec import KVSpec, ShardRecord, ShardSummary
from ccjax.store.usage import HOST

Held = TypeVar("Held")


class MemoryTier(abc.ABC, Generic[Held]):
    """Variants in some memory, each held as a `Held`. `TieredStore` serialises mutations.

    Eviction drops only the tier's reference: a reader's data stays valid until the reader releases it.

    Attributes:
      name: name of the tier.
      budget: byte budget of the tier.
    """

    def __init__(self, name: str, budget: ByteBudget) -> None:
        self.name = name
        self.budget = budget
        self._shards: dict[str, tuple[ShardRecord, Held]] = {}
        self._lossy: set[str] = set()

    @abc.abstractmethod
    def charge_bytes(self, num_tokens: int) -> int:
        """Bytes of a variant of this many tokens in the budget."""

    @abc.abstractmethod
    def _hold(self, kv: Any) -> Held:
        """Converts KV to the tier's representation; raises TierFullError if it does not fit despite the budget."""

    def is_here(self, kv: Any) -> bool:
        """True if holding this KV takes no room, because the tier's memory contains it already."""
        return False

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def summaries(self) -> list[ShardSummary]:
        """Summaries of all variants held, oldest first."""
        return [record.summary for record, _ in self._shards.values()]

    def get_record(self, variant_id: str) -> ShardRecord | None:
        """The record of a held variant, or None."""
        shard = self._shards.get(variant_id)
        return None if shard is None else shard[0]

    def get_summary(self, variant_id: str) -> ShardSummary | None:
        """The summary of a held variant, or None."""
        record = self.get_record(variant_id)
        return None if record is None else record.summary

    def charged(self, variant_id: str) -> int | None:
        """Bytes of a held variant in the budget; None for others."""
        shard = self._shards.get(variant_id)
        return None if shard is None else self.charge_bytes(shard[0].num_tokens)

    def is_lossy(self, variant_id: str) -> bool:
        """True if the variant's copy may differ from the KV stored."""
        return variant_id in self._lossy

    def put(self, record: ShardRecord, kv: Any, *, is_lossy: bool = False) -> None:
        """Stores KV, which the caller must own and no longer write to. An existing copy of the variant is kept, unless
        it is lossy and the new one is not.

        Raises:
          TierFullError: the variant does not fit; nothing is changed, except that a lossy copy may be dropped.
        """
        variant_id = record.variant_id
        if variant_id in self._shards:
            if is_lossy or variant_id not in self._lossy:
                return
            self.remove(variant_id)  # frees exactly the needed space
        num_bytes = 0 if self.is_here(kv) else self.charge_bytes(record.num_tokens)
        self.budget.charge(num_bytes)
        try:
            held = self._hold(kv)
        except BaseException:
            self.budget.release(num_bytes)
            raise
        self._shards[variant_id] = (record, held)
        if is_lossy:
            self._lossy.add(variant_id)

    def get(self, variant_id: str) -> Held:
        """The variant in the tier's representation.

        Raises:
          ShardNotFoundError: the tier does not hold it.
        """
        try:
            return self._shards[variant_id][1]
        except KeyError:
            raise ShardNotFoundError(f"{self.name} tier: no variant {variant_id}") from None

    def close(self) -> None:
        """Drops every variant of a tier that is no longer used. May be called twice."""
        for variant_id in tuple(self._shards):
            self.remove(variant_id)

    def remove(self, variant_id: str) -> bool:
        """Drops the variant; False if the tier does not hold it."""
        shard = self._shards.pop(variant_id, None)
        if shard is None:
            return False
        self._lossy.discard(variant_id)
        self.budget.release(self.charge_bytes(shard[0].num_tokens))
        return True


class HostTier(MemoryTier[np.ndarray | HostCopy]):
    """Variants in host memory, each as the given array `[L, 2, T, K, H]`, or as the copy that becomes one."""

    def __init__(self, kv_spec: KVSpec, budget_bytes: int) -> None:
        super().__init__(HOST, ByteBudget(HOST, budget_bytes))
        self._kv_spec = kv_spec

    def charge_bytes(self, num_tokens: int) -> int:
        """See `MemoryTier`."""
        return self._kv_spec.num_bytes(num_tokens)

    def _hold(self, kv: np.ndarray | HostCopy) -> np.ndarray | HostCopy:
        if isinstance(kv, np.ndarray):
            kv.flags.writeable = False
        return kv

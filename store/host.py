"""The host tier: KV shards as read-only NumPy arrays under a byte budget. Knows no disk, no pins, no eviction order."""

from __future__ import annotations

import numpy as np

from store.budget import ByteBudget
from store.errors import ShardNotFoundError
from store.spec import ShardRecord, ShardSummary


class HostTier:
    """Variants in host memory. Not thread-safe: `TieredStore` serialises its calls.

    Evicting drops the tier's reference only: views that a reader holds stay valid until it lets go of them.
    """

    def __init__(self, budget_bytes: int):
        self.budget = ByteBudget("host", budget_bytes)
        self._shards: dict[str, tuple[ShardRecord, np.ndarray]] = {}
        self._lossy: set[str] = set()

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def summaries(self) -> list[ShardSummary]:
        """Of all variants held, oldest first."""
        return [record.summary for record, _ in self._shards.values()]

    def get_record(self, variant_id: str) -> ShardRecord | None:
        """The record of a variant that is held, or None."""
        shard = self._shards.get(variant_id)
        return None if shard is None else shard[0]

    def get_summary(self, variant_id: str) -> ShardSummary | None:
        """Of a variant that is held, or None."""
        record = self.get_record(variant_id)
        return None if record is None else record.summary

    def charge_bytes(self, record: ShardRecord) -> int:
        """Bytes that `record` takes out of the budget."""
        return record.num_bytes

    def charged(self, variant_id: str) -> int | None:
        """Bytes that a held variant takes out of the budget; None for others."""
        shard = self._shards.get(variant_id)
        return None if shard is None else shard[0].num_bytes

    def is_lossy(self, variant_id: str) -> bool:
        """True when the variant's copy may differ from what was stored."""
        return variant_id in self._lossy

    def put(self, record: ShardRecord, kv: np.ndarray, *, is_lossy: bool = False) -> None:
        """Keeps `kv` itself, not a copy, and makes it read-only; the caller must own its memory. A variant that is held
        stays, but for a lossy copy where this one is not.

        Raises:
          TierFullError: it does not fit; nothing changed.
        """
        variant_id = record.variant_id
        if variant_id in self._shards:
            if is_lossy or variant_id not in self._lossy:
                return
            self.remove(variant_id)  # makes just the room that is needed
        self.budget.charge(record.num_bytes)
        kv.flags.writeable = False
        self._shards[variant_id] = (record, kv)
        if is_lossy:
            self._lossy.add(variant_id)

    def get(self, variant_id: str) -> np.ndarray:
        """The read-only KV `[L, 2, T, K, H]`.

        Raises:
          ShardNotFoundError: the tier does not hold it.
        """
        try:
            return self._shards[variant_id][1]
        except KeyError:
            raise ShardNotFoundError(f"host tier: no variant {variant_id}") from None

    def remove(self, variant_id: str) -> bool:
        """Drops the variant; False when it was not there."""
        shard = self._shards.pop(variant_id, None)
        if shard is None:
            return False
        self._lossy.discard(variant_id)
        self.budget.release(shard[0].num_bytes)
        return True

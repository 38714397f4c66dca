"""The tiers of a store, fastest first: their contents and counters, placement of variants, and the store's hints."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ccjax.store.disk import TensorStoreTier
from ccjax.store.memory import MemoryTier
from ccjax.store.spec import ShardRecord, ShardSummary
from ccjax.store.usage import DISK, TierUsage
from ccjax.store.write_behind import WriteBehind


class Levels:
    """Tiers in memory above an optional disk tier. Thread-safe.

    Attributes:
      memory_tiers: names of the tiers in memory, the fastest first.
    """

    def __init__(
        self, memory: Sequence[MemoryTier[Any]], disk: TensorStoreTier | None, writer: WriteBehind | None
    ) -> None:
        self._memory = {tier.name: tier for tier in memory}
        self._disk = disk
        self._writer = writer
        self._lock = threading.RLock()
        self._levels: dict[str, MemoryTier[Any] | TensorStoreTier] = dict(self._memory)
        if disk is not None:
            self._levels[DISK] = disk
        self._counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in self._levels}
        self.memory_tiers = tuple(self._memory)

    def summaries(self) -> list[ShardSummary]:
        """Summaries of the committed variants of all tiers, each once. Reads nothing."""
        with self._lock:
            found = {summary.variant_id: summary for tier in self._levels.values() for summary in tier.summaries()}
        return list(found.values())

    def ids(self, tier: str) -> tuple[str, ...]:
        """Ids of the committed variants of one tier."""
        with self._lock:
            return tuple(summary.variant_id for summary in self._tier(tier).summaries())

    def chunk_ids(self, tiers: Collection[str]) -> frozenset[str]:
        """The chunks with a variant in one of these tiers. Reads nothing."""
        with self._lock:
            return frozenset(summary.chunk_id for name in tiers for summary in self._tier(name).summaries())

    def get_summary(self, variant_id: str) -> ShardSummary | None:
        """Summary of a committed variant of any tier, or None. Reads nothing."""
        with self._lock:
            found = (tier.get_summary(variant_id) for tier in self._levels.values())
            return next(filter(None, found), None)

    def records(self) -> list[ShardRecord]:
        """The full records behind `summaries`."""
        found = (self.get_record(summary.variant_id) for summary in self.summaries())
        return [record for record in found if record is not None]

    def get_record(self, variant_id: str, tier: str | None = None) -> ShardRecord | None:
        """The record of a committed variant in `tier`, or in the fastest tier that has it; None if there is no sound
        record."""
        if tier is not None:
            return self._tier(tier).get_record(variant_id)
        with self._lock:
            held = next(filter(None, (tier.get_record(variant_id) for tier in self._memory.values())), None)
        return held or (None if self._disk is None else self._disk.get_record(variant_id))

    def tier_of(self, variant_id: str) -> str | None:
        """The fastest tier that holds the variant: "device", "host" or "disk"; None if there is none."""
        return next(iter(self.tiers_of(variant_id)), None)

    def tiers_of(self, variant_id: str) -> tuple[str, ...]:
        """Every tier that holds the variant, the fastest first; includes "disk" as soon as its write is queued."""
        queued = self._writer is not None and variant_id in self._writer  # first: it leaves the queue once on disk
        return tuple(name for name, tier in self._levels.items() if variant_id in tier or (queued and name == DISK))

    def is_lossy(self, variant_id: str) -> bool:
        """True if the copy that a load would read now may differ from the KV stored; see `LoadTicket.lossy`."""
        with self._lock:
            for tier in self._memory.values():
                if variant_id in tier:
                    return tier.is_lossy(variant_id)
            is_queued = self._writer is not None and variant_id in self._writer
            return self._disk is not None and not is_queued and self._disk.is_lossy(variant_id)

    def usage(self) -> dict[str, TierUsage]:
        """Tier -> usage and counters since open."""
        with self._lock:
            counts = {name: collections.Counter(self._counts[name]) for name in self._levels}
            if self._disk is not None and self._writer is not None:
                counts[DISK]["corrupt"] = self._disk.num_corrupt
                counts[DISK]["writes"] = self._writer.num_written
                counts[DISK]["bytes_written"] = self._writer.bytes_written
                counts[DISK]["failed_writes"] = self._writer.num_failed
            return {
                name: TierUsage(tier.budget.used_bytes, tier.budget.limit_bytes, len(tier), **counts[name])
                for name, tier in self._levels.items()
            }

    def charge_bytes(self, tier: str, variant_id: str) -> int | None:
        """Bytes of a variant in a tier's budget; None if it is not stored there yet."""
        return self._tier(tier).charged(variant_id)

    def charges(self, tier: str, variant_ids: Collection[str]) -> dict[str, int | None]:
        """`charge_bytes` of the variants that a tier holds; None for a variant whose write is queued."""
        level = self._tier(tier)
        queued = self._writer.pending() if self._writer is not None and tier == DISK else frozenset()  # as in tiers_of
        found = {key: charge for key in variant_ids if (charge := level.charged(key)) is not None}
        return dict.fromkeys(queued.intersection(variant_ids)) | found if queued else found

    def memory_charge(self, tier: str, num_tokens: int) -> int:
        """Bytes of a variant of this many tokens in the budget of one of `memory_tiers`."""
        return self._memory[tier].charge_bytes(num_tokens)

    def tidy(self, is_cancelled: Callable[[], bool] | None = None) -> None:
        """Idle-time and shutdown work: keeps the disk tier quick to open (`TensorStoreTier.tidy`)."""
        if self._disk is not None:
            self._disk.tidy(is_cancelled)

    def renew_catalog(self) -> None:
        """Makes the next `tidy` write a new catalog, without any copy of a deleted record."""
        if self._disk is not None:
            self._disk.renew_catalog()

    def read_hints(self) -> dict[str, Any]:
        """The last values of `write_hints`; empty without a disk."""
        return {} if self._disk is None else self._disk.hints.read()

    def write_hints(self, hints: Mapping[str, Any]) -> None:
        """Stores JSON values in the disk tier's namespace, if there is one (`store.notes.Hints`)."""
        if self._disk is not None:
            self._disk.hints.write(hints)

    def _tier(self, name: str) -> MemoryTier[Any] | TensorStoreTier:
        if name not in self._levels:
            raise ValueError(f"tier: wanted one of {list(self._levels)}, got {name!r}")
        return self._levels[name]

    def _count_look_up(self, tier: str | None) -> None:
        for name in self._levels:
            self._counts[name]["hits" if name == tier else "misses"] += 1
            if name == tier:
                break

"""Names of the tiers, and their byte counts and counters."""

from __future__ import annotations

import dataclasses

DEVICE = "device"
HOST = "host"
DISK = "disk"


@dataclasses.dataclass(frozen=True, slots=True)
class TierUsage:
    """Contents of a tier and its counters since open.

    Attributes:
      used_bytes: bytes held, on disk including writes in progress; exceeds `budget_bytes` only by variants that existed
        at open or that other processes wrote.
      budget_bytes: None for no limit.
      hits, misses: look-ups of `prepare_load` that found or did not find the variant in this tier; tiers are searched
        from the fastest on.
      writes: variants stored or promoted. failed_writes: refused by the disk. skipped_writes: over the budget or the
        write queue's limit.
      corrupt: failed checks of data or records.
      evicted, discarded: removed at the caller's request.
      bytes_read: KV bytes delivered by completed loads. bytes_written: bytes stored, on disk with checksums and record.
    """

    used_bytes: int
    budget_bytes: int | None
    num_variants: int
    hits: int = 0
    misses: int = 0
    writes: int = 0
    failed_writes: int = 0
    skipped_writes: int = 0
    corrupt: int = 0
    evicted: int = 0
    discarded: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

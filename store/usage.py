"""What tiers are called, and what one tells about itself: bytes and counters."""

from __future__ import annotations

import dataclasses

DEVICE = "device"
HOST = "host"
DISK = "disk"


@dataclasses.dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds and what happened to it since open.

    Attributes:
      used_bytes: bytes held, on disk with the writes under way; over `budget_bytes` only by what was there at open or
        what other processes wrote.
      budget_bytes: None = no limit.
      hits, misses: look-ups of `prepare_load` that this tier answered, or could not; the fastest is asked first.
      writes: variants taken in, by store or promotion. failed_writes: refused by the disk. skipped_writes: no room in
        the budget or in the write queue.
      corrupt: failed checks of data or records. forged: those of records, and of a shared index's
        leases and orders, that none of this store's keys sealed.
      evicted, discarded: by the caller's order.
      bytes_read: KV bytes handed out by completed loads. bytes_written: bytes taken in, on disk with checksums and
        record.
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
    forged: int = 0
    evicted: int = 0
    discarded: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

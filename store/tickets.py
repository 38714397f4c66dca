"""The two halves of a load or a store: what `TieredStore.prepare_*` hands out and `complete_*` takes back.
Knows neither budgets nor the tiers themselves, only arrays and readers that the store gave it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import numpy as np

from store.arrays import ShardReader
from store.errors import ShardNotFoundError
from store.spec import ShardRecord

HOST = "host"
DISK = "disk"


class LoadTicket:
    """Pinned variants to read from. Thread-safe; valid until `TieredStore.complete_load`.

    Attributes:
      tiers: variant id -> the tier it is read from, "host" or "disk".
      missing: the wanted ids that no tier has.
      lossy: the ids whose KV, as it is read here, may differ from what was stored.
    """

    def __init__(
        self,
        variant_ids: tuple[str, ...],
        sources: Mapping[str, np.ndarray | ShardReader],
        lossy_in_host: Collection[str],
        num_layers: int,
    ):
        self.tiers = {key: HOST if isinstance(source, np.ndarray) else DISK for key, source in sources.items()}
        self.missing = frozenset(variant_ids) - self.tiers.keys()
        readers = {key: source for key, source in sources.items() if isinstance(source, ShardReader)}
        self.lossy = frozenset(lossy_in_host).union(key for key, reader in readers.items() if reader.is_lossy)
        self._sources = dict(sources)
        self._num_layers = num_layers
        self._host_bytes_read = 0
        self._lock = threading.Lock()
        self._open = True

    @property
    def bytes_read(self) -> dict[str, int]:
        """Tier -> KV bytes handed out (host) or read and checked (disk) so far."""
        disk_bytes = sum(source.bytes_read for source in self._sources.values() if isinstance(source, ShardReader))
        return {HOST: self._host_bytes_read, DISK: disk_bytes}

    def prefetch(self, variant_id: str, first: int, last: int) -> None:
        """Starts reading layers `[first, last)` in the background; nothing to do for a variant in host memory.

        Raises:
          ValueError, ShardNotFoundError: as `read_layers`. Failures of the disk show in `read_layers`.
        """
        source = self._source(variant_id, first, last)
        if isinstance(source, ShardReader):
            source.start(first, last)

    def ready(self, variant_id: str, first: int, last: int) -> bool:
        """True when `read_layers` of these layers would not wait for the disk."""
        source = self._source(variant_id, first, last)
        return not isinstance(source, ShardReader) or source.ready(first, last)

    def read_layers(self, variant_id: str, first: int, last: int, *, timeout_s: float | None = None) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` of layers `[first, last)`: a read-only view, never a copy, that stays valid
        after the ticket.

        Raises:
          ValueError: the ticket does not hold the variant or is completed, or the range is not within the layers.
          ShardNotFoundError: the variant is in `missing`, or another process evicted it meanwhile.
          ShardCorruptError: the stored bytes are not what was written.
          StoreUnavailableError: the disk cannot be read.
          TimeoutError: the layers were not there within `timeout_s`; the reads go on.
        """
        source = self._source(variant_id, first, last)
        if isinstance(source, ShardReader):
            return source.wait(first, last, timeout_s)
        view = source[first:last]
        with self._lock:
            self._host_bytes_read += view.nbytes
        return view

    def _source(self, variant_id: str, first: int, last: int) -> np.ndarray | ShardReader:
        if not self._open:
            raise ValueError("ticket: completed already, its variants are no longer pinned")
        if variant_id in self.missing:
            raise ShardNotFoundError(f"no tier holds variant {variant_id}")
        if variant_id not in self._sources:
            raise ValueError(f"variant_id: wanted one that the ticket was prepared for, got {variant_id!r}")
        if not 0 <= first < last <= self._num_layers:
            raise ValueError(f"first, last: wanted 0 <= first < last <= {self._num_layers}, got {first}, {last}")
        return self._sources[variant_id]

    def from_disk(self) -> tuple[str, ...]:
        """The disk variants that were read and checked whole so far."""
        sources = self._sources.items()
        return tuple(key for key, one in sources if isinstance(one, ShardReader) and one.whole() is not None)

    def close(self) -> dict[str, np.ndarray]:
        """Ends the ticket; variant id -> KV of the disk variants that were read and checked whole.

        Raises:
          ValueError: it was completed before.
        """
        with self._lock:
            if not self._open:
                raise ValueError("ticket: completed already")
            self._open = False
        readers = {key: source for key, source in self._sources.items() if isinstance(source, ShardReader)}
        return {key: kv for key, reader in readers.items() if (kv := reader.whole()) is not None}


class StoreTicket:
    """Announced room for one new variant, until `TieredStore.complete_store`.

    Attributes:
      record: what is to be stored.
      exists: the variant is stored, being written or announced already: there is nothing to do but complete.
      tiers: the tiers whose whole budget could hold it; the others are skipped whatever is evicted.
      charge_bytes: tier of `tiers` -> bytes it takes there.
    """

    def __init__(
        self,
        record: ShardRecord,
        exists: bool,
        charge_bytes: Mapping[str, int],
        shortfall: Callable[[StoreTicket], dict[str, int]],
    ):
        self.record = record
        self.exists = exists
        self.charge_bytes = dict(charge_bytes)
        self.tiers = tuple(charge_bytes)
        self._shortfall = shortfall
        self._open = True
        self._lock = threading.Lock()

    @property
    def shortfall_bytes(self) -> dict[str, int]:
        """Tier -> bytes to evict from it now so that this and all other announced variants fit; tiers that lack nothing
        are left out."""
        return self._shortfall(self)

    def close(self) -> None:
        """Ends the ticket.

        Raises:
          ValueError: it was completed before.
        """
        with self._lock:
            if not self._open:
                raise ValueError("ticket: completed already")
            self._open = False

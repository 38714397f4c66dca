"""Tickets that connect the two phases of a load or a store: returned by `TieredStore.prepare_*`, passed to
`complete_*`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import numpy as np

from ccjax.store.arrays import ShardReader
from ccjax.store.copies import HostCopy, PagedKV
from ccjax.store.errors import ShardNotFoundError
from ccjax.store.spec import KVSpec, ShardRecord
from ccjax.store.usage import DEVICE, DISK, HOST

Source = np.ndarray | HostCopy | ShardReader | PagedKV


class LoadTicket:
    """Pinned variants to read. Thread-safe; valid until `TieredStore.complete_load`.

    Attributes:
      tiers: variant id -> the tier that it is read from, "device", "host" or "disk".
      missing: requested ids that no tier has.
      lossy: ids whose KV, as read by this ticket, may differ from the KV stored.
    """

    def __init__(
        self,
        variant_ids: tuple[str, ...],
        sources: Mapping[str, Source],
        lossy_in_memory: Collection[str],
        kv_spec: KVSpec,
    ):
        self.tiers = {key: _tier_of(source) for key, source in sources.items()}
        self.missing = frozenset(variant_ids) - self.tiers.keys()
        readers = {key: source for key, source in sources.items() if isinstance(source, ShardReader)}
        self.lossy = frozenset(lossy_in_memory).union(key for key, reader in readers.items() if reader.is_lossy)
        self._sources = dict(sources)
        self._kv_spec = kv_spec
        self._bytes_read = {DEVICE: 0, HOST: 0}
        self._read: set[str] = set()
        self._lock = threading.Lock()
        self._open = True

    @property
    def bytes_read(self) -> dict[str, int]:
        """Tier -> KV bytes delivered (device, host) or read and checked (disk) so far."""
        # Variants that this ticket only prefetched count for the ticket that reads them.
        read = (source for key, source in self._sources.items() if key in self._read)
        disk_bytes = sum(source.bytes_read for source in read if isinstance(source, ShardReader))
        return {**self._bytes_read, DISK: disk_bytes}

    def prefetch(self, variant_id: str, first: int, last: int) -> None:
        """Starts reading layers `[first, last)` in the background; does nothing for a variant in memory.

        Raises:
          ValueError, ShardNotFoundError: as `read_layers`. Disk failures surface in `read_layers`.
        """
        source = self._source(variant_id, first, last)
        if isinstance(source, ShardReader):
            source.start(first, last)

    def ready(self, variant_id: str, first: int, last: int) -> bool:
        """True if `read_layers` of these layers would not wait for the disk, or for a copy from the device."""
        source = self._source(variant_id, first, last)
        if isinstance(source, HostCopy):
            return source.is_done
        return not isinstance(source, ShardReader) or source.ready(first, last)

    def read_layers(self, variant_id: str, first: int, last: int, *, timeout_s: float | None = None) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` of layers `[first, last)`: read-only and valid beyond the ticket; a view,
        except for a variant on the device.

        Raises:
          ValueError: the ticket does not hold the variant or is completed, or the range is not within the layers.
          ShardNotFoundError: the variant is in `missing`, or another process evicted it meanwhile.
          ShardCorruptError: the stored bytes differ from those written.
          StoreUnavailableError: the disk cannot be read, or the device lost the KV.
          TimeoutError: the layers were not read within `timeout_s`; the reads continue.
        """
        source = self._source(variant_id, first, last)
        self._read.add(variant_id)
        if isinstance(source, ShardReader):
            return source.wait(first, last, timeout_s)
        if isinstance(source, HostCopy):
            source = source.wait(timeout_s)
        kv = source[first:last] if isinstance(source, np.ndarray) else source.read_layers(first, last)
        with self._lock:
            self._bytes_read[self.tiers[variant_id]] += kv.nbytes
        return kv

    def slots(self, variant_id: str) -> np.ndarray:
        """[T] int32, slot of each token of a variant in the device tier, valid until the ticket is completed. The
        variant counts as completely read.

        Raises:
          ValueError: the ticket reads the variant from another tier, or is completed.
        """
        source = self._source(variant_id, 0, self._kv_spec.num_layers)
        if not isinstance(source, PagedKV):
            raise ValueError(f"variant_id: wanted one on the device, got one from {self.tiers[variant_id]}")
        with self._lock:
            self._bytes_read[DEVICE] += self._kv_spec.num_bytes(len(source.slots))
        return source.slots

    def _source(self, variant_id: str, first: int, last: int) -> Source:
        if not self._open:
            raise ValueError("ticket: completed already, its variants are no longer pinned")
        if variant_id in self.missing:
            raise ShardNotFoundError(f"no tier holds variant {variant_id}")
        if variant_id not in self._sources:
            raise ValueError(f"variant_id: wanted one that the ticket was prepared for, got {variant_id!r}")
        num_layers = self._kv_spec.num_layers
        if not 0 <= first < last <= num_layers:
            raise ValueError(f"first, last: wanted 0 <= first < last <= {num_layers}, got {first}, {last}")
        return self._sources[variant_id]

    def whole(self) -> dict[str, np.ndarray]:
        """Variant id -> KV of the variants in host memory now; disk variants only if completely read and checked."""
        if not self._open:
            raise ValueError("ticket: completed already")
        found: dict[str, np.ndarray] = {}
        for key, source in self._sources.items():
            kv = source.whole() if isinstance(source, ShardReader) else source
            if isinstance(kv, HostCopy):
                kv = kv.kv
            if isinstance(kv, np.ndarray):
                found[key] = kv
        return found

    @property
    def in_place(self) -> frozenset[str]:
        """The variants that it reads from the device and whose pages requests can read in place."""
        return frozenset(key for key, kv in self._sources.items() if isinstance(kv, PagedKV) and kv.begins_pages)

    def on_device(self, variant_ids: Collection[str]) -> dict[str, PagedKV]:
        """Those of these variants that the ticket reads from the device. Does not count as a read."""
        held = ((key, self._sources.get(key)) for key in variant_ids)
        return {key: kv for key, kv in held if isinstance(kv, PagedKV)}

    def close(self) -> None:
        """Ends the ticket and releases its readers.

        Raises:
          ValueError: the ticket was completed before.
        """
        with self._lock:
            if not self._open:
                raise ValueError("ticket: completed already")
            self._open = False
        self._sources.clear()


def _tier_of(source: Source) -> str:
    if isinstance(source, np.ndarray | HostCopy):
        return HOST
    return DISK if isinstance(source, ShardReader) else DEVICE


class StoreTicket:
    """Space announced for one new variant, until `TieredStore.complete_store`.

    Attributes:
      record: record of the new variant.
      exists: True if the variant is already stored, being written or announced; the ticket must only be completed.
      tiers: tiers whose whole budget is large enough for the variant; the others are skipped.
      charge_bytes: tier of `tiers` -> bytes that the variant takes there.
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
        """Tier -> bytes to evict now so that this and all other announced variants fit, for tiers without enough
        space."""
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

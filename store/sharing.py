"""Shares one reader between all concurrent loads of a variant: layers read by one load are available to the others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container

from ccjax.store.arrays import OnRead, ShardReader
from ccjax.store.disk import TensorStoreTier


class SharedReaders:
    """Readers in use, by variant; each is dropped with its last user. Thread-safe.

    Args:
      tier: opens new readers; None if there is no disk.
      on_read: see `ShardReader.watch`.
    """

    def __init__(self, tier: TensorStoreTier | None, on_read: OnRead | None) -> None:
        self._tier = tier
        self._on_read = on_read
        self._lock = threading.Lock()
        self._readers: weakref.WeakValueDictionary[str, ShardReader] = weakref.WeakValueDictionary()

    def open(self, variant_id: str) -> ShardReader:
        """The variant's reader in use, or a new one if there is none or it has failed.

        Raises:
          ShardNotFoundError: the tier does not hold the variant.
        """
        with self._lock:
            reader = self._readers.get(variant_id)
            if reader is None or reader.has_failed:
                assert self._tier is not None
                reader = self._tier.open(variant_id)
                if self._on_read is not None:
                    reader.watch(self._on_read)
                self._readers[variant_id] = reader
            return reader

    def bytes_there(self, variant_id: str) -> int:
        """KV bytes of the variant that concurrent loads have already read into memory."""
        reader = self._readers.get(variant_id)
        return 0 if reader is None or reader.has_failed else reader.bytes_there

    def forget(self, variant_id: str) -> None:
        """Stops sharing a variant's reader, because the variant may be rewritten; current users keep the reader."""
        with self._lock:
            self._readers.pop(variant_id, None)

    def retain(self, pinned: Container[str]) -> None:
        """Stops sharing the readers of unpinned variants, which may be evicted and rewritten."""
        with self._lock:
            for variant_id in [key for key in self._readers.keys() if key not in pinned]:
                self._readers.pop(variant_id, None)

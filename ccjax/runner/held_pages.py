"""Which pages of the device tier are free, and who holds the others."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

import numpy as np

from ccjax.store.budget import ByteBudget
from ccjax.store.errors import TierFullError
from ccjax.store.usage import DEVICE


class Pages:
    """Which pages of a pool are free, and how many shards of requests and of the device tier hold each other one.
    Thread-safe."""

    def __init__(self, num_pages: int) -> None:
        self._free = collections.deque(range(num_pages))
        self._holders = np.zeros(num_pages, np.int32)
        self._in_tier = np.zeros(num_pages, np.int32)
        self._dropped: collections.deque[Sequence[int]] = collections.deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of free pages."""
        with self._lock:
            self._collect()
            return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free pages.

        Raises:
          TierFullError: too few are free; none is taken.
        """
        with self._lock:
            self._collect()
            if count > len(self._free):
                raise TierFullError(f"device tier: wanted {count} pages, {len(self._free)} are free")
            taken = [self._free.popleft() for _ in range(count)]
            self._holders[taken] = 1
            return taken

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder of pages that are held already."""
        with self._lock:
            self._holders[pages] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Removes a holder; takes no lock, since the garbage collector may call it at any time."""
        self._dropped.append(pages)

    def count_in_tier(self, pages: Sequence[int], change: int) -> None:
        """One holder more or less (`change`) belongs to the device tier."""
        with self._lock:
            self._in_tier[pages] += change

    def num_available(self, in_use: Sequence[Sequence[int]]) -> int:
        """Number of pages that nobody holds but the device tier, without those `in_use`."""
        with self._lock:
            self._collect()
            count = int(np.count_nonzero(self._holders == self._in_tier))
            used = np.unique(np.concatenate([np.zeros(0, np.int64), *map(np.asarray, in_use)]).astype(np.int64))
            return count - int(np.count_nonzero(self._holders[used] == self._in_tier[used]))

    def _collect(self) -> None:
        while self._dropped:
            pages = np.asarray(self._dropped.popleft(), np.int64)
            self._holders[pages] -= 1
            self._free.extend(pages[self._holders[pages] == 0].tolist())


class PageBudget(ByteBudget):
    """Bytes of a pool's pages in use by chunks or requests, derived from the free pages: charging only checks them."""

    def __init__(self, num_pages: int, page_bytes: int, free: Pages) -> None:
        super().__init__(DEVICE, num_pages * page_bytes)
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._free = free

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages that are not free."""
        return (self._num_pages - len(self._free)) * self._page_bytes

    def charge(self, num_bytes: int) -> None:
        """Raises TierFullError unless `num_bytes` are free."""
        if short := self.shortfall(num_bytes):
            raise TierFullError(f"device tier: wanted {num_bytes} bytes of pages, {short} more than are free")

    def release(self, num_bytes: int) -> None:
        """Does nothing, since pages are freed with their `PagedShard`."""

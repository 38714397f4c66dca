"""Claims of this process on variants that it computes: leases, released once the variant is written or abandoned. If
the disk or bucket fails, only the coordination with other processes is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from ccjax.store.disk import TensorStoreTier
from ccjax.store.leases import Lease

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Claims:
    """The leases that one store holds on variants of `tier`. Thread-safe; raises no disk errors.

    Args:
      is_queued: whether the write of a variant is queued; `written` is called later for each of these.

    Attributes:
      is_failing: the disk refused the last call.
    """

    def __init__(self, tier: TensorStoreTier, is_queued: Callable[[str], bool]):
        self._tier = tier
        self._leases = tier.leases
        self._is_queued = is_queued
        self._held: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self.is_failing = False

    def claim(self, variant_ids: Sequence[str], seconds: float) -> tuple[str, ...]:
        """Claims variants in order, up to the first one claimed by another process; returns the claimed ones."""
        held = self._try(lambda: self._leases.acquire(variant_ids, seconds)) or []
        with self._lock:
            self._held.update((lease.key, lease) for lease in held)
        return tuple(lease.key for lease in held)

    def holds(self, variant_id: str) -> bool:
        """Whether this process has claimed the variant."""
        return variant_id in self._held

    def taken(self, variant_ids: Collection[str]) -> frozenset[str]:
        """The variants that other processes have claimed; none while the disk is unavailable."""
        found = self._try(lambda: self._leases.held(variant_ids)) or frozenset()
        with self._lock:
            return found - self._held.keys()

    def committed(self, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """The variants that are on disk now, written by any process; the tier knows them from now on."""
        return self._tier.find_committed(variant_ids)

    def release(self, variant_ids: Collection[str]) -> None:
        """Releases the claims on variants that will not be stored, and on queued ones once they are written."""
        for variant_id in variant_ids:
            if not self._is_queued(variant_id):
                self.written(variant_id)

    def written(self, variant_id: str) -> None:
        """Releases the claim on a variant that is on disk or that the disk refused."""
        with self._lock:
            lease = self._held.pop(variant_id, None)
        if lease is not None:
            self._try(lambda: self._leases.release(lease))

    def close(self) -> None:
        """Releases all claims."""
        with self._lock:
            held = tuple(self._held)
        for variant_id in held:
            self.written(variant_id)

    def _try(self, call: Callable[[], T]) -> T | None:
        """Runs a call; None if the disk refused, which is logged once per outage."""
        try:
            result = call()
        except OSError as error:
            if not self.is_failing:
                _log.warning("store: leases: %s; nothing is shared until they work again", error)
            self.is_failing = True
            return None
        self.is_failing = False
        return result

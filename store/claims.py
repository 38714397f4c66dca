"""What this process told others that it computes: leases on variants, given up once the variant is written or will not
be. A failing disk or bucket costs the agreement with others, and nothing else."""

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
    """The leases that one store holds on variants of `tier`. Thread-safe; raises nothing of the disk's.

    Args:
      is_queued: whether a variant is on its way to disk; `written` follows for each such one.

    Attributes:
      is_failing: the disk refused when it was last asked.
    """

    def __init__(self, tier: TensorStoreTier, is_queued: Callable[[str], bool]):
        self._tier = tier
        self._leases = tier.leases
        self._is_queued = is_queued
        self._held: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self.is_failing = False

    def claim(self, variant_ids: Sequence[str], seconds: float) -> tuple[str, ...]:
        """Takes leases on the first of these variants, up to the one that another process has; which ones it got."""
        held = self._try(lambda: self._leases.acquire(variant_ids, seconds)) or []
        with self._lock:
            self._held.update((lease.key, lease) for lease in held)
        return tuple(lease.key for lease in held)

    def holds(self, variant_id: str) -> bool:
        """Whether this process said that it computes it."""
        return variant_id in self._held

    def taken(self, variant_ids: Collection[str]) -> frozenset[str]:
        """Those that other processes say they compute; none while the disk cannot be asked."""
        found = self._try(lambda: self._leases.held(variant_ids)) or frozenset()
        with self._lock:
            return found - self._held.keys()

    def committed(self, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """Those that are on disk now, by whomever; what was not known before is from now on."""
        return self._tier.find_committed(variant_ids)

    def release(self, variant_ids: Collection[str]) -> None:
        """Nothing more will be stored of these: gives their leases up, those being written once they are."""
        for variant_id in variant_ids:
            if not self._is_queued(variant_id):
                self.written(variant_id)

    def written(self, variant_id: str) -> None:
        """The variant is on disk, or the disk refused it."""
        with self._lock:
            lease = self._held.pop(variant_id, None)
        if lease is not None:
            self._try(lambda: self._leases.release(lease))

    def close(self) -> None:
        """Gives all leases up."""
        with self._lock:
            held = tuple(self._held)
        for variant_id in held:
            self.written(variant_id)

    def _try(self, call: Callable[[], T]) -> T | None:
        """The result, or None where the disk refused; the first failure of a row is logged as a warning."""
        try:
            result = call()
        except OSError as error:
            if not self.is_failing:
                _log.warning("store: leases: %s; nothing is shared until they work again", error)
            self.is_failing = True
            return None
        self.is_failing = False
        return result

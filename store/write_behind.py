"""A bounded write queue in front of the disk tier: one thread writes; disk failures are counted, never raised."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from ccjax.store.claims import Claims
from ccjax.store.copies import HostCopy, host_array
from ccjax.store.disk import TensorStoreTier
from ccjax.store.spec import IsCovered, ShardRecord

_log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_PENDING_BYTES = 256 << 20
"""Default of `TieredStore.open(max_pending_bytes=...)`: bytes of KV that may wait for the disk."""


class WriteBehind:
    """Writes variants to `tier` in order, on one background thread.

    Args:
      max_pending_bytes: KV bytes that may be queued; a single variant of any size is always accepted.

    Attributes:
      num_written, bytes_written: commits by this queue, and their bytes on disk.
      claims: leases on variants of the tier, released when their write is done.
      num_failed: writes that the disk refused. The start and the end of a failure are logged as warnings.
    """

    def __init__(self, tier: TensorStoreTier, max_pending_bytes: int):
        self.num_written = 0
        self.bytes_written = 0
        self.num_failed = 0
        self.claims = Claims(tier, self.__contains__)
        self._tier = tier
        self._max_pending_bytes = max_pending_bytes
        self._pending: dict[str, tuple[ShardRecord, np.ndarray | HostCopy]] = {}
        self._writing: str | None = None
        self._cancelled: set[str] = set()
        self._failing = False
        self._closed = False
        self._changed = threading.Condition()
        # An executor instead of a thread: at exit, the interpreter finishes its queue; it neither drops it nor hangs.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store-write")

    def __contains__(self, variant_id: str) -> bool:
        return self.get(variant_id) is not None

    def get(self, variant_id: str) -> np.ndarray | HostCopy | None:
        """The KV of a variant whose write is queued, else None; the disk tier knows a variant that leaves the queue."""
        pending = self._pending.get(variant_id)
        return None if pending is None or variant_id in self._cancelled else pending[1]

    def pending(self) -> frozenset[str]:
        """The variants with a queued write."""
        with self._changed:
            return frozenset(self._pending.keys() - self._cancelled)

    def add(self, record: ShardRecord, kv: np.ndarray | HostCopy, *, wait: bool = False) -> bool:
        """Queues a write whose bytes the tier has reserved; `kv` must not be changed afterwards.

        Returns False, with the queue unchanged, if the queue is full; with `wait`, waits for space instead.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._fits(record))
            if self._closed or not self._fits(record):
                return False
            self._pending[record.variant_id] = (record, kv)
            self._executor.submit(self._write, record.variant_id)
            return True

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs `function` on the writing thread, after everything queued so far.

        Raises:
          RuntimeError: the queue is closed.
        """
        return self._executor.submit(function)

    def cancel(self, variant_id: str, is_covered: IsCovered | None = None) -> None:
        """Cancels a queued write; if it is in progress, the variant is removed from disk as soon as it ends. Does
        nothing if the variant is not queued, or if `is_covered` does not select its record."""
        with self._changed:
            pending = self._pending.get(variant_id)
            if pending is None or (is_covered is not None and not is_covered(pending[0])):
                return
            if variant_id == self._writing:
                self._cancelled.add(variant_id)
            else:
                del self._pending[variant_id]
                self._tier.release(pending[0])
                self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything queued is on disk or has failed; False after `timeout_s`."""
        with self._changed:
            ours = list(self._pending.items())  # by identity: a later write of the same id is not waited for
            return self._changed.wait_for(
                lambda: all(self._pending.get(key) is not entry for key, entry in ours), timeout_s
            )

    def close(self) -> None:
        """Finishes queued writes and ends the thread; `add` returns False from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._executor.shutdown(wait=True)
        self.claims.close()

    def _fits(self, record: ShardRecord) -> bool:
        if record.variant_id in self._pending:
            return False
        waiting = sum(pending.num_bytes for pending, _ in self._pending.values())
        return not waiting or waiting + record.num_bytes <= self._max_pending_bytes

    def _write(self, variant_id: str) -> None:
        with self._changed:
            if variant_id not in self._pending:  # cancelled meanwhile
                return
            record, kv = self._pending[variant_id]
            self._writing = variant_id
        start_s = time.monotonic()
        error = None
        won = False
        try:
            won = self._tier.write(record, host_array(kv), reserved=True)
        except Exception as caught:  # the thread must survive any error
            error = caught
        with self._changed:
            cancelled = variant_id in self._cancelled
            if won:
                self.num_written += 1
                self.bytes_written += self._tier.charged(record.variant_id) or 0
            self.num_failed += error is not None
        if cancelled:
            self._tier.remove((variant_id,))
        self._log_change(error, time.monotonic() - start_s)
        self.claims.written(record.variant_id)
        with self._changed:
            self._cancelled.discard(variant_id)
            self._writing = None
            del self._pending[variant_id]
            self._changed.notify_all()

    def _log_change(self, error: Exception | None, seconds: float) -> None:
        if error is not None and not self._failing:
            _log.warning(
                "store: a write failed after %.1f s, variants stay in host memory until writes succeed again: %s",
                seconds,
                error,
                exc_info=None if isinstance(error, OSError) else error,
            )
        elif error is None and self._failing:
            _log.warning("store: writes to %s succeed again after %d failures", self._tier.url, self.num_failed)
        self._failing = error is not None

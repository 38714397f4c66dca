"""Copies the KV that queued requests will reuse from host memory to free pages of the device (CacheCraft sec. 3.5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ccjax.cache.variants import VariantIndex
from ccjax.runner.pool import DevicePool, PagedShard, num_pages
from ccjax.store.errors import TierFullError
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import HOST
from ccjax.types import VariantId

logger = logging.getLogger(__name__)


class DevicePreloader:
    """Copies one variant after the other, on a thread of its own; nothing is evicted for a copy. Once `collect` has
    added it to the device tier, it is evicted as all others are. Methods are for the batch thread.

    Attributes:
      num_bytes: of the KV added so far.
    """

    def __init__(self, store: TieredStore, variants: VariantIndex, pool: DevicePool) -> None:
        self.num_bytes = 0
        self._store, self._variants, self._pool = store, variants, pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ccjax-device-preload")
        self._copy: tuple[VariantId, Future[PagedShard | None]] | None = None
        self._tried: set[VariantId] = set()

    def want(self, variant_ids: Iterable[VariantId], *, num_spare: int) -> None:
        """Starts to copy the first of these variants that is in host memory alone, unless a copy is under way, if it
        leaves `num_spare` pages free. Each is tried once, as long as it is wanted. A copy that nothing waits for any
        more is dropped: if its request runs, it loads the variant itself."""
        wanted = dict.fromkeys(variant_ids)
        self._tried &= wanted.keys()
        if self._copy is not None and self._copy[0] not in wanted:
            self._copy = None
        for variant_id in wanted:
            if self._copy is not None:
                return
            summary = self._store.get_summary(variant_id)
            if variant_id in self._tried or summary is None or self._store.tier_of(variant_id) != HOST:
                continue
            if num_pages(summary.num_tokens) + num_spare <= self._pool.num_free:
                self._tried.add(variant_id)
                self._copy = variant_id, self._thread.submit(self._copied, variant_id)

    def collect(self) -> VariantId | None:
        """Adds a finished copy to the device tier; returns the variant."""
        if self._copy is None or not self._copy[1].done():
            return None
        (variant_id, copy), self._copy = self._copy, None
        shard = copy.result()
        if shard is None or not self._variants.add_to_device(variant_id, shard):
            return None
        self.num_bytes += shard.num_bytes
        return variant_id

    def forget(self) -> None:
        """Drops a copy that was not collected, since the pool's contents are lost."""
        self._copy = None

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._thread.shutdown()
        self._copy = None

    def _copied(self, variant_id: VariantId) -> PagedShard | None:
        """The KV in pages of the device; None if it is not in host memory any more, or there is no room."""
        try:
            ticket = self._store.prepare_load((variant_id,), counted=False)
            try:
                kv = None if ticket.lossy else ticket.whole().get(variant_id)
                return None if kv is None else self._pool.write(kv)
            finally:
                self._store.complete_load(ticket, ok=False)
        except TierFullError:
            return None
        except Exception:  # the request loads it when it runs, and then reports what is wrong
            logger.exception("what a queued request will reuse could not be copied to the device")
            return None

"""Copies the KV that queued requests will reuse to free pages of the device: from host memory, or what a `Preload` has
read from disk (CacheCraft sec. 3.5)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable

from ccjax.cache.variants import VariantIndex
from ccjax.runner.pool import DevicePool, PagedShard, num_pages
from ccjax.store.errors import TierFullError
from ccjax.store.throttle import DONE, ThrottledLink
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DISK, HOST
from ccjax.types import ChunkId, VariantId

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A copy under way: its pages, the count of variant changes at its start, and whether all is written."""

    variant_id: VariantId
    chunk_id: ChunkId
    started_at: int
    shard: PagedShard
    filling: concurrent.futures.Future[bool]


class DevicePreloader:
    """Copies one variant after the other, on a thread of its own, into pages reserved for it; nothing is evicted for a
    copy. Once `collect` has added it to the device tier, it is evicted before all others until a request has used it.
    Methods are for the batch thread.

    Args:
      link: throttles copies to the device.
      must_wait: True while a running request loads over this link; its KV goes first.

    Attributes:
      num_bytes: of the KV added so far.
    """

    def __init__(
        self,
        store: TieredStore,
        variants: VariantIndex,
        pool: DevicePool,
        *,
        link: ThrottledLink | None = None,
        must_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_bytes = 0
        self._store, self._variants, self._pool = store, variants, pool
        self._link, self._must_wait = link, must_wait
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ccjax-device-preload")
        self._copy: _Copy | None = None
        self._tried: set[VariantId] = set()

    @property
    def num_pages(self) -> int:
        """The pages of the copy under way, which `give_back` frees."""
        return 0 if self._copy is None else self._copy.shard.num_pages

    def want(self, variant_ids: Iterable[VariantId], *, num_spare: int) -> None:
        """Starts to copy the first of these variants that is in memory, but not on the device, unless a copy is under
        way, if it leaves `num_spare` pages free. Each is tried once, as long as it is wanted."""
        wanted = dict.fromkeys(variant_ids)
        self._tried &= wanted.keys()
        for variant_id in wanted:
            if self._copy is not None or self._must_wait():
                return
            summary = self._store.get_summary(variant_id)
            if variant_id in self._tried or summary is None or not self._is_in_memory(variant_id):
                continue
            if num_pages(summary.num_tokens) + num_spare > self._pool.num_free:
                continue
            self._tried.add(variant_id)
            with contextlib.suppress(TierFullError):
                (shard,) = self._pool.allocate([summary.num_tokens])
                filling = self._thread.submit(self._fill, variant_id, shard)
                started_at, chunk_id = self._variants.changes.count, ChunkId(summary.chunk_id)
                self._copy = _Copy(variant_id, chunk_id, started_at, shard, filling)

    def collect(self) -> VariantId | None:
        """Adds a finished copy to the device tier; returns the variant."""
        copy = self._copy
        if copy is None or not copy.filling.done():
            return None
        self._copy = None
        if self._variants.changes.last((copy.chunk_id,)) > copy.started_at:
            self._tried.discard(copy.variant_id)  # it may have been erased, and computed again under the same id
        elif copy.filling.result() and self._variants.add_to_device(copy.variant_id, copy.shard):
            self.num_bytes += copy.shard.num_bytes
            return copy.variant_id
        copy.shard.free()  # even if a traceback in a log still refers to it
        return None

    def give_back(self) -> None:
        """Frees the pages of the copy under way, once what is being written is written."""
        copy, self._copy = self._copy, None
        if copy is not None:
            concurrent.futures.wait((copy.filling,))
            copy.shard.free()

    def forget(self) -> None:
        """Drops a copy that was not collected; its pages are free once its thread has done with them."""
        copy, self._copy = self._copy, None
        self._tried.clear()
        if copy is not None:
            copy.filling.add_done_callback(lambda _: copy.shard.free())

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._thread.shutdown()
        self._copy = None

    def _is_in_memory(self, variant_id: VariantId) -> bool:
        tier = self._store.tier_of(variant_id)
        return tier == HOST or (tier == DISK and not self._store.unread_bytes(variant_id))

    def _fill(self, variant_id: VariantId, shard: PagedShard) -> bool:
        """Writes the KV to the pages; False if it is gone, not what was stored, or could not be written."""
        try:
            ticket = self._store.prepare_load((variant_id,), counted=False)
            try:
                if ticket.missing or ticket.lossy:
                    return False
                kv = ticket.read_layers(variant_id, 0, self._store.kv_spec.num_layers)
                self._pool.fill(shard, kv)
                if self._link is not None:
                    self._link(DONE, kv.nbytes).result()
                return True
            finally:
                self._store.complete_load(ticket, ok=False)
        except TierFullError:
            return False
        except Exception:  # the request loads it when it runs, and then reports what is wrong
            logger.exception("what a queued request will reuse could not be copied to the device")
            return False

"""Operations on an engine's whole chunk-cache: `Engine.cache`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.snapshot import IndexedStore, RestoreReport, SaveReport, restore_snapshot, save_snapshot
from ccjax.cache.warming.passages import PassageWarmer
from ccjax.config import EngineConfig
from ccjax.engine.batch.loop import BatchLoop
from ccjax.engine.maintenance import Maintenance, MaintenanceCounts
from ccjax.engine.shadow import ShadowChecks, ShadowCounts
from ccjax.errors import ReadOnlyError
from ccjax.loading.model import Progress
from ccjax.policy.routing import ChunkFilter, Summary, load_cost
from ccjax.runner.budgets import file_system_used
from ccjax.runner.cancellation import IsCancelled
from ccjax.store.change_feed import ChangeFeedCounts
from ccjax.store.usage import DISK, HOST, TierUsage
from ccjax.types import ChunkId

logger = logging.getLogger(__name__)

_SHRUNK_BYTES = 1 << 28
"""Some 50 ms on a local disk."""

NEARLY_FULL = 0.8
"""Share of the last tier's budget beyond which nothing is prepared that no request reused."""


class EngineCache:
    """Usage, maintenance, shadow checks and snapshots of an engine's chunk-cache. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        chunks: ChunkCache,
        warmer: PassageWarmer,
        maintenance: Maintenance,
        shadow: ShadowChecks,
        loop: BatchLoop,
    ) -> None:
        self._config = config
        self._rates = chunks.rates
        self._variants = chunks.variants
        self._store = chunks.store
        self._documents = chunks.documents
        self._updater = chunks.updater
        self._warmer = warmer
        self._maintenance = maintenance
        self._shadow = shadow
        self._loop = loop
        self._exclusive = loop.exclusive
        self._indexed = IndexedStore(
            chunks.store, chunks.variants, chunks.identity, model_name, config.max_variants, loop.exclusive
        )

    def usage(self) -> dict[str, TierUsage]:
        """Bytes, variants and counters of every tier."""
        return self._store.usage()

    @property
    def capacity_used(self) -> float:
        """Used share of the lowest tier's budget or, if it has none, of its file system; 1.0 if the capacity is
        unknown, as for a bucket."""
        usage = self._store.usage()
        last = usage.get(DISK) or usage[HOST]
        if last.budget_bytes is not None:
            return last.used_bytes / last.budget_bytes if last.budget_bytes else 1.0
        used = None if self._config.store is None else file_system_used(self._config.store)
        return 1.0 if used is None else used

    @property
    def _is_nearly_full(self) -> bool:
        return self.capacity_used > NEARLY_FULL

    @property
    def num_variants(self) -> int:
        """Number of chunk variants that can be reused now."""
        return len(self._variants)

    @property
    def num_unprepared(self) -> int:
        """Number of passages of requests that `repair_one` still has to prepare, with the one in progress."""
        return self._warmer.num_unprepared(only_reused=self._is_nearly_full)

    @property
    def maintenance_counts(self) -> MaintenanceCounts:
        """Results of `repair_one` and `refresh` so far."""
        updater = self._updater
        return dataclasses.replace(self._maintenance.counts, adopted=updater.num_adopted, vanished=updater.num_vanished)

    @property
    def change_feed_counts(self) -> ChangeFeedCounts | None:
        """Whether the shared index answers, and how many changes were applied from it; None without a shared index."""
        return None if self._store.change_feed is None else self._store.change_feed.counts

    def repair_one(self, *, is_cancelled: IsCancelled | None = None) -> bool:
        """In idle time, prepares one passage that requests computed, or reused from KV computed behind too little text
        or without known deviations; if there is none, replaces one approximate variant by an exact one. Once the last
        tier is nearly full, passages that no request reused are left out.

        Chunks of which the same tokens were recomputed in all layers are stored as approximate variants. Exact ones can
        be reused behind their prefix in every mode, and errors do not accumulate on them.

        Args:
          is_cancelled: called before every layer; once it returns True, nothing is changed.

        Returns:
          Whether a variant was processed, so that there may be another one. False if there is none, the engine is in
          use, `read_only` or of strategy `full`, or the call was cancelled.

        Raises:
          RuntimeError: the engine is closed.
        """
        if not self._config.stores_chunks:
            return False
        if self._warmer.prepare_one(is_cancelled, only_reused=self._is_nearly_full):
            self._maintenance.count(prepared=1)
            return True
        return self._maintenance.repair_one(is_cancelled)

    @property
    def shadow_counts(self) -> ShadowCounts:
        """Results of `check_one` so far."""
        return self._shadow.counts

    def check_one(self, *, is_cancelled: IsCancelled | None = None) -> bool:
        """In idle time, compares one answer over approximate reuse, selected by `EngineConfig.shadow_ratio`, with a
        full prefill.

        Args:
          is_cancelled: called before every layer; once it returns True, the answer keeps waiting.

        Returns:
          Whether an answer was checked. False if none waits, the engine is in use, or the call was cancelled.

        Raises:
          RuntimeError: an answer waits, but the engine is closed.
        """
        if not self._shadow.num_waiting:
            return False
        with self._exclusive(wait=False) as is_ours:
            if not is_ours:
                return False
        return self._shadow.check_one(is_cancelled)

    def refresh(self) -> None:
        """Applies what other processes added to and removed from the same store since the last call, and evicts what is
        beyond its limits.

        The disk is read while requests run; only the index is changed while no prefill runs.

        Raises:
          RuntimeError: the engine is closed.
        """
        notes = self._documents.fetch()  # first, since erased chunks must not be adopted
        added, removed = self._store.refresh()
        is_due = not self._config.read_only and self._documents.needs_tending()
        if added or removed or any(notes) or is_due:
            with self._exclusive():
                self._documents.apply_changes(*notes)
                self._updater.apply_changes(added, removed)
                if is_due:
                    self._documents.tend()
        self._shrink()
        self.tidy()

    def _shrink(self) -> None:
        evicted = 0
        while not self._config.read_only:
            with self._exclusive():  # some at a time, since requests wait meanwhile
                freed = self._variants.shrink(_SHRUNK_BYTES)
            if not freed:
                break
            evicted += freed
        if evicted:
            logger.info("the store held more than its limit: evicted %.1f MB", evicted / 1e6)

    def summary(self) -> Summary:
        """The summary that a router needs of this engine; does no disk I/O."""
        rates, disk = self._rates, self._rates.tiers[DISK].cost
        load_s = None if disk is None else disk.unit_s * self._store.kv_spec.num_bytes(1)
        held = ChunkFilter.of(map(ChunkId, self._store.chunk_ids(self._store.memory_tiers)))
        return Summary(held, self._loop.counts.waiting_tokens, load_cost(load_s, rates.seconds_per_token))

    def save_snapshot(
        self, where: str | Path, *, overwrite: bool = False, progress: Progress | None = None
    ) -> SaveReport:
        """Writes all chunk-caches with their metadata to a directory or bucket while requests run; see
        `ccjax.cache.snapshot.save_snapshot`."""
        return save_snapshot(self._indexed, where, overwrite=overwrite, progress=progress)

    def restore_snapshot(
        self, where: str | Path, *, max_bytes: int | None = None, progress: Progress | None = None
    ) -> RestoreReport:
        """Restores the chunk-caches of a snapshot, or the hottest `max_bytes` of them, while requests run; see
        `ccjax.cache.snapshot.restore_snapshot`. Raises ReadOnlyError if the engine is `read_only`."""
        if self._config.read_only:
            raise ReadOnlyError("read_only", "wanted an engine that stores chunks, this one has read_only=True")
        return restore_snapshot(self._indexed, where, max_bytes=max_bytes, progress=progress)

    def flush(self) -> None:
        """Waits until what finished requests leave is stored, and all pending writes to the disk tier are complete.

        Raises:
          RuntimeError: the engine is closed.
        """
        with self._exclusive():
            pass  # the loop keeps a prompt and its answer after it has given the answer
        self._store.flush()
        self.save_hints()
        self.tidy()

    def tidy(self) -> None:
        """Deletes what the store no longer needs, unless the engine is `read_only`."""
        if not self._config.read_only:
            self._store.tidy()

    def save_hints(self) -> None:
        """Saves the usage data of variants for the next start, unless the engine is `read_only`."""
        if not self._config.read_only:
            self._variants.save_hints()

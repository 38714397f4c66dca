"""KV shards in tiers of memory and, with a URL, of disk: two-phase loads and stores, pins, budgets, write-behind."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ccjax.store.arrays import OnRead
from ccjax.store.change_feed import ChangeFeed
from ccjax.store.copies import KV, HostCopier, HostCopy, PagedKV
from ccjax.store.disk import TensorStoreTier
from ccjax.store.erasure import erase_from_disk
from ccjax.store.errors import ShardNotFoundError, TierFullError
from ccjax.store.formats import check_kv_dtype
from ccjax.store.index import open_index
from ccjax.store.levels import Levels
from ccjax.store.memory import HostTier, MemoryTier
from ccjax.store.notes import Notes
from ccjax.store.sharing import SharedReaders
from ccjax.store.spec import IsCovered, KVSpec, ShardRecord, StoreIdentity, check_kv, check_record, positive_int
from ccjax.store.tickets import LoadTicket, Source, StoreTicket
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.store.watcher import StoreWatcher
from ccjax.store.write_behind import MAX_PENDING_BYTES, WriteBehind

_log = logging.getLogger(__name__)
_MAX_COPYING_BYTES = 2 << 30
"""KV that may wait for its copy from the device: its pages are not free meanwhile."""


class TieredStore(Levels):
    """A store of variants in several tiers. Thread-safe; open it with `TieredStore.open`, and use it as a context
    manager or `close` it.

    A variant is stored in every tier with enough free budget; a completely read variant is promoted to the faster
    tiers. `notes` are small JSON objects shared with other processes; `claims` records which variants this and other
    processes are computing (None without a disk); `change_feed` announces changes through a shared index (None without
    one).
    """

    def __init__(
        self,
        kv_spec: KVSpec,
        memory: Sequence[MemoryTier[Any]],
        disk: TensorStoreTier | None,
        max_pending_bytes: int,
        on_read: OnRead | None = None,
        change_feed: ChangeFeed | None = None,
    ):
        super().__init__(memory, disk, None if disk is None else WriteBehind(disk, max_pending_bytes))
        self.kv_spec = kv_spec
        self._readers = SharedReaders(disk, on_read)
        self._copier = HostCopier(kv_spec, _MAX_COPYING_BYTES)
        self.notes = Notes()
        if self._writer is not None and disk is not None:
            self.notes = Notes(*disk.notes_place, run=self._writer.call, is_open=lambda: disk.is_open)
        self.claims = None if self._writer is None else self._writer.claims
        self._pins: collections.Counter[str] = collections.Counter()
        self._announced: dict[str, StoreTicket] = {}
        self._open = True
        self.change_feed = change_feed
        self._watcher = None if disk is None else StoreWatcher(disk, change_feed, self._pins, self._lock)

    @classmethod
    def open(
        cls,
        url: str | None,
        *,
        kv_spec: KVSpec,
        identity: StoreIdentity,
        host_bytes: int,
        disk_bytes: int | None = None,
        device: MemoryTier[Any] | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        kv_dtype: str = "auto",
        on_read: OnRead | None = None,
        index: str | None = None,
        read_only: bool = False,
        is_optional: bool = False,
    ) -> TieredStore:
        """Opens a store for the variants of one model; `url=None` keeps them in memory only.

        Args:
          host_bytes, disk_bytes: budgets of the tiers; None for no limit.
          device: a tier above host memory, whose variants are `store.tickets.PagedKV`.
          max_pending_bytes: bytes of KV that may wait for the disk; further stores skip the disk.
          kv_dtype: type of new variants' KV in the disk tier, one of `store.formats.KV_DTYPES`.
          on_read: observes, and may delay, every read of the disk tier.
          index: URL of an index shared by the processes on the store, see `store.index.open_index`; needs `url`.
          read_only: the disk is only read; it need not be writable.
          is_optional: open also if a bucket does not answer, as if it had stopped to do so later: with a warning, and
            `refresh` tries again.

        Raises:
          ValueError, StoreUnavailableError, StoreIdentityError: as `TensorStoreTier`.
        """
        positive_int("max_pending_bytes", max_pending_bytes)
        check_kv_dtype(kv_dtype)
        host, disk = HostTier(kv_spec, host_bytes), None
        if index is not None and url is None:
            raise ValueError("store_index: wanted a store that it is the index of, got none")
        change_feed = None
        with contextlib.ExitStack() as undo:
            if index is not None:
                change_feed = undo.enter_context(contextlib.closing(ChangeFeed(open_index(index, identity.namespace))))
            if url is not None:
                how: dict[str, Any] = {"kv_dtype": kv_dtype, "change_feed": change_feed}
                how |= {"read_only": read_only, "is_optional": is_optional}
                disk = TensorStoreTier(url, kv_spec, identity, disk_bytes, **how)
            undo.pop_all()
        return cls(kv_spec, [host] if device is None else [device, host], disk, max_pending_bytes, on_read, change_feed)

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def shortfall_bytes(self, tier: str, num_bytes: int) -> int | None:
        """Bytes to evict from `tier` before `num_bytes` fit in addition to announced variants; None if they exceed its
        whole budget."""
        with self._lock:
            budget = self._tier(tier).budget
            return self._short(tier, num_bytes) if budget.can_ever_hold(num_bytes) else None

    def is_pinned(self, variant_id: str) -> bool:
        """True while a load of the variant is open."""
        return variant_id in self._pins

    @property
    def pinned_ids(self) -> tuple[str, ...]:
        """The variants with an open load."""
        with self._lock:
            return tuple(self._pins)

    def refresh(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Applies changes of other processes to the disk tier: `(added, removed)` variant ids, both empty while the
        disk cannot be listed. Logs the start and the end of such an outage as warnings."""
        return ((), ()) if self._watcher is None else self._watcher.list_all()

    # -- load --------------------------------------------------------------------------------------------------

    def unread_bytes(self, variant_id: str) -> int:
        """KV bytes that a load would have to read from disk now, without those that another load has already read."""
        summary = self.get_summary(variant_id) if self.tier_of(variant_id) == DISK else None
        return 0 if summary is None else summary.num_bytes - self._readers.bytes_there(variant_id)

    def prepare_load(self, variant_ids: Iterable[str], *, counted: bool = True) -> LoadTicket:
        """Pins the variants in every tier until `complete_load`. Reads nothing yet. Concurrent loads share their reads,
        and a queued write is read from memory. With `counted` False, the look-ups are not added to the usage
        counters."""
        wanted = tuple(dict.fromkeys(variant_ids))
        sources: dict[str, Source] = {}
        lossy, on_disk = [], []
        with self._lock:
            self._check_open()
            for variant_id in wanted:
                tier = self.tier_of(variant_id)
                if counted:
                    self._count_look_up(tier)
                if tier in self._memory:
                    sources[variant_id] = self._memory[tier].get(variant_id)
                    if self._memory[tier].is_lossy(variant_id):
                        lossy.append(variant_id)
                elif tier == DISK and self._writer is not None:
                    queued = self._writer.get(variant_id)  # read from memory
                    if queued is None:
                        on_disk.append(variant_id)
                    else:
                        sources[variant_id] = queued
            self._pins.update([*sources, *on_disk])
        for position, variant_id in enumerate(on_disk):  # no lock needed: they are pinned
            try:
                sources[variant_id] = self._readers.open(variant_id)
            except ShardNotFoundError:  # evicted by another process, which another thread has just detected
                self._unpin([variant_id])
            except BaseException:  # for example no memory for the buffer: leave no pins behind
                self._unpin([*sources, *on_disk[position:]])
                raise
        return LoadTicket(wanted, sources, lossy, self.kv_spec)

    def complete_load(
        self, ticket: LoadTicket, ok: bool = True, *, promote: Mapping[str, Collection[str]] | None = None
    ) -> dict[str, tuple[str, ...]]:
        """Unpins the variants of a load.

        With `ok`, variants whose KV is now in host memory (from disk only if completely read) are added to the memory
        tiers that lack them, if they fit without eviction (see `shortfall_bytes`). With `promote`, a mapping of tier ->
        ids, only those are added, and KV on the device may be copied to host memory. Returns tier -> added ids.

        Raises:
          ValueError: the ticket was completed before.
        """
        whole: dict[str, KV] = {**ticket.whole()}
        whole |= ticket.on_device([] if promote is None else promote.get(HOST, ()))
        bytes_read = ticket.bytes_read
        ticket.close()
        promoted: dict[str, tuple[str, ...]] = {}
        with self._lock:
            self._unpin(ticket.tiers)
            for tier, num_bytes in bytes_read.items():
                if num_bytes:
                    self._counts[tier]["bytes_read"] += num_bytes
            for tier in self._memory if ok and self._open else ():
                wanted = whole if promote is None else [key for key in promote.get(tier, ()) if key in whole]
                moved = [key for key in wanted if self._promote(tier, key, whole[key], key in ticket.lossy)]
                if moved:
                    promoted[tier] = tuple(moved)
        return promoted

    # -- store -------------------------------------------------------------------------------------------------

    def prepare_store(self, record: ShardRecord, *, is_paged: bool = False) -> StoreTicket:
        """Announces a variant, so that the caller can evict `ticket.shortfall_bytes` first. If a load would read a
        lossy copy of the variant, the variant may be stored again and replaces that copy.

        Args:
          is_paged: its KV is in pages of the device tier, which takes no more room for it.

        Raises:
          ValueError: `record.num_bytes` does not match its number of tokens.
        """
        check_record(record, self.kv_spec)
        with self._lock:
            self._check_open()
            variant_id = record.variant_id
            is_there = self.tier_of(variant_id) is not None and not self.is_lossy(variant_id)
            exists = is_there or variant_id in self._announced
            charges = {} if exists else self._charges(record, is_paged)
            ticket = StoreTicket(record, exists, charges, self._store_shortfall)
            if not exists:
                self._announced[variant_id] = ticket
            return ticket

    def complete_store(
        self, ticket: StoreTicket, kv: KV | None, *, wait: bool = False, tiers: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Stores a copy of `kv` `[L, 2, T, K, H]`: in memory at once, on disk in the background. KV in pages stays
        there for the device tier, and is copied to the other tiers in the background. Returns the tiers that accepted
        it; a tier is skipped and counted if it has too little free budget or, below the device, if too much KV waits
        to be copied; a failing disk is counted and logged.

        Args:
          kv: the KV; None if the variant was not computed.
          wait: wait for space in the queues (batch jobs) instead of skipping tiers (requests).
          tiers: tiers to store the variant in; None for all.

        Raises:
          ValueError: `kv` has another shape or dtype, or the ticket was completed before; nothing is stored.
        """
        ticket.close()
        record = ticket.record
        try:
            held = None if ticket.exists else kv
            if isinstance(held, PagedKV):
                if len(held.slots) != record.num_tokens:
                    raise ValueError(f"kv: wanted {record.num_tokens} tokens, got {len(held.slots)}")
            elif held is not None:
                # Always copies: on CPU `np.asarray` of a JAX array is a view of a buffer that may be donated later.
                held = np.array(check_kv(held, record, self.kv_spec), order="C", copy=True)
                held.flags.writeable = False
        except BaseException:
            self._withdraw(ticket)
            raise
        took = []
        with self._lock:
            self._withdraw(ticket)
            if held is None or not self._open:
                return ()
            allowed = self._levels.keys() if tiers is None else tiers
            if DEVICE in self._memory and DEVICE in allowed and self._fits(DEVICE, self._put, DEVICE, record, held):
                took.append(DEVICE)
            if isinstance(held, PagedKV):
                below = [tier for tier in allowed if tier != DEVICE]
                if below and self._copier.is_full and not wait:
                    for tier in below:
                        self._counts[tier]["skipped_writes"] += 1
                    below = []
                held = self._to_host(record.variant_id, held) if below else None
            if held is None:
                return tuple(took)
            if HOST in allowed and self._fits(HOST, self._put, HOST, record, held):
                took.append(HOST)
            disk = self._disk if DISK in allowed else None
            on_disk = disk is not None and disk.takes(record.variant_id) and self._fits(DISK, disk.reserve, record)
        if on_disk and self._write_behind(record, held, wait):
            took.append(DISK)
        return tuple(took)

    # -- removal -----------------------------------------------------------------------------------------------

    def evict(self, tier: str, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """Evicts variants from one tier and returns those removed; skips pinned variants and those that the tier does
        not hold.

        Raises:
          ValueError: there is no such tier.
        """
        self._tier(tier)
        with self._lock:
            self._check_open()
            victims = [key for key in dict.fromkeys(variant_ids) if key not in self._pins]
            if tier in self._memory:
                hidden, gone = [], tuple(key for key in victims if self._memory[tier].remove(key))
            else:
                assert self._disk is not None
                hidden, gone = self._disk.hide(victims), ()
        if hidden and self._disk is not None:
            gone = self._disk.erase(hidden)  # without the lock: 12 ms for 67 MB on ext4; no load can pin them
        with self._lock:
            self._counts[tier]["evicted"] += len(gone)
        return gone

    def discard(self, variant_id: str, is_covered: IsCovered | None = None) -> None:
        """Removes a corrupt or outdated variant from every tier, pinned or not. Existing views stay valid; later reads
        from disk miss. With `is_covered`, the variant is kept in tiers whose record of it is not selected, for example
        because another process rewrote it."""
        with self._lock:
            for name, tier in self._memory.items():
                record = tier.get_record(variant_id)
                if record is not None and (is_covered is None or is_covered(record)):
                    self._counts[name]["discarded"] += tier.remove(variant_id)
            if self._writer is not None:
                self._writer.cancel(variant_id, is_covered)
            hidden = [] if self._disk is None else self._disk.hide([variant_id], is_covered)
            if hidden:
                self._counts[DISK]["discarded"] += len(hidden)
                self._readers.forget(variant_id)
        if hidden and self._disk is not None:
            self._disk.erase(hidden, covered=True)

    def erase(
        self, variant_ids: Iterable[str], *, uncommitted: bool, is_covered: IsCovered | None = None
    ) -> tuple[str, ...]:
        """Discards variants and verifies, after the queued writes, that they are gone; returns the keys and variant ids
        that could not be deleted.

        Refreshes the disk tier, so `records` may return more variants afterwards. With `uncommitted` it also deletes
        everything on disk without a sound record, regardless of age: parts of interrupted writes, damaged records,
        temporary files. A concurrent write of another process may then be lost.

        Raises:
          OSError: the disk cannot be listed.
        """
        covered = tuple(variant_ids)
        for variant_id in covered:
            self.discard(variant_id, is_covered)
        if self._disk is None or self._writer is None:
            return ()
        erase = functools.partial(erase_from_disk, self._disk, covered, uncommitted=uncommitted, is_covered=is_covered)
        try:
            # On the writing thread, so that no write of this process is in progress.
            return self._writer.call(erase).result()
        finally:
            self.request_relisting()  # copies of erased variants may also be in other processes' memory

    def request_relisting(self) -> None:
        """Asks other processes, through the index if there is one, to list the store for unannounced changes."""
        if self.change_feed is not None:
            self.change_feed.mark_incomplete()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything stored so far is on disk or has failed; False after `timeout_s`. Waits at most one
        more second for the index."""
        is_done = self._copier.flush(timeout_s)
        is_done = is_done and (self._writer is None or (self._writer.flush(timeout_s) and self.notes.flush()))
        if self.change_feed is not None:
            self.change_feed.flush()
        return is_done

    def close(self) -> None:
        """Finishes queued writes, frees memory and refuses further use. May be called twice."""
        with self._lock:
            self._open = False
        self._copier.close()
        if self._writer is not None:
            self._writer.close()
        if self.change_feed is not None:
            self.change_feed.close()
        with self._lock:
            for tier in self._memory.values():
                tier.close()

    # -- internals ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError("store: closed")

    def _short(self, tier: str, num_bytes: int) -> int:
        """Bytes by which `tier` falls short of `num_bytes` in addition to all announced variants."""
        announced = sum(ticket.charge_bytes.get(tier, 0) for ticket in self._announced.values())
        return self._levels[tier].budget.shortfall(announced + num_bytes)

    def _charges(self, record: ShardRecord, is_paged: bool) -> dict[str, int]:
        """Bytes to charge in each tier that would store the variant and whose whole budget is large enough."""
        charges = {  # 0 where it replaces a lossy copy
            name: 0
            if record.variant_id in tier or (is_paged and name == DEVICE)
            else tier.charge_bytes(record.num_tokens)
            for name, tier in self._memory.items()
        }
        if self._disk is not None and self._disk.takes(record.variant_id):
            charges[DISK] = self._disk.charge_bytes(record)
        return {name: size for name, size in charges.items() if self._levels[name].budget.can_ever_hold(size)}

    def _store_shortfall(self, ticket: StoreTicket) -> dict[str, int]:
        with self._lock:
            if self._announced.get(ticket.record.variant_id) is not ticket:
                return {}
            short = {tier: self._short(tier, 0) for tier in ticket.tiers}
        return {tier: num_bytes for tier, num_bytes in short.items() if num_bytes}

    def _to_host(self, variant_id: str, kv: PagedKV) -> HostCopy:
        """Starts a copy to host memory; if it fails, the host tier loses the variant."""

        def drop(copy: HostCopy, error: Exception) -> None:
            _log.warning("variant %s: %s", variant_id, error)
            with self._lock:
                if variant_id in self._memory[HOST] and self._memory[HOST].get(variant_id) is copy:
                    self._counts[HOST]["discarded"] += self._memory[HOST].remove(variant_id)

        return self._copier.start(kv, drop)

    def adopt(self, tier: str, variant_id: str, kv: KV) -> bool:
        """Adds KV that is in the memory of a tier to this tier; False if it has the variant, or no tier has."""
        with self._lock:
            record = self.get_record(variant_id) if self._open else None
            if record is None or variant_id in self._memory[tier]:
                return False
            return self._fits(tier, self._put, tier, record, kv)

    def _put(self, tier: str, record: ShardRecord, kv: KV | HostCopy, is_lossy: bool = False) -> None:
        self._memory[tier].put(record, kv, is_lossy=is_lossy)
        self._counts[tier]["writes"] += 1
        self._counts[tier]["bytes_written"] += record.num_bytes

    def _promote(self, tier: str, variant_id: str, kv: KV, is_lossy: bool) -> bool:
        """Adds KV that was read to a memory tier that lacks the variant, if it fits; True if it was added."""
        summary = self.get_summary(variant_id)
        if summary is None or variant_id in self._memory[tier]:
            return False
        if self._short(tier, self._memory[tier].charge_bytes(summary.num_tokens)):
            return False
        record = self.get_record(variant_id)
        if record is None:
            return False
        held = self._to_host(variant_id, kv) if isinstance(kv, PagedKV) else kv
        return self._fits(tier, self._put, tier, record, held, is_lossy)

    def _fits(self, tier: str, charge: Callable[..., Any], *args: Any) -> bool:
        """Runs `charge(*args)`; False, and counted, if the tier's budget refuses it."""
        try:
            charge(*args)
        except TierFullError:
            self._counts[tier]["skipped_writes"] += 1
            return False
        return True

    def _write_behind(self, record: ShardRecord, kv: np.ndarray | HostCopy, wait: bool) -> bool:
        """Queues a reserved write; call it without the lock, because with `wait` it blocks until there is space."""
        assert self._disk is not None and self._writer is not None
        if self._writer.add(record, kv, wait=wait):
            return True
        self._disk.release(record)
        with self._lock:
            self._counts[DISK]["skipped_writes"] += 1
        return False

    def _withdraw(self, ticket: StoreTicket) -> None:
        with self._lock:
            if self._announced.get(ticket.record.variant_id) is ticket:
                del self._announced[ticket.record.variant_id]

    def _unpin(self, variant_ids: Iterable[str]) -> None:
        with self._lock:
            self._pins.subtract(list(variant_ids))  # `subtract` would read a mapping as counts
            self._pins += collections.Counter()  # drops zero counts
            self._readers.retain(self._pins)

"""KV shards in a host tier and, with a URL, a disk tier: two-phase loads and stores, pins, budgets, write-behind.
Knows no policy: which variants go is decided by the caller, and `meta` is opaque."""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from store.arrays import OnRead, ShardReader
from store.disk import TensorStoreTier
from store.erasure import erase_from_disk
from store.errors import ShardNotFoundError, TierFullError
from store.formats import StorageFormat
from store.host import HostTier
from store.notes import Notes
from store.sharing import SharedReaders
from store.spec import KVSpec, ShardRecord, ShardSummary, StoreIdentity, check_kv, check_record, positive_int
from store.tickets import DISK, HOST, LoadTicket, StoreTicket
from store.usage import TierUsage
from store.write_behind import MAX_PENDING_BYTES, WriteBehind

_log = logging.getLogger(__name__)


class TieredStore:
    """Thread-safe; open it with `TieredStore.open`, use it as a context manager or `close` it.

    A variant is stored in every tier that has room; disk variants that were read whole are promoted to host memory.
    `notes` are small JSON objects beside the variants, shared with other processes; `claims` is what this process and
    others say they compute, None without a disk.
    """

    def __init__(
        self,
        kv_spec: KVSpec,
        host: HostTier,
        disk: TensorStoreTier | None,
        max_pending_bytes: int,
        on_read: OnRead | None = None,
    ):
        self.kv_spec = kv_spec
        self._host = host
        self._disk = disk
        self._writer = None if disk is None else WriteBehind(disk, max_pending_bytes)
        self._readers = SharedReaders(disk, on_read)
        self.notes = Notes() if self._writer is None or disk is None else Notes(*disk.notes_place, self._writer.call)
        self.claims = None if self._writer is None else self._writer.claims
        self._lock = threading.RLock()
        self._pins: collections.Counter[str] = collections.Counter()
        self._announced: dict[str, StoreTicket] = {}
        self._counts: dict[str, collections.Counter[str]] = {HOST: collections.Counter(), DISK: collections.Counter()}
        self._open = True
        self._refresh_fails = False

    @classmethod
    def open(
        cls,
        url: str | None,
        *,
        kv_spec: KVSpec,
        identity: StoreIdentity,
        host_bytes: int,
        disk_bytes: int | None = None,
        exclusive: bool = True,
        head_groups: int = 1,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        kv_dtype: str = "auto",
        compression: str = "none",
        on_read: OnRead | None = None,
    ) -> TieredStore:
        """A store of one model's variants; `url=None` keeps them in host memory only.

        Args:
          host_bytes, disk_bytes, exclusive, head_groups: budgets (None is no limit), and as `TensorStoreTier`.
          max_pending_bytes: KV that may wait for the disk before stores skip it.
          kv_dtype, compression: how the disk tier stores new variants, see `StorageFormat`.
          on_read: sees, and may delay, every read of the disk tier.

        Raises:
          ValueError, StoreUnavailableError, StoreIdentityError: as `TensorStoreTier`.
        """
        positive_int("max_pending_bytes", max_pending_bytes)
        storage, host, disk = StorageFormat(kv_dtype, compression), HostTier(host_bytes), None
        if url is not None:
            disk = TensorStoreTier(
                url, kv_spec, identity, disk_bytes, exclusive=exclusive, head_groups=head_groups, storage=storage
            )
        return cls(kv_spec, host, disk, max_pending_bytes, on_read)

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- looking -----------------------------------------------------------------------------------------------

    def summaries(self) -> list[ShardSummary]:
        """Every committed variant of any tier, once. Reads nothing."""
        with self._lock:
            found = {one.variant_id: one for tier in self._tiers().values() for one in tier.summaries()}
        return list(found.values())

    def get_summary(self, variant_id: str) -> ShardSummary | None:
        """Of a committed variant of any tier, or None. Reads nothing."""
        with self._lock:
            found = (tier.get_summary(variant_id) for tier in self._tiers().values())
            return next(filter(None, found), None)

    def records(self) -> list[ShardRecord]:
        """The whole records behind `summaries`."""
        found = (self.get_record(one.variant_id) for one in self.summaries())
        return [record for record in found if record is not None]

    def get_record(self, variant_id: str) -> ShardRecord | None:
        """The record of a committed variant of any tier; None where there is none, or none that is sound."""
        with self._lock:
            held = self._host.get_record(variant_id)
        return held or (None if self._disk is None else self._disk.get_record(variant_id))

    def tier_of(self, variant_id: str) -> str | None:
        """The fastest tier that holds the variant: "host", "disk" or None."""
        return next(iter(self.tiers_of(variant_id)), None)

    def tiers_of(self, variant_id: str) -> tuple[str, ...]:
        """Every tier that holds the variant, the fastest first; "disk" from the moment that its write is queued."""
        queued = self._writer is not None and variant_id in self._writer  # first: what leaves the queue is on disk
        return tuple(name for name, tier in self._tiers().items() if variant_id in tier or (queued and name == DISK))

    def is_lossy(self, variant_id: str) -> bool:
        """True when the copy that a load would read now may differ from what was stored; see `LoadTicket.lossy`."""
        with self._lock:
            if variant_id in self._host:
                return self._host.is_lossy(variant_id)
            is_queued = self._writer is not None and variant_id in self._writer
            return self._disk is not None and not is_queued and self._disk.is_lossy(variant_id)

    def usage(self) -> dict[str, TierUsage]:
        """Tier -> usage and counters since open."""
        with self._lock:
            counts = {name: collections.Counter(self._counts[name]) for name in self._tiers()}
            if self._disk is not None and self._writer is not None:
                counts[DISK]["corrupt"] = self._disk.num_corrupt
                counts[DISK]["writes"] = self._writer.num_written
                counts[DISK]["bytes_written"] = self._writer.bytes_written
                counts[DISK]["failed_writes"] = self._writer.num_failed
            return {
                name: TierUsage(tier.budget.used_bytes, tier.budget.limit_bytes, len(tier), **counts[name])
                for name, tier in self._tiers().items()
            }

    def shortfall_bytes(self, tier: str, num_bytes: int) -> int | None:
        """Bytes to evict from `tier` before it has room for `num_bytes` more, beside what is announced; None where its
        whole budget is less."""
        with self._lock:
            budget = self._tier(tier).budget
            return self._short(tier, num_bytes) if budget.can_ever_hold(num_bytes) else None

    def charge_bytes(self, tier: str, variant_id: str) -> int | None:
        """Bytes that a variant takes out of a tier's budget; None where it is not there, or on its way."""
        return self._tier(tier).charged(variant_id)

    def foreign_fingerprints(self) -> frozenset[str]:
        """Other models that have variants under the same URL."""
        return frozenset() if self._disk is None else self._disk.foreign_fingerprints()

    def refresh(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Takes in what other processes did to the disk tier: `(added, removed)` variant ids; both empty while the disk
        cannot be listed. The first failure of a row is logged as a warning, so is the recovery."""
        changes: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        if self._disk is None:
            return changes
        failure = None
        try:
            changes = self._disk.refresh()
        except OSError as error:
            failure = error
        if (failure is None) == self._refresh_fails:
            _log.warning("store: refresh of %s: %s", self._disk.url, failure or "succeeds again")
        self._refresh_fails = failure is not None
        return changes

    def tidy(self, is_cancelled: Callable[[], bool] | None = None) -> None:
        """Work for idle time, and for the end: keeps the disk tier quick to open (`TensorStoreTier.tidy`)."""
        if self._disk is not None:
            self._disk.tidy(is_cancelled)

    def renew_catalog(self) -> None:
        """The next `tidy` is to leave no copy of a record that is gone, not even one, which it may else."""
        if self._disk is not None:
            self._disk.renew_catalog()

    def read_hints(self) -> dict[str, Any]:
        """What `write_hints` noted last; empty without a disk."""
        return {} if self._disk is None else self._disk.hints.read()

    def write_hints(self, hints: Mapping[str, Any]) -> None:
        """Notes JSON values beside the disk tier, if there is one (`store.hints.Hints`)."""
        if self._disk is not None:
            self._disk.hints.write(hints)

    # -- load --------------------------------------------------------------------------------------------------

    def unread_bytes(self, variant_id: str) -> int:
        """KV bytes that a load would have to read from disk now: 0 where memory, or another load, has them all."""
        summary = self.get_summary(variant_id) if self.tier_of(variant_id) == DISK else None
        return 0 if summary is None else summary.num_bytes - self._readers.bytes_there(variant_id)

    def prepare_load(self, variant_ids: Iterable[str], *, counted: bool = True) -> LoadTicket:
        """Pins the variants in every tier, until `complete_load`. Reads nothing yet: loads that are open at once share
        what they read, a queued write is read from memory. `counted` off: the look-ups show in no usage."""
        wanted = tuple(dict.fromkeys(variant_ids))
        sources: dict[str, np.ndarray | ShardReader] = {}
        on_disk = []
        with self._lock:
            self._check_open()
            for variant_id in wanted:
                tier = self.tier_of(variant_id)
                if counted:
                    self._count_look_up(tier)
                if tier == HOST:
                    sources[variant_id] = self._host.get(variant_id)
                elif tier == DISK and self._writer is not None:
                    queued = self._writer.get(variant_id)  # still in memory, so it is served from there
                    if queued is None:
                        on_disk.append(variant_id)
                    else:
                        sources[variant_id] = queued
            lossy_in_host = [key for key in sources if self._host.is_lossy(key)]
            self._pins.update([*sources, *on_disk])
        for position, variant_id in enumerate(on_disk):  # pinned, so this may be outside the lock
            try:
                sources[variant_id] = self._readers.open(variant_id)
            except ShardNotFoundError:  # another process evicted it, and another thread just learnt of that
                self._unpin([variant_id])
            except BaseException:  # no memory for the buffer: leave no pin that nobody could take back
                self._unpin([*sources, *on_disk[position:]])
                raise
        return LoadTicket(wanted, sources, lossy_in_host, self.kv_spec.num_layers)

    def complete_load(
        self, ticket: LoadTicket, ok: bool = True, *, promote: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Unpins. With `ok`, variants that were read whole from disk move into host memory if they fit without eviction
        (see `shortfall_bytes`), where `promote` is given only those of it; returns those.

        Raises:
          ValueError: the ticket was completed before.
        """
        whole = ticket.close()
        promoted = []
        with self._lock:
            self._unpin(ticket.tiers)
            for tier, num_bytes in ticket.bytes_read.items():
                self._counts[tier]["bytes_read"] += num_bytes
            for variant_id, kv in whole.items() if ok else ():
                summary = self.get_summary(variant_id)
                if summary is None or variant_id in self._host or self._short(HOST, summary.num_bytes):
                    continue
                if promote is not None and variant_id not in promote:
                    continue
                record = self.get_record(variant_id)
                if record is not None:
                    self._put_host(record, kv, is_lossy=variant_id in ticket.lossy)
                    promoted.append(variant_id)
        return tuple(promoted)

    # -- store -------------------------------------------------------------------------------------------------

    def prepare_store(self, record: ShardRecord) -> StoreTicket:
        """Announces a variant, so that the caller can make the room that `ticket.shortfall_bytes` wants. A
        variant of which a load would read a lossy copy may be stored again: it takes the place of that.

        Raises:
          ValueError: `record.num_bytes` does not belong to its tokens.
        """
        check_record(record, self.kv_spec)
        with self._lock:
            self._check_open()
            variant_id = record.variant_id
            is_there = self.tier_of(variant_id) is not None and not self.is_lossy(variant_id)
            exists = is_there or variant_id in self._announced
            ticket = StoreTicket(record, exists, {} if exists else self._charges(record), self._store_shortfall)
            if not exists:
                self._announced[variant_id] = ticket
            return ticket

    def complete_store(self, ticket: StoreTicket, kv: np.ndarray | None, *, wait: bool = False) -> tuple[str, ...]:
        """Stores a copy of `kv` `[L, 2, T, K, H]`: in host memory at once, on disk in the background. Returns the tiers
        that took it; one without room is skipped and counted, a failing disk is counted and logged.

        Args:
          kv: None when the variant was not computed after all.
          wait: wait for room in the write queue (batch jobs) instead of skipping the disk (requests).

        Raises:
          ValueError: `kv` has another shape or dtype, or the ticket was completed before; nothing is stored.
        """
        ticket.close()
        record = ticket.record
        try:
            # Always a copy: on CPU `np.asarray` of a JAX array is a view of a buffer that may be donated later.
            copied = None
            if kv is not None and not ticket.exists:
                copied = np.array(check_kv(kv, record, self.kv_spec), order="C", copy=True)
                copied.flags.writeable = False
        except BaseException:
            self._withdraw(ticket)
            raise
        took = []
        with self._lock:
            self._withdraw(ticket)
            if copied is None or not self._open:
                return ()
            if self._fits(HOST, self._put_host, record, copied):
                took.append(HOST)
            disk = self._disk if self._disk is not None and self._disk.takes(record.variant_id) else None
            on_disk = disk is not None and self._fits(DISK, disk.reserve, record)
        if on_disk and self._write_behind(record, copied, wait):
            took.append(DISK)
        return tuple(took)

    # -- removal -----------------------------------------------------------------------------------------------

    def evict(self, tier: str, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """Takes variants out of one tier and returns those that went; pinned ones and ones it does not hold stay.

        Raises:
          ValueError: there is no such tier.
        """
        self._tier(tier)
        with self._lock:
            self._check_open()
            victims = [key for key in dict.fromkeys(variant_ids) if key not in self._pins]
            if tier == HOST:
                hidden, gone = [], tuple(key for key in victims if self._host.remove(key))
            else:
                assert self._disk is not None
                hidden, gone = self._disk.hide(victims), ()
        if hidden and self._disk is not None:
            gone = self._disk.erase(hidden)  # outside the lock: 12 ms for 67 MB on ext4; nobody can pin them any more
        with self._lock:
            self._counts[tier]["evicted"] += len(gone)
        return gone

    def discard(self, variant_id: str) -> None:
        """Takes the variant out of every tier, pinned or not, for ever: the end of a corrupt or outdated one. Readers
        that hold views keep them; later reads of the disk miss."""
        with self._lock:
            if self._host.remove(variant_id):
                self._counts[HOST]["discarded"] += 1
            if self._writer is not None:
                self._writer.cancel(variant_id)
            hidden = [] if self._disk is None else self._disk.hide([variant_id])
            self._counts[DISK]["discarded"] += len(hidden)
        if hidden and self._disk is not None:
            self._disk.erase(hidden, condemned=True)

    def erase(self, variant_ids: Iterable[str], *, uncommitted: bool) -> tuple[str, ...]:
        """`discard`s variants and looks whether they are gone, behind the write queue; returns the keys and variant ids
        that could not be deleted. It refreshes, so `records` may know more. Raises OSError: the disk cannot be listed.
        With `uncommitted` also goes what lies on disk without a sound record, of any age: parts of killed writes,
        damaged records, temporary files. A write of another process that is under way may be lost by that.
        """
        condemned = tuple(variant_ids)
        for variant_id in condemned:
            self.discard(variant_id)
        if self._disk is None or self._writer is None:
            return ()
        erase = functools.partial(erase_from_disk, self._disk, condemned, uncommitted=uncommitted)
        return self._writer.call(erase).result()  # on the writing thread: none of our own writes is under way then

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything stored so far is on disk or has failed; False when `timeout_s` passed before that."""
        return self._writer is None or (self._writer.flush(timeout_s) and self.notes.flush())

    def close(self) -> None:
        """Writes what is queued and refuses further use. May be called twice."""
        with self._lock:
            self._open = False
        if self._writer is not None:
            self._writer.close()

    # -- inside ------------------------------------------------------------------------------------------------

    def _tiers(self) -> dict[str, HostTier | TensorStoreTier]:
        return {HOST: self._host} if self._disk is None else {HOST: self._host, DISK: self._disk}

    def _tier(self, name: str) -> HostTier | TensorStoreTier:
        tiers = self._tiers()
        if name not in tiers:
            raise ValueError(f"tier: wanted one of {list(tiers)}, got {name!r}")
        return tiers[name]

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError("store: closed")

    def _short(self, tier: str, num_bytes: int) -> int:
        """Bytes that `tier` lacks for `num_bytes` beside all announced variants."""
        announced = sum(ticket.charge_bytes.get(tier, 0) for ticket in self._announced.values())
        return self._tiers()[tier].budget.shortfall(announced + num_bytes)

    def _charges(self, record: ShardRecord) -> dict[str, int]:
        """Bytes that storing takes in each tier that would be written to and that can ever hold them."""
        charges = {HOST: 0 if record.variant_id in self._host else record.num_bytes}  # a lossy copy makes room for it
        if self._disk is not None and self._disk.takes(record.variant_id):
            charges[DISK] = self._disk.charge_bytes(record)
        return {name: size for name, size in charges.items() if self._tiers()[name].budget.can_ever_hold(size)}

    def _store_shortfall(self, ticket: StoreTicket) -> dict[str, int]:
        with self._lock:
            if self._announced.get(ticket.record.variant_id) is not ticket:
                return {}
            short = {tier: self._short(tier, 0) for tier in ticket.tiers}
        return {tier: num_bytes for tier, num_bytes in short.items() if num_bytes}

    def _put_host(self, record: ShardRecord, kv: np.ndarray, is_lossy: bool = False) -> None:
        self._host.put(record, kv, is_lossy=is_lossy)
        self._counts[HOST]["writes"] += 1
        self._counts[HOST]["bytes_written"] += record.num_bytes

    def _fits(self, tier: str, charge: Callable[..., Any], *args: Any) -> bool:
        """Runs `charge(*args)`; False, counted, when the tier's budget refuses it."""
        try:
            charge(*args)
        except TierFullError:
            self._counts[tier]["skipped_writes"] += 1
            return False
        return True

    def _write_behind(self, record: ShardRecord, kv: np.ndarray, wait: bool) -> bool:
        """Queues a reserved write; not under the lock, because with `wait` it blocks until the writer made room."""
        assert self._disk is not None and self._writer is not None
        if self._writer.submit(record, kv, wait=wait):
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
            self._pins.subtract(list(variant_ids))  # a mapping would be taken for counts
            self._pins += collections.Counter()  # drops the zeros
            self._readers.retain(self._pins)

    def _count_look_up(self, tier: str | None) -> None:
        for name in self._tiers():
            self._counts[name]["hits" if name == tier else "misses"] += 1
            if name == tier:
                break

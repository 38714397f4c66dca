"""The disk tier, in a directory or a bucket: immutable zarr3 objects and the records that commit them, shared safely
with other processes."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from ccjax.store.arrays import ArrayDriver, ShardReader
from ccjax.store.budget import ByteBudget
from ccjax.store.change_feed import ChangeFeed
from ccjax.store.commits import CommittedShards
from ccjax.store.errors import (
    CommitUnknownError,
    ShardCorruptError,
    ShardNotFoundError,
    StoreIdentityError,
    StoreUnavailableError,
)
from ccjax.store.formats import ObjectLayout, check_kv_dtype, encode, expected_layout
from ccjax.store.index.api import LeaseTable
from ccjax.store.index.outage import PreferredLeases
from ccjax.store.leases import Leases
from ccjax.store.namespaces import ORPHAN_AGE_S, QUARANTINE_AGE_S, open_namespace
from ccjax.store.notes import Hints
from ccjax.store.objects import Root, for_each, open_root
from ccjax.store.records import KnownShard, encode_record
from ccjax.store.spec import (
    IsCovered,
    KVSpec,
    ShardRecord,
    ShardSummary,
    StoreIdentity,
    check_kv,
    check_record,
)
from ccjax.store.sweep import sweep

logger = logging.getLogger(__name__)

# Prefixes of tensorstore's errors for wrong stored bytes; others mean permissions, I/O or timeouts.
_BAD_DATA = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


class TensorStoreTier:
    """The disk tier: variants of one identity under one store URL. Thread-safe.

    Args:
      url: `file:///absolute/path`, created if missing, or an existing bucket, see `store.buckets.BucketRoot`.
      kv_spec: shape and dtype of every variant.
      identity: owner of the variants; those of other owners under the same URL are neither seen nor changed.
      budget_bytes: limit of objects and records for `write`, None for no limit. Objects of other processes count once
        `refresh` has seen them.
      kv_dtype: type of new variants' KV, one of `store.formats.KV_DTYPES`; existing ones are read in any.
      change_feed: publishes commits and deletions of this process; its index keeps the leases as long as it answers.
      read_only: only read what is there, from a directory or bucket that need not be writable.

    Raises:
      ValueError: the URL or an argument is invalid.
      StoreUnavailableError: the path or the bucket cannot be used.
      StoreIdentityError: the store has another format version or KV shape.
    """

    def __init__(
        self,
        url: str,
        kv_spec: KVSpec,
        identity: StoreIdentity,
        budget_bytes: int | None = None,
        *,
        kv_dtype: str = "auto",
        change_feed: ChangeFeed | None = None,
        read_only: bool = False,
        is_optional: bool = False,
    ):
        self.url = url
        self.kv_spec = kv_spec
        self.identity = identity
        self._bytes_per_token = kv_spec.num_bytes(1)
        self.kv_dtype = check_kv_dtype(kv_dtype)
        self.budget = ByteBudget("disk", budget_bytes)
        self._root = open_root(url, read_only=read_only, is_optional=is_optional)
        self._namespace = identity.namespace
        self._arrays = ArrayDriver(kv_spec, lambda: self._root.context, self._root.longest_wait_s)
        self._commits = CommittedShards(self._root, url, identity, kv_spec, self.budget, change_feed)
        self._lock = self._commits.lock
        leases = Leases(self._root, self._namespace)
        self.leases: LeaseTable = leases if change_feed is None else PreferredLeases(change_feed.index.leases, leases)
        self.hints = Hints(self._root, self._key("hints.json"), self._commits.warn)
        self._suspects: list[str] = []
        self._is_read_only, self.is_open = read_only, False
        try:
            self._begin()
            if read_only:
                self._commits.refresh()
            else:
                self.sweep(ORPHAN_AGE_S, QUARANTINE_AGE_S, quick=True)
        except OSError as error:
            if not is_optional or self._root.outage() is None:
                raise StoreUnavailableError(f"store: cannot open {url}: {error}") from error
            logger.warning(
                "store: cannot open %s: %s; until it answers, nothing is read from it or kept in it", url, error
            )

    def _begin(self) -> None:
        """Prepares the namespace, once the root answers. Raises OSError."""
        self._root.begin()
        open_namespace(self._root, self.url, self.identity, self.kv_spec, read_only=self._is_read_only)
        if not self._is_read_only:
            self.leases.sweep()
        self.is_open = True

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._commits

    def __len__(self) -> int:
        return len(self._commits)

    @property
    def num_corrupt(self) -> int:
        """Failed checks of records and data since open."""
        return self._commits.num_corrupt

    def summaries(self) -> list[ShardSummary]:
        """Summaries of all committed variants known to this process; reads nothing."""
        return [self._summary(known) for known in self._commits.all()]

    def get_summary(self, variant_id: str) -> ShardSummary | None:
        """Summary of a committed variant, or None; reads nothing."""
        known = self._commits.get(variant_id)
        return None if known is None else self._summary(known)

    def records(self) -> list[ShardRecord]:
        """The full records behind `summaries`; takes about 50 us each."""
        found = (self.get_record(known.variant_id) for known in self._commits.all())
        return [record for record in found if record is not None]

    def get_record(self, variant_id: str) -> ShardRecord | None:
        """The record of a committed variant, or None."""
        shard = self._commits.details(variant_id)
        return None if shard is None else shard.record

    def is_lossy(self, variant_id: str) -> bool:
        """True if the variant's copy on disk may differ from the KV written."""
        known = self._commits.get(variant_id)
        return known is not None and known.is_lossy

    def takes(self, variant_id: str) -> bool:
        """True if `write` would store the variant: it is missing, or its copy is lossy and a new one would not be."""
        return variant_id not in self or (self.is_lossy(variant_id) and self.kv_dtype == "auto")

    def charge_bytes(self, record: ShardRecord) -> int:
        """Bytes on disk that the variant will take: object and record. KV that 8 bits cannot represent takes more,
        which `write` charges then."""
        layout = expected_layout(self.kv_spec, record.num_tokens, self.kv_dtype)
        return self._num_bytes(record, layout, self._encode(record, uuid.uuid4().hex, layout))

    def charged(self, variant_id: str) -> int | None:
        """Bytes of a committed variant in the budget; None if it is unknown."""
        known = self._commits.get(variant_id)
        return None if known is None else known.charge_bytes

    def reserve(self, record: ShardRecord) -> int:
        """Charges the budget for a later `write(..., reserved=True)`, which refunds it on failure; returns the bytes
        charged.

        Raises:
          TierFullError: the variant does not fit.
        """
        with self._lock:
            return self.budget.recharge(0, self.charge_bytes(record))

    def release(self, record: ShardRecord) -> None:
        """Refunds the charge of `reserve` if no write follows."""
        with self._lock:
            self.budget.release(self.charge_bytes(record))

    def write(self, record: ShardRecord, kv: np.ndarray, *, reserved: bool = False) -> bool:
        """Stores `kv` `[L, 2, T, K, H]` durably. True if it is now the stored variant, as `kv_dtype` or, if 8 bits
        cannot represent it, unquantised; False if another writer committed the variant first, whose bytes stay.

        Raises:
          ValueError: record or KV do not match `kv_spec`.
          TierFullError: the variant does not fit into the budget.
          StoreUnavailableError: the disk refused (full, read-only, gone) or the bucket did not answer; the attempt is
            invisible to readers.
          CommitUnknownError: the bucket stopped answering during the commit; a later `refresh` shows whether the
            variant exists.
        """
        check_record(record, self.kv_spec)
        if not self.is_open:
            raise StoreUnavailableError(f"store: {self.url} has not answered since the start")
        kv = np.ascontiguousarray(check_kv(kv, record, self.kv_spec))
        charged = self.charge_bytes(record) if reserved else self.reserve(record)
        object_id = self._root.new_id()  # no data object ever has two writers
        committed = is_kept = False
        try:
            layout, stored = encode(self.kv_spec, kv, self.kv_dtype)
            raw = self._encode(record, object_id, layout)
            with self._lock:
                charged = self.budget.recharge(charged, self._num_bytes(record, layout, raw))
            place = self._key("data", object_id)
            folder = self._root.folder(place)
            if folder is None:
                self._root.make_prefix(place)
            elif not (folder.parent.exists() or any(map(Path.is_file, folder.parents))):
                logger.warning("store: the directory of %s was removed: made again", self.url)
                self._root.make_prefix("")
                open_namespace(self._root, self.url, self.identity, self.kv_spec)
            try:
                self._arrays.write(self._root.kvstore(place), stored, folder)
            except ValueError as error:
                if not self._root.renew(error):
                    raise
                self._arrays.write(self._root.kvstore(place), stored, folder)
            self.remove([record.variant_id] if self.takes(record.variant_id) else [])  # a lossy copy, if any
            committed = self._commits.commit(record.variant_id, raw)
        except CommitUnknownError:
            is_kept = True  # if the record exists after all, deleting the object would break the variant
            raise
        except (OSError, ValueError) as error:
            self._root.record_failure(error)
            raise StoreUnavailableError(f"store: cannot write to {self.url}: {error}") from error
        finally:
            if not committed:
                with self._lock:
                    self.budget.release(charged)
            if not (committed or is_kept):
                with contextlib.suppress(OSError):  # the first error is raised; the next open sweeps
                    self._root.delete(self._key("data", object_id))
        return committed

    def open(self, variant_id: str) -> ShardReader:
        """A reader of the variant's layers; reads nothing yet.

        Raises:
          ShardNotFoundError: the variant is unknown to this process.
        """
        shard = self._commits.details(variant_id)
        if shard is None:
            raise ShardNotFoundError(f"disk tier: no variant {variant_id}")
        place = self._key("data", shard.object_id)
        return self._arrays.open(
            self._root.kvstore(place),
            shard.record.num_tokens,
            shard.layout,
            lambda error: self._explain(variant_id, shard.object_id, error),
            self._root.outage(),
            folder=self._root.folder(place),
        )

    def remove(self, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """Evicts variants and returns those removed. A variant that cannot be deleted stays."""
        return self.erase(self.hide(variant_ids))

    def hide(self, variant_ids: Iterable[str], is_covered: IsCovered | None = None) -> list[KnownShard]:
        """First, instant half of an eviction: makes variants unknown, with `is_covered` only those whose records it
        selects, and returns those that were known. `erase` must follow."""
        hidden = self._commits.hide(variant_ids)
        if is_covered is None:
            return hidden
        spared = [shard for shard in hidden if (found := self._commits.decoded(shard)) and not is_covered(found.record)]
        for shard in spared:
            self._commits.restore(shard)
        return [shard for shard in hidden if shard not in spared]

    def erase(self, shards: Iterable[KnownShard], *, covered: bool = False) -> tuple[str, ...]:
        """Second half of an eviction, milliseconds per variant: deletes the record first, so that no new read starts
        that the deletion of the data would break. Returns the ids removed; a variant that cannot be deleted becomes
        known again, unless it is `covered`."""
        return tuple(filter(None, for_each(self._root, lambda shard: self._erase_one(shard, covered), shards)))

    def _erase_one(self, shard: KnownShard, covered: bool) -> str | None:
        """Erases one variant; returns its id if it is gone."""
        variant_id = shard.variant_id
        try:
            if self._commits.names(variant_id, shard.object_id):
                self._root.delete(self._commits.record_key(variant_id))
                self._commits.record_deletion(variant_id, shard.object_id)
        except OSError as error:
            self._commits.warn("store: cannot delete variant %s in %s: %s", variant_id, self.url, error)
            if not covered:
                self._commits.restore(shard)
                return None
        self._delete_quietly(self._key("data", shard.object_id))
        with self._lock:
            self._commits.forget(variant_id, shard.object_id)  # a concurrent refresh may have found the record again
            self.budget.release(shard.charge_bytes)
        return variant_id

    def refresh(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Applies commits and evictions of other processes since the last listing: `(added, removed)` variant ids.

        Raises:
          OSError: the directory or bucket cannot be listed.
        """
        if not self.is_open:
            try:
                self._begin()
            except StoreIdentityError as error:
                raise StoreUnavailableError(str(error)) from error
            return (), ()  # the next call lists: erasures, which are notes, must be known before what they cover
        return self._commits.refresh()

    def apply_commits(self, added: Mapping[str, bytes | None]) -> tuple[str, ...]:
        """Applies commits announced by another process, see `store.index.api.StoreChanges`; returns the variants that
        are known now. Reads records that were not sent."""
        return self._commits.apply_commits(added)

    def outdated_object(self, variant_id: str) -> str | None:
        """The data object that this process knows for a variant if the variant's record commits another one or cannot
        be read; else None. Reads the record."""
        return self._commits.outdated_object(variant_id)

    def forget_removed(self, variant_id: str, object_id: str | None) -> None:
        """Applies another process's eviction of a variant with that data object; a newer object of it stays known."""
        self._commits.forget_removed(variant_id, object_id)

    def find_committed(self, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """The given variants that are committed now, by any process; reads the records of unknown ones. For a few
        variants much cheaper than `refresh`. Unreadable records count as not committed and are logged."""
        wanted = tuple(dict.fromkeys(variant_ids))
        found = for_each(self._root, lambda key: key in self or self._commits.load_record(key), wanted)
        return tuple(key for key, is_there in zip(wanted, found, strict=True) if is_there)

    def tidy(self, is_cancelled: Callable[[], bool] | None = None) -> None:
        """Idle-time work: finishes the sweep that `open` started, and writes a new catalog if enough changed. Failures
        are logged."""
        if self._suspects and self._commits.verify(is_cancelled):
            self._sweep_suspects()
        if is_cancelled is None or not is_cancelled():
            self._commits.save_catalog()

    def sweep(self, orphan_age_s: float, quarantine_age_s: float, *, quick: bool = False) -> tuple[str, ...]:
        """Refreshes, then deletes data objects without a record, left-overs of killed processes and quarantined records
        older than the given ages; an age of 0 selects all. Returns the keys that could not be deleted.

        Args:
          quick: do not read the records of variants known only from the catalog, if there are many. `tidy` then deletes
            the uncommitted data objects; one that only the catalog still names is left to a later sweep.

        Raises:
          OSError: the directory or bucket cannot be listed.
        """
        self._commits.num_unread = 0
        objects = self._names("data")  # before the records, so that new commits do not look like orphans
        self.refresh()
        is_verified = quick or self._commits.verify()
        if self._commits.num_unread or not is_verified:  # an unread record may commit any object; a later sweep deletes
            return (self._key("records"),)
        self._suspects = [name for name in self._uncommitted(objects) if self._is_older(name, orphan_age_s)]
        orphans = []
        # The catalog may name an object that another process has replaced, so it cannot decide which ones are orphans.
        if self._suspects and (not quick or (self._commits.is_quickly_verified and self._commits.verify())):
            orphans, self._suspects = self._uncommitted(self._suspects), []
        return sweep(self._root, self._namespace, orphans, orphan_age_s, quarantine_age_s, self._delete_quietly)

    def drop_catalog(self) -> tuple[str, ...]:
        """Deletes the catalog, which may contain copies of deleted records; `tidy` writes a new one. Returns the keys
        that could not be deleted. Raises OSError if the catalog cannot be listed."""
        return self._commits.drop_catalog(self._delete_quietly)

    def renew_catalog(self) -> None:
        """Makes the next `tidy` write a new catalog regardless of how little changed."""
        self._commits.renew_catalog()

    @property
    def notes_place(self) -> tuple[Root, str]:
        """Root and prefix of the notes."""
        return self._root, self._key("notes")

    # -- internals ---------------------------------------------------------------------------------------------

    def _summary(self, known: KnownShard) -> ShardSummary:
        num_tokens = known.num_tokens
        return ShardSummary(known.variant_id, known.chunk_id, num_tokens, num_tokens * self._bytes_per_token)

    def _num_bytes(self, record: ShardRecord, layout: ObjectLayout, raw: bytes) -> int:
        return layout.num_bytes(self.kv_spec, record.num_tokens) + len(raw)

    def _encode(self, record: ShardRecord, object_id: str, layout: ObjectLayout) -> bytes:
        return encode_record(record, identity=self.identity, kv_spec=self.kv_spec, object_id=object_id, layout=layout)

    def _explain(self, variant_id: str, object_id: str, error: ValueError | TimeoutError | None) -> Exception:
        """The exception for a failed read of a variant's object; `error` is tensorstore's, None if the bytes do not
        match the record."""
        if error is not None and (self._root.record_failure(error) or not str(error).startswith(_BAD_DATA)):
            return StoreUnavailableError(f"store: cannot read variant {variant_id} from {self.url}: {error}")
        try:
            is_outdated = not self._commits.names(variant_id, object_id)
        except OSError as record_error:
            return StoreUnavailableError(f"store: cannot read {self.url}: {record_error}")
        if is_outdated:
            self._commits.forget(variant_id, object_id)
            self._commits.load_record(variant_id)
            return ShardNotFoundError(f"disk tier: variant {variant_id} was evicted")
        with self._lock:
            self._commits.num_corrupt += 1
        reason = error or "the data object is not the one that the record commits"
        return ShardCorruptError(f"variant {variant_id} in {self.url}: {reason}")

    def _key(self, *parts: str) -> str:
        return "/".join((self._namespace, *parts))

    def _names(self, folder: str) -> list[str]:
        return self._root.names(self._key(folder))

    def _delete_quietly(self, key: str) -> bool:
        """Deletes a key; False (logged) if the disk refused."""
        try:
            self._root.delete(key)
        except OSError as error:  # without a record it is never read; the next open sweeps it
            self._commits.warn("store: cannot delete %s in %s: %s", key, self.url, error)
            return False
        return True

    def _is_older(self, object_id: str, age_s: float) -> bool:
        return not age_s or self._root.age_s(self._key("data", object_id)) > age_s

    def _sweep_suspects(self) -> None:
        """Deletes the suspects that no record commits; every known variant must have been verified."""
        orphans = [self._key("data", name) for name in self._uncommitted(self._suspects)]
        for_each(self._root, self._delete_quietly, orphans)
        self._suspects = []

    def _uncommitted(self, object_ids: list[str]) -> list[str]:
        committed = {known.object_id for known in self._commits.all()}
        return [name for name in object_ids if name not in committed]

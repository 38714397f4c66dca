"""The committed variants of one namespace that this process knows, and the bytes that they take. The listed records are
authoritative; the catalog avoids reading each of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from ccjax.store.budget import ByteBudget
from ccjax.store.bulk import uncollected
from ccjax.store.catalog import delete_catalog, read_catalog, write_catalog
from ccjax.store.change_feed import ChangeFeed
from ccjax.store.errors import ShardCorruptError
from ccjax.store.index.api import CHANGES_KEPT
from ccjax.store.objects import Root, for_each
from ccjax.store.records import KnownShard, StoredShard, decode_known, known_from_raw
from ccjax.store.spec import KVSpec, StoreIdentity

_log = logging.getLogger(__name__)

LEAST_CHANGES = 64
"""Fewer new records are read one by one; fewer changes do not trigger a new catalog."""

COPIED_SHARE = 0.05
"""For a smaller share of all records the catalog, which is read as a whole, is not used: reading them one by one is
faster."""

CHANGED_SHARE = 0.01
"""A new catalog is written once this share of it is outdated. All catalogs ever written then take, per record, about a
hundred times its size, about as much as the KV of two tokens."""

_VERIFY_AT_ONCE = 1024


class CommittedShards:
    """The known variants of `identity` below `root`. Thread-safe. Publishes commits and deletions to `change_feed`.

    Attributes:
      lock: guards this object and `budget`, to which every known variant is charged.
      num_corrupt: failed checks, counted where they are detected.
      num_unread: listed records that could not be read so far.
    """

    def __init__(
        self,
        root: Root,
        url: str,
        identity: StoreIdentity,
        kv_spec: KVSpec,
        budget: ByteBudget,
        change_feed: ChangeFeed | None = None,
    ):
        self.lock = threading.RLock()
        self.num_corrupt = 0
        self.num_unread = 0
        self._root = root
        self._url = url
        self._identity = identity
        self._kv_spec = kv_spec
        self._budget = budget
        self._change_feed = change_feed
        self._namespace = identity.namespace
        self._shards: dict[str, KnownShard] = {}
        self._unverified: set[str] = set()
        self._removed: dict[str, str | None] = {}  # most recent removals, as in `StoreChanges.removed`
        self._cataloged: frozenset[str] = frozenset()
        self._num_changes = 0  # upper bound of the difference between `_shards` and `_cataloged`
        self._is_catalog_damaged = False  # or has an entry that must be removed
        self._catalog_lock = threading.Lock()  # serialises catalog changes, so that no write undoes a deletion

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, variant_id: str) -> KnownShard | None:
        """The known variant, or None."""
        return self._shards.get(variant_id)

    def all(self) -> list[KnownShard]:
        """Every known variant."""
        with self.lock:
            return list(self._shards.values())

    def decoded(self, known: KnownShard) -> StoredShard | None:
        """Decodes our copy of a record; None (logged) if the copy is damaged."""
        try:
            return decode_known(known, identity=self._identity, kv_spec=self._kv_spec)
        except ShardCorruptError as error:
            _log.warning("store: copy of a record in %s: %s; its original is read instead", self._url, error)
            return None

    def details(self, variant_id: str) -> StoredShard | None:
        """The decoded record of a variant, or None. If our copy is damaged, the record itself is read."""
        known = self.get(variant_id)
        if known is None:
            return None
        shard = self.decoded(known)
        if shard is not None:
            return shard
        self.forget(variant_id, known.object_id)
        self._is_catalog_damaged = True
        fresh = self._read_quietly(variant_id)
        if fresh is None:
            return None
        self._adopt(fresh)
        return decode_known(fresh, identity=self._identity, kv_spec=self._kv_spec)

    # -- reading the records -----------------------------------------------------------------------------------

    def refresh(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Applies commits and evictions of other processes since the last listing: `(added, removed)` variant ids.

        Raises:
          OSError: the directory or bucket cannot be listed.
        """
        with self.lock:
            # Before the listing, so that commits of this process in the meantime do not look like removals.
            known = dict(self._shards)
        names = self._root.names(f"{self._namespace}/records")
        listed = {name.removesuffix(".json") for name in names if name.endswith(".json")}
        new = sorted(listed - known.keys())
        is_worthwhile = len(new) >= max(LEAST_CHANGES, int(COPIED_SHARE * len(listed)))
        with uncollected():
            copies = self._copies(set(new)) if is_worthwhile else {}
            self._adopt_copies([copies[key] for key in new if key in copies])
        read = for_each(self._root, self._read_quietly, [key for key in new if key not in copies])
        singles = {shard.variant_id: shard for shard in read if shard is not None}
        for shard in singles.values():
            self._adopt(shard)
        removed = tuple(sorted(known.keys() - listed))
        for variant_id in removed:
            self.forget(variant_id, known[variant_id].object_id)
        return tuple(key for key in new if key in copies or key in singles), removed

    def apply_commits(self, added: Mapping[str, bytes | None]) -> tuple[str, ...]:
        """Applies commits announced by another process, using the record sent with each if it is sound; returns the
        variants that are known now. Announcements may be stale: if a variant is known with another data object, or was
        removed before, its record is read from the root."""
        found = []
        for variant_id, raw in added.items():
            known = self.get(variant_id)
            shard = None if raw is None else self._parse_sent(variant_id, raw)
            is_other = shard is not None and known is not None and known.object_id != shard.object_id
            if shard is None or is_other or self._removed.get(variant_id, "") in (None, shard.object_id):
                shard = self._read_quietly(variant_id)
            if shard is not None:
                self._adopt(shard)
                found.append(variant_id)
        return tuple(found)

    def outdated_object(self, variant_id: str) -> str | None:
        """The data object that this process knows for a variant if the variant's record commits another one or cannot
        be read; else None."""
        known = self.get(variant_id)
        try:
            return None if known is None or self.names(variant_id, known.object_id) else known.object_id
        except OSError:
            return None if known is None else known.object_id

    def forget_removed(self, variant_id: str, object_id: str | None) -> None:
        """Applies another process's removal of the variant with that data object; a newer object is kept."""
        if object_id is None:
            self._remember_removal(variant_id, None)
        else:
            self.forget(variant_id, object_id)

    def load_record(self, variant_id: str) -> bool:
        """Reads a record from disk into memory; True if it is sound. A damaged record is moved to quarantine."""
        shard = self._read_quietly(variant_id)
        if shard is not None:
            self._adopt(shard)
        return shard is not None

    def read(self, variant_id: str) -> KnownShard | None:
        """The variant that the record on disk commits now; None if there is no record.

        Raises:
          ShardCorruptError: the record fails its check.
          OSError: the record cannot be read.
        """
        raw = self._root.read(self.record_key(variant_id))
        return None if raw is None else self._known(variant_id, raw)

    def names(self, variant_id: str, object_id: str) -> bool:
        """False if the record on disk is gone or commits another object, because another process rewrote the variant. A
        damaged record counts as True. Raises OSError."""
        try:
            current = self.read(variant_id)
        except ShardCorruptError:
            return True
        return current is not None and current.object_id == object_id

    def verify(self, is_cancelled: Callable[[], bool] | None = None) -> bool:
        """Reads the record of every variant known only from the catalog; True if all known variants are verified now.
        Polls `is_cancelled` between batches."""
        with self.lock:
            waiting = sorted(self._unverified)
        for start in range(0, len(waiting), _VERIFY_AT_ONCE):
            if is_cancelled is not None and is_cancelled():
                return False
            for_each(self._root, self._verify_one, waiting[start : start + _VERIFY_AT_ONCE])
        return not self._unverified

    @property
    def is_quickly_verified(self) -> bool:
        """True when `verify` takes at most about a second."""
        return len(self._unverified) <= _VERIFY_AT_ONCE

    def save_catalog(self) -> bool:
        """Writes a new catalog if enough changed since the last one that was read or written; True if it was written. A
        failure is logged and, unless the catalog is damaged, not retried until more changed."""
        with self._catalog_lock:
            with self.lock:
                is_damaged = self._is_catalog_damaged
                if not self._is_catalog_due():
                    return False
                self._num_changes = len(frozenset(shard.object_id for shard in self.all()) ^ self._cataloged)
                if not self._is_catalog_due():
                    return False
            try:
                # Another process may have erased a variant that is still known here: no copy may outlive its record.
                listed = set(self._root.names(f"{self._namespace}/records"))
                with self.lock:
                    shards = [shard for shard in self.all() if f"{shard.variant_id}.json" in listed]
                    self._cataloged = frozenset(shard.object_id for shard in shards)
                    self._num_changes, self._is_catalog_damaged = 0, False
                write_catalog(self._root, self._namespace, shards)
            except OSError as error:
                self.warn("store: cannot write the catalog of %s: %s", self._url, error)
                self._is_catalog_damaged = is_damaged
                return False
            return True

    def _is_catalog_due(self) -> bool:
        least = max(LEAST_CHANGES, int(CHANGED_SHARE * len(self._shards)))
        return self._num_changes >= least or self._is_catalog_damaged

    def renew_catalog(self) -> None:
        """Makes the next `save_catalog` write a catalog regardless of how little changed."""
        self._is_catalog_damaged = True

    def drop_catalog(self, delete: Callable[[str], bool]) -> tuple[str, ...]:
        """Deletes the catalog with `delete`, which returns whether a key is gone; returns the keys that are not.

        Raises:
          OSError: the catalog cannot be listed.
        """
        with self._catalog_lock:
            left = delete_catalog(self._root, self._namespace, delete)
            with self.lock:
                self._cataloged, self._num_changes = frozenset(), len(self._shards)
                self._is_catalog_damaged = bool(left)
            return left

    # -- own commits and evictions -----------------------------------------------------------------------------

    def commit(self, variant_id: str, raw: bytes) -> bool:
        """Publishes the record `raw`, whose bytes are already charged. False if a sound record already exists.

        Raises:
          OSError: the root refused.
        """
        mine = self._known(variant_id, raw)
        for _ in range(2):
            if self._root.create(self.record_key(variant_id), raw):
                with self.lock:
                    known = self._shards.get(variant_id)
                    if known is not None:  # evicted by another process, not seen by a refresh yet
                        self.forget(variant_id, known.object_id)
                    self._shards[variant_id] = mine
                    self._num_changes += 1
                if self._change_feed is not None:
                    self._change_feed.record_commit(variant_id, mine.object_id, raw)
                return True
            if self.load_record(variant_id):
                return False
            # The existing record failed its check and is in quarantine now, so try once more.
        return False

    def hide(self, variant_ids: Iterable[str]) -> list[KnownShard]:
        """Makes variants unknown but keeps their bytes charged; returns those that were known."""
        with self.lock:
            self._unverified.difference_update(variant_ids := tuple(variant_ids))
            hidden = [shard for key in variant_ids if (shard := self._shards.pop(key, None)) is not None]
            self._num_changes += len(hidden)
            return hidden

    def record_deletion(self, variant_id: str, object_id: str | None) -> None:
        """Announces that this process deleted the record of a variant; `object_id` is None if its object is unknown."""
        if self._change_feed is not None:
            self._change_feed.record_deletion(variant_id, object_id)

    def restore(self, shard: KnownShard) -> None:
        """Undoes `hide`."""
        with self.lock:
            if shard.variant_id in self._shards:
                self._budget.release(shard.charge_bytes)
            else:
                self._shards[shard.variant_id] = shard
                self._num_changes += 1

    def forget(self, variant_id: str, object_id: str) -> None:
        """Drops the variant from memory and budget, unless it was replaced by another object."""
        with self.lock:
            self._remember_removal(variant_id, object_id)
            known = self._shards.get(variant_id)
            if known is not None and known.object_id == object_id:
                del self._shards[variant_id]
                self._num_changes += 1
                self._unverified.discard(variant_id)
                self._budget.release(known.charge_bytes)

    # -- internals ---------------------------------------------------------------------------------------------

    def record_key(self, variant_id: str) -> str:
        """Key of the variant's record."""
        return f"{self._namespace}/records/{variant_id}.json"

    def warn(self, message: str, *values: object) -> None:
        """Logs a failure of the root. During an outage, which writers and `refresh` report, only at debug level."""
        _log.log(logging.WARNING if self._root.outage() is None else logging.DEBUG, message, *values)

    def _remember_removal(self, variant_id: str, object_id: str | None) -> None:
        with self.lock:
            self._removed.pop(variant_id, None)  # keep the order of removal
            self._removed[variant_id] = object_id
            while len(self._removed) > CHANGES_KEPT:
                del self._removed[next(iter(self._removed))]

    def _known(self, variant_id: str, raw: bytes) -> KnownShard:
        return known_from_raw(raw, variant_id=variant_id, identity=self._identity, kv_spec=self._kv_spec)

    def _read_sound(self, variant_id: str) -> KnownShard | None:
        """The variant that the record on disk commits; None if there is no record, or if it is damaged (it is
        then moved to quarantine). Raises OSError."""
        try:
            return self.read(variant_id)
        except ShardCorruptError as error:
            _log.warning("store: %s; moved to quarantine", error)
            with self.lock:
                self.num_corrupt += 1
        aside = f"{self._namespace}/quarantine/{variant_id}.{self._root.new_id()}.json"
        self._root.move(self.record_key(variant_id), aside)
        self.record_deletion(variant_id, None)
        return None

    def _parse_sent(self, variant_id: str, raw: bytes) -> KnownShard | None:
        """Decodes a record received through the change feed; None if it fails its check."""
        try:
            return self._known(variant_id, raw)
        except ShardCorruptError as error:
            _log.warning("store: record sent by another process: %s; the record itself is read", error)
            return None

    def _read_quietly(self, variant_id: str) -> KnownShard | None:
        try:
            return self._read_sound(variant_id)
        except OSError as error:
            self.warn("store: cannot read the record of variant %s from %s: %s", variant_id, self._url, error)
            with self.lock:
                self.num_unread += 1
        return None

    def _verify_one(self, variant_id: str) -> None:
        known = self.get(variant_id)
        try:
            current = self._read_sound(variant_id)
        except OSError as error:
            self.warn("store: cannot read the record of variant %s from %s: %s", variant_id, self._url, error)
            return
        if current is not None:
            self._adopt(current)
        elif known is not None:
            self.forget(variant_id, known.object_id)

    def _adopt(self, shard: KnownShard) -> None:
        """Adds a shard whose record was read from the root."""
        with self.lock:
            known = self._shards.get(shard.variant_id)
            self._unverified.discard(shard.variant_id)
            if known is None or known.object_id != shard.object_id:
                if known is not None:
                    self.forget(known.variant_id, known.object_id)
                self._shards[shard.variant_id] = shard
                self._num_changes += 1
                self._budget.adopt(shard.charge_bytes)

    def _adopt_copies(self, copies: list[KnownShard]) -> None:
        """Adds shards from the catalog, except variants that are already known."""
        with self.lock:
            fresh = [shard for shard in copies if shard.variant_id not in self._shards]
            self._shards.update((shard.variant_id, shard) for shard in fresh)
            self._unverified.update(shard.variant_id for shard in fresh)
            self._budget.adopt(sum(shard.charge_bytes for shard in fresh))

    def _copies(self, wanted: set[str]) -> dict[str, KnownShard]:
        """Catalog entries of the `wanted` variants."""
        try:
            shards, wrong = read_catalog(self._root, self._namespace)
        except OSError as error:
            self.warn("store: cannot read the catalog of %s: %s", self._url, error)
            return {}
        for problem in wrong:
            _log.warning("store: the catalog of %s: %s; the records are read one by one", self._url, problem)
        self._cataloged = frozenset(shard.object_id for shard in shards)
        self._num_changes = len(shards) + len(self._shards)  # upper bound; counted exactly when needed
        self._is_catalog_damaged = bool(wrong)
        return {shard.variant_id: shard for shard in shards if shard.variant_id in wanted}

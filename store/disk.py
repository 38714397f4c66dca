"""The disk tier, in a directory or a bucket: immutable zarr3 objects and the records that commit them, shared safely
with other processes. Knows no host memory, no pins, no queue and no eviction order."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterable

import numpy as np

from store.arrays import ArrayDriver, ShardReader
from store.budget import ByteBudget
from store.errors import CommitUnknownError, ShardCorruptError, ShardNotFoundError, StoreUnavailableError
from store.formats import AS_IT_IS, ObjectLayout, StorageFormat, expected_layout
from store.hints import Hints
from store.namespaces import ORPHAN_AGE_S, QUARANTINE_AGE_S, foreign_fingerprints, open_namespace
from store.objects import Root, for_each, open_root
from store.records import StoredShard, decode_record, encode_record
from store.spec import KVSpec, ShardRecord, StoreIdentity, check_kv, check_record, positive_int
from store.sweep import sweep

_log = logging.getLogger(__name__)

# How tensorstore's errors begin when the stored bytes are wrong; others (permissions, I/O, timeouts) do not mean that.
_BAD_DATA = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


class TensorStoreTier:
    """Variants of one identity under one store URL. Thread-safe.

    Args:
      url: `file:///absolute/path`, made if missing, or a bucket that exists, as `store.buckets.BucketRoot` has it.
      kv_spec: shape and dtype of every variant.
      identity: whose variants these are; others under the same URL are neither seen nor touched.
      budget_bytes: bytes of objects and records that `write` may fill, None = no limit. What other processes wrote
        counts once `refresh` has seen it.
      exclusive: refuse a store that holds another model's variants and none of ours.
      head_groups: inner chunks per layer along K, so that a reader of some heads need not read the others.
      storage: how to store new variants; what is there is read however it is stored.

    Raises:
      ValueError: a bad URL or argument.
      StoreUnavailableError: the path or the bucket cannot be used.
      StoreIdentityError: another format version or KV shape; with `exclusive`, another model's store.
    """

    def __init__(
        self,
        url: str,
        kv_spec: KVSpec,
        identity: StoreIdentity,
        budget_bytes: int | None = None,
        *,
        exclusive: bool = False,
        head_groups: int = 1,
        storage: StorageFormat = AS_IT_IS,
    ):
        if kv_spec.num_kv_heads % positive_int("head_groups", head_groups):
            raise ValueError(f"head_groups: wanted a divisor of {kv_spec.num_kv_heads} KV heads, got {head_groups}")
        self.url = url
        self.kv_spec = kv_spec
        self.identity = identity
        self.head_groups = head_groups
        self.storage = storage
        self.budget = ByteBudget("disk", budget_bytes)
        self.num_corrupt = 0
        self._num_unread = 0
        self._lock = threading.RLock()
        self._shards: dict[str, StoredShard] = {}
        self._root = open_root(url)
        self._arrays = ArrayDriver(kv_spec, self._root.context, self._root.longest_wait_s)
        self._namespace = identity.namespace
        self.hints = Hints(self._root, self._key("hints.json"), self._warn)
        try:
            open_namespace(self._root, url, identity, kv_spec, exclusive=exclusive)
            self.sweep(ORPHAN_AGE_S, QUARANTINE_AGE_S)
        except OSError as error:
            raise StoreUnavailableError(f"store: cannot open {url}: {error}") from error

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def records(self) -> list[ShardRecord]:
        """Records of all committed variants this process knows of."""
        with self._lock:
            return [shard.record for shard in self._shards.values()]

    def get_record(self, variant_id: str) -> ShardRecord | None:
        """The record of a committed variant, or None."""
        shard = self._shards.get(variant_id)
        return None if shard is None else shard.record

    def foreign_fingerprints(self) -> frozenset[str]:
        """Fingerprints of the other models that have variants under this URL."""
        return foreign_fingerprints(self._root, self.identity)

    def is_lossy(self, variant_id: str) -> bool:
        """True when the variant's copy may differ from what was written."""
        shard = self._shards.get(variant_id)
        return shard is not None and shard.layout.storage.is_lossy

    def takes(self, variant_id: str) -> bool:
        """True where `write` stores the variant: it is not here, or is a lossy copy and would not be one now."""
        return variant_id not in self._shards or (self.is_lossy(variant_id) and not self.storage.is_lossy)

    def charge_bytes(self, record: ShardRecord) -> int:
        """Bytes on disk that `record` will take, with compression at most: object, checksums, index, the record itself.
        Where 8 bits cannot hold the KV it is more; `write` charges that when it finds out."""
        layout = expected_layout(self.kv_spec, record.num_tokens, self.head_groups, self.storage)
        return layout.num_bytes + len(self._encode(record, uuid.uuid4().hex, layout))

    def charged(self, variant_id: str) -> int | None:
        """Bytes that a committed variant takes out of the budget; None for others."""
        shard = self._shards.get(variant_id)
        return None if shard is None else shard.charge_bytes

    def reserve(self, record: ShardRecord) -> int:
        """Charges the budget for a later `write(..., reserved=True)`, which returns it if it fails; how many bytes.

        Raises:
          TierFullError: it does not fit.
        """
        with self._lock:
            return self.budget.recharge(0, self.charge_bytes(record))

    def release(self, record: ShardRecord) -> None:
        """Gives back what `reserve` charged, where no write follows."""
        with self._lock:
            self.budget.release(self.charge_bytes(record))

    def write(self, record: ShardRecord, kv: np.ndarray, *, reserved: bool = False) -> bool:
        """Stores `kv` `[L, 2, T, K, H]` durably. True when it is what is stored now, in `storage` or, where 8 bits
        cannot hold it, as it is; False when another writer committed the variant first, whose bytes stay.

        Raises:
          ValueError: record or KV do not fit `kv_spec`.
          TierFullError: not within the budget.
          StoreUnavailableError: the disk refused (full, read-only, gone) or the bucket did not answer; nothing is left
            of the attempt that a reader could see.
          CommitUnknownError: the bucket fell silent in the middle; a later `refresh` shows the variant, or not.
        """
        check_record(record, self.kv_spec)
        kv = np.ascontiguousarray(check_kv(kv, record, self.kv_spec))
        charged = self.charge_bytes(record) if reserved else self.reserve(record)
        object_id = self._root.new_id()  # never two writers on one data object
        committed = is_kept = False
        try:
            layout, prepared = self._arrays.prepare(kv, self.head_groups, self.storage)
            raw = self._encode(record, object_id, layout)
            with self._lock:
                charged = self.budget.recharge(charged, len(raw) + layout.num_bytes)
            place = self._key("data", object_id)
            folder = self._root.folder(place)
            if folder is None:
                self._root.make_prefix(place)
            self._arrays.write(self._root.kvstore(place), layout, prepared, folder)
            self.remove([record.variant_id] if self.takes(record.variant_id) else [])  # a lossy copy, if any
            committed = self._commit(record.variant_id, raw)
        except CommitUnknownError:
            is_kept = True  # deleting the object would break the variant if the record is there after all
            raise
        except (OSError, ValueError) as error:
            self._root.note_failure(error)
            raise StoreUnavailableError(f"store: cannot write to {self.url}: {error}") from error
        finally:
            if not committed:
                with self._lock:
                    self.budget.release(charged)
            if not (committed or is_kept):
                with contextlib.suppress(OSError):  # the error on its way says it all; the next open sweeps
                    self._root.delete(self._key("data", object_id))
        return committed

    def open(self, variant_id: str) -> ShardReader:
        """A reader of the variant's layers; reads nothing yet.

        Raises:
          ShardNotFoundError: no such variant is known here.
        """
        with self._lock:
            shard = self._shards.get(variant_id)
        if shard is None:
            raise ShardNotFoundError(f"disk tier: no variant {variant_id}")
        place = self._key("data", shard.object_id)
        return self._arrays.open(
            self._root.kvstore(place),
            shard.record.num_tokens,
            shard.layout,
            lambda error: self._explain(shard, error),
            self._root.outage(),
            folder=self._root.folder(place),
        )

    def remove(self, variant_ids: Iterable[str]) -> tuple[str, ...]:
        """Evicts; returns what went. A variant that could not be deleted stays."""
        return self.erase(self.hide(variant_ids))

    def hide(self, variant_ids: Iterable[str]) -> list[StoredShard]:
        """First, instant half of an eviction: the variants that were here are unknown now; `erase` must follow."""
        with self._lock:
            return [shard for key in variant_ids if (shard := self._shards.pop(key, None)) is not None]

    def erase(self, shards: Iterable[StoredShard], *, condemned: bool = False) -> tuple[str, ...]:
        """Second half, milliseconds per variant: the record goes first, so that no reader begins what the deletion of
        the data would cut short. Returns the ids that went; one that could not be deleted is known again, unless it is
        `condemned`."""
        return tuple(filter(None, for_each(self._root, lambda shard: self._erase_one(shard, condemned), shards)))

    def _erase_one(self, shard: StoredShard, condemned: bool) -> str | None:
        """The variant's id if it went."""
        variant_id = shard.record.variant_id
        try:
            if self._record_names(shard):
                self._root.delete(self._record_key(variant_id))
        except OSError as error:
            self._warn("store: cannot delete variant %s in %s: %s", variant_id, self.url, error)
            if not condemned:
                self._restore(shard)
                return None
        self._delete_quietly(self._key("data", shard.object_id))
        with self._lock:
            self._forget(shard)  # a refresh in between may have found the record again
            self.budget.release(shard.charge_bytes)
        return variant_id

    def refresh(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Takes in what other processes committed and evicted since: `(added, removed)` variant ids.

        Raises:
          OSError: the directory or bucket cannot be listed.
        """
        with self._lock:
            known = dict(self._shards)  # before the listing: what this process commits meanwhile is no removal
        listed = {name.removesuffix(".json") for name in self._names("records") if name.endswith(".json")}
        added = list(filter(None, for_each(self._root, self._load_sound, sorted(listed - known.keys()))))
        for shard in added:
            self._adopt(shard)
        removed = tuple(sorted(known.keys() - listed))
        for variant_id in removed:
            self._forget(known[variant_id])
        return tuple(shard.record.variant_id for shard in added), removed

    def sweep(self, orphan_age_s: float, quarantine_age_s: float) -> tuple[str, ...]:
        """Refreshes, and deletes what is at least that old of data objects that no record commits, of what killed
        processes left, and of quarantine. Returns the keys that could not be deleted.

        Raises:
          OSError: the directory or bucket cannot be listed.
        """
        self._num_unread = 0
        objects = self._names("data")  # before the records: an object committed in between must not look like an orphan
        self.refresh()
        if self._num_unread:  # an unread record may commit any object; a later sweep deletes
            return (self._key("records"),)
        with self._lock:
            committed = {shard.object_id for shard in self._shards.values()}
        orphans = [name for name in objects if name not in committed]
        return sweep(self._root, self._namespace, orphans, orphan_age_s, quarantine_age_s, self._delete_quietly)

    @property
    def notes_place(self) -> tuple[Root, str]:
        """Where the notes of this identity are kept: root and prefix."""
        return self._root, self._key("notes")

    # -- records -----------------------------------------------------------------------------------------------

    def _commit(self, variant_id: str, raw: bytes) -> bool:
        """Publishes the record `raw`, whose bytes are already charged. False when a sound record was there first."""
        mine = self._decode(variant_id, raw)
        for _ in range(2):
            if self._root.create(self._record_key(variant_id), raw):
                with self._lock:
                    if variant_id in self._shards:  # another process evicted that one, and no refresh saw it yet
                        self._forget(self._shards[variant_id])
                    self._shards[variant_id] = mine
                return True
            if self._take_in(variant_id):
                return False
            # The name was held by a record that failed its check; it is in quarantine now, so try once more.
        return False

    def _take_in(self, variant_id: str) -> bool:
        """Reads the record on disk into memory and says whether there is a sound one; a bad one goes to quarantine."""
        shard = self._load_sound(variant_id)
        if shard is not None:
            self._adopt(shard)
        return shard is not None

    def _load_sound(self, variant_id: str) -> StoredShard | None:
        try:
            try:
                return self._load(variant_id)
            except ShardCorruptError as error:
                _log.warning("store: %s; moved to quarantine", error)
                with self._lock:
                    self.num_corrupt += 1
                self._set_aside(variant_id)
        except OSError as error:
            self._warn("store: cannot take in the record of variant %s from %s: %s", variant_id, self.url, error)
            self._num_unread += 1
        return None

    def _adopt(self, shard: StoredShard) -> None:
        with self._lock:
            known = self._shards.get(shard.record.variant_id)
            if known is None or known.object_id != shard.object_id:
                if known is not None:
                    self._forget(known)
                self._shards[shard.record.variant_id] = shard
                self.budget.adopt(shard.charge_bytes)

    def _load(self, variant_id: str) -> StoredShard | None:
        raw = self._root.read(self._record_key(variant_id))
        return None if raw is None else self._decode(variant_id, raw)

    def _decode(self, variant_id: str, raw: bytes) -> StoredShard:
        return decode_record(raw, variant_id=variant_id, identity=self.identity, kv_spec=self.kv_spec)

    def _encode(self, record: ShardRecord, object_id: str, layout: ObjectLayout) -> bytes:
        return encode_record(record, identity=self.identity, kv_spec=self.kv_spec, object_id=object_id, layout=layout)

    def _record_names(self, shard: StoredShard) -> bool:
        """True unless the record on disk commits another object: then another process wrote the variant anew."""
        try:
            current = self._load(shard.record.variant_id)
        except ShardCorruptError:
            return True
        return current is not None and current.object_id == shard.object_id

    def _explain(self, shard: StoredShard, error: ValueError | TimeoutError | None) -> Exception:
        """What a failed read of `shard` means; `error` is tensorstore's, None where the bytes are not the record's."""
        variant_id = shard.record.variant_id
        if error is not None and not str(error).startswith(_BAD_DATA):
            self._root.note_failure(error)
            return StoreUnavailableError(f"store: cannot read variant {variant_id} from {self.url}: {error}")
        try:
            current = self._load(variant_id)
        except ShardCorruptError:
            current = shard
        except OSError as record_error:
            return StoreUnavailableError(f"store: cannot read {self.url}: {record_error}")
        if current is None or current.object_id != shard.object_id:
            self._forget(shard)
            if current is not None:
                self._take_in(variant_id)
            return ShardNotFoundError(f"disk tier: variant {variant_id} was evicted")
        with self._lock:
            self.num_corrupt += 1
        reason = error or "the data object is not the one that the record commits"
        return ShardCorruptError(f"variant {variant_id} in {self.url}: {reason}")

    def _forget(self, shard: StoredShard) -> None:
        """Drops `shard` from memory and budget, unless another one took its place."""
        with self._lock:
            known = self._shards.get(shard.record.variant_id)
            if known is not None and known.object_id == shard.object_id:
                del self._shards[shard.record.variant_id]
                self.budget.release(shard.charge_bytes)

    def _restore(self, shard: StoredShard) -> None:
        """Undoes `hide`."""
        with self._lock:
            if shard.record.variant_id in self._shards:
                self.budget.release(shard.charge_bytes)
            else:
                self._shards[shard.record.variant_id] = shard

    # -- names and files ---------------------------------------------------------------------------------------

    def _key(self, *parts: str) -> str:
        return "/".join((self._namespace, *parts))

    def _record_key(self, variant_id: str) -> str:
        return self._key("records", f"{variant_id}.json")

    def _names(self, folder: str) -> list[str]:
        return self._root.names(self._key(folder))

    def _set_aside(self, variant_id: str) -> None:
        """Moves the record to quarantine. Raises OSError."""
        aside = self._key("quarantine", f"{variant_id}.{self._root.new_id()}.json")
        self._root.move(self._record_key(variant_id), aside)

    def _delete_quietly(self, key: str) -> bool:
        """False where the disk refused."""
        try:
            self._root.delete(key)
        except OSError as error:  # without a record it is never read again; the next open sweeps it
            self._warn("store: cannot delete %s in %s: %s", key, self.url, error)
            return False
        return True

    def _warn(self, message: str, *values: object) -> None:
        # An outage shows in every call; that there is one is logged by those who write and refresh.
        _log.log(logging.WARNING if self._root.outage() is None else logging.DEBUG, message, *values)

"""Takes a snapshot of a chunk-cache while the engine serves."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ccjax.cache.snapshot.cache import IndexedStore
from ccjax.cache.snapshot.index import KEY, PARTS, SnapshotIndex, SnapshotVariant, decode_index, url_of
from ccjax.cache.snapshot.packs import PackFolder
from ccjax.errors import SnapshotError
from ccjax.loading.model import Progress
from ccjax.policy.variants import hottest_first
from ccjax.store.errors import ShardCorruptError, ShardNotFoundError
from ccjax.store.formats import checksum
from ccjax.store.objects import Root, open_root
from ccjax.store.spec import ShardRecord

logger = logging.getLogger(__name__)

PACK_BYTES = 16 << 20
"""Variants share an array up to this size; a larger one has its own. A restore reads whole packs."""

PART_BYTES = 128 << 20
"""Packs share a checkpoint up to this size. Saving and restoring hold one in memory, saving twice because Orbax copies
what it writes."""

LEFT_OVER_AGE_S = 24 * 3600.0
"""The next save to the same target deletes parts of killed saves that are this old; no save takes longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaveReport:
    """Contents of a saved snapshot.

    Attributes:
      num_evicted: variants that left the store after they were listed and before they were read.
      num_damaged: variants that failed the store's check; logged and left out.
    """

    url: str
    num_variants: int
    num_bytes: int
    num_evicted: int = 0
    num_damaged: int = 0


def save_snapshot(
    cache: IndexedStore, where: str | Path, *, overwrite: bool = False, progress: Progress | None = None
) -> SaveReport:
    """Writes all variants of the cache, hottest first, with their metadata and `f_r`. A reader finds the whole snapshot
    or none, even if the process is killed.

    Variants are listed once and then read pack by pack, each pack pinned while it is read; variants computed after the
    listing are not included. Needs twice `PART_BYTES` of memory besides the cache, or twice the largest variant.

    Args:
      where: an absent or empty directory or bucket prefix, as a path or a URL in the store's format.
      overwrite: replace an existing snapshot, which stays until the new one is complete.
      progress: called with ("save", bytes done, bytes in all).

    Raises:
      SnapshotError: the target holds a snapshot, or anything else.
      ValueError, StoreUnavailableError: a bad URL; the target cannot be written, or the store cannot be read.
    """
    url = url_of(where)
    root = open_root(url)
    replaced = _check_target(root, url, overwrite)
    cache.store.flush()  # queued writes have no record yet
    with cache.exclusive():
        held = hottest_first(cache.variants)
        frequencies: dict[str, float] = {meta.variant_id: meta.frequency_reuse for meta in held}
        uses = cache.variants.uses()
        listed = list(filter(None, (cache.store.get_record(meta.variant_id) for meta in held)))
    writer = _Writer(cache, frequencies, _sum_bytes(listed), progress)
    name = root.new_id()
    folder = PackFolder(root, f"{PARTS}/{name}")
    is_unsure = False
    try:
        for part in _groups(_groups(listed, PACK_BYTES, lambda record: record.num_bytes), PART_BYTES, _sum_bytes):
            writer.write(folder, part)
        raw = writer.index(name, uses).encode()
        is_unsure = not folder.is_local  # a bucket that stops responding during the commit may have accepted it
        if overwrite:
            root.replace(KEY, raw)
        elif not root.create(KEY, raw):
            is_unsure = False
            raise SnapshotError(f"snapshot: another process saved one to {url} meanwhile; that one stays")
    except BaseException:
        if not is_unsure:
            with contextlib.suppress(OSError):
                folder.delete()
        raise
    with contextlib.suppress(OSError):  # the snapshot is complete; the next save to this target tries again
        _sweep(root, name, replaced)
    return SaveReport(
        url, len(writer.variants), writer.num_bytes, num_evicted=writer.num_evicted, num_damaged=writer.num_damaged
    )


class _Writer:
    """Writes parts and collects the index of their variants."""

    def __init__(
        self, cache: IndexedStore, frequencies: dict[str, float], total_bytes: int, progress: Progress | None
    ) -> None:
        self.variants: list[SnapshotVariant] = []
        self.num_bytes = 0
        self.num_evicted = 0
        self.num_damaged = 0
        self._cache = cache
        self._frequencies = frequencies
        self._parts: list[int] = []
        self._total_bytes = total_bytes
        self._progress = progress
        self._seen_bytes = 0
        self._report()

    def write(self, folder: PackFolder, part: list[list[ShardRecord]]) -> None:
        """Reads the variants of one part, pack by pack, and writes the part."""
        number = self._parts[-1] + 1 if self._parts else 0
        packs: dict[int, np.ndarray] = {}
        for records in part:
            found = list(self._read(records))
            if found:
                packs[len(self._parts)] = self._pack(found)
                self._parts.append(number)
        if packs:
            folder.write(number, packs)
        self._seen_bytes += sum(map(_sum_bytes, part))
        self._report()

    def index(self, folder: str, uses: dict[str, Any]) -> SnapshotIndex:
        """The index of all that was written."""
        return SnapshotIndex(
            model=self._cache.model,
            model_fingerprint=self._cache.identity.model_fingerprint,
            namespace=self._cache.identity.namespace,
            kv_spec=self._cache.store.kv_spec,
            created_s=time.time(),
            folder=folder,
            parts=tuple(self._parts),
            variants=tuple(self.variants),
            uses=uses,
        )

    def _read(self, records: list[ShardRecord]) -> Iterator[tuple[ShardRecord, np.ndarray]]:
        """Yields the KV `[L, 2, T, K, H]` of the variants that are still stored and undamaged."""
        store = self._cache.store
        num_layers = store.kv_spec.num_layers
        ticket = store.prepare_load(record.variant_id for record in records)
        try:
            for variant_id in ticket.tiers:
                ticket.prefetch(variant_id, 0, num_layers)
            for record in records:
                try:
                    yield record, ticket.read_layers(record.variant_id, 0, num_layers)
                except ShardNotFoundError:
                    self.num_evicted += 1
                except ShardCorruptError as error:
                    logger.warning("snapshot: left out: %s", error)
                    self.num_damaged += 1
        finally:
            store.complete_load(ticket, ok=False)  # a snapshot must not change placement

    def _pack(self, found: list[tuple[ShardRecord, np.ndarray]]) -> np.ndarray:
        spec = self._cache.store.kv_spec
        pack = np.empty(spec.shape(sum(record.num_tokens for record, _ in found)), spec.np_dtype)
        first = 0
        for record, kv in found:
            pack[:, :, first : first + record.num_tokens] = kv
            frequency = self._frequencies[record.variant_id]
            digest = checksum(np.ascontiguousarray(kv))
            self.variants.append(SnapshotVariant(record, frequency, digest, len(self._parts), first))
            self.num_bytes += record.num_bytes
            first += record.num_tokens
        return pack

    def _report(self) -> None:
        if self._progress is not None:
            self._progress("save", self._seen_bytes, self._total_bytes)


def _check_target(root: Root, url: str, overwrite: bool) -> str | None:
    """The folder of the snapshot to be replaced, if there is a valid one."""
    strangers = [name for name in root.names("") if name not in (KEY, PARTS) and not name.startswith(".probe-")]
    if strangers:
        raise SnapshotError(f"snapshot: wanted an absent or empty directory or prefix, got {url} with {strangers[0]!r}")
    raw = root.read(KEY)
    if raw is None:
        return None
    if not overwrite:
        raise SnapshotError(f"snapshot: {url} holds a snapshot already; name another place, or overwrite it")
    try:
        return decode_index(raw, url).folder
    except SnapshotError:
        return None


_Item = TypeVar("_Item")


def _groups(items: Iterable[_Item], limit_bytes: int, num_bytes: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Groups consecutive items up to the limit; a larger item is a group of its own."""
    group: list[_Item] = []
    group_bytes = 0
    for item in items:
        if group and group_bytes + num_bytes(item) > limit_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += num_bytes(item)
    if group:
        yield group


def _sum_bytes(records: Iterable[ShardRecord]) -> int:
    return sum(record.num_bytes for record in records)


def _sweep(root: Root, name: str, replaced: str | None) -> None:
    """Deletes the parts that the new snapshot `name` replaced, and old ones of killed saves."""
    for other in root.names(PARTS):
        key = f"{PARTS}/{other}"
        if other == replaced or (other != name and root.age_s(key) > LEFT_OVER_AGE_S):
            root.delete(key)

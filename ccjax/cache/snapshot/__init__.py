"""Snapshots: a whole chunk-cache in a directory or bucket, to be restored elsewhere.

TARGET/snapshot.json               written last, create-if-absent, which commits the snapshot; see `index`
TARGET/parts/ID/00000/             an Orbax checkpoint of up to 128 MiB; ID is new for every save; see `packs`
TARGET/parts/ID/00000/pack-00000/  one array [L, 2, sum of T, K, H]: variants concatenated along T

KV is saved from and restored to host memory, never a sharded device array, so a snapshot does not depend on the device
mesh.
"""

from ccjax.cache.snapshot.cache import IndexedStore, open_cache
from ccjax.cache.snapshot.index import SnapshotIndex, SnapshotVariant, inspect_snapshot
from ccjax.cache.snapshot.restore import RestoreReport, restore_snapshot
from ccjax.cache.snapshot.save import SaveReport, save_snapshot

__all__ = [
    "IndexedStore",
    "RestoreReport",
    "SaveReport",
    "SnapshotIndex",
    "SnapshotVariant",
    "inspect_snapshot",
    "open_cache",
    "restore_snapshot",
    "save_snapshot",
]

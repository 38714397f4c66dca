"""Takes variants off the disk for ever, and looks whether they are gone. Knows no memory and no queue."""

from __future__ import annotations

from collections.abc import Collection

from store.disk import TensorStoreTier
from store.namespaces import ORPHAN_AGE_S, QUARANTINE_AGE_S


def erase_from_disk(disk: TensorStoreTier, condemned: Collection[str], *, uncommitted: bool) -> tuple[str, ...]:
    """Deletes variants, also such as an earlier attempt left or another process wrote meanwhile, and every copy of a
    record.

    Args:
      uncommitted: also whatever lies there without a sound record, however young.

    Returns:
      Keys and variant ids of what could not be deleted.

    Raises:
      OSError: the disk cannot be listed.
    """
    disk.refresh()
    disk.erase(disk.hide(condemned), condemned=True)
    ages = (0.0, 0.0) if uncommitted else (ORPHAN_AGE_S, QUARANTINE_AGE_S)
    left = disk.sweep(*ages)  # it refreshes, and so knows again what could not be deleted
    stayed = disk.hide(condemned)
    disk.erase(stayed, condemned=True)  # once more, and out of the budget
    # Even where nothing was deleted: the catalog may have copies of records that were evicted since it was written.
    copies = disk.drop_catalog()
    return (*left, *copies, *(shard.variant_id for shard in stayed))

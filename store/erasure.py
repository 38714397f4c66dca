"""Takes variants off the disk for ever, and looks whether they are gone."""

from __future__ import annotations

from collections.abc import Collection

from ccjax.store.disk import TensorStoreTier
from ccjax.store.namespaces import ORPHAN_AGE_S, QUARANTINE_AGE_S
from ccjax.store.spec import Condemns


def erase_from_disk(
    disk: TensorStoreTier, condemned: Collection[str], *, uncommitted: bool, condemns: Condemns | None = None
) -> tuple[str, ...]:
    """Deletes variants, also such as an earlier attempt left or another process wrote meanwhile, and every copy of a
    record.

    Args:
      uncommitted: also whatever lies there without a sound record, however young, and what other releases stored in
        formats that cannot be looked into here.
      condemns: asked of the records, as another process may have written a variant anew; None condemns all.

    Returns:
      Keys and variant ids of what could not be deleted.

    Raises:
      OSError: the disk cannot be listed.
    """
    disk.refresh()
    disk.erase(disk.hide(condemned, condemns), condemned=True)
    foreign = disk.erase_foreign() if uncommitted else ()
    ages = (0.0, 0.0) if uncommitted else (ORPHAN_AGE_S, QUARANTINE_AGE_S)
    left = disk.sweep(*ages)  # it refreshes, and so knows again what could not be deleted
    stayed = disk.hide(condemned, condemns)
    disk.erase(stayed, condemned=True)  # once more, and out of the budget
    # Even where nothing was deleted: the catalog may have copies of records that were evicted since it was written.
    copies = disk.drop_catalog()
    return (*foreign, *left, *copies, *(shard.variant_id for shard in stayed))

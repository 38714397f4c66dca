"""Erases variants from disk and verifies that they are gone."""

from __future__ import annotations

from collections.abc import Collection

from ccjax.store.disk import TensorStoreTier
from ccjax.store.namespaces import ORPHAN_AGE_S, QUARANTINE_AGE_S
from ccjax.store.spec import IsCovered


def erase_from_disk(
    disk: TensorStoreTier, covered: Collection[str], *, uncommitted: bool, is_covered: IsCovered | None = None
) -> tuple[str, ...]:
    """Deletes variants, including remains of an earlier attempt and concurrent writes of other processes, and every
    copy of a record.

    Args:
      uncommitted: also delete objects of any age without a sound record.
      is_covered: selects records to delete, because another process may have rewritten a variant; None selects all.

    Returns:
      Keys and variant ids that could not be deleted.

    Raises:
      OSError: the disk cannot be listed.
    """
    disk.refresh()
    disk.erase(disk.hide(covered, is_covered), covered=True)
    ages = (0.0, 0.0) if uncommitted else (ORPHAN_AGE_S, QUARANTINE_AGE_S)
    left = disk.sweep(*ages)  # its refresh makes undeleted variants known again
    stayed = disk.hide(covered, is_covered)
    disk.erase(stayed, covered=True)  # once more, also from the budget
    # Even if nothing was deleted: the catalog may have copies of records that were evicted after it was written.
    copies = disk.drop_catalog()
    return (*left, *copies, *(shard.variant_id for shard in stayed))

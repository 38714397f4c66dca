"""Deletes unused objects: data without a record, left-overs of killed processes, quarantined records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ccjax.store.objects import Root, for_each


def sweep(
    root: Root,
    namespace: str,
    orphans: Iterable[str],
    orphan_age_s: float,
    quarantine_age_s: float,
    delete: Callable[[str], bool],
) -> tuple[str, ...]:
    """Deletes the data objects `orphans`, left-overs and quarantined records of `namespace` that are older than the
    given ages; an age of 0 selects all.

    Args:
      delete: deletes one key; False if the disk refused.

    Returns:
      The keys that could not be deleted.

    Raises:
      OSError: the directory or bucket cannot be listed.
    """
    stale = [f"{namespace}/data/{name}" for name in orphans]
    folders = (f"{namespace}/{name}" for name in ("records", "notes", "catalog", "leases"))
    stale += root.left_overs(("", namespace, *folders))
    ages = dict.fromkeys(stale, orphan_age_s)
    quarantine = f"{namespace}/quarantine"
    ages |= {f"{quarantine}/{name}": quarantine_age_s for name in root.names(quarantine)}
    old = [key for key, age_s in ages.items() if not age_s or root.age_s(key) > age_s]
    went = for_each(root, delete, old)
    return tuple(key for key, is_gone in zip(old, went, strict=True) if not is_gone)

"""Applies changes of other processes to a disk tier, from listings and from the change feed of a shared index."""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import AbstractContextManager

from ccjax.store.change_feed import ChangeFeed
from ccjax.store.disk import TensorStoreTier
from ccjax.store.index.api import StoreChanges

_log = logging.getLogger(__name__)

Found = tuple[tuple[str, ...], tuple[str, ...]]
"""Ids of variants that were added and that were removed."""


class StoreWatcher:
    """Watches a disk tier for changes of other processes. Thread-safe.

    Args:
      change_feed: its changes are applied from now on.
      pinned: variants with an open load, guarded by `lock`. They are kept until the load completes, even if the feed
        removes them, because the request that uses them needs their records at the end.
    """

    def __init__(
        self,
        disk: TensorStoreTier,
        change_feed: ChangeFeed | None,
        pinned: Container[str],
        lock: AbstractContextManager[object],
    ) -> None:
        self._disk = disk
        self._change_feed = change_feed
        self._pinned = pinned
        self._lock = lock
        self._unapplied_removals: set[tuple[str, str | None]] = set()  # variants and their data objects
        self._is_failing = not disk.is_open
        if change_feed is not None:
            change_feed.start(self._apply)

    def list_all(self) -> Found:
        """Returns the changes found by `TensorStoreTier.refresh`; none while the disk cannot be listed. Logs the start
        and the end of such an outage as warnings."""
        found: Found = (), ()
        failure = None
        if self._change_feed is not None:
            self._change_feed.begin_listing()
        try:
            found = self._disk.refresh()
        except OSError as error:
            failure = error
            if self._change_feed is not None:
                self._change_feed.mark_listing_failed()
        if (failure is None) == self._is_failing:
            _log.warning("store: refresh of %s: %s", self._disk.url, failure or "succeeds again")
        self._is_failing = failure is not None
        return found

    def _apply(self, changes: StoreChanges) -> Found:
        added = self._disk.apply_commits(changes.added)
        removed = [(key, name or self._disk.outdated_object(key)) for key, name in changes.removed.items()]
        with self._lock:
            self._unapplied_removals.update(removed)
            gone = [pair for pair in self._unapplied_removals if pair[0] not in self._pinned]
            self._unapplied_removals.difference_update(gone)
            for variant_id, object_id in gone:
                self._disk.forget_removed(variant_id, object_id)
            went = tuple(sorted({key for key, _ in gone if key not in self._disk}))
            return tuple(key for key in added if key in self._disk), went

"""What other processes do to a disk tier, taken in: by listing it, and by news of a shared index."""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import AbstractContextManager

from ccjax.store.disk import TensorStoreTier
from ccjax.store.index.api import Changes
from ccjax.store.news import News

_log = logging.getLogger(__name__)

Found = tuple[tuple[str, ...], tuple[str, ...]]
"""Ids of variants that were added and that were removed."""


class Following:
    """Thread-safe.

    Args:
      pinned: variants that a load is open of, guarded by `lock`. These stay until that is over, whatever news say, as
        whoever computes on top of them asks for their records at the end.
      news: followed from now on.
    """

    def __init__(
        self, disk: TensorStoreTier, news: News | None, pinned: Container[str], lock: AbstractContextManager[object]
    ) -> None:
        self._disk = disk
        self._news = news
        self._pinned = pinned
        self._lock = lock
        self._going: set[tuple[str, str | None]] = set()  # variants and their data objects
        self._is_failing = False
        if news is not None:
            news.follow(self._take_in)

    def list_all(self) -> Found:
        """What `TensorStoreTier.refresh` finds; nothing while the disk cannot be listed. The first failure of a row is
        logged as a warning, so is the recovery."""
        found: Found = (), ()
        failure = None
        if self._news is not None:
            self._news.begin_listing()
        try:
            found = self._disk.refresh()
        except OSError as error:
            failure = error
            if self._news is not None:
                self._news.listing_failed()
        if (failure is None) == self._is_failing:
            _log.warning("store: refresh of %s: %s", self._disk.url, failure or "succeeds again")
        self._is_failing = failure is not None
        return found

    def _take_in(self, changes: Changes) -> Found:
        added = self._disk.follow(changes.added)
        removed = [(key, name or self._disk.outdated_object(key)) for key, name in changes.removed.items()]
        with self._lock:
            self._going.update(removed)
            gone = [pair for pair in self._going if pair[0] not in self._pinned]
            self._going.difference_update(gone)
            for variant_id, object_id in gone:
                self._disk.forget_gone(variant_id, object_id)
            went = tuple(sorted({key for key, _ in gone if key not in self._disk}))
            return tuple(key for key in added if key in self._disk), went

"""Change feed between the processes on one store: a background thread publishes this process's commits and deletions to
the shared index, and receives those of other processes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Sequence

from ccjax.store.index.api import CHANGES_AT_ONCE, CHANGES_KEPT, SharedIndex, StoreChanges, record_removal

_log = logging.getLogger(__name__)

POLL_S = 0.05
"""Pause between two polls of the index."""

FLUSH_S = 1.0
"""Longest wait for stored variants to become visible to others."""

LARGEST_SENT_BYTES = 32 << 10
"""Larger records are not sent; receivers read them from the store. Up to this size (a chunk of 200 tokens takes 4 to 8
kB) sending takes 0.1 to 0.2 ms each way and saves every reader a request to a bucket, which takes a hundred times as
long for a remote bucket. It also limits the changes kept by an index to 64 MiB."""

ApplyChanges = Callable[[StoreChanges], tuple[Sequence[str], Sequence[str]]]


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeFeedCounts:
    """State of the feed: whether the index answers, and how many changes of other processes were applied since open."""

    is_up: bool
    num_applied: int


class ChangeFeed:
    """Sends and receives changes. Thread-safe; the thread starts with `start` and ends with `close`. Open it before
    listing the store: every later commit is then either announced, or requires another listing."""

    def __init__(self, index: SharedIndex) -> None:
        self.index = index
        self._changed = threading.Condition()
        self._unsent: dict[str, tuple[str, bytes | None]] = {}
        self._unsent_removals: dict[str, str | None] = {}
        self._is_complete = True  # whether the unsent changes are all changes
        self._is_sending = False
        self._added: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._needs_listing = False
        self._num_applied = 0
        self._is_up = True
        self._closed = False
        self._thread: threading.Thread | None = None
        self._cursor: str | None = None
        try:
            self._cursor = index.changes(None).cursor
        except OSError as error:
            self._log_outage(error)

    # -- changes of this process ---------------------------------------------------------------------------------

    def record_commit(self, variant_id: str, object_id: str, record: bytes) -> None:
        """Queues the announcement that `record` commits the variant with this data object."""
        with self._changed:
            self._unsent.pop(variant_id, None)
            self._unsent[variant_id] = object_id, record if len(record) <= LARGEST_SENT_BYTES else None
            self._bound()

    def record_deletion(self, variant_id: str, object_id: str | None) -> None:
        """Queues the announcement that the variant's record of that object (None if unreadable) is deleted."""
        with self._changed:
            if variant_id in self._unsent and object_id in (None, self._unsent[variant_id][0]):
                del self._unsent[variant_id]
            record_removal(self._unsent_removals, variant_id, object_id)
            self._bound()

    def mark_incomplete(self) -> None:
        """Announces that there are unrecorded changes, so that other processes list the store."""
        with self._changed:
            self._is_complete = False
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until other processes can see all recorded changes; False if the index does not answer in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_all_sent or not self._is_up or self._thread is None, timeout_s)
            return self._is_all_sent

    # -- changes of other processes ------------------------------------------------------------------------------

    @property
    def counts(self) -> ChangeFeedCounts:
        """Current state of the feed."""
        return ChangeFeedCounts(self._is_up, self._num_applied)

    @property
    def has_changes(self) -> bool:
        """True if `take` would return a change; cheap enough to poll."""
        return bool(self._added or self._removed)

    @property
    def needs_listing(self) -> bool:
        """True if changes may have been missed, until `begin_listing`."""
        return self._needs_listing

    def begin_listing(self) -> None:
        """Clears `needs_listing`; call it before listing the store."""
        self._needs_listing = False

    def mark_listing_failed(self) -> None:
        """Sets `needs_listing`; call it after a listing failed."""
        with self._changed:
            self._needs_listing = True

    def take(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns and clears the variants added and removed since the last call; a variant with both changes is only
        in the list of the later one."""
        with self._changed:
            added, removed = tuple(self._added), tuple(self._removed)
            self._added.clear()
            self._removed.clear()
            return added, removed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until `has_changes` or `needs_listing`; False if closed or timed out."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_changes or self._needs_listing or self._closed, timeout_s)
            return not self._closed and (self.has_changes or self._needs_listing)

    def start(self, apply: ApplyChanges) -> None:
        """Starts the thread, which calls `apply` at every poll, also without changes; `apply` returns the ids that were
        added and removed in this process."""
        self._thread = threading.Thread(target=self._run, args=(apply,), name="store-change-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends queued changes if the index answers, and ends the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.index.close()

    # -- internals ---------------------------------------------------------------------------------------------

    @property
    def _is_all_sent(self) -> bool:
        return not (self._unsent or self._unsent_removals or self._is_sending) and self._is_complete

    def _bound(self) -> None:
        """Drops the queue and marks it incomplete if the index, once it is back, would not keep that many changes."""
        if len(self._unsent) + len(self._unsent_removals) > CHANGES_KEPT:
            self._unsent.clear()
            self._unsent_removals.clear()
            self._is_complete = False
        self._changed.notify_all()

    def _run(self, apply: ApplyChanges) -> None:
        failed = closed = False
        while not closed:
            with self._changed:  # during an outage, unsent changes do not shorten the pause
                self._changed.wait_for(lambda: self._closed or not (failed or self._is_all_sent), POLL_S)  # noqa: B023
                closed = self._closed
            failed = not self._exchange(apply)

    def _exchange(self, apply: ApplyChanges) -> bool:
        """Sends and receives once; False if the index did not answer."""
        error: OSError | None = None
        try:
            self._send()
            while self._receive(apply):
                pass
        except OSError as caught:
            error = caught
        except Exception:  # the thread must survive any error
            _log.exception("store: changes of other processes could not be applied")
            with self._changed:
                self._needs_listing = True
        self._log_outage(error)
        return error is None

    def _send(self) -> None:
        while True:
            with self._changed:
                if self._is_all_sent:
                    return
                added = dict(itertools.islice(self._unsent.items(), CHANGES_AT_ONCE))
                removed = dict(itertools.islice(self._unsent_removals.items(), CHANGES_AT_ONCE))
                is_complete, self._is_complete = self._is_complete, True
                for key in added:
                    del self._unsent[key]
                for key in removed:
                    del self._unsent_removals[key]
                self._is_sending = True
            is_sent = False
            try:
                self.index.notify({key: record for key, (_, record) in added.items()}, removed, is_complete=is_complete)
                is_sent = True
            finally:
                with self._changed:
                    self._is_sending = False
                    if not is_sent:  # changes recorded meanwhile are newer
                        self._unsent = added | self._unsent
                        for key, object_id in self._unsent_removals.items():
                            record_removal(removed, key, object_id)
                        self._unsent_removals = removed
                        self._is_complete = self._is_complete and is_complete
                        self._bound()
                    self._changed.notify_all()

    def _receive(self, apply: ApplyChanges) -> bool:
        """Applies the next changes; False if there were none."""
        changes = self.index.changes(self._cursor)
        is_first, self._cursor = self._cursor is None, changes.cursor
        added, removed = apply(changes)
        with self._changed:
            for key in added:
                self._removed.pop(key, None)
                self._added[key] = None
            for key in removed:
                self._added.pop(key, None)
                self._removed[key] = None
            self._num_applied += len(changes.added) + len(changes.removed)
            self._needs_listing = self._needs_listing or is_first or not changes.is_complete
            if added or removed or self._needs_listing:
                self._changed.notify_all()
        return bool(changes.added or changes.removed)

    def _log_outage(self, error: OSError | None) -> None:
        """Logs the start and the end of an outage."""
        if error is not None and self._is_up:
            _log.warning("store: %s; until it answers, changes of other processes are found by listings", error)
        elif error is None and not self._is_up:
            _log.warning("store: the shared index answers again")
        with self._changed:
            self._is_up = error is None
            self._changed.notify_all()

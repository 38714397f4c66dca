"""Applies other processes' changes of a shared store to an engine's index.

The shared index reports changes at once through its change feed: they are applied before a request is planned, or right
away while no request runs. If changes may have been missed, the store is listed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ccjax.cache.exclusive import Exclusive
from ccjax.store.change_feed import POLL_S, ChangeFeed

logger = logging.getLogger(__name__)

_LISTING_PAUSE_S = 1.0
"""Pause after a listing before the next one."""


class VariantIndexUpdater:
    """Watches the store of one engine; does nothing without a shared index.

    The store's own thread polls the index and reads what it needs. `apply` updates the variants, without I/O, on the
    batch loop's thread or while that is paused.

    Args:
      apply_changes: applies the ids that were added and removed to the variants.
      exclusive: entered to apply pending changes.
      refresh: lists the store and applies the differences.
    """

    def __init__(
        self,
        change_feed: ChangeFeed | None,
        apply_changes: Callable[[tuple[str, ...], tuple[str, ...]], None],
        exclusive: Exclusive,
        refresh: Callable[[], None],
    ) -> None:
        self._change_feed = change_feed
        self._apply_changes = apply_changes
        self._exclusive = exclusive
        self._refresh = refresh
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts watching if there is a shared index."""
        if self._change_feed is not None:
            self._thread = threading.Thread(target=self._run, name="ccjax-watch", daemon=True)
            self._thread.start()

    def apply(self) -> None:
        """Applies the changes since the last call to the variants; logs a failure."""
        if self._change_feed is None or not self._change_feed.has_changes:
            return
        try:
            self._apply_changes(*self._change_feed.take())
        except Exception:
            logger.exception("changes of other processes could not be applied; the next listing will find them")

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._change_feed is not None
        while not self._closing.is_set():
            if not self._change_feed.wait(POLL_S):
                continue
            pause_s = POLL_S  # while requests run, changes are applied before each is planned
            try:
                if self._change_feed.needs_listing:
                    self._refresh()
                    pause_s = _LISTING_PAUSE_S
                else:
                    with self._exclusive(wait=False):
                        pass
            except RuntimeError:  # closed meanwhile
                logger.debug("watching the store ends", exc_info=True)
            except Exception:
                logger.exception("the store could not be listed; the next listing will find what changed")
            self._closing.wait(pause_s)

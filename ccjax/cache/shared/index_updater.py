"""Applies to an engine's variants what other processes did to the same store.

The shared index tells at once (its change feed): changes are applied before a request is planned, or right away while
no request runs. Where changes may be missing, the store is listed.
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

    The store's own thread asks the index and reads what there is to read. `apply` tells the variants, without I/O, on
    the batch loop's thread or while that is paused.

    Args:
      apply_changes: tells the variants which ids came and which went.
      exclusive: entered to apply what has come.
      refresh: lists the store and applies what it finds.
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
        """Begins to watch, where there is a shared index."""
        if self._change_feed is not None:
            self._thread = threading.Thread(target=self._run, name="ccjax-watch", daemon=True)
            self._thread.start()

    def apply(self) -> None:
        """Tells the variants what came and went since the last call; logs a failure."""
        if self._change_feed is None or not self._change_feed.has_changes:
            return
        try:
            self._apply_changes(*self._change_feed.take())
        except Exception:
            logger.exception("changes of other processes could not be applied; the next listing of the store tells all")

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
            pause_s = POLL_S  # where requests run, changes are applied before each is planned
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
                logger.exception("the store could not be listed; the next time tells all")
            self._closing.wait(pause_s)

"""Applies other processes' changes of a shared store to an engine's index.

The shared index reports changes at once through its change feed: they are applied before a request is planned, or right
away while no request runs. If changes may have been missed, the store is listed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ccjax.cache.exclusive import Exclusive
from ccjax.cache.variants import VariantIndex
from ccjax.store.change_feed import POLL_S, ChangeFeed

logger = logging.getLogger(__name__)

_LISTING_PAUSE_S = 1.0
"""Pause after a listing before the next one."""


class VariantIndexUpdater:
    """Watches the store of one engine; does nothing without a shared index.

    The store's own thread polls the index and reads what it needs. `apply` updates the variants, without I/O, on the
    batch loop's thread or while that is paused.

    Attributes:
      num_adopted, num_vanished: variants that other processes added to, or removed from, the same store so far.
    """

    def __init__(self, change_feed: ChangeFeed | None, variants: VariantIndex) -> None:
        self.num_adopted = 0
        self.num_vanished = 0
        self._change_feed = change_feed
        self._variants = variants
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, exclusive: Exclusive, refresh: Callable[[], None]) -> None:
        """Starts watching if there is a shared index.

        Args:
          exclusive: applies pending changes when it is entered.
          refresh: lists the store and applies the differences.
        """
        if self._change_feed is not None:
            arguments = (self._change_feed, exclusive, refresh)
            self._thread = threading.Thread(target=self._run, args=arguments, name="ccjax-watch", daemon=True)
            self._thread.start()

    def apply_changes(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Applies the ids of variants that were added and removed, as `TieredStore.refresh` returns them."""
        adopted, vanished = self._variants.apply_changes(added, removed)
        self.num_adopted += adopted
        self.num_vanished += vanished

    def apply(self) -> None:
        """Applies the changes since the last call to the variants; logs a failure."""
        if self._change_feed is None or not self._change_feed.has_changes:
            return
        try:
            self.apply_changes(*self._change_feed.take())
        except Exception:
            logger.exception("changes of other processes could not be applied; the next listing will find them")

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, change_feed: ChangeFeed, exclusive: Exclusive, refresh: Callable[[], None]) -> None:
        while not self._closing.is_set():
            if not change_feed.wait(POLL_S):
                continue
            pause_s = POLL_S  # while requests run, changes are applied before each is planned
            try:
                if change_feed.needs_listing:
                    refresh()
                    pause_s = _LISTING_PAUSE_S
                else:
                    with exclusive(wait=False):
                        pass
            except RuntimeError:  # closed meanwhile
                logger.debug("watching the store ends", exc_info=True)
            except Exception:
                logger.exception("the store could not be listed; the next listing will find what changed")
            self._closing.wait(pause_s)

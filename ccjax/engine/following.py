"""Takes in what other processes on the same store did, by news of the shared index: at the moment a request is planned,
where no request runs at once, and by listing the store where news may be missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from ccjax.engine.maintenance import Maintenance
from ccjax.store.change_feed import POLL_S, ChangeFeed

logger = logging.getLogger(__name__)

_LISTING_PAUSE_S = 1.0
"""After a listing that news made necessary, before the next one."""


class LetIn(Protocol):
    """`ccjax.engine.engine.Engine._exclusive`."""

    def __call__(self, *, wait: bool) -> AbstractContextManager[bool]: ...


class Following:
    """Follows for one engine; does nothing without news.

    The store's own thread asks the index and reads what there is to read. What is left is to tell the variants, on the
    batch loop's thread or by a guest of it: `take_in`, without I/O.

    Args:
      let_in: takes in what has come, where it lets a guest in.
      refresh: lists the store and takes in what it finds, as a guest.
    """

    def __init__(
        self, news: ChangeFeed | None, maintenance: Maintenance, let_in: LetIn, refresh: Callable[[], None]
    ) -> None:
        self._news = news
        self._maintenance = maintenance
        self._let_in = let_in
        self._refresh = refresh
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins, where there is something to follow."""
        if self._news is not None:
            self._thread = threading.Thread(target=self._run, name="ccjax-follow", daemon=True)
            self._thread.start()

    def take_in(self) -> None:
        """Tells the variants what came and went since the last call; a failure is logged."""
        if self._news is None or not self._news.has_changes:
            return
        try:
            self._maintenance.follow(*self._news.take())
        except Exception:
            logger.exception("news of other processes could not be taken in; the next listing of the store tells all")

    def close(self) -> None:
        """Ends the thread; what comes later is not followed."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._news is not None
        while not self._closing.is_set():
            if not self._news.wait(POLL_S):
                continue
            pause_s = POLL_S  # where requests run, these take it in themselves
            try:
                if self._news.needs_listing:
                    self._refresh()
                    pause_s = _LISTING_PAUSE_S
                else:
                    with self._let_in(wait=False):
                        pass
            except RuntimeError:  # closed meanwhile
                logger.debug("following ends", exc_info=True)
            except Exception:
                logger.exception("the store could not be listed; the next time tells all")
            self._closing.wait(pause_s)

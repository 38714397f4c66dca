"""What a server looks for at intervals: changed documents, changes of the store, requests that wait long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import ccjax.server.own_documents as own_documents
from ccjax.server.backend import Backend
from ccjax.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_ORDER_EVERY_S = 0.1
"""Interval between checks for requests that wait long; without a shared index a check does nothing."""


async def keep_fresh(settings: ServerSettings, backend: Callable[[], Backend | None]) -> None:
    """Refreshes changed documents every `refresh_interval_s` and the store every `store_refresh_interval_s`, and checks
    for long waits, until cancelled.

    Args:
      backend: returns None while the server is loading or closed; nothing is looked for then.
    """
    await asyncio.gather(
        _repeat(settings.refresh_interval_s, _refresh_documents, backend),
        _repeat(settings.store_refresh_interval_s or None, lambda found: found.engine.cache.refresh(), backend),
        _repeat(_ORDER_EVERY_S, lambda found: found.engine.orders.place(), backend),
    )


async def _repeat(
    interval_s: float | None, look: Callable[[Backend], object], backend: Callable[[], Backend | None]
) -> None:
    while interval_s is not None:
        await asyncio.sleep(interval_s)
        current = backend()
        if current is None:
            continue
        try:
            await asyncio.to_thread(look, current)
        except Exception:
            if backend() is not None:  # it fails if the server was closed meanwhile
                logger.exception("looking for changes failed; nothing was changed")


def _refresh_documents(backend: Backend) -> None:
    if own_documents.refresh(backend.retriever, backend.engine, backend.worker) and backend.preparation is not None:
        backend.preparation.restart()
        backend.worker.thread.call(lambda: None)  # wakes it up

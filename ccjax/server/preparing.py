"""Prepares the server's own documents in idle time, so that the first question about them finds their KV.

Passages are warmed one at a time, as by `POST /v1/cache/warm`, until all are cached or the last tier is nearly full.
Nothing is evicted for them: KV cached by requests is worth more than KV not yet requested.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Callable

from ccjax.engine import Engine, Warming
from ccjax.engine.engine_cache import NEARLY_FULL
from ccjax.errors import RequestError
from ccjax.retrieval import Retriever
from ccjax.types import Document

logger = logging.getLogger(__name__)

_VECTORS_S = 0.1
"""Longest wait for vectors before requests are looked for again."""


class DocumentPreparation:
    """The passages of one retriever that still have to be prepared. `step` belongs to one thread."""

    def __init__(self, engine: Engine, retriever: Retriever, count: Callable[[str], None]) -> None:
        """Args:
        count: called with the `WarmStatus` of each finished passage.
        """
        self._engine = engine
        self._retriever = retriever
        self._count = count
        self._lock = threading.Lock()
        self._documents: collections.deque[str] = collections.deque()
        self._passages: collections.deque[Document] = collections.deque()
        self._warming: Warming | None = None
        self._num_prepared = 0
        self.restart()

    def restart(self) -> None:
        """Restarts with the current documents; passages that are cached already take no time.

        Processes on one store start at different documents: each skips what another one has stored.
        """
        if not self._engine.config.stores_chunks:
            return
        documents = self._retriever.document_ids
        with self._lock:
            self._passages.clear()
            self._documents = collections.deque(documents)
            if self._engine.config.store is not None and documents:
                self._documents.rotate(os.getpid() % len(documents))

    @property
    def num_documents_left(self) -> int:
        """Number of documents with passages that may still have to be prepared."""
        with self._lock:
            return len(self._documents) + bool(self._passages or self._warming)

    def step(self, is_wanted: Callable[[], bool]) -> bool:
        """Prepares a passage, unless `is_wanted`; False if no work is left now."""
        if not self._retriever.wait(_VECTORS_S):  # they take the same cores, and every question wants them
            return not is_wanted()
        if self._warming is None:
            self._warming = self._next()
        if self._warming is None:
            return False
        num_done = len(self._warming.done)
        try:
            is_through = self._engine.documents.warm_one(self._warming, is_cancelled=is_wanted)
        except Exception:
            logger.exception("documents: a passage could not be prepared; questions will compute it")
            self._warming = None
            return True
        for passage in self._warming.done[num_done:]:
            self._count(passage.status)
            self._num_prepared += passage.status == "computed"
        if self._warming.is_finished:
            self._warming = None
        return is_through

    def _next(self) -> Warming | None:
        while True:
            if self._engine.cache.capacity_used > NEARLY_FULL and self.num_documents_left:
                self._report(f"{self.num_documents_left} documents stay unprepared, since the cache is nearly full")
                with self._lock:
                    self._documents.clear()
                    self._passages.clear()
                return None
            with self._lock:
                while not self._passages and self._documents:
                    found = self._retriever.passages(self._documents.popleft())
                    self._passages.extend(passage.as_document() for passage in found)
                passage = self._passages.popleft() if self._passages else None
            if passage is None:
                self._report("all documents are prepared")
                return None
            try:
                return self._engine.documents.begin_warming([passage])
            except RequestError as error:
                logger.warning("documents: passage %s cannot be prepared: %s", passage.id, error)

    def _report(self, what: str) -> None:
        if self._num_prepared:
            logger.info("documents: %s; %d passages were computed in idle time", what, self._num_prepared)
            self._num_prepared = 0

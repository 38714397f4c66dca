"""Work on an index while it is searched: vectors that passages still lack, and clusters of all vectors."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ccjax.retrieval.embedding import embed_each
from ccjax.retrieval.index import PassageIndex

Embed = Callable[[Sequence[str]], np.ndarray]

_FILLED_TOGETHER, _FILLED_SHARE = 1024, 1 / 32
"""Passages whose vectors are stored, and searched, together: most, and share of those left, since processes that share
an index may compute the same ones; as many are computed again after a process was killed."""
_EMBEDDED_TOGETHER = 16
"""Passages that are embedded without a look at what else is wanted: half a second on two CPU cores."""
_GIVES_WAY_S = 1.0
"""Longest pause before the next ones while something else is wanted."""
_LOOKS_EVERY_S = 0.01
_TELLS_EVERY_S = 10.0
_log = logging.getLogger(__name__)


class BackgroundWork:
    """Fills and clusters one index in threads of its own.

    Attributes:
      is_wanted: while it returns True, vectors are computed more slowly, since something else needs the processor.
    """

    def __init__(self, index: PassageIndex, embed: Embed) -> None:
        self._index, self._embed = index, embed
        self.is_wanted: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        self._is_done.set()
        self._is_closed = False
        self._clustering = threading.Thread()

    def start(self) -> None:
        """Begins with what there is to do and nobody does yet."""
        with self._lock:
            if self._is_closed or not self._is_done.is_set():
                return
            if self._index.num_pending:
                self._is_done.clear()
                atexit.register(self.close)  # XLA aborts a process that ends while a thread computes
                threading.Thread(target=self._fill, name="ccjax-vectors", daemon=True).start()
            elif not self._clustering.is_alive():
                self._clustering = threading.Thread(target=self._cluster, name="ccjax-cluster", daemon=True)
                self._clustering.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all vectors are computed, or that failed; False if it took longer."""
        return self._is_done.wait(timeout_s)

    def close(self) -> None:
        """Ends the computation of vectors; the index can be closed afterwards."""
        with self._lock:
            self._is_closed = True
        self._is_done.wait()

    def _fill(self) -> None:
        index = self._index
        try:
            _log.info("the vectors of %d passages are computed, which are found by words until then", index.num_pending)
            told_s = time.monotonic()
            while self._is_more_pending():
                count = max(_EMBEDDED_TOGETHER, int(_FILLED_SHARE * index.num_pending))
                pending = index.pending(min(count, _FILLED_TOGETHER))
                rows = sorted(pending, key=lambda row: len(pending[row].text))  # of similar length: padded less
                vectors: list[np.ndarray] = []
                for start in range(0, len(rows), _EMBEDDED_TOGETHER):
                    self._give_way()
                    if self._is_closed:
                        break
                    some = [pending[row] for row in rows[start : start + _EMBEDDED_TOGETHER]]
                    names = [passage.passage_id for passage in some]
                    vectors.append(embed_each(self._embed, [passage.text for passage in some], names))
                if vectors:
                    together = np.concatenate(vectors)
                    index.fill(rows[: len(together)], together)
                if time.monotonic() >= told_s + _TELLS_EVERY_S or not index.num_pending:
                    told_s = time.monotonic()
                    _log.info("vectors: %d passages left", index.num_pending)
        except Exception:
            _log.exception("no more vectors are computed until the next refresh; passages are found by words meanwhile")
            with self._lock:
                self._end()
        else:
            self.start()

    def _give_way(self) -> None:
        end_s = time.monotonic() + _GIVES_WAY_S
        while self.is_wanted() and not self._is_closed and time.monotonic() < end_s:
            time.sleep(_LOOKS_EVERY_S)

    def _is_more_pending(self) -> bool:
        """False, and noted, if nothing is left to compute: what is added later needs another `start`."""
        with self._lock:
            is_more = not self._is_closed and self._index.num_pending > 0
            if not is_more:
                self._end()
        return is_more

    def _end(self) -> None:
        atexit.unregister(self.close)
        self._is_done.set()

    def _cluster(self) -> None:
        try:
            if self._index.improve():
                _log.info("the vectors of %d passages were clustered", len(self._index))
        except Exception:
            if not self._is_closed:
                _log.exception("clustering failed; all vectors are compared")

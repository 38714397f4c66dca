"""Copies KV from the pages of a device tier to host memory, on a thread of its own."""

from __future__ import annotations

import abc
import concurrent.futures
import threading
from collections.abc import Callable

import numpy as np

from ccjax.store.errors import StoreUnavailableError
from ccjax.store.spec import KVSpec


class PagedKV(abc.ABC):
    """KV in the pages of a device tier, valid as long as this object is held.

    Attributes:
      slots: [T] int32, slot of each token.
      begins_pages: the first token and every later one that would begin a page, if they filled pages, does: requests
        can read it in place.
    """

    slots: np.ndarray
    begins_pages: bool

    @abc.abstractmethod
    def read_layers(self, first: int, last: int) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` of layers `[first, last)`, copied to host memory."""


class HostCopy:
    """KV `[L, 2, T, K, H]` that is being copied to host memory."""

    def __init__(self, copying: concurrent.futures.Future[np.ndarray]) -> None:
        self._copying = copying

    @property
    def is_done(self) -> bool:
        """True if `wait` would not wait."""
        return self._copying.done()

    @property
    def kv(self) -> np.ndarray | None:
        """The KV if it is there already, else None."""
        return self._copying.result() if self.is_done and self._copying.exception() is None else None

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """The KV, read-only.

        Raises:
          TimeoutError: it was not copied within `timeout_s`; the copy continues.
          StoreUnavailableError: the device lost the KV.
        """
        return self._copying.result(timeout_s)


class HostCopier:
    """Copies KV to host memory in the order of the calls, on one thread.

    Args:
      max_pending_bytes: KV that may wait for its copy, and thereby hold its pages.
    """

    def __init__(self, kv_spec: KVSpec, max_pending_bytes: int) -> None:
        self._kv_spec = kv_spec
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="store-copy")
        self._last: concurrent.futures.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """True while no more copies should be started."""
        return self._pending_bytes >= self._max_pending_bytes

    def start(self, kv: PagedKV, on_failure: Callable[[HostCopy, Exception], None]) -> HostCopy:
        """Starts a copy, which holds the pages until it is done.

        Args:
          on_failure: called, from the thread, with the copy and the error if it fails.
        """
        sources = [kv]  # emptied by the thread: a finished copy holds no pages
        copying: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()
        started, num_bytes = HostCopy(copying), self._kv_spec.num_bytes(len(kv.slots))
        self._count(num_bytes)

        def copy() -> None:
            try:
                copied = sources.pop().read_layers(0, self._kv_spec.num_layers)
            except Exception as error:
                failure = StoreUnavailableError(f"KV on the device could not be copied to host memory: {error}")
                self._count(-num_bytes)
            else:
                self._count(-num_bytes)
                copied.flags.writeable = False
                copying.set_result(copied)
                return
            on_failure(started, failure)  # out here, where the error has no traceback that would hold the pages
            copying.set_exception(failure)

        self._last = self._executor.submit(copy)
        return started

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._pending_bytes += num_bytes

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all copies started so far are done; False after `timeout_s`."""
        last = self._last
        return last is None or not concurrent.futures.wait([last], timeout_s).not_done

    def close(self) -> None:
        """Finishes the copies and ends the thread. May be called twice."""
        self._executor.shutdown(wait=True)


KV = np.ndarray | PagedKV
"""KV of a variant, [L, 2, T, K, H] or in pages."""


def host_array(kv: np.ndarray | HostCopy) -> np.ndarray:
    """The KV in host memory, once it is there.

    Raises:
      StoreUnavailableError: as `HostCopy.wait`.
    """
    return kv.wait() if isinstance(kv, HostCopy) else kv

"""What happens while an index does not answer: only the call that detects it waits, later calls fail at once, and
leases are those of the store's root."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence

from ccjax.store.errors import IndexUnavailableError
from ccjax.store.index.api import LeaseTable
from ccjax.store.leases import Lease

ANSWER_S = 0.5
"""Timeout of a connection attempt and of a reply: the delay of the call that detects an outage."""

PROBE_INTERVAL_S = 0.5
"""Pause between two background probes of an index that did not answer."""


class Outage:
    """Outage state of one index. Thread-safe.

    Args:
      name: name of the index in messages; contains no password.
      probe: raises while the index does not answer; called on a separate thread.
    """

    def __init__(self, name: str, probe: Callable[[], object]) -> None:
        self._name = name
        self._probe = probe
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._next_probe_s = 0.0
        self._is_probing = False

    def check(self) -> None:
        """Call before each use of the index; starts a background probe during an outage if one is due.

        Raises:
          IndexUnavailableError: the index did not answer recently.
        """
        with self._lock:
            if self._reason is None:
                return
            error = IndexUnavailableError(f"{self._name} did not answer recently: {self._reason}")
            is_due = not self._is_probing and time.monotonic() >= self._next_probe_s
            self._is_probing = self._is_probing or is_due
        if is_due:
            threading.Thread(target=self._check, name="store-index-probe", daemon=True).start()
        raise error

    def begin(self, error: Exception) -> IndexUnavailableError:
        """Records that a call failed because the index did not answer; returns the exception to raise."""
        with self._lock:
            self._reason = _first_line(error)
            self._next_probe_s = time.monotonic() + PROBE_INTERVAL_S
        return self.refusal(error)

    def refusal(self, error: Exception) -> IndexUnavailableError:
        """The exception to raise if the index answered with an error."""
        return IndexUnavailableError(f"{self._name}: {_first_line(error)}")

    def _check(self) -> None:
        reason = None
        try:
            self._probe()
        except Exception as error:
            reason = _first_line(error)
        with self._lock:
            self._reason, self._is_probing = reason, False
            self._next_probe_s = time.monotonic() + PROBE_INTERVAL_S


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class PreferredLeases:
    """A `LeaseTable` that falls back to another one. May raise what `fallback` raises.

    While only some processes reach the index, the two kinds of leases do not exclude each other, as with processes that
    have no index. Work may then be done twice, which leases always allow.

    Args:
      preferred: leases of an index, which have epoch 0.
      fallback: leases of a root, which have positive epochs.
    """

    def __init__(self, preferred: LeaseTable, fallback: LeaseTable) -> None:
        self._preferred = preferred
        self._fallback = fallback

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        try:
            return self._preferred.acquire(keys, seconds)
        except OSError:
            return self._fallback.acquire(keys, seconds)

    def held(self, keys: Collection[str]) -> frozenset[str]:
        try:
            return self._preferred.held(keys)
        except OSError:
            return self._fallback.held(keys)

    def release(self, lease: Lease) -> None:
        if lease.epoch:
            self._fallback.release(lease)
            return
        with contextlib.suppress(OSError):  # otherwise it expires
            self._preferred.release(lease)

    def sweep(self) -> None:
        with contextlib.suppress(OSError):
            self._preferred.sweep()
        self._fallback.sweep()

"""Leases of a shared index, sealed if the store has keys, with the leases of the store's root as fallback.

While only some processes reach the index, the two kinds of leases do not exclude each other, as with processes that
have no index. Work may then be done twice, which leases always allow.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ccjax.store.index.api import LeaseTable
from ccjax.store.leases import Lease
from ccjax.store.spec import StoreIdentity

LATE_S = 60.0
"""Grace period of a sealed lease after its expiry by the holder's clock: the index expires leases by its own clock,
which may differ. A lease that is present later than that was replayed."""

_MOST_FORGED = 8
"""Most entries without a valid seal that one call clears."""


class LeaseRows(Protocol):
    """The stored leases of one namespace. Thread-safe; may raise OSError."""

    def take(self, rows: Sequence[tuple[str, str]], seconds: float) -> int:
        """Writes the value under each key, expiring after `seconds`, in order up to the first key that exists; returns
        the number written."""
        ...

    def values_of(self, keys: Collection[str]) -> Mapping[str, str]:
        """Key -> value of the keys that exist and have not expired."""
        ...

    def drop(self, key: str, value: str) -> None:
        """Deletes a key if it has that value."""
        ...

    def sweep(self) -> None:
        """Deletes expired keys."""
        ...


class IndexLeases:
    """A `LeaseTable` based on `LeaseRows`. May raise OSError.

    Args:
      identity: owner; if it has keys, a lease is sealed together with its key and its expiry, and unsealed entries are
        ignored.
      clock: seconds on this host, for the expiry of a sealed lease.

    Attributes:
      num_forged: unsealed entries found so far.
    """

    def __init__(
        self, rows: LeaseRows, identity: StoreIdentity | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._rows = rows
        self._identity = identity if identity is not None and identity.keys is not None else None
        self._clock = clock
        self.num_forged = 0

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        if not keys:
            return []
        holder, until_s = uuid.uuid4().hex, self._clock() + seconds
        rows = [(key, self._value(key, holder, until_s)) for key in keys]
        num_won = self._rows.take(rows, seconds)
        for _ in range(_MOST_FORGED if self._identity is not None else 0):
            if num_won == len(rows) or not self._drop_forged(keys[num_won]):
                break
            num_won += self._rows.take(rows[num_won:], seconds)
        return [Lease(key, 0, value, until_s) for key, value in rows[:num_won]]

    def held(self, keys: Collection[str]) -> frozenset[str]:
        return frozenset(key for key, value in self._rows.values_of(keys).items() if self._is_ours(key, value))

    def release(self, lease: Lease) -> None:
        self._rows.drop(lease.key, lease.holder)

    def sweep(self) -> None:
        self._rows.sweep()

    def _value(self, key: str, holder: str, until_s: float) -> str:
        if self._identity is None:
            return holder
        return self._identity.seal("index lease", key, json.dumps([holder, until_s]).encode()).hex()

    def _is_ours(self, key: str, value: str) -> bool:
        if self._identity is None:
            return True
        try:
            _, until_s = json.loads(self._identity.unseal("index lease", key, bytes.fromhex(value)))
            if self._clock() < until_s + LATE_S:
                return True
        except (ValueError, TypeError):  # SealError is a ValueError; SQLite may store other types
            pass
        self.num_forged += 1
        return False

    def _drop_forged(self, key: str) -> bool:
        """Clears a key whose entry has no valid seal; False if the lease is genuine."""
        value = self._rows.values_of([key]).get(key)
        if value is None:  # it just expired
            return True
        if self._is_ours(key, value):
            return False
        self._rows.drop(key, value)
        return True


class PreferredLeases:
    """A `LeaseTable` that falls back to another one. May raise what `fallback` raises.

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

"""Interface of the shared index, through which the processes on one store notify each other.

The commit records in the store are authoritative; an index may be lost, late or empty at any time. That only costs
time: variants are found by the next listing, work is done twice, and orders are placed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ccjax.store.leases import Lease

CHANGES_KEPT = 2048
"""Number of changes that an index keeps at least: a hundred times what a process that polls every 50 ms needs."""

CHANGES_AT_ONCE = 64
"""Most changes that one call returns or should send: 2 MiB if all have records of the largest size sent, which must
arrive within half a second."""

MOST_ORDERS = 4096
"""Further orders replace the oldest."""

ADDED, REMOVED, MORE = "added", "removed", "more"
"""Kinds of changes; "more" names no variant and means that the store has to be listed."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreChanges:
    """Changes of the variants of a store since a cursor.

    Attributes:
      cursor: cursor for the next call.
      added: variant id -> the bytes of its last commit record, None if it has to be read from the store.
      removed: variant id -> its deleted data object, None if the store has to be checked. A variant may be in both,
        because its deletion may be announced after another process announced that it rewrote the variant.
      is_complete: False if changes since that cursor are missing, because the index was lost, trimmed or not notified;
        the store has to be listed then.
    """

    cursor: str
    added: Mapping[str, bytes | None]
    removed: Mapping[str, str | None]
    is_complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Work that a process requests from any other process.

    Attributes:
      key: identifies the work, so that an order placed twice is carried out once.
      value: description of the work, as written by the process that placed the order.
      attempt: how often the order was taken, including this time.
    """

    key: str
    value: bytes
    attempt: int


class LeaseTable(Protocol):
    """Time-limited leases, with which a process declares that it computes something. Thread-safe; may raise OSError."""

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        """Acquires leases on the first of `keys`, up to the first one held by another process."""
        ...

    def held(self, keys: Collection[str]) -> frozenset[str]:
        """Those of `keys` with a live lease of any process."""
        ...

    def release(self, lease: Lease) -> None:
        """Releases a lease; does nothing if it expired or another process holds it."""
        ...

    def sweep(self) -> None:
        """Deletes leases left by killed processes."""
        ...


class OrderBoard(Protocol):
    """Orders for work that any process may carry out. Thread-safe; may raise OSError. Best effort: an order may be
    lost."""

    def place(self, key: str, value: bytes, seconds: float) -> bool:
        """Places an order that expires after `seconds`; False if it already exists (its expiry does not change)."""
        ...

    def take(self, seconds: float) -> Order | None:
        """Takes the oldest free order; after `seconds`, other processes may take it. None if there is none."""
        ...

    def finish(self, key: str) -> None:
        """Removes an order that is done or obsolete; does nothing if there is none."""
        ...

    def __len__(self) -> int:
        """Number of orders, taken or not, that are neither finished nor expired."""
        ...


class SharedIndex(Protocol):
    """One namespace of an index. Thread-safe; every method may raise OSError.

    Attributes:
      leases, orders: the tables of this namespace.
    """

    leases: LeaseTable
    orders: OrderBoard

    def notify(
        self, added: Mapping[str, bytes | None], removed: Mapping[str, str | None], *, is_complete: bool = True
    ) -> None:
        """Announces commits of this process (with the record bytes, None if too long to send) and deletions (with the
        data objects, None if unknown). With `is_complete` False there are further changes, and receivers must list the
        store."""
        ...

    def changes(self, cursor: str | None) -> StoreChanges:
        """The changes of other processes since `cursor`, or the first part of them; an empty result means that there
        are no more. With None, returns no changes and the current cursor."""
        ...

    def close(self) -> None:
        """Closes the connections."""
        ...


def changes_to_send(
    added: Mapping[str, bytes | None], removed: Mapping[str, str | None], is_complete: bool
) -> list[tuple[str, str, bytes]]:
    """Kind, variant, and record or object of each change, as an index stores them; empty bytes for None."""
    found = [(REMOVED, variant_id, (object_id or "").encode()) for variant_id, object_id in removed.items()]
    found += [(ADDED, variant_id, record or b"") for variant_id, record in added.items()]
    return found if is_complete else [*found, (MORE, "", b"")]


def changes_read(cursor: str, found: Iterable[tuple[str, str, bytes]], is_complete: bool) -> StoreChanges:
    """Inverse of `changes_to_send`; the changes are applied in order."""
    added: dict[str, bytes | None] = {}
    removed: dict[str, str | None] = {}
    for kind, variant_id, value in found:
        if kind == MORE:
            is_complete = False
        elif kind == ADDED:
            added[variant_id] = value or None
        else:
            record_removal(removed, variant_id, value.decode("latin-1") or None)  # untrusted bytes
    return StoreChanges(cursor, added, removed, is_complete)


def record_removal(removed: dict[str, str | None], variant_id: str, object_id: str | None) -> None:
    """Adds to `StoreChanges.removed`; for two removed objects of one variant, the store has to be checked."""
    removed[variant_id] = object_id if removed.get(variant_id, object_id) == object_id else None

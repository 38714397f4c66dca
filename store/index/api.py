"""What processes on one store tell each other at once: the interface of a shared index.

The commit records in the store are the truth; an index may be lost, late or empty at any time. What that costs is time:
variants are found by the next listing, work is done twice, orders are placed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ccjax.store.leases import Lease

CHANGES_KEPT = 2048
"""Changes of variants that an index keeps at least: of one that follows every 50 ms, a hundred times what it needs."""

CHANGES_AT_ONCE = 64
"""At most so many come back from one call, or should go out with one: 2 MiB where all have the longest records that are
sent, which has to arrive within half a second."""

MOST_ORDERS = 4096
"""An order beyond that takes the place of the oldest."""

ADDED, REMOVED, MORE = "added", "removed", "more"
"""What a change can be; "more" is one that names no variant: the store has to be listed."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreChanges:
    """What happened to the variants of a store since a cursor.

    Attributes:
      cursor: to ask with the next time.
      added: variant id -> the bytes of its last commit record, None where it has to be read.
      removed: variant id -> the data object that is gone, None where the store has to be asked. A variant may be in
        both: who deleted it may tell of that after another process told that it wrote the variant anew.
      is_complete: False where the index does not know all since that cursor, because it was lost, or forgot, or nobody
        told it: the store has to be listed.
    """

    cursor: str
    added: Mapping[str, bytes | None]
    removed: Mapping[str, str | None]
    is_complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Work that some process asks for, whoever does it.

    Attributes:
      key: names the work; one that is ordered twice is done once.
      value: what to do, as the one who ordered it wrote it.
      attempt: how often somebody took it, this time included: at least 1.
    """

    key: str
    value: bytes
    attempt: int


class LeaseTable(Protocol):
    """For some seconds one of many processes may say "I compute this". Thread-safe; may raise OSError."""

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        """Leases on the first of `keys`, up to the one that another process holds."""
        ...

    def held(self, keys: Collection[str]) -> frozenset[str]:
        """Those of `keys` on which there is a live lease, whoever holds it."""
        ...

    def release(self, lease: Lease) -> None:
        """Gives a lease up; nothing happens where it expired, and another holder's stays."""
        ...

    def sweep(self) -> None:
        """Deletes what killed processes left."""
        ...


class OrderBoard(Protocol):
    """Work that processes ask each other for. Thread-safe; may raise OSError. It is advice: an order may be lost."""

    def place(self, key: str, value: bytes, seconds: float) -> bool:
        """Asks for work, for so long; False where it was asked for already, whose time is not made longer."""
        ...

    def take(self, seconds: float) -> Order | None:
        """The oldest order that nobody has, for so many seconds: others may take it after that. None where there is
        none."""
        ...

    def finish(self, key: str) -> None:
        """Takes an order away, done or not wanted any more; nothing happens where there is none."""
        ...

    def __len__(self) -> int:
        """Orders that are not finished and not too old, taken or not."""
        ...


class SharedIndex(Protocol):
    """One namespace of an index. Thread-safe; every method may raise OSError.

    Attributes:
      leases, orders: see there.
      num_forged: those of them so far that were not sealed, where the store has keys.
    """

    leases: LeaseTable
    orders: OrderBoard

    @property
    def num_forged(self) -> int: ...

    def notify(
        self, added: Mapping[str, bytes | None], removed: Mapping[str, str | None], *, is_complete: bool = True
    ) -> None:
        """Tells others what this process committed (with the bytes of the records, None where these are too long to be
        sent) and deleted (with the data objects, None where these are not known). With `is_complete` off more happened
        than that: what they read next is not complete."""
        ...

    def changes(self, cursor: str | None) -> StoreChanges:
        """What others told since `cursor`, or the first part of it: nothing more is there once it is empty. With None
        nothing, and the cursor of this moment."""
        ...

    def close(self) -> None:
        """Gives connections back."""
        ...


def changes_to_send(
    added: Mapping[str, bytes | None], removed: Mapping[str, str | None], is_complete: bool
) -> list[tuple[str, str, bytes]]:
    """Kind, variant and record or object of each change, as an index keeps them; no bytes where there are none."""
    found = [(REMOVED, variant_id, (object_id or "").encode()) for variant_id, object_id in removed.items()]
    found += [(ADDED, variant_id, record or b"") for variant_id, record in added.items()]
    return found if is_complete else [*found, (MORE, "", b"")]


def changes_read(cursor: str, found: Iterable[tuple[str, str, bytes]], is_complete: bool) -> StoreChanges:
    """The changes that `changes_to_send` made, in order."""
    added: dict[str, bytes | None] = {}
    removed: dict[str, str | None] = {}
    for kind, variant_id, value in found:
        if kind == MORE:
            is_complete = False
        elif kind == ADDED:
            added[variant_id] = value or None
        else:
            record_removal(removed, variant_id, value.decode("latin-1") or None)  # whatever somebody wrote
    return StoreChanges(cursor, added, removed, is_complete)


def record_removal(removed: dict[str, str | None], variant_id: str, object_id: str | None) -> None:
    """Adds to `StoreChanges.removed`; with two removed objects of one variant, the store has to be asked."""
    removed[variant_id] = object_id if removed.get(variant_id, object_id) == object_id else None

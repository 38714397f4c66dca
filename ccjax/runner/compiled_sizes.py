"""Which sizes an engine's steps are compiled for, and which one rows and slots are padded to.

Verbs: `pack`, `rows`, `decode`, `batch` and `write` say which size to take, `note` that one is compiled, `next` which
is to be compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Literal

from ccjax.runner.buckets import batch_bucket, entry_bucket, segment_bucket, slot_bucket, token_bucket

Kind = Literal["pack", "decode", "batch", "write", "context"]
"""What a size is of: a pack (rows, context slots, columns of the mass output or 0), a decode step (requests, entries of
the page tables), logits (rows), a variant that is written to the pool (tokens), a context that is brought into it
(slots)."""

Key = tuple[Kind, tuple[int, ...]]
"""A size and what it is of."""


class CompiledSizes:
    """The sizes of one engine; thread-safe.

    What is asked for gets its own size, the natural one, unless `substitute` was called: from then on it gets the
    smallest that is compiled and large enough, and its own is noted as wanted. Where none is, it gets its own, whose
    steps compile when they are called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[Kind, set[tuple[int, ...]]] = {}
        self._left: dict[Key, None] = {}
        self._wanted: dict[Key, None] = {}
        self._given_up: set[Key] = set()
        self._substitutes = False

    # -- which size to take ------------------------------------------------------------------------------------

    def pack(self, num_rows: int, num_slots: int, num_segments: int) -> tuple[int, int, int]:
        """(rows, context slots, columns of the mass output) of a pack; `num_segments` 0 for one without masses."""
        columns = segment_bucket(num_segments) if num_segments else 0
        rows, slots, columns = self._take("pack", (token_bucket(num_rows), slot_bucket(num_slots), columns))
        return rows, slots, columns

    def rows(self, num_rows: int, slots: int, columns: int) -> int:
        """Rows of a pack some of which were dropped, whose other numbers stay as `pack` gave them."""
        return self._take("pack", (token_bucket(num_rows), slots, columns), num_fixed=2)[0]

    def decode(self, num_requests: int, num_entries: int) -> tuple[int, int]:
        """(requests, entries of the page tables) of a decode step, and of the logits behind it."""
        requests, entries = self._take("decode", (batch_bucket(num_requests), entry_bucket(num_entries)))
        return requests, entries

    def batch(self, num_rows: int) -> int:
        """Rows of the logits behind a pack."""
        return self._take("batch", (batch_bucket(num_rows),))[0]

    def write(self, num_tokens: int) -> int:
        """Tokens that are written to the pool for a variant."""
        return self._take("write", (token_bucket(num_tokens),))[0]

    # -- what is compiled --------------------------------------------------------------------------------------

    def note(self, kind: Kind, size: tuple[int, ...]) -> bool:
        """Notes that a size is compiled; True the first time."""
        with self._lock:
            compiled = self._compiled.setdefault(kind, set())
            is_new = size not in compiled
            compiled.add(size)
            self._left.pop((kind, size), None)
            self._wanted.pop((kind, size), None)
        return is_new

    def compiled(self, kind: Kind) -> frozenset[tuple[int, ...]]:
        """The sizes that were noted."""
        with self._lock:
            return frozenset(self._compiled.get(kind, ()))

    def substitute(self, left: Iterable[Key]) -> None:
        """From now on compiled sizes are given in place of others.

        Args:
          left: what is to be compiled besides what is wanted; what is compiled already is left out.
        """
        with self._lock:
            self._substitutes = True
            self._left = {(kind, size): None for kind, size in left if size not in self._compiled.get(kind, ())}

    def next(self) -> Key | None:
        """What to compile next: what was wanted first, then what is left; None once there is nothing."""
        with self._lock:
            return next(iter(self._wanted or self._left), None)

    def give_up(self, key: Key) -> None:
        """Strikes a size out that cannot be compiled: it is never asked for again."""
        with self._lock:
            self._given_up.add(key)
            self._left.pop(key, None)
            self._wanted.pop(key, None)

    @property
    def num_left(self) -> int:
        """Sizes that are still to be compiled."""
        with self._lock:
            return len(self._wanted.keys() | self._left.keys())

    def _take(self, kind: Kind, natural: tuple[int, ...], num_fixed: int = 0) -> tuple[int, ...]:
        """The size to take; the last `num_fixed` numbers stay as they are."""
        with self._lock:
            compiled = self._compiled.get(kind, set())
            if not self._substitutes or natural in compiled:
                return natural
            first_fixed = len(natural) - num_fixed
            large_enough = [
                size
                for size in compiled
                if size[first_fixed:] == natural[first_fixed:] and all(map(int.__ge__, size, natural))
            ]
            if not large_enough:
                return natural
            if (kind, natural) not in self._given_up:
                self._wanted[kind, natural] = None
            # Rows and requests stand first: each one more is computed with, an unused slot or entry is not looked at.
            return min(large_enough)

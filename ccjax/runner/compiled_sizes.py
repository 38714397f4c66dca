"""The sizes that an engine's steps are compiled for, and the size that rows and slots are padded to.

`pack`, `fewer`, `question`, `decode`, `batch` and `write` return the size to use, `note` records a compiled size,
`next` returns the next size to compile.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Sequence
from typing import Literal

from ccjax.runner.buckets import (
    batch_bucket,
    entry_bucket,
    question_bucket,
    segment_bucket,
    slot_bucket,
    token_bucket,
)

Kind = Literal["pack", "question", "decode", "batch", "masks", "adjustments", "write", "context"]
"""What a size describes: a pack (rows, context slots, columns of the mass output or 0), a pass of questions (rows,
context slots), a decode step (requests, entries of the page tables), logits (rows), the same with masks of constrained
answers or with penalties (rows), a variant written to the pool (tokens), a context loaded into it (slots)."""

Key = tuple[Kind, tuple[int, ...]]
"""A size and its kind."""


class CompiledSizes:
    """The sizes of one engine; thread-safe.

    A request for a size returns its natural size until `substitute` is called. From then on, if the natural size is not
    compiled, it returns the smallest compiled size that is large enough and records the natural one as wanted. If no
    compiled size is large enough, it returns the natural one, whose steps compile on first use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[Kind, set[tuple[int, ...]]] = {}
        self._left: dict[Key, None] = {}
        self._wanted: dict[Key, None] = {}
        self._given_up: set[Key] = set()
        self._substitutes = self._notes_wanted = False

    # -- which size to take ------------------------------------------------------------------------------------

    def pack(self, rows_by_layer: Sequence[int], num_slots: int, num_segments: int) -> tuple[int, int, int]:
        """(rows of the first layer, context slots, columns of the mass output) of a pack.

        All layers have the same slots and columns, so a substitute is chosen by the rows that run there in all layers
        together: where only large sizes are compiled, a prompt gains nothing by dropping rows.

        Args:
          rows_by_layer: rows of each layer, as far as known before the first one runs.
          num_segments: 0 without masses.
        """
        slots, columns = slot_bucket(num_slots), segment_bucket(num_segments) if num_segments else 0
        layers = collections.Counter(token_bucket(count) for count in rows_by_layer)
        first, most = token_bucket(rows_by_layer[0]), max(layers)
        naturals = [(rows, slots, columns) for rows in layers]
        with self._lock:
            compiled = self._compiled.get("pack", set())
            if not self._substitutes or compiled.issuperset(naturals):
                return first, slots, columns
            rows_at: dict[tuple[int, int], list[int]] = {}
            for count, *where in compiled:
                if where[0] >= slots and where[1] >= columns:
                    rows_at.setdefault((where[0], where[1]), []).append(count)
            options = []
            for where, counts in rows_at.items():
                if max(counts) >= most:
                    substitute = {rows: min(count for count in counts if count >= rows) for rows in layers}
                    total = sum(substitute[rows] * num_layers for rows, num_layers in layers.items())
                    options.append((total, *where, substitute[first]))
            if not options:
                return first, slots, columns
            self._want("pack", naturals)
            _, slots, columns, rows = min(options)
            return rows, slots, columns

    def fewer(self, kind: Kind, size: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
        """The size of a pack, or of a pass of questions, after some rows were dropped; its other numbers stay."""
        bucket = question_bucket if kind == "question" else token_bucket
        return self._take(kind, (bucket(num_rows), *size[1:]), num_fixed=len(size) - 1)

    def question(self, num_rows: int, num_slots: int) -> tuple[int, int]:
        """(rows, context slots) of a pass of questions."""
        rows, slots = self._take("question", (question_bucket(num_rows), slot_bucket(num_slots)))
        return rows, slots

    def decode(self, num_requests: int, num_entries: int) -> tuple[int, int]:
        """(requests, entries of the page tables) of a decode step; its logits have as many rows as requests."""
        requests, entries = self._take("decode", (batch_bucket(num_requests), entry_bucket(num_entries)))
        return requests, entries

    def batch(self, num_rows: int) -> int:
        """Rows of the logits after a pack."""
        return self._take("batch", (batch_bucket(num_rows),))[0]

    def write(self, num_tokens: int) -> int:
        """Tokens written to the pool for a variant."""
        return self._take("write", (token_bucket(num_tokens),))[0]

    # -- what is compiled --------------------------------------------------------------------------------------

    def note(self, kind: Kind, size: tuple[int, ...]) -> bool:
        """Records that a size is compiled; returns True the first time."""
        with self._lock:
            compiled = self._compiled.setdefault(kind, set())
            is_new = size not in compiled
            compiled.add(size)
            self._left.pop((kind, size), None)
            self._wanted.pop((kind, size), None)
        return is_new

    def compiled(self, kind: Kind) -> frozenset[tuple[int, ...]]:
        """The recorded sizes of a kind."""
        with self._lock:
            return frozenset(self._compiled.get(kind, ()))

    def substitute(self, left: Iterable[Key], *, notes_wanted: bool = True) -> None:
        """From now on, substitutes compiled sizes for those that are not compiled.

        Args:
          left: sizes to compile besides those that will be wanted; compiled ones are ignored.
          notes_wanted: `next` also returns the sizes that requests wanted.
        """
        with self._lock:
            self._substitutes, self._notes_wanted = True, notes_wanted
            self._left = {(kind, size): None for kind, size in left if size not in self._compiled.get(kind, ())}

    def next(self) -> Key | None:
        """The next size to compile: wanted ones first, then the remaining ones; None if there is none."""
        with self._lock:
            return next(iter(self._wanted or self._left), None)

    def give_up(self, key: Key) -> None:
        """Removes a size that cannot be compiled; `next` will not return it again."""
        with self._lock:
            self._given_up.add(key)
            self._left.pop(key, None)
            self._wanted.pop(key, None)

    @property
    def num_left(self) -> int:
        """Number of sizes still to be compiled."""
        with self._lock:
            return len(self._wanted.keys() | self._left.keys())

    def _take(self, kind: Kind, natural: tuple[int, ...], num_fixed: int = 0) -> tuple[int, ...]:
        """The size to use; the last `num_fixed` numbers are not changed."""
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
            self._want(kind, [natural])
            # Rows and requests come first in a size: each extra one is computed, unused slots and entries are not read.
            return min(large_enough)

    def _want(self, kind: Kind, sizes: Iterable[tuple[int, ...]]) -> None:
        """Compiles these sizes next, except those that are compiled or cannot be."""
        compiled = self._compiled.get(kind, set())
        for size in sizes:
            if self._notes_wanted and size not in compiled and (kind, size) not in self._given_up:
                self._wanted[kind, size] = None

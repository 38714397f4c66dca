"""Keys ordered by ranks that may change."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Any)


class LeastFirst(Generic[Key]):
    """A heap of keys; `put` and `discard` cost O(log n) amortised, because outdated entries stay in the heap until they
    surface or outnumber the others. Equal ranks are ordered by key."""

    def __init__(self) -> None:
        self._ranks: dict[Key, Any] = {}
        self._heap: list[tuple[Any, Key]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, key: Key, rank: Any) -> None:
        """Adds the key, or changes its rank."""
        if self._ranks.get(key) != rank:
            self._ranks[key] = rank
            heapq.heappush(self._heap, (rank, key))
            self._compact()

    def discard(self, key: Key) -> None:
        """Removes the key if it is held."""
        if self._ranks.pop(key, None) is not None:
            self._compact()

    def least(self) -> tuple[Any, Key] | None:
        """The least rank and its key; None if nothing is held."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank:
                return rank, key
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + 16:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

"""When the variants of each chunk last changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ccjax.types import ChunkId

_MOST_CHUNKS = 100_000
_MOST_AT_ONCE = 1000


class Changes:
    """Counts changes, and keeps for each chunk the number of its last change, or of a later one.

    Attributes:
      count: changes so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._of_all = 0
        self._of_chunk: dict[ChunkId, int] = {}

    def note(self, chunk_id: ChunkId) -> None:
        """A variant of this chunk was added or removed."""
        self.count += 1
        self._of_chunk[chunk_id] = self.count
        if len(self._of_chunk) > _MOST_CHUNKS:
            self.note_all(0)

    def note_each(self, chunk_ids: Collection[ChunkId]) -> None:
        """A variant of each of these chunks was added or removed."""
        if len(chunk_ids) > _MOST_AT_ONCE:
            self.note_all(len(chunk_ids))
            return
        for chunk_id in chunk_ids:
            self.note(chunk_id)

    def note_all(self, num_changes: int) -> None:
        """Variants of many chunks, which are not tracked one by one, were added or removed."""
        self.count += num_changes
        self._of_all = self.count
        self._of_chunk.clear()

    def last(self, chunk_ids: Iterable[ChunkId]) -> int:
        """The number of the latest change that may concern any of these chunks; 0 for none."""
        return max((self._of_all, *(self._of_chunk.get(chunk_id, 0) for chunk_id in chunk_ids)))

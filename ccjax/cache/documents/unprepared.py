"""Passages that idle time should compute behind the frame."""

from __future__ import annotations

import collections
from collections.abc import Callable

from ccjax.prompts import Prompt
from ccjax.types import ChunkId

_MOST_KEPT = 1000


class UnpreparedPassages:
    """Passages of requests that idle time may prepare: the last 1,000 that were reused out of context, and the last
    1,000 that were computed.

    Those that were reused from KV computed behind too little text come first, since the next prompts are likely to
    reuse them, too. Not thread-safe.
    """

    def __init__(self) -> None:
        self._reused: collections.OrderedDict[ChunkId, Prompt] = collections.OrderedDict()
        self._computed: collections.OrderedDict[ChunkId, Prompt] = collections.OrderedDict()

    def count(self, *, only_reused: bool) -> int:
        """How many `pop` still returns."""
        return len(self._reused) + (0 if only_reused else len(self._computed))

    def note(self, alone: Prompt, *, was_reused: bool) -> None:
        """Adds a passage, or makes it the next of its kind.

        Args:
          alone: a prompt whose only passage it is.
        """
        chunk_id = alone.chunks[-1].chunk_id
        if was_reused:
            self._computed.pop(chunk_id, None)
        elif chunk_id in self._reused:
            return
        kept = self._reused if was_reused else self._computed
        kept[chunk_id] = alone
        kept.move_to_end(chunk_id)
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)

    def pop(self, *, only_reused: bool) -> tuple[Prompt, bool] | None:
        """Takes out the next passage: what `note` was given for it; None if there is none."""
        for kept, was_reused in ((self._reused, True), (self._computed, False)):
            if kept and (was_reused or not only_reused):
                return kept.popitem()[1], was_reused
        return None

    def drop(self, is_gone: Callable[[ChunkId], bool]) -> None:
        """Forgets passages that were erased."""
        for kept in (self._reused, self._computed):
            for chunk_id in [key for key in kept if is_gone(key)]:
                del kept[chunk_id]

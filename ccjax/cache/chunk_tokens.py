"""Token ids of the chunks of held variants and of their prefixes, so that a variant can be recomputed."""

from __future__ import annotations

import collections
from collections.abc import Iterable, KeysView, Sequence

import numpy as np

from ccjax.prompts import chunk_id, tenant_of
from ccjax.types import Chunk, ChunkId, VariantMeta


class ChunkTokens:
    """Chunk id -> token ids, kept while a held variant is of the chunk or has it in its prefix. Not thread-safe."""

    def __init__(self) -> None:
        self._ids: dict[ChunkId, np.ndarray] = {}
        self._num_uses: collections.Counter[ChunkId] = collections.Counter()

    def hold(self, meta: VariantMeta) -> None:
        """Counts a variant that is now held."""
        self._num_uses.update({meta.chunk_id, *meta.prefix_ids})

    def release(self, meta: VariantMeta) -> None:
        """Undoes `hold`; drops the ids of chunks that no held variant refers to any more."""
        for key in {meta.chunk_id, *meta.prefix_ids}:
            self._num_uses[key] -= 1
            if not self._num_uses[key]:
                del self._num_uses[key]
                self._ids.pop(key, None)

    def learn(self, key: ChunkId, token_ids: Sequence[int]) -> None:
        """Keeps the ids of a chunk that is in use; ignores ids that do not hash to the chunk's id."""
        if key in self._num_uses and key not in self._ids and chunk_id(token_ids, tenant_of(key)) == key:
            self._ids[key] = np.asarray(token_ids, np.int32)

    def known(self) -> KeysView[ChunkId]:
        """The chunks whose ids are known."""
        return self._ids.keys()

    def num_tokens(self, keys: Iterable[ChunkId]) -> int:
        """Total tokens of these chunks, without those whose ids are unknown."""
        return sum(len(self._ids[key]) for key in keys if key in self._ids)

    def ids(self, key: ChunkId) -> np.ndarray:
        """The chunk's token ids [n], int32.

        Raises:
          KeyError: they are not known.
        """
        return self._ids[key]

    def chunk(self, key: ChunkId) -> Chunk:
        """The chunk.

        Raises:
          KeyError: its ids are not known.
        """
        return Chunk(key, tuple(self._ids[key].tolist()))

"""Token ids of the chunks that held variants are made of, so that a variant can be computed again."""

from __future__ import annotations

import collections
from collections.abc import Iterable, KeysView, Sequence

import numpy as np

from ccjax.prompts import chunk_id, tenant_of
from ccjax.types import Chunk, ChunkId, VariantMeta


class ChunkTokens:
    """Chunk id -> token ids, while some held variant has the chunk as its own or in its prefix. Not thread-safe."""

    def __init__(self) -> None:
        self._ids: dict[ChunkId, np.ndarray] = {}
        self._num_uses: collections.Counter[ChunkId] = collections.Counter()

    def hold(self, meta: VariantMeta) -> None:
        """Counts a variant that is held from now on."""
        self._num_uses.update({meta.chunk_id, *meta.prefix_ids})

    def release(self, meta: VariantMeta) -> None:
        """Takes back `hold`; what no held variant refers to any more is dropped."""
        for key in {meta.chunk_id, *meta.prefix_ids}:
            self._num_uses[key] -= 1
            if not self._num_uses[key]:
                del self._num_uses[key]
                self._ids.pop(key, None)

    def learn(self, key: ChunkId, token_ids: Sequence[int]) -> None:
        """Keeps the ids of a chunk that is in use; ids that are not the chunk's are passed over."""
        if key in self._num_uses and key not in self._ids and chunk_id(token_ids, tenant_of(key)) == key:
            self._ids[key] = np.asarray(token_ids, np.int32)

    def known(self) -> KeysView[ChunkId]:
        """The chunks whose ids are known."""
        return self._ids.keys()

    def num_tokens(self, keys: Iterable[ChunkId]) -> int:
        """Tokens of these chunks together, those that are not known left out."""
        return sum(len(self._ids[key]) for key in keys if key in self._ids)

    def chunk(self, key: ChunkId) -> Chunk:
        """The chunk.

        Raises:
          KeyError: its ids are not known.
        """
        return Chunk(key, tuple(self._ids[key].tolist()))

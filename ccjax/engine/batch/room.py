"""The pages that requests could have, and who gives them up: cached chunks that nobody uses, prompts whose answers all
wait."""

from __future__ import annotations

from ccjax.engine.batch.siblings import SharedPrompt, Siblings
from ccjax.engine.pool import DevicePool
from ccjax.engine.variants import VariantIndex
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE


class Room:
    """What is free in a pool, or could be.

    Attributes:
      shared: the requests whose prompt is shared.
    """

    def __init__(self, pool: DevicePool, store: TieredStore, variants: VariantIndex) -> None:
        self.shared: list[Siblings] = []
        self._pool = pool
        self._store = store
        self._variants = variants
        self._caches_chunks = DEVICE in store.memory_tiers

    @property
    def num_pages(self) -> int:
        """Pages that requests could have: free ones, those of cached chunks that nobody uses, those of prompts that no
        admitted answer reads."""
        return self._num_evictable + sum(one.prompt.num_pages for one in self.shared if one.prompt and one.is_parked)

    def make(self, num_pages: int) -> list[tuple[Siblings, SharedPrompt]]:
        """Frees so many pages, if that can be, and returns the prompts that had to be dropped for it, oldest first:
        as few as can be, for to compute one again takes longer than to load a cached chunk."""
        dropped = []
        for siblings in [one for one in self.shared if one.is_parked]:
            if num_pages <= self._num_evictable:
                break
            dropped.append((siblings, self.drop(siblings)))
        if self._caches_chunks and num_pages > self._pool.num_free:
            self._variants.make_room(DEVICE, num_pages * self._pool.page_bytes)
        return dropped

    def lose(self) -> None:
        """Forgets the cached chunks that nobody uses, pinned documents or not: what their pages held is lost."""
        if self._caches_chunks:
            self._variants.lose(DEVICE)

    def drop(self, siblings: Siblings) -> SharedPrompt:
        """Frees a shared prompt, which no answer reads."""
        prompt, siblings.prompt = siblings.prompt, None
        assert prompt is not None
        self.shared.remove(siblings)
        prompt.drop()
        return prompt

    @property
    def _num_evictable(self) -> int:
        evictable = self._store.evictable_bytes(DEVICE) if self._caches_chunks else 0
        return self._pool.num_free + evictable // self._pool.page_bytes

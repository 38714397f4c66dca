"""The pages available to requests: free ones, and those of cached chunks and unread shared prompts."""

from __future__ import annotations

from ccjax.cache.device_preload import DevicePreloader
from ccjax.cache.variants import VariantIndex
from ccjax.engine.batch.group import SequenceGroup
from ccjax.engine.batch.shared_prompt import SharedPrompt
from ccjax.runner.pool import DevicePool
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE


class AvailablePages:
    """Counts and reclaims the pages of a pool that are free or can be freed.

    Attributes:
      shared: the groups whose prompt is shared, oldest first.
    """

    def __init__(
        self, pool: DevicePool, store: TieredStore, variants: VariantIndex, preloader: DevicePreloader | None = None
    ) -> None:
        self.shared: list[SequenceGroup] = []
        self._pool = pool
        self._store = store
        self._variants = variants
        self._preloader = preloader
        self._caches_chunks = DEVICE in store.memory_tiers

    @property
    def num_pages(self) -> int:
        """Free pages, plus those of unused cached chunks, of a copy for a queued request that is under way, and of
        shared prompts that no admitted sequence reads."""
        return self._num_evictable + sum(
            group.shared_prompt.num_pages for group in self.shared if group.shared_prompt and group.is_unread
        )

    def reclaim(self, num_pages: int) -> list[tuple[SequenceGroup, SharedPrompt]]:
        """Frees pages until `num_pages` are free, if possible. Returns the shared prompts dropped for this, oldest
        first; as few as possible, since computing a prompt again takes longer than loading a cached chunk."""
        dropped = []
        for group in [group for group in self.shared if group.is_unread]:
            if num_pages <= self._num_evictable:
                break
            dropped.append((group, self.drop(group)))
        if self._caches_chunks and num_pages > self._pool.num_free:
            num_bytes = num_pages * self._pool.page_bytes
            if not self._variants.make_room(DEVICE, num_bytes) and self._preloader is not None:
                self._preloader.give_back()  # last, since it has to be waited for
                self._variants.make_room(DEVICE, num_bytes)
        return dropped

    def forget_cached(self) -> None:
        """Removes the unused cached chunks, even of pinned documents, since the contents of their pages are lost."""
        if self._caches_chunks:
            self._variants.lose(DEVICE)

    def drop(self, group: SequenceGroup) -> SharedPrompt:
        """Frees a shared prompt that no sequence reads, and returns it."""
        shared_prompt, group.shared_prompt = group.shared_prompt, None
        assert shared_prompt is not None
        self.shared.remove(group)
        shared_prompt.drop()
        return shared_prompt

    @property
    def _num_evictable(self) -> int:
        num_reserved = 0 if self._preloader is None else self._preloader.num_pages
        return num_reserved + self._pool.num_available(self._store.pinned_ids if self._caches_chunks else ())

"""Where the KV of a running request lies: pages for each of its segments, some of them a cached chunk's own."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from ccjax.runner.pool import PAGE_TOKENS, DevicePool, PagedShard
from ccjax.types import PrefillPlan, VariantId

_PAGE, _START, _LENGTH = range(3)


def shared_segments(plan: PrefillPlan, chunks: Container[VariantId | None]) -> frozenset[int]:
    """Segments of a plan that are read where a cached chunk has them: reused without any change."""
    return frozenset(
        index
        for index, segment in enumerate(plan.segments)
        if segment.variant_id in chunks and not segment.recompute_offsets
    )


class RequestPages:
    """The pages of one request. A segment that is reused unchanged stays where the chunk is, and any number of requests
    read it there, each at its own position; every other one has pages of its own, and so has the answer.

    Its pages are free again, and the chunks' may be, after `release`, or once this object is released.

    Attributes:
      shared: indices of the segments that lie in a chunk's pages.
      num_tokens: tokens that have a slot: the prompt's and those of the answer so far.
      num_entries: pages that they take.
    """

    def __init__(self, pool: DevicePool, plan: PrefillPlan, chunks: Mapping[VariantId, PagedShard]) -> None:
        """
        Args:
          chunks: the plan's variants that are in the pool.

        Raises:
          TierFullError: too few pages are free; none is taken.
        """
        self._pool = pool
        self.shared = shared_segments(plan, chunks)
        own = [index for index in range(len(plan.segments)) if index not in self.shared]
        shards = dict(zip(own, pool.allocate([plan.segments[index].num_tokens for index in own]), strict=True))
        self._own = list(shards.values())
        self._num_prompt_shards = len(shards)
        self._segments: list[PagedShard] = []
        table: list[tuple[int, int, int]] = []
        for index, segment in enumerate(plan.segments):
            variant_id = segment.variant_id
            if variant_id is None or index not in self.shared:
                shard = shards[index]
            else:
                shard = chunks[variant_id]
            self._segments.append(shard)
            for first in range(0, segment.num_tokens, PAGE_TOKENS):
                page, length = int(shard.slots[first]) // PAGE_TOKENS, min(PAGE_TOKENS, segment.num_tokens - first)
                table.append((page, segment.start + first, length))
        self.num_tokens = plan.num_tokens
        self.num_entries = len(table)
        self._table = np.asarray(table, np.int32).T

    @property
    def needs_page(self) -> bool:
        """True when the next token of the answer begins a page."""
        return self._table[_LENGTH, self.num_entries - 1] == PAGE_TOKENS

    def append(self) -> int:
        """The slot of one more token, behind all others.

        Raises:
          TierFullError: it begins a page and none is free.
        """
        if self.needs_page:
            (shard,) = self._pool.allocate([1])
            self._own.append(shard)
            if self.num_entries == self._table.shape[1]:
                self._table = np.pad(self._table, ((0, 0), (0, self.num_entries)))
            self._table[:, self.num_entries] = shard.slots[0] // PAGE_TOKENS, self.num_tokens, 0
            self.num_entries += 1
        last = self._table[:, self.num_entries - 1]
        slot = int(last[_PAGE] * PAGE_TOKENS + last[_LENGTH])
        last[_LENGTH] += 1
        self.num_tokens += 1
        return slot

    def hand_over(self) -> tuple[list[PagedShard], list[PagedShard]]:
        """Where each segment of the prompt lies, and which of the shards were this request's own: they are free when
        their new owner says so. Pages of the answer stay, and it goes on in the prompt's last page."""
        own, self._own = self._own[: self._num_prompt_shards], self._own[self._num_prompt_shards :]
        self._num_prompt_shards = 0
        return list(self._segments), own

    def release(self) -> None:
        """Gives all pages back. It must not be used any more, though a traceback, say, may still hold it."""
        for shard in self._own:
            shard.free()
        self._own, self._segments = [], []

    @property
    def slots(self) -> np.ndarray:
        """[n] int32, the slot of every token, by position."""
        pages, starts, lengths = self.table
        return np.repeat(pages * PAGE_TOKENS - starts, lengths) + np.arange(self.num_tokens, dtype=np.int32)

    @property
    def table(self) -> np.ndarray:
        """[3, M] int32: page, position of its first token, tokens in use, of each page in order of position."""
        return self._table[:, : self.num_entries]

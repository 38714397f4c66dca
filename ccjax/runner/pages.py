"""The pages that hold the KV of a running request, some of them shared with cached chunks."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from ccjax.runner.pool import PAGE_TOKENS, DevicePool, PagedShard, num_pages
from ccjax.types import PlannedSegment, PrefillPlan, VariantId

_PAGE, _START, _LENGTH = range(3)


def shared_segments(plan: PrefillPlan, chunks: Container[VariantId | None]) -> frozenset[int]:
    """Segments of a plan that are read in place from the pages of `chunks`: reused from the beginning of a page on,
    without recomputed tokens or with whole pages of them."""
    written = frozenset(plan.chosen_by_question)
    # Else tokens may be dropped on the way, and need their stored KV from there on.
    is_fixed = not plan.hkvd_counts_by_layer and plan.focus_window is None
    return frozenset(
        index
        for index, segment in enumerate(plan.segments)
        if segment.variant_id in chunks
        and (not segment.recompute_offsets or (is_fixed and _fill_pages(segment)))
        and segment.chunk_offset % PAGE_TOKENS == 0
        and index not in written
    )


def num_own_pages(plan: PrefillPlan, chunks: Container[VariantId | None]) -> int:
    """Pages that a request needs for its prompt besides those of `chunks`."""
    shared = shared_segments(plan, chunks)
    return sum(
        len(_recomputed_pages(segment)) if index in shared else num_pages(segment.num_tokens)
        for index, segment in enumerate(plan.segments)
    )


def _recomputed_pages(segment: PlannedSegment) -> list[int]:
    return sorted({offset // PAGE_TOKENS for offset in segment.recompute_offsets})


def _fill_pages(segment: PlannedSegment) -> bool:
    """True if the recomputed tokens are those of some pages."""
    sizes = (min(PAGE_TOKENS, segment.num_tokens - page * PAGE_TOKENS) for page in _recomputed_pages(segment))
    return len(segment.recompute_offsets) == sum(sizes)


class RequestPages:
    """The pages of one request. Pages of reused segments are read in place, by any number of requests, each at its own
    position, unless tokens in them are recomputed; those, all other segments, and the answer have pages of their own.

    `release`, or garbage collection of this object, frees its own pages and drops its references to those of chunks.

    Attributes:
      shared: indices of the segments that are in a chunk's pages.
      num_tokens: tokens that have a slot: the prompt's and those of the answer so far.
      num_entries: number of pages that they take.
    """

    def __init__(self, pool: DevicePool, plan: PrefillPlan, chunks: Mapping[VariantId, PagedShard]) -> None:
        """
        Args:
          chunks: the plan's variants whose tokens fill pages of the pool from their beginning on.

        Raises:
          TierFullError: too few pages are free; none is allocated.
        """
        self._pool = pool
        self.shared = shared_segments(plan, chunks)
        lengths = {
            index: len(_recomputed_pages(segment)) * PAGE_TOKENS if index in self.shared else segment.num_tokens
            for index, segment in enumerate(plan.segments)
            if index not in self.shared or segment.recompute_offsets
        }
        shards = dict(zip(lengths, pool.allocate(list(lengths.values())), strict=True))
        self._own = list(shards.values())
        self._num_prompt_shards = len(shards)
        self._segments: list[PagedShard] = []
        table: list[tuple[int, int, int]] = []
        for index, segment in enumerate(plan.segments):
            variant_id = segment.variant_id
            if variant_id is None or index not in self.shared:
                shard, slots = shards[index], shards[index].slots
            elif index not in shards:
                shard, slots = chunks[variant_id], chunks[variant_id].slots[segment.rows]
            else:
                slots = chunks[variant_id].slots[segment.rows].copy()
                written = np.asarray(segment.recompute_offsets)
                number = np.searchsorted(_recomputed_pages(segment), written // PAGE_TOKENS)
                slots[written] = shards[index].slots[number * PAGE_TOKENS + written % PAGE_TOKENS]
                shard = pool.hold(slots)
            self._segments.append(shard)
            for first in range(0, segment.num_tokens, PAGE_TOKENS):
                page, length = int(slots[first]) // PAGE_TOKENS, min(PAGE_TOKENS, segment.num_tokens - first)
                table.append((page, segment.start + first, length))
        self.num_tokens = plan.num_tokens
        self.num_entries = len(table)
        self._table = np.asarray(table, np.int32).T

    def count_reused(self, plan: PrefillPlan) -> None:
        """Adds the pages of reused segments to `DevicePool.reused_pages`."""
        for index, segment in enumerate(plan.segments):
            if segment.action == "reuse":
                num_recomputed = len(_recomputed_pages(segment))
                how = "in place" if index in self.shared else "copied"
                self._pool.reused_pages["recomputed"] += num_recomputed
                self._pool.reused_pages[how] += num_pages(segment.num_tokens) - num_recomputed

    @property
    def needs_page(self) -> bool:
        """True if the next token of the answer starts a new page."""
        return self._table[_LENGTH, self.num_entries - 1] == PAGE_TOKENS

    def append(self) -> int:
        """Appends a token and returns its slot.

        Raises:
          TierFullError: the token starts a new page and none is free.
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
        """Transfers ownership of the prompt's own shards to the caller. Returns the shards of all segments of the
        prompt, and those of them that this request owned. The answer keeps its pages and continues in the prompt's last
        page."""
        own, self._own = self._own[: self._num_prompt_shards], self._own[self._num_prompt_shards :]
        self._num_prompt_shards = 0
        return list(self._segments), own

    def hold(self) -> PagedShard:
        """All tokens, and a hold on their pages."""
        return self._pool.hold(self.slots)

    def release(self) -> None:
        """Drops its own pages now, even if references to this object, e.g. in a traceback, remain; it must not be used
        any more."""
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
        """[3, M] int32: page number, position of its first token and number of tokens, for each page by position."""
        return self._table[:, : self.num_entries]

"""The KV of a prompt, computed once by the first sequence of a request and read by the others."""

from __future__ import annotations

import dataclasses

from ccjax.cache.planned_prefill import PlannedPrefill
from ccjax.policy.scheduling import SequenceWork
from ccjax.runner.pages import RequestPages
from ccjax.runner.pool import PAGE_TOKENS, PagedShard
from ccjax.types import PrefillPlan, VariantId


class SharedPrompt:
    """The KV of a prompt that several sequences read; none of them overwrites it.

    The sequence that computed it continues in the prompt's last page, after the slots that the others read.

    Attributes:
      plan: the plan of a sequence that reads the prompt. Everything is reused except the last token, which is computed
        again in a page of the sequence's own: its logits yield the sequence's first token.
      shards: pages of the reused segments of the plan.
      num_pages: pages that `drop` frees; pages of cached chunks do not count.
      prefill: pins the cached chunks that the prompt reads; close it after `drop`.
    """

    def __init__(self, plan: PrefillPlan, pages: RequestPages, prefill: PlannedPrefill) -> None:
        """
        Args:
          plan: the plan of the prefill that computed the prompt.
          pages: the pages of the sequence that computed it; it keeps those of its answer.
        """
        shards, self._own = pages.hand_over()
        question = plan.segments[-1]
        segments = [
            dataclasses.replace(
                segment,
                action="reuse",
                variant_id=VariantId(f"prompt/{index}"),
                recompute_offsets=(),
                chunk_offset=segment.chunk_offset if index in pages.shared and not segment.recompute_offsets else 0,
            )
            for index, segment in enumerate(plan.segments)
        ]
        segments[-1] = dataclasses.replace(segments[-1], num_tokens=question.num_tokens - 1)
        if not segments[-1].num_tokens:
            segments.pop()
        last = dataclasses.replace(question, start=plan.num_tokens - 1, num_tokens=1)
        self.plan = PrefillPlan((*segments, last))
        self.shards = {
            segment.variant_id: shard for segment, shard in zip(segments, shards, strict=False) if segment.variant_id
        }
        self.num_pages = sum(shard.num_pages for shard in self._own)
        self.prefill = prefill

    def drop(self) -> None:
        """Frees the pages; no sequence may still read them."""
        for shard in self._own:
            shard.free()
        self._own: list[PagedShard] = []
        self.shards = {}


def sharing_work(work: SequenceWork) -> SequenceWork:
    """The work of the sequence that computed a prompt, once other sequences read that prompt, too."""
    return dataclasses.replace(work, prompt_pages=0, shared_pages=work.shared_pages + work.prompt_pages)


def reading_work(work: SequenceWork) -> SequenceWork:
    """An upper bound of the work of a sequence that reads a shared prompt."""
    return dataclasses.replace(sharing_work(work), prefill_tokens=1, prompt_pages=1, tail_slots=PAGE_TOKENS - 1)

"""The KV of a prompt that several sequences of one request read: computed once, by the first of them."""

from __future__ import annotations

import dataclasses

from ccjax.engine.admission import Admission
from ccjax.policy.scheduling import SequenceWork
from ccjax.runner.pages import RequestPages
from ccjax.runner.pool import PAGE_TOKENS, PagedShard
from ccjax.types import PrefillPlan, VariantId


class SharedPrompt:
    """The KV of a prompt that several sequences read; none of them writes there.

    The one that computed it goes on in the prompt's last page, behind all that the others read of it.

    Attributes:
      plan: of a sequence that reads it. All is reused but the last token, which is computed again in a page of that
        sequence's own: the sequence's first token is drawn from its logits.
      shards: where the reused segments of the plan lie.
      num_pages: pages that are free once this is dropped; those of cached chunks are not among them.
      admission: holds the cached chunks that the prompt reads; to be closed then.
    """

    def __init__(self, plan: PrefillPlan, pages: RequestPages, admission: Admission) -> None:
        """
        Args:
          plan: of the prefill that computed it.
          pages: of the request that did, which keeps those of its answer.
        """
        shards, self._own = pages.hand_over()
        question = plan.segments[-1]
        segments = [
            dataclasses.replace(segment, action="reuse", variant_id=VariantId(f"prompt/{index}"), recompute_offsets=())
            for index, segment in enumerate(plan.segments)
        ]
        segments[-1] = dataclasses.replace(segments[-1], num_tokens=question.num_tokens - 1)
        if not segments[-1].num_tokens:
            segments.pop()
        last = dataclasses.replace(question, start=plan.num_tokens - 1, num_tokens=1)
        self.plan = PrefillPlan(plan.request_id, (*segments, last))
        self.shards = {one.variant_id: shard for one, shard in zip(segments, shards, strict=False) if one.variant_id}
        self.num_pages = sum(shard.num_pages for shard in self._own)
        self.admission = admission

    def drop(self) -> None:
        """Gives the pages back, which no sequence reads any more."""
        for shard in self._own:
            shard.free()
        self._own: list[PagedShard] = []
        self.shards = {}


def sharing_work(work: SequenceWork) -> SequenceWork:
    """The work of a sequence that computed its prompt, once others read that, too."""
    return dataclasses.replace(work, prompt_pages=0, shared_pages=work.shared_pages + work.prompt_pages)


def reading_work(work: SequenceWork) -> SequenceWork:
    """The most work of a sequence that reads another one's prompt."""
    return dataclasses.replace(sharing_work(work), prefill_tokens=1, prompt_pages=1, tail_slots=PAGE_TOKENS - 1)

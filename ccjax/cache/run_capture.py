"""Stores the KV of finished prompts and their answers as runs, for prompts that begin with the same tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import numpy as np

from ccjax.cache.planned_prefill import Prefilled
from ccjax.cache.prefix_runs import run_prefix
from ccjax.cache.variants import VariantIndex
from ccjax.policy.capture import variant_meta
from ccjax.prompts import Prompt, as_chunk, tenant_of
from ccjax.runner.pool import PAGE_TOKENS, PagedShard
from ccjax.types import ChunkId, Fidelity, Segment, SegmentRole, VariantId, VariantMeta

logger = logging.getLogger(__name__)

_MOST_TOKENS = 512
"""Tokens of the longest run of exact KV: what is evicted and read together."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVOrigin:
    """Where the KV of a prompt came from: `num_exact` of its first tokens equal those of a full prefill; `seen` are the
    chunks that influenced any of it, `erasures` those known when it was computed, which do not cover it."""

    num_exact: int
    seen: frozenset[ChunkId]
    erasures: frozenset[str] = frozenset()

    def joined(self, other: KVOrigin | None) -> KVOrigin:
        """What holds of both."""
        if other is None:
            return self
        num_exact = min(self.num_exact, other.num_exact)
        return KVOrigin(num_exact, self.seen | other.seen, self.erasures & other.erasures)


class RunCapture:
    """Stores runs. Not thread-safe."""

    def __init__(self, variants: VariantIndex) -> None:
        self._variants = variants

    def origin_of(self, prefilled: Prefilled) -> KVOrigin:
        """The origin of a prompt's KV, while what it reused is pinned."""
        seen = {chunk.chunk_id for chunk in prefilled.asked.chunks}
        num_exact = prefilled.plan.num_tokens
        for segment in prefilled.plan.segments:
            if segment.variant_id is not None:
                seen |= self._variants.origin_of(segment.variant_id).seen
            if segment.fidelity != "exact":
                num_exact = min(num_exact, segment.start)
        return KVOrigin(num_exact, frozenset(seen), self._variants.documents.erasure_ids)

    def keep(
        self, prompt: Prompt, answer: list[int], kv: PagedShard, origin: KVOrigin, *, with_approximate: bool = True
    ) -> None:
        """Stores the tokens of a prompt and its answer that are not stored yet. A failure is logged.

        Args:
          kv: of all tokens, but perhaps not of the answer's last one.
          with_approximate: store approximate KV as well.
        """
        try:
            ids = np.concatenate([prompt.token_ids, np.asarray(answer, np.int32)])[: len(kv.slots)]
            tenant = tenant_of(prompt.segments[0].chunk.chunk_id)
            kept: set[VariantId] = set()

            def is_as_good(meta: VariantMeta) -> bool:
                return meta.fidelity == "exact" or (meta.start or 0) >= origin.num_exact

            found = self._variants.runs.match(ids, tenant, is_usable=is_as_good)
            start = sum(run.num_tokens for run in found)
            # The last token of a prompt is always computed, so it is stored with the answer.
            num_prompt = min(prompt.num_tokens - 1, len(ids))
            for first, last, role in _pieces(start, origin.num_exact, num_prompt, len(ids)):
                fidelity: Fidelity = "exact" if min(last, num_prompt) <= origin.num_exact else "approx"
                if fidelity == "exact" or with_approximate:
                    self._store(ids, tenant, first, last, role, fidelity, kv, origin, kept)
        except Exception:
            logger.exception("the KV of a conversation could not be stored")

    def _store(
        self,
        ids: np.ndarray,
        tenant: str,
        first: int,
        last: int,
        role: SegmentRole,
        fidelity: Fidelity,
        kv: PagedShard,
        origin: KVOrigin,
        kept: set[VariantId],
    ) -> None:
        chunk, num_tokens = as_chunk(tuple(ids[first:last].tolist()), None, tenant), last - first
        prefix = run_prefix(ids[:first], tenant)
        part = kv.part(first, last)
        meta = variant_meta(
            chunk_id=chunk.chunk_id,
            prefix_ids=prefix,
            prefix_lengths=(first,) * len(prefix),
            inter_by_prefix=(0.0,) * len(prefix),
            intra=0.0,
            token_scores=(0.0,) * num_tokens,
            num_bytes=part.num_bytes,
            fidelity=fidelity,
            start=first,
            roles=("text",) * len(prefix) + (role,),
        )
        prompt = Prompt.of_chunks((Segment(role, chunk),))
        if self._variants.add(meta, part, prompt, pinned=kept, seen=origin.seen, erasures=origin.erasures):
            kept.add(meta.variant_id)


def _pieces(start: int, num_exact: int, num_prompt: int, num_tokens: int) -> Iterator[tuple[int, int, SegmentRole]]:
    """First and last token (exclusive) and role of the runs to store from `start` on: exact text, text of which some is
    approximate, and the answer. What is shorter than a page is joined with what follows."""
    exact_end = min(max(start, num_exact), num_prompt)
    for end in (*range(start + _MOST_TOKENS, exact_end - PAGE_TOKENS, _MOST_TOKENS), exact_end):
        if end - start >= PAGE_TOKENS:
            yield start, end, "text"
            start = end
    if num_prompt - start >= PAGE_TOKENS:
        yield start, num_prompt, "text"
        start = num_prompt
    if num_tokens - start >= PAGE_TOKENS:
        yield start, num_tokens, "answer"

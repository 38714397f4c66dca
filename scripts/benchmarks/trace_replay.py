"""The engine's decisions about requests, one after the other, without a model.

Planner, strategies, index, placement and eviction are the engine's, over host memory; KV is 8 bytes a token, and
attention masses are placeholders. Chunks are kept as prompts had them, as by an engine without a frame.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.cache.variants import VariantIndex
from ccjax.policy.capture import should_capture, variant_meta
from ccjax.policy.planner import plan_prefill
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import expected_share
from ccjax.prompts import Prompt, chunk_id
from ccjax.store import KVSpec, StoreIdentity, TieredStore
from ccjax.types import Chunk, PlannedSegment, PrefillPlan, Segment, VariantMeta

KV_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
INTRA_OVER_INTER = 2.18
"""CacheCraft sec. 6 (1): intra- over inter-attention on average; assumed for every chunk."""
SYSTEM_TOKENS = QUESTION_TOKENS = 32
_SYSTEM = 2**31 - 1
"""The number of the system prompt among passages."""

Passages = Sequence[tuple[int, int]]
"""(Number, tokens) of each passage of a request, in prompt order."""


@dataclasses.dataclass(frozen=True)
class Served:
    """Tokens of a request that were computed (recomputed ones too) and those only loaded; its passages, and hits."""

    computed: int
    reused: int
    documents: int
    hits: int


class Replay:
    """The engine's decisions about one sequence of requests, over a host tier of `budget_tokens`."""

    def __init__(
        self,
        strategy: str,
        policy: str,
        budget_tokens: int,
        *,
        grid: PrefillGrid,
        recompute_ratio: float | None = None,
        system_tokens: int = SYSTEM_TOKENS,
        question_tokens: int = QUESTION_TOKENS,
    ) -> None:
        self._settings = settings = PlannerSettings(strategy=strategy, recompute_ratio=recompute_ratio)
        self.store = TieredStore.open(
            None,
            kv_spec=KV_SPEC,
            identity=StoreIdentity("replay"),
            host_bytes=max(1, KV_SPEC.num_bytes(budget_tokens)),
        )
        self.index = VariantIndex(
            self.store,
            MeasuredCosts(Rates(), grid),
            policy=policy,
            max_variants=None,
            expected_share=lambda cci: expected_share(settings, cci),
        )
        self._system = [Segment("instructions", chunk_of(_SYSTEM, system_tokens))] if system_tokens else []
        self._question = Segment("question", chunk_of(0, question_tokens))

    def answer(self, passages: Passages) -> Served:
        """Plans a request, credits what it reuses and stores what it computes."""
        prompt = self.prompt(passages)
        plan = self.plan(prompt)
        self.keep(prompt, plan)
        computed = round(sum(map(plan.computed_tokens, plan.segments)))
        hits = sum(segment.role == "passage" and segment.action == "reuse" for segment in plan.segments)
        return Served(computed, plan.num_tokens - computed, len(passages), hits)

    def prompt(self, passages: Passages) -> Prompt:
        """The prompt of a request."""
        chunks = (Segment("passage", chunk_of(*passage)) for passage in passages)
        return Prompt((*self._system, *chunks, self._question), max_new_tokens=1)

    def plan(self, prompt: Prompt) -> PrefillPlan:
        """Finds the stored variants of the prompt, and plans it."""
        candidates = self.index.of_chunks({chunk.chunk_id for chunk in prompt.chunks})
        return plan_prefill(prompt.planned_chunks, candidates, mode="bounded", settings=self._settings)

    def keep(self, prompt: Prompt, plan: PrefillPlan) -> None:
        """Credits the variants reused and stores the chunks computed, as the engine does after a prefill."""
        computed = round(sum(map(plan.computed_tokens, plan.segments)))
        self.index.describe_prefill(plan.num_tokens - computed, computed)
        shares = [
            (segment.variant_id, plan.recomputed_tokens(segment) / segment.num_tokens) for segment in plan.segments
        ]
        self.index.credit([(variant_id, share) for variant_id, share in shares if variant_id is not None])
        known, pinned = self.index.of_chunks({chunk.chunk_id for chunk in prompt.chunks}), set(plan.pin)
        for place, (segment, chunk) in enumerate(zip(plan.segments, prompt.chunks, strict=False)):
            prefix_ids = tuple(earlier.chunk_id for earlier in prompt.chunks[:place])
            if plan.hkvd_counts_by_layer and segment.action == "reuse":
                continue  # the engine does not store what deviations chose tokens of
            if should_capture(segment, known.get(chunk.chunk_id, ()), prefix_ids):
                meta = _meta(prompt, place, segment)
                if self.index.add(meta, _kv(segment.num_tokens), prompt, pinned=pinned):
                    pinned.add(meta.variant_id)


@functools.lru_cache(1 << 16)
def chunk_of(number: int, num_tokens: int) -> Chunk:
    """The chunk that stands for a passage: its number as often as it has tokens."""
    ids = (number,) * num_tokens
    return Chunk(chunk_id(ids), ids)


def _meta(prompt: Prompt, place: int, segment: PlannedSegment) -> VariantMeta:
    """Placeholders for measured masses: on each earlier passage by its tokens, with the same CCI behind any."""
    lengths = [len(chunk.token_ids) for chunk in prompt.chunks[:place]]
    num_passages = max(1, place - len(prompt.instructions))
    return variant_meta(
        chunk_id=prompt.chunks[place].chunk_id,
        prefix_ids=tuple(chunk.chunk_id for chunk in prompt.chunks[:place]),
        prefix_lengths=lengths,
        inter_by_prefix=[length * segment.num_tokens / num_passages for length in lengths],
        intra=INTRA_OVER_INTER * segment.num_tokens**2,
        token_scores=(1.0,) * segment.num_tokens,
        num_bytes=KV_SPEC.num_bytes(segment.num_tokens),
        fidelity=segment.fidelity,
        roles=[earlier.role for earlier in prompt.cached[: place + 1]],
    )


@functools.cache
def _kv(num_tokens: int) -> np.ndarray:
    return np.zeros(KV_SPEC.shape(num_tokens), np.float32)

"""The chunk-cache of one simulated replica: plans prompts, counts uses and stores computed chunks, with the engine's
own planner, strategies, index, placement and eviction, and placeholders for attention masses and KV."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from ccjax.cache.load_plan import LoadPlanner
from ccjax.cache.rates import Cost, Rates
from ccjax.policy.capture import make_variant_id, should_capture
from ccjax.policy.eviction import DEFAULT_POLICY
from ccjax.policy.planner import plan_prefill
from ccjax.policy.reuse import chunk_context_impact
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies import expected_share
from ccjax.prompts import Prompt
from ccjax.store.spec import KVSpec
from ccjax.store.tickets import LoadTicket
from ccjax.store.usage import DISK
from ccjax.types import ChunkId, PrefillPlan, ReuseMode, Segment, VariantId, VariantMeta
from scripts.simulation.costs import CostModel
from scripts.simulation.store import NO_KV, SizedIndex, SizedStore
from scripts.simulation.workload import Passages, chunk_of

INTRA_OVER_INTER = 2.18
"""CacheCraft sec. 6 (1): intra-attention is 2.18 times inter-attention on average, assumed for every chunk."""
CCI = chunk_context_impact(1.0, INTRA_OVER_INTER)
"""CacheCraft eq. 11 of every chunk, since there is no model to measure it."""
SYSTEM = 2**31 - 1
"""The number of the system prompt among passages."""
_TYPICAL_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class SimulatedCacheSettings:
    """The chunk-cache settings of `EngineConfig`, under the same names.

    Attributes:
      device_cache_bytes, host_cache_bytes, disk_cache_bytes: budgets of the tiers; 0 for none. The device's is separate
        from the pages of requests, which share one pool in the engine.
    """

    strategy: str = "cachecraft"
    reuse: ReuseMode = "bounded"
    recompute_ratio: float | None = None
    eviction_policy: str = DEFAULT_POLICY
    max_variants: int | None = None
    device_cache_bytes: int = 0
    host_cache_bytes: int = 64 * 2**30
    disk_cache_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt as policy and index see it."""

    prompt: Prompt
    chunks: tuple[PromptChunk, ...]
    ids: tuple[ChunkId, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A plan with frequently used totals.

    Attributes:
      at: `Changes.count` of the index when it was made.
      computed: tokens that run through the model.
      uses: variants reused, with their CFO.
      num_documents, num_hits: all passages, and those reused.
    """

    view: PromptView
    plan: PrefillPlan
    at: int
    computed: int
    recomputed: int
    num_tokens: int
    uses: tuple[tuple[VariantId, float], ...]
    num_documents: int
    num_hits: int


class ReplicaCache:
    """The chunk-cache of a replica.

    CacheCraft's focus cut needs attention masses of the question, which do not exist here: it is off, and settings with
    a fixed `recompute_ratio` should be compared. Only the number of recomputed tokens is meaningful, not which ones.
    """

    def __init__(self, settings: SimulatedCacheSettings, costs: CostModel, kv_spec: KVSpec) -> None:
        self.settings = settings
        self.store = SizedStore(
            kv_spec,
            device_bytes=settings.device_cache_bytes,
            host_bytes=settings.host_cache_bytes,
            disk_bytes=settings.disk_cache_bytes,
        )
        self._planner = PlannerSettings(
            strategy=settings.strategy,
            recompute_ratio=settings.recompute_ratio,
            focus_window=None,
            num_layers=kv_spec.num_layers,
        )
        self.index = SizedIndex(
            self.store,
            costs,
            policy=settings.eviction_policy,
            max_variants=settings.max_variants,
            expected_share=lambda cci: expected_share(self._planner, cci),
        )
        self._loads = LoadPlanner(self.store, _ModelRates(costs), kv_spec.num_layers)
        self.kv_spec = kv_spec
        self._views: dict[Passages, PromptView] = {}
        self._planned: dict[Passages, Planned] = {}

    @property
    def is_off(self) -> bool:
        """True if nothing is reused and nothing stored."""
        return self.settings.reuse == "off"

    def view(self, passages: Passages, system_tokens: int) -> PromptView:
        """The prompt of these passages; the question is left out, since its tokens do not matter."""
        view = self._views.get(passages)
        if view is None:
            numbers, lengths = passages.numbers, passages.num_tokens
            if system_tokens:
                numbers, lengths = (SYSTEM, *numbers), (system_tokens, *lengths)
            own = tuple(map(chunk_of, numbers))
            chunks = tuple(
                PromptChunk(chunk.chunk_id, length, "system" if number == SYSTEM else "document")
                for chunk, number, length in zip(own, numbers, lengths, strict=True)
            )
            prompt = Prompt(own, bool(system_tokens), (0,), max_new_tokens=1)
            view = self._views[passages] = PromptView(prompt, chunks, tuple(chunk.chunk_id for chunk in own))
        return view

    def is_current(self, planned: Planned) -> bool:
        """False if variants of its chunks were added or removed since."""
        return planned.at >= self.index.changes.last(planned.view.ids)

    def plan(self, passages: Passages, system_tokens: int, question_tokens: int) -> Planned:
        """The plan in the current state. A plan for the same passages is reused until their variants change, which is
        when the engine replans a waiting request."""
        planned = self._planned.get(passages)
        if planned is None or not self.is_current(planned):
            view = self.view(passages, system_tokens)
            planned = self._planned[passages] = self._summed(view, self._make(view, question_tokens, frozenset()))
        if not self.settings.disk_cache_bytes or not any(map(self.store.unread_bytes, planned.plan.pin)):
            return planned
        view, first = planned.view, planned.plan

        def make(without: frozenset[VariantId]) -> PrefillPlan:
            return self._make(view, question_tokens, without) if without else first

        plan, given_up = self._loads.plan_loads(make)
        return self._summed(view, plan) if given_up else planned

    def pin(self, planned: Planned) -> LoadTicket:
        """Pins the variants that a plan reuses."""
        return self.store.prepare_load(planned.plan.pin)

    def unpin(self, ticket: LoadTicket) -> None:
        """Promotes variants read from a lower tier to faster tiers where that is worth it."""
        self.index.complete_load(ticket)

    def keep(self, planned: Planned) -> None:
        """Credits reused variants and stores computed chunks, as `PrefillCapture.keep` does."""
        if self.is_off:
            return
        plan, view = planned.plan, planned.view
        self.index.describe_prefill(planned.num_tokens - planned.computed, planned.computed)
        self.index.credit(planned.uses)
        computed = [place for place, segment in enumerate(plan.segments[:-1]) if _is_new(segment, plan)]
        if not computed:
            return
        known = self.index.of_chunks({view.ids[place] for place in computed})
        kept = set(plan.pin)
        for place in computed:
            segment, prefix = plan.segments[place], view.ids[:place]
            if should_capture(segment, known.get(view.ids[place], ()), prefix):
                meta = self._meta(segment, view, place)
                if self.index.add(meta, NO_KV, view.prompt, pinned=kept):
                    kept.add(meta.variant_id)

    def _make(self, view: PromptView, question_tokens: int, without: frozenset[VariantId]) -> PrefillPlan:
        candidates: Mapping[ChunkId, Sequence[VariantMeta]] = {}
        if not self.is_off:
            candidates = self.index.of_chunks(set(view.ids))
        if without:
            candidates = {
                key: [meta for meta in metas if meta.variant_id not in without] for key, metas in candidates.items()
            }
        return plan_prefill(view.chunks, question_tokens, candidates, mode=self.settings.reuse, settings=self._planner)

    def _summed(self, view: PromptView, plan: PrefillPlan) -> Planned:
        computed = hits = documents = 0
        recomputed = 0.0
        uses = []
        for segment in plan.segments:
            documents += segment.role == "document"
            if segment.action == "compute":
                computed += segment.num_tokens
            else:
                assert segment.variant_id is not None
                recomputed += plan.recomputed_tokens(segment)
                hits += segment.role == "document"
                uses.append((segment.variant_id, plan.recomputed_tokens(segment) / segment.num_tokens))
        at = self.index.changes.count
        again = round(recomputed)
        return Planned(view, plan, at, computed + again, again, plan.num_tokens, tuple(uses), documents, hits)

    def _meta(self, segment: Segment, view: PromptView, place: int) -> VariantMeta:
        """Placeholder for measured masses: on each earlier chunk by its tokens, with the same CCI for all."""
        prefix = view.ids[:place]
        has_system = bool(prefix) and view.chunks[0].role == "system"
        return VariantMeta(
            variant_id=make_variant_id(view.ids[place], prefix, segment.fidelity),
            chunk_id=view.ids[place],
            prefix_ids=prefix,
            inter_by_prefix=tuple(float(chunk.num_tokens * (chunk.role != "system")) for chunk in view.chunks[:place]),
            a_mean=1.0,
            b_mean=INTRA_OVER_INTER,
            cci=CCI if len(prefix) > has_system else 0.5,
            token_ranking=_ranking(segment.num_tokens),
            num_tokens=segment.num_tokens,
            num_bytes=self.kv_spec.num_bytes(segment.num_tokens),
            fidelity=segment.fidelity,
            has_system=has_system,
        )


class _ModelRates(Rates):
    """A cost model in place of measured rates, for `LoadPlanner`."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self._costs = costs
        whole_s = costs.compute_s(_TYPICAL_TOKENS, 0, _TYPICAL_TOKENS)
        self._token_s = whole_s / _TYPICAL_TOKENS
        for _ in range(32):  # this many make a measured rate settled
            self.tiers[DISK].add(1 << 20, costs.link_s(DISK, 1 << 20))

    def load_s(self, tier: str, num_bytes: int) -> float | None:
        return self._costs.link_s(tier, num_bytes)

    def compute_s(self, num_tokens: int) -> float | None:
        return Cost(0.0, self._token_s).seconds(num_tokens)

    @property
    def seconds_per_token(self) -> float | None:
        return self._token_s


def _is_new(segment: Segment, plan: PrefillPlan) -> bool:
    """True if the engine would store it; what deviations chose tokens of, it does not."""
    return segment.action == "compute" or bool(segment.recompute_offsets and not plan.hkvd_counts_by_layer)


@functools.cache
def _ranking(num_tokens: int) -> tuple[int, ...]:
    return tuple(range(num_tokens))

"""Stores what finished prefills computed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from ccjax.cache.capture import capture_variants, context_deviations
from ccjax.cache.documents.unprepared import UnpreparedPassages
from ccjax.cache.planned_prefill import Prefilled
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.variants import VariantIndex
from ccjax.config import EngineConfig
from ccjax.policy.strategies import get_strategy
from ccjax.policy.variants import MIN_CHUNKS_BEFORE, choose_other_context
from ccjax.prompts import Prompt
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.heavy_hitters import received_mass, with_received
from ccjax.runner.plan_rows import recomputed_share
from ccjax.runner.pool import PagedShard
from ccjax.store.errors import StoreError
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE, HOST
from ccjax.types import REUSED_ANYWHERE, ChunkId, PlannedSegment, PrefillPlan, Segment, VariantId, VariantMeta

logger = logging.getLogger(__name__)


class PrefillCapture:
    """Credits the variants that prefills reused and stores the chunks that they computed. Not thread-safe.

    Attributes:
      unprepared: passages that idle time should compute behind the frame.
    """

    def __init__(
        self,
        model: DeviceModel,
        store: TieredStore,
        variants: VariantIndex,
        planner: PrefillPlanner,
        config: EngineConfig,
    ) -> None:
        self.unprepared = UnpreparedPassages()
        self._model = model
        self._store = store
        self._variants = variants
        self._planner = planner
        self._ranking_layers = config.ranking_layers
        self._cached_documents = config.cached_documents
        self._measures_received = "received" in get_strategy(config.strategy).needs

    def keep(self, prefilled: Prefilled) -> None:
        """Credits the used variants and stores the new ones. A failure is logged and never affects the answer."""
        if prefilled.ticket is None:
            return
        try:
            plan = prefilled.plan
            self._describe(plan)
            num_layers = self._model.config.num_layers
            self._variants.credit(
                [
                    (segment.variant_id, self._unused_share(segment, share))
                    for index, segment in enumerate(plan.segments)
                    if segment.variant_id is not None
                    for share in [recomputed_share(plan, prefilled.result, index, num_layers)]
                ]
            )
            if not self._planner.read_only:
                self._note_unprepared(prefilled.asked.instructions, prefilled.prompt, plan)
                self._variants.documents.learn(prefilled.asked.chunks)
                if prefilled.keeps_chunks:
                    self._capture(prefilled, only_replacing=False)
        except Exception:
            logger.exception("the chunk-caches of a prompt could not be stored")

    def replace_approximate(self, prefilled: Prefilled) -> int:
        """Stores the computed chunks that replace an approximate variant or a lossy copy; returns how many."""
        return self._capture(prefilled, only_replacing=True)

    def store_new(
        self,
        prefilled: Prefilled,
        kept: set[VariantId],
        other: np.ndarray | PagedShard | None = None,
        *,
        only_last: bool = False,
        wait: bool = False,
    ) -> None:
        """Stores the new chunks of a prefill that no question asked for; credits nothing.

        Args:
          kept: variants that must not be evicted for it; stored ones are added.
          other: KV of its last chunk behind another prefix, to compare with.
          only_last: store only the last chunk.
          wait: if the disk's write queue is full, wait instead of skipping the disk.
        """
        self._variants.documents.learn(prefilled.asked.chunks)
        self._capture(prefilled, only_replacing=False, kept=kept, other=other, only_last=only_last, wait=wait)

    def keep_prepared(self, prefilled: Prefilled) -> None:
        """Stores the new chunks of a prefill that prepares a passage of a request. A failure is logged."""
        try:
            self.store_new(prefilled, set())
        except Exception:
            logger.exception("a prepared passage could not be stored")

    def stored_kv(self, variant_id: VariantId) -> np.ndarray | PagedShard | None:
        """KV of a stored variant, [L, 2, T, K, H] or in pages, to compare with; None if it cannot be read."""
        try:
            return self._read(variant_id)
        except StoreError as error:
            logger.warning("variant %s: %s; nothing is compared with it", variant_id, error)
            return None

    def _capture(
        self,
        prefilled: Prefilled,
        *,
        only_replacing: bool,
        kept: set[VariantId] | None = None,
        other: np.ndarray | PagedShard | None = None,
        only_last: bool = False,
        wait: bool = False,
    ) -> int:
        """Stores variants of a prefill; returns how many."""
        prompt, plan = prefilled.prompt, prefilled.plan
        self._describe(plan)
        # Chunks partly recomputed from a lossy copy are stored, like those from its exact original: errors do not
        # accumulate, since nothing is stored from an approximate variant. Unused lossy copies are replaced.
        known = self._planner.usable(prompt, as_stored=plan.pin)
        seen = self._seen(plan)
        kept = set() if kept is None else kept
        kept.update(plan.pin)  # the new variants of one prompt must not evict each other either
        count = 0
        received = received_mass(self._model, prompt.token_ids) if self._measures_received else None
        found = capture_variants(
            plan,
            prefilled.result,
            known,
            ranking_layers=self._ranking_layers,
        )
        for meta, kv in found:
            if only_last and len(meta.prefix_ids) < len(prompt.chunks) - 1:
                continue
            num_before = sum(role in REUSED_ANYWHERE for role in meta.roles[:-1])
            if self._cached_documents is not None and num_before >= self._cached_documents:
                continue
            is_replacing = self._variants.replaces_approximate(meta) or self._store.is_lossy(meta.variant_id)
            if only_replacing and not is_replacing:
                continue
            is_last = meta.chunk_id == prompt.chunks[-1].chunk_id
            theirs = other if is_last else None
            if not self._planner.prepared.are_kept_apart:
                theirs = self._other_kv(meta, known.get(meta.chunk_id, ())) if theirs is None else theirs
            if theirs is not None:
                meta = dataclasses.replace(meta, token_deviations=context_deviations(kv, theirs))
            if received is not None:
                first = plan.segments[len(meta.prefix_ids)].start
                meta = with_received(meta, received[first : first + meta.num_tokens])
            if self._variants.add(meta, kv, prompt, pinned=kept, seen=seen[len(meta.prefix_ids)], wait=wait):
                kept.add(meta.variant_id)
                count += 1
        return count

    def _unused_share(self, segment: PlannedSegment, recomputed: float) -> float:
        """The share of a reused variant that a prompt recomputed (`recomputed`, of its segment) or has no slice of."""
        assert segment.variant_id is not None
        summary = self._store.get_summary(segment.variant_id)
        if summary is None or summary.num_tokens == segment.num_tokens:
            return recomputed
        return 1.0 - (1.0 - recomputed) * segment.num_tokens / summary.num_tokens

    def _note_unprepared(self, instructions: Sequence[Segment], prompt: Prompt, plan: PrefillPlan) -> None:
        """Notes the passages that were computed, and those that were reused behind others though fewer than
        `MIN_CHUNKS_BEFORE` chunks had stood before them or the deviations of their tokens are unknown; instead of a
        slice that was reused, its whole chunk."""
        known = self._variants.of_chunks(prompt.stored_ids)
        for segment, own in zip(plan.segments, prompt.segments, strict=True):
            if own.role not in REUSED_ANYWHERE:
                continue
            variants = known.get(own.chunk.chunk_id, ())
            if own.source is not None and all(variant.variant_id != segment.variant_id for variant in variants):
                if segment.variant_id is not None and own.source.chunk_id in self._variants.tokens.known():
                    own = Segment(own.role, self._variants.tokens.chunk(own.source.chunk_id))
                    variants = known.get(own.chunk.chunk_id, ())
            used = [variant for variant in variants if variant.variant_id == segment.variant_id]
            is_known = any(variant.token_deviations for variant in variants)
            was_reused = segment.fidelity == "approx" and bool(used)
            was_reused = was_reused and (used[0].chunks_before < MIN_CHUNKS_BEFORE or not is_known)
            if was_reused or segment.variant_id is None:
                alone = Prompt.of_chunks((*instructions, own))
                self.unprepared.note(alone, was_reused=was_reused)

    def _describe(self, plan: PrefillPlan) -> None:
        num_new = round(sum(map(plan.computed_tokens, plan.segments)))
        self._variants.describe_prefill(plan.num_tokens - num_new, num_new)

    def _other_kv(self, meta: VariantMeta, variants: Sequence[VariantMeta]) -> np.ndarray | PagedShard | None:
        """KV of another variant in memory to compare an exact variant with; None if there is none."""
        other = choose_other_context(filter(self._is_at_hand, variants), meta) if meta.fidelity == "exact" else None
        return None if other is None else self._read(other.variant_id)

    def _read(self, variant_id: VariantId) -> np.ndarray | PagedShard:
        ticket = self._store.prepare_load((variant_id,), counted=False)
        try:
            for kv in ticket.on_device((variant_id,)).values():
                if isinstance(kv, PagedShard):
                    return kv
            return ticket.read_layers(variant_id, 0, self._model.config.num_layers)
        finally:
            self._store.complete_load(ticket, ok=False)

    def _is_at_hand(self, meta: VariantMeta) -> bool:
        return self._store.tier_of(meta.variant_id) in (DEVICE, HOST)

    def _seen(self, plan: PrefillPlan) -> list[frozenset[ChunkId]]:
        """For each chunk of a plan, all chunks that influenced its KV: those up to it, and those that the reused
        variants among them had attended to."""
        seen: frozenset[ChunkId] = frozenset()
        by_chunk = []
        for segment in plan.segments:
            if segment.chunk_id is not None:
                seen |= {segment.chunk_id}
                if segment.variant_id is not None:
                    seen |= self._variants.origin_of(segment.variant_id).seen
                by_chunk.append(seen)
        return by_chunk

"""Prepares and follows up prefills over stored chunks: which variants may be reused, the plan, the loads, and which
computed chunks are stored. The prefill itself runs in `ccjax.runner`."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ccjax.cache.capture import ReadLayers, capture_variants, context_deviations
from ccjax.cache.contexts import LayerLoader, Pool
from ccjax.cache.documents.unprepared import UnpreparedPassages
from ccjax.cache.load_plan import LoadPlanner
from ccjax.cache.rates import Rates
from ccjax.cache.reads import LoadFailedError, Patience
from ccjax.cache.shared.prefill import SharedPrefill
from ccjax.cache.variant_records import own_platform
from ccjax.cache.variants import VariantIndex
from ccjax.config import EngineConfig
from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.variants import IN_CONTEXT, choose_other_context
from ccjax.prompts import Prompt
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.heavy_hitters import received_mass, with_received
from ccjax.runner.plan_rows import PrefillOutcome, computed_offsets, recomputed_share
from ccjax.store.errors import ShardCorruptError, ShardNotFoundError, StoreError
from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.types import ChunkId, PrefillPlan, ReuseMode, VariantId, VariantMeta

logger = logging.getLogger(__name__)
FindVariants = Callable[[Collection[ChunkId]], Mapping[ChunkId, Sequence[VariantMeta]]]


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A finished prefill, as its report and capture need it.

    Attributes:
      ticket: None if reuse was off.
      shared: None if no other process was involved.
      preloaded_bytes, load_s, given_up_loads: as in `ReuseReport`.
    """

    prompt: Prompt
    plan: PrefillPlan
    result: PrefillOutcome
    ticket: LoadTicket | None
    read_layers: ReadLayers | None
    plan_s: float
    planned_at: float
    failed_loads: int
    preloaded_bytes: int = 0
    load_s: float = 0.0
    given_up_loads: int = 0
    shared: SharedPrefill | None = None


class CachedPrefill:
    """Plans, loads and stores for the prefills of one engine. Not thread-safe, except `is_reading` and `wanted`.

    Attributes:
      read_only: nothing computed is stored.
      settings: the planner's settings unless a request has its own.
      loads: decides when loads begin, from measured rates.
      unprepared: passages that idle time should compute behind the frame.
    """

    def __init__(
        self,
        model: DeviceModel,
        store: TieredStore,
        variants: VariantIndex,
        rates: Rates,
        config: EngineConfig,
        pool: Pool | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._store = store
        self._variants = variants
        self.settings = config.planner_settings(model.config.num_layers)
        self.read_only = config.read_only
        self._ranking_layers = config.ranking_layers
        self._cached_documents = config.cached_documents
        self.rates = rates
        self._loading = config.loading
        self.loads = LoadPlanner(store, rates, model.config.num_layers)
        self._loaders: list[weakref.ref[LayerLoader]] = []
        self.unprepared = UnpreparedPassages()

    @property
    def is_reading(self) -> bool:
        """True while a running prefill has reads in flight; callable from any thread."""
        loaders = [reference() for reference in self._loaders]
        return any(loader is not None and loader.is_reading for loader in loaders)

    def wanted(self, prompt: Prompt, mode: ReuseMode, settings: PlannerSettings | None = None) -> dict[VariantId, int]:
        """The variants that a plan made now would load, with their bytes; callable while a prefill runs."""
        candidates = self.usable(prompt, known=self._variants.peek)
        pinned = self.plan(prompt, mode, candidates, settings).pin
        sizes = {meta.variant_id: meta.num_bytes for metas in candidates.values() for meta in metas}
        return {variant_id: sizes[variant_id] for variant_id in pinned}

    def plan(
        self,
        prompt: Prompt,
        mode: ReuseMode,
        candidates: Mapping[ChunkId, Sequence[VariantMeta]],
        settings: PlannerSettings | None = None,
    ) -> PrefillPlan:
        """Plans a prompt with `ccjax.policy`."""
        chunks, num_question = prompt.planned_chunks, len(prompt.question)
        return plan_prefill(chunks, num_question, candidates, mode=mode, settings=settings or self.settings)

    def shared(self) -> SharedPrefill | None:
        """State for sharing a prefill's computation with other processes; None if none shares the store."""
        claims = None if self.read_only else self._store.claims
        if claims is None:
            return None
        return SharedPrefill(claims, self._variants, self.rates.seconds_per_token)

    def loader(
        self,
        ticket: LoadTicket,
        plan: PrefillPlan,
        patience: Patience,
        *,
        skip: Collection[int] = (),
        is_cancelled: IsCancelled | None = None,
        on_layer: Callable[[int, float, float], None] | None = None,
    ) -> LayerLoader:
        """A context manager that loads a plan's variants layer by layer, except the segments in `skip`."""
        num_layers = self._model.config.num_layers
        loader = LayerLoader(
            ticket,
            plan,
            shape=self._model.context_shape(plan),
            dtype=self._model.dtype,
            num_layers=num_layers,
            patience=patience,
            pool=self._pool,
            skip=skip,
            is_cancelled=is_cancelled,
            lead={"layerwise": 1, "alg2": plan.preload_depth, "sync": num_layers}[self._loading],
            on_merge=self.rates.tiers[HOST].add,
            turn=self._model.turned,
            placement=self._model.context_placement,
            on_layer=on_layer,
        )
        self._loaders = [
            *(one for one in self._loaders if one() is not None),
            weakref.ref(loader),
        ]  # a new list, since `is_reading` may iterate over the old one in another thread
        return loader

    def pin(self, plan: PrefillPlan) -> LoadTicket:
        """Pins the variants that a plan reuses."""
        return self._store.prepare_load(plan.pin)

    def is_as_planned(self, ticket: LoadTicket, plan: PrefillPlan) -> bool:
        """False if the ticket reads a lossy copy of a variant that the plan treats as exact."""
        return ticket.lossy.isdisjoint(_exactly_reused(plan))

    def unpin(self, ticket: LoadTicket, *, ok: bool = True) -> None:
        """Ends a load; with `ok`, completely read variants may move to a faster tier."""
        self._variants.complete_load(ticket, ok=ok)

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
                    (segment.variant_id, recomputed_share(plan, prefilled.result, index, num_layers))
                    for index, segment in enumerate(plan.segments)
                    if segment.variant_id is not None
                ]
            )
            if not self.read_only:
                self._note_unprepared(prefilled.prompt, plan)
                self._variants.documents.learn(prefilled.prompt.chunks)
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
        other: np.ndarray | None = None,
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
        self._variants.documents.learn(prefilled.prompt.chunks)
        self._capture(prefilled, only_replacing=False, kept=kept, other=other, only_last=only_last, wait=wait)

    def stored_kv(self, variant_id: VariantId) -> np.ndarray | None:
        """KV [L, 2, T, K, H] of a stored variant, to compare with; None if it cannot be read."""
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
        other: np.ndarray | None = None,
        only_last: bool = False,
        wait: bool = False,
    ) -> int:
        """Stores variants of a prefill; returns how many."""
        prompt, plan = prefilled.prompt, prefilled.plan
        self._describe(plan)
        # Chunks repaired from a lossy copy are stored, like those repaired from its exact original: errors do not
        # accumulate, since nothing is stored from a repaired (approximate) variant. Unused lossy copies are replaced.
        known = self.usable(prompt, as_stored=plan.pin)
        seen = self._seen(plan)
        kept = set() if kept is None else kept
        kept.update(plan.pin)  # the new variants of one prompt must not evict each other either
        count = 0
        received = received_mass(self._model, prompt.token_ids) if self.settings.strategy == "h2o" else None
        found = capture_variants(
            plan, prefilled.result, known, prefilled.read_layers, ranking_layers=self._ranking_layers
        )
        for meta, kv in found:
            if only_last and len(meta.prefix_ids) < len(prompt.chunks) - 1:
                continue
            place = len(meta.prefix_ids) - prompt.has_system  # among the documents, from 0
            if self._cached_documents is not None and place >= self._cached_documents:
                continue
            is_replacing = self._variants.replaces_approximate(meta) or self._store.is_lossy(meta.variant_id)
            if only_replacing and not is_replacing:
                continue
            is_last = meta.chunk_id == prompt.chunks[-1].chunk_id
            theirs = other if other is not None and is_last else self._other_kv(meta, known.get(meta.chunk_id, ()))
            if theirs is not None:
                meta = dataclasses.replace(meta, token_deviations=context_deviations(kv, theirs))
            if received is not None:
                first = plan.segments[len(meta.prefix_ids)].start
                meta = with_received(meta, received[first : first + meta.num_tokens])
            if self._variants.add(meta, kv, prompt, pinned=kept, seen=seen[len(meta.prefix_ids)], wait=wait):
                kept.add(meta.variant_id)
                count += 1
        return count

    def _note_unprepared(self, prompt: Prompt, plan: PrefillPlan) -> None:
        """Notes the passages that were computed, and those that were reused behind others though fewer than
        `IN_CONTEXT` passages had stood before them."""
        first = int(prompt.has_system)
        known = self._variants.of_chunks({chunk.chunk_id for chunk in prompt.chunks[first:]})
        for segment, chunk in zip(plan.segments[first:], prompt.chunks[first:], strict=False):
            used = [one for one in known.get(chunk.chunk_id, ()) if one.variant_id == segment.variant_id]
            was_reused = segment.fidelity == "approx" and bool(used) and used[0].passages_before < IN_CONTEXT
            if was_reused or segment.variant_id is None:
                alone = Prompt((*prompt.chunks[:first], chunk), prompt.has_system, chunk.token_ids[-1:], 1)
                self.unprepared.note(alone, was_reused=was_reused)

    def _describe(self, plan: PrefillPlan) -> None:
        num_new = len(computed_offsets(plan))
        self._variants.describe_prefill(plan.num_tokens - num_new, num_new)

    def _other_kv(self, meta: VariantMeta, variants: Sequence[VariantMeta]) -> np.ndarray | None:
        """KV of another variant in memory to compare an exact variant with; None if there is none."""
        other = choose_other_context(filter(self._is_at_hand, variants), meta) if meta.fidelity == "exact" else None
        return None if other is None else self._read(other.variant_id)

    def _read(self, variant_id: VariantId) -> np.ndarray:
        ticket = self._store.prepare_load((variant_id,), counted=False)
        try:
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

    def usable(
        self,
        prompt: Prompt,
        failed: Collection[str] = (),
        *,
        lossy: Collection[str] = (),
        as_stored: Collection[str] = (),
        known: FindVariants | None = None,
    ) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """The known variants of a prompt's chunks, except `failed` ones.

        Variants whose load would read, or did read (`lossy`), a lossy copy count as approximate, unless they are in
        `as_stored`. So does float32 KV that another platform computed, whose rounding differs; in bfloat16 this
        difference is smaller than that between shapes of prefills.

        Args:
          known: looks variants up; None for `VariantIndex.of_chunks`.
        """

        platform = own_platform()

        def seen(meta: VariantMeta) -> VariantMeta:
            is_lossy = meta.variant_id in lossy or self._store.is_lossy(meta.variant_id)
            is_foreign = meta.platform not in (None, platform) and self._model.dtype == jnp.float32
            is_approx = (is_lossy or is_foreign) and meta.variant_id not in as_stored
            return dataclasses.replace(meta, fidelity="approx") if is_approx else meta

        found = (known or self._variants.of_chunks)({chunk.chunk_id for chunk in prompt.chunks})
        usable = {chunk: [meta for meta in metas if meta.variant_id not in failed] for chunk, metas in found.items()}
        return {chunk: tuple(map(seen, metas)) for chunk, metas in usable.items()}

    def leave_out(self, error: LoadFailedError, waited_s: float) -> None:
        """Drops damaged and missing variants; late ones, and those on a failing disk, stay for later requests."""
        late = [key for key, cause in error.causes.items() if isinstance(cause, TimeoutError)]
        late_bytes = sum(map(self._store.unread_bytes, late))
        if late_bytes:  # the reads continue, but the request may have ended by then
            self.rates.tiers[DISK].add(late_bytes, waited_s)
        for variant_id, cause in error.causes.items():
            logger.warning("variant %s: %s; its chunk is computed instead", variant_id, cause)
            if isinstance(cause, ShardCorruptError):
                self._variants.discard(variant_id)
            elif isinstance(cause, ShardNotFoundError):
                self._variants.forget(variant_id)


def _exactly_reused(plan: PrefillPlan) -> frozenset[VariantId]:
    """The variants that the plan treats as equal to a full prefill's KV."""
    return frozenset(
        segment.variant_id
        for segment in plan.segments
        if segment.variant_id is not None and segment.fidelity == "exact"
    )

"""Prepares prefills over stored chunks: which variants may be reused, the plan, and the loads."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Container, Mapping, Sequence

import jax.numpy as jnp

from ccjax.cache.causes import KnownChunks
from ccjax.cache.contexts import LayerLoader
from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.documents.prepared import PreparedPassages
from ccjax.cache.load_plan import LoadPlanner
from ccjax.cache.prefix_runs import CutPrompt, FoundRun
from ccjax.cache.rates import Rates
from ccjax.cache.reads import LoadFailedError, WaitLimit
from ccjax.cache.shared.prefill import SharedPrefill
from ccjax.cache.variant_records import own_platform
from ccjax.cache.variants import VariantIndex
from ccjax.config import EngineConfig
from ccjax.policy.capture import LEAST_TEXT
from ccjax.policy.planner import plan_prefill
from ccjax.policy.question import with_early
from ccjax.policy.settings import PlannerSettings
from ccjax.prompts import Prompt
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.device_memory import longest
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.pool import DevicePool, num_pages
from ccjax.store.errors import ShardCorruptError, ShardNotFoundError
from ccjax.store.throttle import ThrottledLink
from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.types import ChunkId, PrefillPlan, ReuseMode, Segment, VariantId, VariantMeta

logger = logging.getLogger(__name__)
_RECORDS_PER_PLAN = 100
"""Some 5 ms."""
FindVariants = Callable[[Collection[ChunkId]], Mapping[ChunkId, Sequence[VariantMeta]]]


class PrefillPlanner:
    """Plans and loads for the prefills of one engine. Not thread-safe, except `is_reading`, `is_loading` and
    `would_load`.

    Attributes:
      prepared: which variants may serve a prompt.
      read_only: nothing computed is stored, and nothing is claimed from other processes.
      settings: the planner's settings unless a request has its own.
      rates: measured rates of loading and computing.
      loads: decides, from these rates, which loads to give up and how many layers to load ahead.
    """

    def __init__(
        self,
        model: DeviceModel,
        store: TieredStore,
        variants: VariantIndex,
        rates: Rates,
        config: EngineConfig,
        frame: PassageFrame,
        pool: DevicePool | None = None,
        link: ThrottledLink | None = None,
    ) -> None:
        prepares = config.unprepared == "prepare" and config.stores_chunks
        limit = longest(model.config, config)
        self.prepared = PreparedPassages(frame, variants, prepares=prepares, max_model_len=limit)
        self._model = model
        self._pool, self._link = pool, link
        self._store = store
        self._variants = variants
        self.settings = config.planner_settings(model.config.num_layers)
        self.read_only = config.read_only
        self.rates = rates
        self._loading = config.loading
        self.loads = LoadPlanner(store, rates, model.config.num_layers)
        self._loaders: list[weakref.ref[LayerLoader]] = []

    @property
    def is_reading(self) -> bool:
        """True while a running prefill has reads in flight; callable from any thread."""
        return any(loader.is_reading for loader in self._open_loaders())

    @property
    def is_loading(self) -> bool:
        """True while a running prefill waits for KV from host memory or disk; callable from any thread."""
        return any(loader.is_loading for loader in self._open_loaders())

    def _open_loaders(self) -> list[LayerLoader]:
        return [loader for reference in self._loaders if (loader := reference()) is not None]

    def would_load(
        self, prompt: Prompt, mode: ReuseMode, settings: PlannerSettings | None = None
    ) -> dict[VariantId, int]:
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
        plan = plan_prefill(prompt.planned_chunks, candidates, mode=mode, settings=settings or self.settings)
        return with_early(plan, *prompt.early_question)

    def behind_runs(
        self, prompt: Prompt, mode: ReuseMode, num_last: int, *, failed: Collection[str], with_approximate: bool
    ) -> CutPrompt:
        """See `PrefixRuns.cut`; reads some more records of a store that was opened with variants."""
        self._variants.examine(_RECORDS_PER_PLAN)
        return self._variants.runs.cut(prompt, mode, num_last, failed=failed, with_approximate=with_approximate)

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
        wait_limit: WaitLimit,
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
            kv_spec=self._store.kv_spec,
            wait_limit=wait_limit,
            pool=self._pool,
            skip=skip,
            is_cancelled=is_cancelled,
            lead={"layerwise": 1, "alg2": plan.preload_depth, "sync": num_layers}[self._loading],
            on_merge=self.rates.tiers[HOST].add,
            turn=self._model.turned,
            placement=self._model.rows_placement,
            link=self._link,
            on_layer=on_layer,
        )
        self._loaders = [
            *(reference for reference in self._loaders if reference() is not None),
            weakref.ref(loader),
        ]  # a new list, since `is_reading` may iterate over the old one in another thread
        return loader

    def protect(self, prompt: Prompt, plan: PrefillPlan) -> Callable[[], None]:
        """See `VariantIndex.protect`: what a plan reuses, and the passages of its prompt behind the frame."""
        return self._variants.protect({*map(VariantId, plan.pin), *self.prepared.framed(prompt)})

    def pin(self, plan: PrefillPlan) -> LoadTicket:
        """Pins the variants that a plan reuses."""
        return self._store.prepare_load(plan.pin)

    def is_as_planned(self, ticket: LoadTicket, plan: PrefillPlan) -> bool:
        """False if the ticket reads a lossy copy of a variant that the plan treats as exact."""
        return ticket.lossy.isdisjoint(_exactly_reused(plan))

    def unpin(self, ticket: LoadTicket, *, ok: bool = True) -> None:
        """Ends a load; with `ok`, completely read variants may move to a faster tier."""
        self._variants.complete_load(ticket, ok=ok)

    def usable(
        self,
        prompt: Prompt,
        failed: Collection[str] = (),
        *,
        lossy: Collection[str] = (),
        as_stored: Collection[str] = (),
        known: FindVariants | None = None,
        asked: Prompt | None = None,
        runs: Sequence[FoundRun] = (),
    ) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """The known variants of a prompt's chunks, except `failed` ones.

        If passages are kept apart (`PreparedPassages`), only those that it allows.

        Variants whose load would read, or did read (`lossy`), a lossy copy count as approximate, unless they are in
        `as_stored`. So does float32 KV that another platform computed, whose rounding differs; in bfloat16 this
        difference is smaller than that between shapes of prefills.

        Args:
          known: looks variants up; None for `VariantIndex.of_chunks`.
          asked: the prompt before it was cut behind `runs`.
        """

        platform = own_platform()

        def seen(meta: VariantMeta) -> VariantMeta:
            is_lossy = meta.variant_id in lossy or self._store.is_lossy(meta.variant_id)
            is_foreign = meta.platform not in (None, platform) and self._model.dtype == jnp.float32
            is_approx = (is_lossy or is_foreign) and meta.variant_id not in as_stored
            return dataclasses.replace(meta, fidelity="approx") if is_approx else meta

        found = dict((known or self._variants.of_chunks)(prompt.stored_ids))
        failed = self._without_room(prompt, found).union(failed)
        allowed = self.prepared.allowed(asked or prompt) if self.prepared.are_kept_apart else None

        def is_usable(meta: VariantMeta) -> bool:
            return meta.variant_id not in failed and (allowed is None or meta.variant_id in allowed)

        usable = {chunk: tuple(map(seen, filter(is_usable, metas))) for chunk, metas in found.items()}
        ids = [chunk.chunk_id for chunk in prompt.chunks]
        for index, run in enumerate(runs):
            if run.meta.variant_id not in failed:
                key = run.meta.chunk_id
                usable[key] = (*usable.get(key, ()), seen(run.behind(ids[:index])))
        return usable

    def _without_room(self, prompt: Prompt, found: Mapping[ChunkId, Sequence[VariantMeta]]) -> set[VariantId]:
        """The variants on the device that the pool has no room for beside the prompt: a slice pins a whole variant."""
        if self._pool is None:
            return set()
        room = self._pool.num_pages - num_pages(prompt.num_tokens + prompt.max_new_tokens) - len(prompt.segments)
        left_out = set()
        for chunk_id in prompt.stored_ids.difference(chunk.chunk_id for chunk in prompt.chunks):
            for meta in found.get(chunk_id, ()):
                if self._store.tier_of(meta.variant_id) == DEVICE:
                    room -= num_pages(meta.num_tokens)
                    left_out.update({meta.variant_id} if room < 0 else ())
        return left_out

    def known(
        self, prompt: Prompt, usable: Mapping[ChunkId, Sequence[VariantMeta]], given_up: Collection[VariantId]
    ) -> KnownChunks:
        """What is known now of a prompt's chunks, whose `usable` variants without `given_up` were planned with."""
        ids = {part.chunk.chunk_id: {part.chunk.chunk_id} for part in prompt.cached}
        for part in prompt.cached:
            ids[part.chunk.chunk_id] |= {part.source.chunk_id} if part.source else set()

        def among(held: Container[ChunkId]) -> frozenset[ChunkId]:
            """The chunks that are held, or are slices of a chunk that is."""
            return frozenset(chunk for chunk, own in ids.items() if any(one in held for one in own))

        return KnownChunks(
            edited=_edited(prompt.cached, usable),
            stored=among(self._variants.chunk_ids()),
            usable=among({chunk for chunk, metas in usable.items() if metas}),
            evicted=among(self._variants.evicted.ids),
            given_up=among({c for c, metas in usable.items() if any(meta.variant_id in given_up for meta in metas)}),
        )

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


def _edited(parts: Sequence[Segment], usable: Mapping[ChunkId, Sequence[VariantMeta]]) -> frozenset[ChunkId]:
    """The chunks behind a slice of a stored chunk that goes on there, by more than a token that straddles the end;
    text too short to be stored only between two such slices."""
    found = set()
    for before, part, after in zip(parts, parts[1:], (*parts[2:], None), strict=False):
        metas = usable.get(before.source.chunk_id) if before.source else None
        if not before.source or not metas:
            continue
        goes_on = before.source.offset + len(before.chunk.token_ids) + 1 < metas[0].num_tokens
        is_inside = after is not None and after.source and after.source.chunk_id == before.source.chunk_id
        if goes_on and (is_inside or len(part.chunk.token_ids) >= LEAST_TEXT):
            found.add(part.chunk.chunk_id)
    return frozenset(found)


def _exactly_reused(plan: PrefillPlan) -> frozenset[VariantId]:
    """The variants that the plan treats as equal to a full prefill's KV."""
    return frozenset(
        segment.variant_id
        for segment in plan.segments
        if segment.variant_id is not None and segment.fidelity == "exact"
    )

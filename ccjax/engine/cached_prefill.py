"""Prefills over stored chunks: plan, load, compute, then keep what is new. Knows no request, no text and no answer."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from ccjax.engine.capture import capture_variants
from ccjax.engine.prefill import IsCancelled, Prefiller, PrefillResult, ReadLayers, Size
from ccjax.engine.prompts import Prompt
from ccjax.engine.reads import BoundedReader, ComputeRate, LoadFailedError
from ccjax.engine.sharing import SharedPrefill
from ccjax.engine.variants import VariantIndex
from ccjax.policy.planner import PlannerSettings, plan_prefill
from ccjax.types import ChunkId, PrefillPlan, ReuseMode, VariantId, VariantMeta
from store.errors import ShardCorruptError, ShardNotFoundError
from store.tickets import LoadTicket
from store.tiered import TieredStore

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A finished prefill with what its report and capture need; `ticket` is None where reuse was off, `shared` where
    nothing was agreed with other processes."""

    prompt: Prompt
    plan: PrefillPlan
    result: PrefillResult
    ticket: LoadTicket | None
    read_layers: ReadLayers | None
    plan_s: float
    planned_at: float
    failed_loads: int
    shared: SharedPrefill | None = None


class CachedPrefill:
    """Runs prefills of one model over one store; not thread-safe, the engine's lock guards it.

    Every `Prefilled` with a ticket must come back, through `finish` or `replace_approximate`, which unpin its variants.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        store: TieredStore,
        variants: VariantIndex,
        settings: PlannerSettings,
        rate: ComputeRate,
        *,
        read_only: bool,
    ) -> None:
        self._prefiller = prefiller
        self._store = store
        self._variants = variants
        self._settings = settings
        self._read_only = read_only
        self._rate = rate

    def plan(self, prompt: Prompt, mode: ReuseMode, candidates: Mapping[ChunkId, Sequence[VariantMeta]]) -> PrefillPlan:
        """Policy's decisions for a prompt."""
        return plan_prefill(
            "", prompt.planned_chunks, len(prompt.question), candidates, mode=mode, settings=self._settings
        )

    def size_of(self, prompt: Prompt, mode: ReuseMode) -> Size:
        """The size that `run` will begin with, if it captures and all loads succeed."""
        return self._prefiller.size_of(self.plan(prompt, mode, self._usable(prompt)))

    def run(
        self,
        prompt: Prompt,
        mode: ReuseMode,
        *,
        is_cancelled: IsCancelled | None = None,
        queued_layers: int = 1,
        is_shared: bool = False,
    ) -> Prefilled:
        """Plans, loads and computes. Variants that cannot be read, or not in time, are left out and the prompt planned
        again without them.

        Args:
          is_cancelled, queued_layers: as `Prefiller.run`.
          is_shared: chunks that another process on the same store is just computing are waited for
            (`ccjax.engine.sharing`), and others may wait for those that are computed here.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True; nothing stays pinned.
        """
        started = time.perf_counter()
        compute = functools.partial(
            self._prefiller.run, prompt.token_ids, is_cancelled=is_cancelled, queued_layers=queued_layers
        )
        if mode == "off":
            plan = self.plan(prompt, mode, {})
            planned = time.perf_counter()
            result = compute(plan)
            self._measure(result, planned, waited_s=0.0)
            return Prefilled(prompt, plan, result, None, None, planned - started, planned, 0)
        shared = self._shared(is_cancelled) if is_shared else None
        try:
            return self._run_stored(prompt, mode, compute, is_cancelled, started, shared)
        except BaseException:
            if shared is not None:
                shared.release()
            raise

    def _shared(self, is_cancelled: IsCancelled | None) -> SharedPrefill | None:
        claims = None if self._read_only else self._store.claims
        if claims is None:
            return None
        return SharedPrefill(claims, self._variants, self._rate.seconds_per_token, is_cancelled)

    def _run_stored(
        self,
        prompt: Prompt,
        mode: ReuseMode,
        compute: Callable[..., PrefillResult],
        is_cancelled: IsCancelled | None,
        started: float,
        shared: SharedPrefill | None,
    ) -> Prefilled:
        failed: set[VariantId] = set()
        lossy: set[str] = set()
        lost_s = 0.0
        while True:
            usable = self._usable(prompt, failed, lossy=lossy)
            plan = self.plan(prompt, mode, usable)
            if shared is not None and shared.settle(plan, usable):
                continue
            planned = time.perf_counter()
            ticket = self._store.prepare_load(plan.pin)
            if not ticket.lossy.isdisjoint(_exactly_reused(plan)):  # since it was planned, the exact copy went
                self._variants.complete_load(ticket, ok=False)
                lossy |= ticket.lossy
                continue
            sizes = {segment.variant_id: segment.num_tokens for segment in plan.segments if segment.variant_id}
            read_layers = BoundedReader(ticket, sizes, self._rate.seconds_per_token, is_cancelled)
            try:
                read_layers.start(self._prefiller.config.num_layers)
                result = compute(plan, read_layers=read_layers, collect=not self._read_only)
            except LoadFailedError as error:
                self._variants.complete_load(ticket)  # those that were read whole and sound may stay in host memory
                failed.update(error.causes)
                lost_s += read_layers.waited_s
                self._leave_out(error)
                continue
            except BaseException:
                self._variants.complete_load(ticket, ok=False)
                raise
            shared_s = 0.0 if shared is None else shared.waited_s
            result.load_wait_s += lost_s + shared_s
            self._measure(result, planned, read_layers.waited_s)
            plan_s = planned - started - shared_s
            return Prefilled(prompt, plan, result, ticket, read_layers, plan_s, planned, len(failed), shared)

    def finish(self, prefilled: Prefilled) -> None:
        """Credits the used variants, stores the new ones and unpins; a failure costs later reuse, never the answer."""
        if prefilled.ticket is None:
            return
        try:
            segments = prefilled.plan.segments
            self._variants.credit([(one.variant_id, one.cfo or 0.0) for one in segments if one.variant_id is not None])
            if not self._read_only:
                self._capture(prefilled, only_replacing=False)
        except Exception:
            logger.exception("the chunk-caches of a prompt could not be stored")
        finally:
            self._variants.complete_load(prefilled.ticket)
            if prefilled.shared is not None:
                prefilled.shared.release()

    def replace_approximate(self, prefilled: Prefilled) -> int:
        """Of the computed chunks, stores those that take the place of an approximate variant or of a lossy copy, and
        unpins; how many."""
        assert prefilled.ticket is not None
        try:
            return self._capture(prefilled, only_replacing=True)
        finally:
            self._variants.complete_load(prefilled.ticket)

    def _capture(self, prefilled: Prefilled, *, only_replacing: bool) -> int:
        """Stores variants of a prefill; how many."""
        prompt, plan = prefilled.prompt, prefilled.plan
        # A lossy copy that was reused may beget a repaired variant, like the exact one that it is of: error does not
        # build up, for a repaired one is approximate and begets none. Others are replaced by what was computed.
        known = self._usable(prompt, as_stored=plan.pin)
        kept = set(plan.pin)  # nor do the new variants of one prompt push each other out
        count = 0
        for meta, kv in capture_variants(plan, prefilled.result, known, prefilled.read_layers):
            is_replacing = self._variants.replaces_approximate(meta) or self._store.is_lossy(meta.variant_id)
            if only_replacing and not is_replacing:
                continue
            if self._variants.add(meta, kv, prompt, pinned=kept):
                kept.add(meta.variant_id)
                count += 1
        return count

    def _usable(
        self,
        prompt: Prompt,
        failed: Collection[str] = (),
        *,
        lossy: Collection[str] = (),
        as_stored: Collection[str] = (),
    ) -> dict[ChunkId, tuple[VariantMeta, ...]]:
        """The known variants but the `failed` ones. One of which a load would read a lossy copy, or read one (`lossy`),
        is approximate there, unless it is among `as_stored`: a lossy copy must not pass for a full prefill."""

        def seen(meta: VariantMeta) -> VariantMeta:
            is_lossy = meta.variant_id in lossy or self._store.is_lossy(meta.variant_id)
            is_approx = is_lossy and meta.variant_id not in as_stored
            return dataclasses.replace(meta, fidelity="approx") if is_approx else meta

        known = self._variants.of_chunks({chunk.chunk_id for chunk in prompt.chunks})
        usable = {chunk: [meta for meta in metas if meta.variant_id not in failed] for chunk, metas in known.items()}
        return {chunk: tuple(map(seen, metas)) for chunk, metas in usable.items()}

    def _leave_out(self, error: LoadFailedError) -> None:
        """Drops what is damaged or gone; what was only late, or behind a failing disk, stays for later requests."""
        for variant_id, cause in error.causes.items():
            logger.warning("variant %s: %s; its chunk is computed instead", variant_id, cause)
            if isinstance(cause, ShardCorruptError):
                self._variants.discard(variant_id)
            elif isinstance(cause, ShardNotFoundError):
                self._variants.forget(variant_id)

    def _measure(self, result: PrefillResult, planned: float, waited_s: float) -> None:
        """Waits for the device, so that the clock tells what computing took."""
        jax.block_until_ready(result.hidden)
        seconds = time.perf_counter() - planned
        self._rate.observe(result, self._prefiller.config.num_layers, seconds, waited_s)


def _exactly_reused(plan: PrefillPlan) -> frozenset[VariantId]:
    """The variants that the plan takes for what a full prefill would give."""
    return frozenset(
        segment.variant_id
        for segment in plan.segments
        if segment.variant_id is not None and segment.fidelity == "exact"
    )

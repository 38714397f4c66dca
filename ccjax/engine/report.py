"""Builds the reuse report of a finished prefill."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from ccjax.cache.planned_prefill import Prefilled
from ccjax.policy.contract import ReuseContract
from ccjax.types import REUSED_ANYWHERE, DocumentReuse, PlannedSegment, ReuseMode, ReuseReport, VariantId


def build_report(
    prefilled: Prefilled,
    *,
    mode: ReuseMode,
    contract: ReuseContract,
    strategy: str,
    num_layers: int,
    framed: Collection[VariantId],
) -> ReuseReport:
    """Reports what the prefill reused, per document and in total."""
    prompt, plan, result = prefilled.prompt, prefilled.plan, prefilled.result
    tiers: Mapping[str, str] = {} if prefilled.ticket is None else prefilled.ticket.tiers
    documents: list[DocumentReuse] = []
    number = 0
    splits = [_split(segment, result.recomputed_tokens_of.get(index)) for index, segment in enumerate(plan.segments)]
    for segment, chunk, split, cause in zip(plan.segments, prompt.chunks, splits, prefilled.causes, strict=False):
        focused = None
        if segment.role in REUSED_ANYWHERE:
            focused = None if result.focused is None else number in result.focused
            number += 1
        reused, recomputed, computed = split
        documents.append(
            DocumentReuse(
                role=segment.role,
                chunk_id=segment.chunk_id,
                num_tokens=segment.num_tokens,
                reused_tokens=reused,
                recomputed_tokens=recomputed,
                computed_tokens=computed,
                tier=tiers.get(segment.variant_id) if segment.variant_id is not None else None,
                cfo=segment.cfo,
                exact=segment.fidelity == "exact",
                focused=focused,
                framed=segment.variant_id in framed,
                document_id=chunk.document_id,
                version=chunk.version,
                title=chunk.title,
                cause=cause,
            )
        )
    approximate = [segment for segment in plan.segments if segment.fidelity != "exact"]
    unprepared = {segment.variant_id for segment in approximate if segment.variant_id is not None}.difference(framed)
    bound = None if contract.is_for_prepared and unprepared else contract.quality_bound
    return ReuseReport(
        mode=mode,
        strategy=strategy,
        prompt_tokens=plan.num_tokens,
        computed_tokens=sum(split[2] for split in splits),
        recomputed_tokens=sum(split[1] for split in splits),
        reused_tokens=sum(split[0] for split in splits),
        computed_share=result.computed_token_layers / (plan.num_tokens * num_layers),
        exact=not approximate,
        per_document=tuple(documents),
        focus_cut_layer=result.focus_cut_layer,
        loaded_bytes=result.loaded_bytes,
        load_wait_s=result.load_wait_s,
        plan_s=prefilled.plan_s,
        prefill_s=time.perf_counter() - prefilled.planned_at_s,
        failed_loads=prefilled.failed_loads,
        preloaded_bytes=prefilled.preloaded_bytes,
        load_s=prefilled.load_s,
        given_up_loads=prefilled.given_up_loads,
        calibrated=contract.is_calibrated and bool(approximate),
        quality_target=contract.quality_target,
        quality_bound=bound if approximate else 1.0,
    )


def _split(segment: PlannedSegment, chosen: int | None) -> tuple[int, int, int]:
    """(reused, recomputed, computed) tokens of a segment. `chosen`: tokens chosen by deviation for recomputing, None
    if deviation did not choose."""
    if segment.action == "compute":
        return 0, 0, segment.num_tokens
    recomputed = len(segment.recompute_offsets) if chosen is None else chosen
    return segment.num_tokens - recomputed, recomputed, 0

"""Builds the reuse report of a finished prefill."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from ccjax.cache.planned_prefill import Prefilled
from ccjax.policy.contract import ReuseContract
from ccjax.prompts import Prompt
from ccjax.types import (
    REUSED_ANYWHERE,
    DocumentReuse,
    PlannedSegment,
    PrefillPlan,
    ReuseMode,
    ReuseReport,
    VariantId,
)


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
    plan, result = prefilled.plan, prefilled.result
    parts = reuse_by_segment(prefilled, framed)
    num_prepared = sum(s.num_tokens for s in plan.segments if s.chunk_id in prefilled.prepared and s.action == "reuse")
    approximate = [segment for segment in plan.segments if segment.fidelity != "exact"]
    unprepared = {segment.variant_id for segment in approximate if segment.variant_id is not None}.difference(framed)
    bound = None if contract.is_for_prepared and unprepared else contract.quality_bound
    return ReuseReport(
        mode=mode,
        strategy=strategy,
        prompt_tokens=plan.num_tokens,
        computed_tokens=sum(part.computed_tokens for part in parts),
        recomputed_tokens=sum(part.recomputed_tokens for part in parts),
        reused_tokens=sum(part.reused_tokens for part in parts),
        computed_share=(result.computed_token_layers / num_layers + num_prepared) / plan.num_tokens,
        exact=not approximate,
        per_document=_by_asked_segment(prefilled.asked, plan, parts),
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


def reuse_by_segment(prefilled: Prefilled, framed: Collection[VariantId] = ()) -> list[DocumentReuse]:
    """The reuse of each planned segment, the question included."""
    plan, result = prefilled.plan, prefilled.result
    tiers: Mapping[str, str] = {} if prefilled.ticket is None else prefilled.ticket.tiers
    parts: list[DocumentReuse] = []
    number = 0
    for index, (segment, own) in enumerate(zip(plan.segments, prefilled.prompt.segments, strict=True)):
        focused = None
        if segment.role in REUSED_ANYWHERE:
            focused = None if result.focused is None else number in result.focused
            number += 1
        is_prepared = segment.chunk_id in prefilled.prepared
        reused, recomputed, computed = _split(segment, result.recomputed_tokens_of.get(index), is_prepared=is_prepared)
        parts.append(
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
                document_id=own.chunk.document_id,
                version=own.chunk.version,
                title=own.chunk.title,
                cause="new" if is_prepared else prefilled.causes[index],
            )
        )
    return parts


def _by_asked_segment(asked: Prompt, plan: PrefillPlan, parts: Sequence[DocumentReuse]) -> tuple[DocumentReuse, ...]:
    """The reuse of each segment of the prompt as it was assembled, without the question: a run may span several, and
    end within one."""
    found, start = [], 0
    for segment in asked.cached:
        chunk, end = segment.chunk, start + len(segment.chunk.token_ids)
        reused = recomputed = computed = 0
        inside = []
        for planned, part in zip(plan.segments, parts, strict=True):
            overlap = min(end, planned.start + planned.num_tokens) - max(start, planned.start)
            if overlap <= 0:
                continue
            inside.append(part)
            is_whole = overlap == planned.num_tokens
            recomputed += part.recomputed_tokens if is_whole else 0
            computed += part.computed_tokens if is_whole else overlap * (planned.action == "compute")
            reused += part.reused_tokens if is_whole else overlap * (planned.action == "reuse")
        told = DocumentReuse(
            role=segment.role,
            chunk_id=chunk.chunk_id,
            num_tokens=end - start,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            computed_tokens=computed,
            tier=next((part.tier for part in inside if part.tier is not None), None),
            cfo=next((part.cfo for part in inside if part.cfo is not None), None),
            exact=all(part.exact for part in inside),
            focused=next((part.focused for part in inside if part.focused is not None), None),
            framed=any(part.framed for part in inside),
            document_id=chunk.document_id,
            version=chunk.version,
            title=chunk.title,
            cause=next((part.cause for part in inside if part.cause is not None), None),
        )
        found.append(told)
        start = end
    return tuple(found)


def _split(segment: PlannedSegment, chosen: int | None, *, is_prepared: bool) -> tuple[int, int, int]:
    """(reused, recomputed, computed) tokens of a segment.

    Args:
      chosen: tokens chosen by deviation for recomputing, None if deviation did not choose.
      is_prepared: what is reused was computed for this prompt.
    """
    if segment.action == "compute":
        return 0, 0, segment.num_tokens
    recomputed = len(segment.recompute_offsets) if chosen is None else chosen
    others = segment.num_tokens - recomputed
    return (0, recomputed, others) if is_prepared else (others, recomputed, 0)

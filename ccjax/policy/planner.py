"""Plans a prefill: turns a chunked prompt and the stored variants into the `PrefillPlan` that the engine executes.

Exact first, in every strategy and mode: an exact variant behind exactly its own prefix is what a full prefill would
compute, so it is reused unchanged wherever it occurs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ccjax.policy._checks import check_count
from ccjax.policy.hkvd import counts_by_layer
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.slices import with_slices
from ccjax.policy.strategies import get_strategy
from ccjax.policy.strategy import Decision
from ccjax.types import REUSE_MODES, REUSED_ANYWHERE, ChunkId, PlannedSegment, PrefillPlan, ReuseMode, VariantMeta


def plan_prefill(
    chunks: Sequence[PromptChunk],
    candidates: Mapping[ChunkId, Sequence[VariantMeta]],
    *,
    mode: ReuseMode,
    settings: PlannerSettings,
) -> PrefillPlan:
    """Makes all decisions for one prefill. Deterministic: the same inputs, with candidates in any order, give the same
    plan.

    Modes: `off` computes everything. `exact` reuses exact variants behind exactly equal prefixes, also after a computed
    chunk, and computes the rest. `bounded` also reuses approximately, as the strategy decides. `fast` does the same
    with at most `settings.fast_ratio` of such a chunk recomputed. A chunk whose tokens would all be recomputed is
    computed instead, so that it is captured as a whole; unless they are only candidates (`Decision.kept_ratio`).

    The last chunk is computed in any case, since its last token gives the answer's first. `fidelity` is exact for an
    exact reuse; for a computed chunk iff no earlier segment is approximate; approx for all else. `cfo` is eq. 12's
    value for the chosen variant, 0 for an exact reuse, even if `recompute_ratio` or `fast_ratio` set another share.
    `focus_window` is set only if some segment has tokens to recompute, since nothing else can be dropped, and if they
    are not already chosen by their deviation during the prefill. `chosen_by_question` is set only if the last chunk,
    which then runs twice, has no more tokens than it chooses.

    Args:
      chunks: the segments of the prompt, in order; each may occur more than once. Only the last may be a question.
      candidates: the usable variants of each chunk, and of the sources of chunks; those without an entry have none. Of
        a source's variants the slice is reused that the chunk is: exactly only the beginning of an exact variant behind
        exactly its own prefix.

    Raises:
      ValueError: no chunk, one without tokens, a question before the last, an unknown mode, or a candidate that belongs
        to another chunk, has another length, or ends before the slice.
    """
    _check_prompt(chunks, candidates, mode)
    candidates, offsets = with_slices(chunks, candidates)
    *chunks, last = chunks
    if mode == "off":
        decisions: Sequence[Decision] = [Decision()] * len(chunks)
    else:
        decisions = get_strategy(settings.strategy).decide(chunks, candidates, mode, settings)

    segments: list[PlannedSegment] = []
    start, is_exact = 0, True
    for chunk, decision in zip(chunks, decisions, strict=True):
        segment = _segment(chunk, decision, start, mode, is_exact, fixes_positions=settings.fixes_positions)
        if segment.variant_id is not None:
            first = offsets.get((chunk.chunk_id, segment.variant_id), 0)
            segment = dataclasses.replace(segment, chunk_offset=first) if first else segment
        segments.append(segment)
        start += chunk.num_tokens
        is_exact = is_exact and segment.fidelity == "exact"
    segments.append(
        PlannedSegment(
            role=last.role,
            action="compute",
            start=start,
            num_tokens=last.num_tokens,
            chunk_id=None if last.role == "question" else last.chunk_id,
            fidelity="exact" if is_exact else "approx",
        )
    )
    num_candidates = sum(len(segment.recompute_offsets) for segment in segments)
    kept_ratio = next((decision.kept_ratio for decision in decisions if decision.kept_ratio is not None), None)
    hkvd_counts: tuple[int, ...] = ()
    if kept_ratio is not None and num_candidates:
        hkvd_counts = counts_by_layer(num_candidates, kept_ratio, settings.num_layers)
    asked = tuple(
        index for index, decision in enumerate(decisions) if decision.by_question and segments[index].action == "reuse"
    )
    num_asked = sum(len(segments[index].recompute_offsets) for index in asked)
    pin = dict.fromkeys(segment.variant_id for segment in segments if segment.variant_id is not None)
    return PrefillPlan(
        segments=tuple(segments),
        focus_window=settings.focus_window if num_candidates and not hkvd_counts else None,
        focus_rule=settings.focus_rule,
        hkvd_counts_by_layer=hkvd_counts,
        chosen_by_question=asked if last.num_tokens <= num_asked else (),
        pin=tuple(pin),
    )


def _segment(
    chunk: PromptChunk, decision: Decision, start: int, mode: ReuseMode, is_prefix_exact: bool, *, fixes_positions: bool
) -> PlannedSegment:
    choice = decision.choice
    is_computed = decision.kept_ratio is None and len(decision.recompute_offsets) == chunk.num_tokens
    if choice is None or is_computed:
        return PlannedSegment(
            role=chunk.role,
            action="compute",
            start=start,
            num_tokens=chunk.num_tokens,
            chunk_id=chunk.chunk_id,
            fidelity="exact" if is_prefix_exact else "approx",
        )
    if mode == "exact" and not choice.exact:
        raise ValueError(f"strategy: mode 'exact' allows exact reuse only, got variant {choice.meta.variant_id!r}")
    if chunk.role not in REUSED_ANYWHERE and choice.missing:
        raise ValueError(f"strategy: wanted {chunk.role} behind its own prefix, got variant {choice.meta.variant_id!r}")
    return PlannedSegment(
        role=chunk.role,
        action="reuse",
        start=start,
        num_tokens=chunk.num_tokens,
        chunk_id=chunk.chunk_id,
        variant_id=choice.meta.variant_id,
        recompute_offsets=decision.recompute_offsets,
        cfo=choice.cfo,
        key_shift=0 if fixes_positions or choice.meta.start is None else choice.meta.start - start,
        fidelity="exact" if choice.exact else "approx",
    )


def _check_prompt(
    chunks: Sequence[PromptChunk], candidates: Mapping[ChunkId, Sequence[VariantMeta]], mode: ReuseMode
) -> None:
    if mode not in REUSE_MODES:
        raise ValueError(f"mode: wanted one of {', '.join(REUSE_MODES)}, got {mode!r}")
    if not chunks:
        raise ValueError("chunks: wanted at least one, got none")
    for index, chunk in enumerate(chunks):
        check_count(f"chunks[{index}].num_tokens", chunk.num_tokens)
        if chunk.role == "question" and index < len(chunks) - 1:
            raise ValueError(
                f"chunks[{index}].role: wanted a question only at the end, got one before {len(chunks) - 1}"
            )
        for meta in candidates.get(chunk.chunk_id, ()):
            if meta.chunk_id != chunk.chunk_id or meta.num_tokens != chunk.num_tokens:
                raise ValueError(
                    f"candidates[{chunk.chunk_id!r}]: wanted variants of this chunk with {chunk.num_tokens} tokens, "
                    f"got {meta.variant_id!r} of {meta.chunk_id!r} with {meta.num_tokens}"
                )
        if chunk.source is None:
            continue
        check_count(f"chunks[{index}].source.offset", chunk.source.offset, least=0)
        end = chunk.source.offset + chunk.num_tokens
        for meta in candidates.get(chunk.source.chunk_id, ()):
            if meta.chunk_id != chunk.source.chunk_id or meta.num_tokens < end:
                raise ValueError(
                    f"candidates[{chunk.source.chunk_id!r}]: wanted variants of this chunk with at least {end} tokens, "
                    f"got {meta.variant_id!r} of {meta.chunk_id!r} with {meta.num_tokens}"
                )

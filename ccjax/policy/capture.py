"""Decides what to store after a prefill, and describes it (CacheCraft eq. 9-11, 14, sec. 3.3)."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from ccjax.policy._checks import check_count, check_masses
from ccjax.policy.reuse import chunk_context_impact, normalised_masses
from ccjax.types import (
    REUSED_ANYWHERE,
    ChunkId,
    Fidelity,
    PlannedSegment,
    PrefillPlan,
    SegmentRole,
    VariantId,
    VariantMeta,
    leading_instructions,
)

LEAST_TEXT = 16
"""Text of fewer tokens, less than a page of the pool, is computed again instead of stored."""


def make_variant_id(chunk_id: ChunkId, prefix_ids: Sequence[ChunkId], fidelity: Fidelity) -> VariantId:
    """sha256 (hex) of chunk id, ordered prefix chunk ids and fidelity; the same in every process."""
    return _variant_id(chunk_id, tuple(prefix_ids), fidelity)


@functools.lru_cache(1 << 14)  # a tree asks for each parent at every use
def _variant_id(chunk_id: ChunkId, prefix_ids: tuple[ChunkId, ...], fidelity: Fidelity) -> VariantId:
    content = json.dumps(["ccjax-variant-1", chunk_id, prefix_ids, fidelity], separators=(",", ":"))
    return VariantId(hashlib.sha256(content.encode()).hexdigest())


def variant_meta(
    *,
    chunk_id: ChunkId,
    prefix_ids: Sequence[ChunkId],
    prefix_lengths: Sequence[int],
    inter_by_prefix: Sequence[float],
    intra: float,
    token_scores: Sequence[float],
    num_bytes: int,
    fidelity: Fidelity = "exact",
    start: int | None = None,
    roles: Sequence[SegmentRole] = (),
) -> VariantMeta:
    """Metadata of a chunk captured behind `prefix_ids`, with `f_r` 0.

    Every mass is a mean over layers (and query heads). CacheCraft eq. 10 averages the per-layer values that eq. 9
    normalises by chunk lengths; lengths are the same in every layer, so normalising the means gives the same.

    Ranking (eq. 14): offsets by descending score, ties by offset. Without passages before the chunk there is nothing to
    rank by; the offsets are then in ascending order, because a chunk's first tokens are those a new prefix changes most
    (computed alone, they served as the attention sink; EPIC's LegoLink recomputes just them).

    For a chunk of which only some tokens were recomputed, pass sums over those tokens and a score of 0 for the others:
    a and b shrink equally, so CCI keeps its meaning, and previously fixed tokens rank first again.

    Args:
      prefix_lengths: tokens of each prefix chunk.
      inter_by_prefix: eq. 3, mass of the chunk's queries on each prefix chunk, summed over the chunk's tokens.
      intra: eq. 4, mass of the chunk's queries on earlier tokens of the chunk, summed; the diagonal left out.
      token_scores: for each token of the chunk, its mass on all prior chunks.
      num_bytes: size of the stored KV.
      start: position of the chunk's first token.
      roles: of the prefix chunks and the chunk (`VariantMeta.roles`); the mass on instructions that the prefix begins
        with is ignored.

    Raises:
      ValueError: lists that should be aligned are not, there is no token, or a number is out of range.
    """
    if not len(prefix_ids) == len(prefix_lengths) == len(inter_by_prefix):
        raise ValueError(
            f"prefix_ids, prefix_lengths, inter_by_prefix: wanted one length, "
            f"got {len(prefix_ids)}, {len(prefix_lengths)}, {len(inter_by_prefix)}"
        )
    num_tokens = len(token_scores)
    check_count("len(token_scores)", num_tokens)
    check_masses("token_scores", token_scores)
    check_count("num_bytes", num_bytes, least=0)
    if roles and len(roles) != len(prefix_ids) + 1:
        raise ValueError(
            f"roles: wanted one for each of {len(prefix_ids)} prefix chunks and the chunk, got {len(roles)}"
        )
    num_instructions = leading_instructions(roles[: len(prefix_ids)])
    inter_by_prefix = (*[0.0] * num_instructions, *inter_by_prefix[num_instructions:])
    a_mean, b_mean = normalised_masses(inter_by_prefix, intra, prefix_lengths, num_tokens)
    ranking = sorted(range(num_tokens), key=lambda offset: (-token_scores[offset] if prefix_ids else 0.0, offset))
    return VariantMeta(
        variant_id=make_variant_id(chunk_id, prefix_ids, fidelity),
        chunk_id=chunk_id,
        prefix_ids=tuple(prefix_ids),
        inter_by_prefix=inter_by_prefix,
        a_mean=a_mean,
        b_mean=b_mean,
        cci=chunk_context_impact(a_mean, b_mean),
        token_ranking=tuple(ranking),
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        fidelity=fidelity,
        start=start,
        roles=tuple(roles),
    )


def should_capture(
    segment: PlannedSegment, existing_variants: Iterable[VariantMeta], prefix_ids: Sequence[ChunkId]
) -> bool:
    """Whether the segment's KV is worth storing after the prefill as a variant of fidelity `segment.fidelity`.

    A computed chunk is, unless a variant with the same prefix and at least that fidelity exists. An approximately
    reused chunk is if some of it was recomputed, the variant it came from is exact (approximate variants are never
    derived from approximate ones, so errors cannot compound) and no variant with the same prefix exists. Nothing else
    is. What is no passage is reused behind its own prefix alone, so an approximate variant of it is of no use, nor is a
    stored one of less than `LEAST_TEXT` tokens.

    Args:
      existing_variants: the stored variants; those of other chunks are skipped.
      prefix_ids: chunk ids before the chunk in the prompt.
    """
    if segment.chunk_id is None or (segment.role not in REUSED_ANYWHERE and segment.fidelity != "exact"):
        return False
    if segment.role == "text" and segment.num_tokens < LEAST_TEXT:
        return False
    own = [meta for meta in existing_variants if meta.chunk_id == segment.chunk_id]
    same_prefix = {meta.fidelity for meta in own if meta.prefix_ids == tuple(prefix_ids)}
    if segment.action == "compute":
        return "exact" not in same_prefix and segment.fidelity not in same_prefix
    is_parent_exact = any(meta.variant_id == segment.variant_id and meta.fidelity == "exact" for meta in own)
    return bool(segment.recompute_offsets) and is_parent_exact and not same_prefix


def variants_to_compute(plan: PrefillPlan, known: Mapping[ChunkId, Sequence[VariantMeta]]) -> dict[VariantId, int]:
    """The variants that the computed chunks of a plan will be stored as, in prompt order, and their tokens.

    Two prompts that share one of these have the same chunks up to it. So all processes agree on prompt order, and the
    process that computes the first shared one computes the others, too.

    Args:
      known: the stored variants of the plan's chunks.
    """
    found: dict[VariantId, int] = {}
    prefix_ids: list[ChunkId] = []
    for segment in plan.segments:
        if segment.chunk_id is None:
            continue
        is_new = segment.action == "compute" and should_capture(segment, known.get(segment.chunk_id, ()), prefix_ids)
        if is_new:
            found[make_variant_id(segment.chunk_id, prefix_ids, segment.fidelity)] = segment.num_tokens
        prefix_ids.append(segment.chunk_id)
    return found

"""Chooses the variant of a chunk to reuse, the credit of a use, the variants to evict (CacheCraft sec. 3.3), and the
variants to replace in idle time."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from ccjax.policy._checks import check_count, check_ratio
from ccjax.policy.reuse import adjusted_overlap, cache_fix_overhead
from ccjax.types import REUSED_ANYWHERE, ChunkId, VariantId, VariantMeta

MIN_CHUNKS_BEFORE = 2
"""Number of chunks before a chunk, besides instructions, from which its KV counts as computed in the middle of a
prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class VariantChoice:
    """The chosen variant, its CFO (CacheCraft eq. 12) behind the new prefix, whether its KV is a full prefill's, and
    the share of its old context that is missing there, `1 - beta'` (eq. 8)."""

    meta: VariantMeta
    cfo: float
    exact: bool
    missing: float


class Evictable(Protocol):
    """The part of a `VariantMeta` needed to choose victims, which callers have for every variant."""

    @property
    def variant_id(self) -> VariantId: ...
    @property
    def frequency_reuse(self) -> float: ...


def choose_variant(
    variants: Iterable[VariantMeta],
    new_prefix_ids: Sequence[ChunkId],
    *,
    alpha: float,
    exact_only: bool = False,
    num_instructions: int = 0,
    in_context_first: bool = False,
) -> VariantChoice | None:
    """The variant with the least CFO behind `new_prefix_ids` (CacheCraft sec. 3.3), or None if none qualifies.

    Reuse is exact iff the variant is exact and its prefix equals the new one; its CFO is then 0. Among equal CFOs an
    exact reuse comes first, then an exact variant before an approximate one, then the least unscaled `CCI (1 - beta')`
    (which distinguishes variants if clipping or alpha = 0 makes CFOs equal), then the smaller variant id.

    Args:
      variants: of one chunk, in any order.
      new_prefix_ids: chunk ids before the chunk in the new prompt.
      exact_only: consider exact reuse alone.
      num_instructions: number of instructions at the beginning of the new prefix. They are no prefix chunks in eq. 6
        and 7; a variant behind other instructions shares no context with the new prompt, so its beta' is 0.
      in_context_first: prefer variants computed behind at least `MIN_CHUNKS_BEFORE` other chunks, then those behind
        fewer. Eq. 12 ranks the other way round, since the CCI of a chunk computed alone is the least; but in
        measurements the tokens of such a chunk behave like the beginning of a text, and its KV changes answers two to
        four times as much as KV computed behind unrelated passages. One passage is not enough for that.
    """
    prefix = tuple(new_prefix_ids)
    variants = tuple(variants)
    exact = [meta for meta in variants if meta.prefix_ids == prefix and meta.fidelity == "exact"]
    if exact:  # its CFO is 0, and nothing ranks higher
        return VariantChoice(min(exact, key=lambda meta: meta.variant_id), 0.0, True, 0.0)
    if exact_only:
        return None

    def rank(meta: VariantMeta) -> tuple[int, float, bool, float, VariantId]:
        overlap = _overlap(meta, prefix, num_instructions)
        unscaled = cfo = cache_fix_overhead(meta.cci, overlap, 1.0)
        if alpha != 1.0:
            cfo = cache_fix_overhead(meta.cci, overlap, alpha)
        is_preferred = not in_context_first or meta.prefix_ids == prefix
        lacking = 0 if is_preferred else max(0, MIN_CHUNKS_BEFORE - meta.chunks_before)
        return lacking, cfo, meta.fidelity != "exact", unscaled, meta.variant_id

    best = min(((rank(meta), meta) for meta in variants), key=lambda pair: pair[0], default=None)
    if best is None:
        return None
    (_, cfo, *_), meta = best
    return VariantChoice(meta, cfo, False, 1.0 - _overlap(meta, prefix, num_instructions))


def _overlap(meta: VariantMeta, prefix: tuple[ChunkId, ...], num_instructions: int) -> float:
    """CacheCraft eq. 8 over both prefixes without their instructions."""
    if meta.prefix_ids == prefix:
        return 1.0
    first = meta.num_instructions
    if meta.prefix_ids[:first] != prefix[:num_instructions]:
        return 0.0
    old, masses, new = meta.prefix_ids[first:], meta.inter_by_prefix[first:], prefix[first:]
    return adjusted_overlap(old, masses, new) if old else 0.0


def choose_other_context(variants: Iterable[VariantMeta], meta: VariantMeta) -> VariantMeta | None:
    """The variant whose KV shows most of the influence of `meta`'s prefix: exact, of the same chunk, behind the prefix
    that has least in common with its own, among several the shortest. None if there is none behind another prefix."""
    own = frozenset(meta.prefix_ids)
    others = (
        other
        for other in variants
        if other.chunk_id == meta.chunk_id and other.fidelity == "exact" and other.prefix_ids != meta.prefix_ids
    )
    return min(
        others,
        key=lambda other: (len(own.intersection(other.prefix_ids)), len(other.prefix_ids), other.variant_id),
        default=None,
    )


def reuse_credit(share: float, num_tokens: int) -> float:
    """Credit of one use in `f_r`, CacheCraft sec. 3.3: 1/CFO, in [1, num_tokens].

    The paper recomputes the CFO of every chunk. If a share is forced, calibrated or capped, or chosen by deviation, CFO
    is not the cost of a use; our reading: `share` is what was recomputed. The paper does not define CFO = 0; our
    reading: at least one token, 1/|C|, so that an exact reuse earns |C|.
    """
    check_ratio("share", share)
    check_count("num_tokens", num_tokens)
    return min(1.0 / share, float(num_tokens)) if share > 0.0 else float(num_tokens)


def choose_victims(
    variants: Iterable[Evictable], count: int, *, pinned: Collection[VariantId] = ()
) -> tuple[VariantId, ...] | None:
    """The `count` variants to drop beyond N x M: least `f_r` first (CacheCraft sec. 3.3), ties by id; None if fewer are
    unpinned. Eviction for lack of bytes is decided by `ccjax.policy.eviction`."""
    check_count("count", count, least=0)
    protected = frozenset(pinned)
    free = (meta for meta in variants if meta.variant_id not in protected) if count else ()
    victims = heapq.nsmallest(count, free, key=lambda meta: (meta.frequency_reuse, meta.variant_id))
    return tuple(meta.variant_id for meta in victims) if len(victims) == count else None


def hottest_first(variants: Iterable[VariantMeta]) -> list[VariantMeta]:
    """Order in which variants are worth copying elsewhere: greatest `f_r` first, the reverse of eviction (CacheCraft
    sec. 3.3); among equals exact ones before approximate ones, which can never be reused exactly, then by id."""
    return sorted(variants, key=lambda meta: (-meta.frequency_reuse, meta.fidelity != "exact", meta.variant_id))


def choose_repair(variants: Iterable[VariantMeta], known_chunk_ids: Collection[ChunkId]) -> VariantMeta | None:
    """The approximate variant to recompute next, so that an exact one replaces it: the one with the greatest `f_r`,
    ties by id; None if there is none.

    CacheCraft does not discuss variants computed on top of approximate KV. Our reading: they are used until there is
    idle time and replaced then, the most useful first, so that errors do not persist.

    Args:
      known_chunk_ids: chunks whose token ids are known. A variant is skipped unless its own chunk and every chunk of
        its prefix are among them; so is what no other prompt than its own conversation's reuses.
    """
    known = frozenset(known_chunk_ids)
    repairable = (
        meta
        for meta in variants
        if meta.fidelity == "approx"
        and (not meta.roles or meta.roles[-1] in REUSED_ANYWHERE)
        and known.issuperset((meta.chunk_id, *meta.prefix_ids))
    )
    return min(repairable, key=lambda meta: (-meta.frequency_reuse, meta.variant_id), default=None)

"""Turns the KV that a prefill computed into chunk variants: arrays, and the metadata that policies decide by.

The equations are in `ccjax.policy.capture`; this module computes the sums in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ccjax.policy.capture import should_capture, variant_meta
from ccjax.runner.plan_rows import SINK_TOKENS, PrefillOutcome, mass_columns
from ccjax.runner.pool import PagedShard
from ccjax.types import ChunkId, PlannedSegment, PrefillPlan, VariantMeta


def capture_variants(
    plan: PrefillPlan,
    result: PrefillOutcome,
    known: Mapping[ChunkId, Collection[VariantMeta]],
    *,
    ranking_layers: Collection[int] | None = None,
) -> Iterator[tuple[VariantMeta, PagedShard]]:
    """Yields each variant worth keeping with its KV, in the pages of the prompt.

    Computed chunks are kept as computed, approximately reused ones with their recomputed tokens (CacheCraft sec. 3.3
    adds a variant for each new prefix); `ccjax.policy.capture.should_capture` decides which. A chunk whose
    recomputation the focus cut short is not kept: a later question that attends to the passage would take it for a
    complete one.

    Args:
      ranking_layers: layers whose masses rank a chunk's tokens (CacheCraft eq. 14); None for all, as in the paper.
    """
    masses = _mean_masses(plan, result)
    ranking = masses[0] if ranking_layers is None else _mean_masses(plan, result, ranking_layers)[0]
    columns = mass_columns(plan)
    before: list[PlannedSegment] = []
    for index, segment in enumerate(plan.segments):
        if segment.chunk_id is None:
            continue
        prefix_ids = tuple(earlier.chunk_id for earlier in before if earlier.chunk_id is not None)
        # Its pages hold each of its tokens as computed or as stored: not after a cut, nor if its keys were rotated.
        is_whole = index not in result.partly_recomputed and not segment.key_shift
        if is_whole and should_capture(segment, known.get(segment.chunk_id, ()), prefix_ids):
            assert result.kv is not None
            kv = result.kv.part(segment.start, segment.start + segment.num_tokens)
            yield _measured_meta(columns[: index + 1], segment, before, prefix_ids, masses, ranking, kv.num_bytes), kv
        before.append(segment)


def context_deviations(kv: PagedShard, other: np.ndarray | PagedShard) -> tuple[float, ...]:
    """Distance of each token's KV from that of the same chunk behind another prefix, to three digits
    (`PagedShard.deviations`)."""
    return tuple(float(f"{value:.3g}") for value in kv.deviations(other))


def _mean_masses(
    plan: PrefillPlan, result: PrefillOutcome, layers: Collection[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mass [n, C] on every column (`mass_columns`) and self mass [n] of every prompt token, float64: means over
    `layers` or all layers, without the attention sink.

    Tokens that no layer computed have mass 0, as `variant_meta` requires for a repaired chunk.
    """
    num_columns = 1 + int(mass_columns(plan).max())
    mass = np.zeros((plan.num_tokens, num_columns))
    own = np.zeros(plan.num_tokens)
    for rows in result.layers:
        if layers is not None and rows.layer not in layers:
            continue
        inside = slice(rows.first, rows.first + len(rows.offsets))
        mass[rows.offsets] += np.asarray(rows.mass)[inside, :num_columns]
        own[rows.offsets] += np.asarray(rows.self_mass)[inside]
    own[:SINK_TOKENS] = 0.0  # their mass on segments is 0 already
    num_layers = result.layers[-1].layer + 1 if layers is None else len(layers)
    return mass / num_layers, own / num_layers


def _measured_meta(
    columns: np.ndarray,
    segment: PlannedSegment,
    before: Sequence[PlannedSegment],
    prefix_ids: tuple[ChunkId, ...],
    masses: tuple[np.ndarray, np.ndarray],
    ranking: np.ndarray,
    num_bytes: int,
) -> VariantMeta:
    assert segment.chunk_id is not None
    rows = slice(segment.start, segment.start + segment.num_tokens)
    mass, own = masses[0][rows], masses[1][rows]
    *others, column = columns.tolist()
    earlier = [(other, one.role) for other, one in zip(others, before, strict=True)]
    # As in eq. 6 to 9: instructions would only blur which tokens depend on the passages before them.
    ranked = sorted({other for other, role in earlier if role != "instructions" and other != column})
    mass_on = mass.sum(0).tolist()
    return variant_meta(
        chunk_id=segment.chunk_id,
        prefix_ids=prefix_ids,
        prefix_lengths=tuple(one.num_tokens for one in before),
        inter_by_prefix=tuple(0.0 if role == "text" else mass_on[other] for other, role in earlier),
        # Rounding may make this slightly negative for a token that attends only to itself.
        intra=max(0.0, float((mass[:, column] - own).sum())),
        token_scores=tuple(float(value) for value in ranking[rows][:, ranked].sum(1)),
        num_bytes=num_bytes,
        fidelity=segment.fidelity,
        start=segment.start,
        roles=(*(one.role for one in before), segment.role),
    )

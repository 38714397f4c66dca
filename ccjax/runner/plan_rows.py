"""The rows of a prompt that a plan computes, and the results of a layer for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ccjax.runner.pool import PagedShard
from ccjax.runner.sampling import SampledToken
from ccjax.types import REUSED_ANYWHERE, LayerStats, PrefillPlan


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """What one layer computed: prompt offsets of its rows (ascending) and, if collected, their masses.

    `mass`: [N, C], by `mass_columns`; `self_mass`: [N]. Only `len(offsets)` of the N rows are valid, starting at
    `first`.
    """

    layer: int
    offsets: np.ndarray
    first: int
    mass: jax.Array | None
    self_mass: jax.Array | None


@dataclasses.dataclass
class PrefillOutcome:
    """The results of a prefill.

    Attributes:
      kv: that of the whole prompt, in its pages; None unless collected.
      layers: computed rows, layer by layer, possibly in several pieces per layer; empty unless collected.
      computed_token_layers: sum over layers of the tokens computed there.
      focused: indices of the focused documents once CacheCraft alg. 1 has decided, else None.
      focus_cut_layer: first layer that ran without the unfocused tokens; None if there was no cut.
      partly_recomputed: segments in which not every token to recompute was computed in every layer.
      recomputed_tokens_of: for each segment recomputed by deviation, the number of tokens kept by the first choice.
      not_recomputed: prompt offsets of the tokens that the first choice by deviation dropped.
      last_logits: [n, V] float32, of the last n tokens, if requested.
      scores: of each token of the prompt but the first, if requested.
    """

    kv: PagedShard | None = None
    layers: list[LayerRows] = dataclasses.field(default_factory=list)
    computed_token_layers: int = 0
    focused: frozenset[int] | None = None
    focus_cut_layer: int | None = None
    partly_recomputed: frozenset[int] = frozenset()
    recomputed_tokens_of: dict[int, int] = dataclasses.field(default_factory=dict)
    not_recomputed: list[np.ndarray] = dataclasses.field(default_factory=list)
    last_logits: np.ndarray | None = None
    scores: list[SampledToken] = dataclasses.field(default_factory=list)
    loaded_bytes: int = 0
    load_wait_s: float = 0.0


SINK_TOKENS = 4
"""Number of first tokens of a prompt that attract attention from all later ones regardless of their content (attention
sink); StreamingLLM (arXiv 2309.17453) keeps four."""


def padded_to(values: np.ndarray | Sequence[int], size: int, fill: int) -> np.ndarray:
    """`values` as int32, padded to `size` with `fill`."""
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded


def computed_offsets(plan: PrefillPlan) -> np.ndarray:
    """Prompt offsets, ascending, of all tokens that run through the model."""
    parts = []
    for segment in plan.segments:
        inside = np.asarray(segment.recompute_offsets, np.int64)
        if segment.action == "compute":
            inside = np.arange(segment.num_tokens)
        parts.append(segment.start + inside)
    return np.concatenate(parts)


def segment_of_tokens(plan: PrefillPlan, num_tokens: int) -> np.ndarray:
    """[num_tokens] int32, the segment of every token; tokens after the prompt belong to the question."""
    segments = np.full(num_tokens, len(plan.segments) - 1, np.int32)
    for index, segment in enumerate(plan.segments):
        segments[segment.start : segment.start + segment.num_tokens] = index
    return segments


def mass_columns(plan: PrefillPlan) -> np.ndarray:
    """[segments] int32, the column of the mass output that the mass on each segment is counted in. Instructions and
    passages have one each; text and the question, of which a prompt may have many, share the last."""
    is_shared = np.asarray([segment.role in ("text", "question") for segment in plan.segments])
    return np.where(is_shared, (~is_shared).sum(), np.cumsum(~is_shared) - 1).astype(np.int32)


def without_sink(columns: np.ndarray) -> np.ndarray:
    """The columns [n] that the mass on each token of a prompt is counted in: -1 for the attention sink, even if it is
    part of a passage."""
    return np.where(np.arange(len(columns)) < SINK_TOKENS, np.int32(-1), columns)


def recomputed_share(plan: PrefillPlan, outcome: PrefillOutcome, index: int, num_layers: int) -> float:
    """The share, in [0, 1], of a reused segment's token-layers that was recomputed."""
    segment = plan.segments[index]
    share = plan.recomputed_tokens(segment) / segment.num_tokens
    if outcome.focus_cut_layer is not None and index in outcome.partly_recomputed:
        share *= outcome.focus_cut_layer / num_layers
    return share


def _documents(plan: PrefillPlan) -> list[int]:
    return [index for index, segment in enumerate(plan.segments) if segment.role in REUSED_ANYWHERE]


def question_stats(plan: PrefillPlan, rows: LayerRows) -> LayerStats:
    """The question's mass on every document in one layer, for the focus policy."""
    question = plan.segments[-1]
    mass = np.asarray(rows.mass)[rows.first : rows.first + len(rows.offsets)][rows.offsets >= question.start]
    return LayerStats(rows.layer, tuple(float(value) for value in mass[:, mass_columns(plan)[_documents(plan)]].sum(0)))


def unfocused(plan: PrefillPlan, focused: frozenset[int]) -> frozenset[int]:
    """Indices of the segments with recomputed tokens outside the focus; `focused` has indices among the documents."""
    return frozenset(
        index
        for number, index in enumerate(_documents(plan))
        if number not in focused and plan.segments[index].recompute_offsets
    )


def rows_outside(plan: PrefillPlan, offsets: np.ndarray, dropped: frozenset[int]) -> np.ndarray:
    """Indices of the rows that are not in a dropped segment."""
    stays = np.ones(len(offsets), bool)
    for segment in (plan.segments[index] for index in dropped):
        stays &= (offsets < segment.start) | (offsets >= segment.start + segment.num_tokens)
    return np.flatnonzero(stays)

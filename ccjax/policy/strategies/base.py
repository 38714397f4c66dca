"""Interface of strategies: a pure function from prompt chunks and their variants to one decision per chunk.

A strategy is not called in mode `off`. In mode `exact` it must choose exact reuse or nothing; the planner checks that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.variants import VariantChoice, choose_variant
from ccjax.types import ChunkId, ReuseMode, VariantMeta

Candidates = Mapping[ChunkId, Sequence[VariantMeta]]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Reuse `choice` and recompute these ascending in-chunk offsets of it; or compute the whole chunk if it is None.

    Attributes:
      kept_ratio: if given, the offsets are candidates, of which this share is kept once deviations are known
        (`ccjax.policy.hkvd`); the same for all chunks of a prompt.
      by_question: the question's attention chooses again, as many tokens in all such chunks (`ccjax.policy.question`).
    """

    choice: VariantChoice | None = None
    recompute_offsets: tuple[int, ...] = ()
    kept_ratio: float | None = None
    by_question: bool = False


Strategy = Callable[[Sequence[PromptChunk], Candidates, ReuseMode, PlannerSettings], Sequence[Decision]]


def best_choices(
    chunks: Sequence[PromptChunk],
    candidates: Candidates,
    mode: ReuseMode,
    settings: PlannerSettings,
    *,
    in_context_first: bool = False,
) -> list[VariantChoice | None]:
    """The best variant of each chunk behind those before it (`choose_variant`); in mode `exact`, exact reuse alone."""
    ids = tuple(chunk.chunk_id for chunk in chunks)
    system_id = ids[0] if chunks and chunks[0].role == "system" else None
    return [
        choose_variant(
            candidates.get(own, ()),
            ids[:index],
            alpha=settings.alpha,
            exact_only=mode == "exact",
            system_id=system_id,
            in_context_first=in_context_first,
        )
        for index, own in enumerate(ids)
    ]


def mean_deviations(variants: Sequence[VariantMeta]) -> list[float] | None:
    """Deviation of each token of a chunk, over its variants that were compared with another one; None if none was."""
    measured = [meta.token_deviations for meta in variants if meta.token_deviations]
    if not measured:
        return None
    return [sum(values) / len(values) for values in zip(*measured, strict=True)]

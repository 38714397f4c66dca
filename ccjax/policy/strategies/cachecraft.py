"""`cachecraft`: reuses the best variant and recomputes its CFO share (CacheCraft sec. 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.reuse import most_contextualised
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.policy.strategies.fixing import fix_choices
from ccjax.types import ReuseMode, VariantMeta


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with its most contextualised tokens recomputed (eq. 14)."""
    return fix_choices(chunks, candidates, mode, settings, _offsets)


def _offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    return most_contextualised(meta.token_ranking, meta.num_tokens, count)

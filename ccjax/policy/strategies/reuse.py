"""`reuse`: reuses the best variant unchanged; the naive baseline of CacheCraft fig. 8b. Never fixes."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, best_choices
from ccjax.types import ReuseMode


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Each chunk that has a usable variant is reused unchanged, whatever its CFO or `settings.recompute_ratio`."""
    return [Decision(choice) for choice in best_choices(chunks, candidates, mode, settings)]

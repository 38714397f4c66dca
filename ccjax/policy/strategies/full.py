"""`full`: computes every token, the baseline without reuse."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.types import ReuseMode


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """One "compute" for each chunk."""
    return [Decision() for _ in chunks]

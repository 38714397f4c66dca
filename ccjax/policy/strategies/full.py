"""`full`: computes every token, the baseline without reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.types import ReuseMode

if TYPE_CHECKING:
    from ccjax.policy.planner import PlannerSettings, PromptChunk


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """One "compute" for each chunk."""
    return [Decision() for _ in chunks]

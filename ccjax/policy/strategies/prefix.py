"""`prefix`: reuses the leading run of exact variants, a path of RAGCache's knowledge tree (sec. 5.1). Never fixes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, best_choices
from ccjax.types import ReuseMode


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse up to the first chunk that has no exact variant behind its prefix; all from there on is computed."""
    chain = takewhile(lambda choice: choice is not None, best_choices(chunks, candidates, "exact", settings))
    reused = [Decision(choice) for choice in chain]
    return reused + [Decision()] * (len(chunks) - len(reused))

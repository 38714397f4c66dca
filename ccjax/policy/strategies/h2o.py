"""`h2o`: recomputes the most attended tokens of each approximately reused chunk (CacheCraft sec. 5.1.4 PREFILL-H2O).

Engines with this strategy measure attention when they compute a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.policy.strategies.fixing import fix_choices, highest
from ccjax.types import ReuseMode, VariantMeta


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with the most attended tokens recomputed.

    The paper only says "the most-attended tokens". Our reading: the mass that all tokens of the prompt put on each when
    the variant was computed (H2O's accumulated scores, Zhang et al. 2023). A variant without these can only be reused
    exactly.
    """
    usable = {
        chunk_id: [meta for meta in metas if meta.token_received or meta.fidelity == "exact"]
        for chunk_id, metas in candidates.items()
    }
    decisions = fix_choices(chunks, usable, mode, settings, _offsets)
    return [Decision() if _is_unknown(decision) else decision for decision in decisions]


def _offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    return highest(meta.token_received, count) if meta.token_received else ()


def _is_unknown(decision: Decision) -> bool:
    choice = decision.choice
    return choice is not None and not choice.exact and not choice.meta.token_received

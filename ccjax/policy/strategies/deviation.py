"""`deviation`: recomputes the tokens of each chunk whose KV was measured to change most with the context.

Half of `auto`: here every chunk has its own number of tokens, so that a comparison separates the gain of knowing the
tokens from that of sharing the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.reuse import most_contextualised
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, mean_deviations
from ccjax.policy.strategies.fixing import fix_choices, highest
from ccjax.types import ReuseMode, VariantMeta


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with the highest deviations recomputed, as many as by `cachecraft`; by
    attention (CacheCraft eq. 14) if no deviation is known."""

    def offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
        deviations = mean_deviations(candidates[meta.chunk_id])
        if deviations is None:
            return most_contextualised(meta.token_ranking, meta.num_tokens, count)
        return highest(deviations, count)

    return fix_choices(chunks, candidates, mode, settings, offsets)

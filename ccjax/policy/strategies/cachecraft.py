"""`cachecraft`: the best variant, of which the CFO share is recomputed (CacheCraft sec. 3.2). Knows no focus cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ccjax.policy.reuse import max_recompute_tokens, most_contextualised, num_recompute_tokens
from ccjax.policy.strategies.base import Candidates, Decision, best_choices
from ccjax.policy.variants import VariantChoice
from ccjax.types import ReuseMode

if TYPE_CHECKING:
    from ccjax.policy.planner import PlannerSettings, PromptChunk


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with its most contextualised tokens recomputed (eq. 14).

    How many: `ceil(CFO |C|)`; in mode `bounded` with `settings.recompute_ratio` that share instead of CFO; in mode
    `fast` CFO's number or `settings.fast_ratio` of the chunk, whichever is less.
    """

    def decision(choice: VariantChoice | None) -> Decision:
        if choice is None or choice.exact:
            return Decision(choice)
        meta = choice.meta
        if mode == "bounded" and settings.recompute_ratio is not None:
            count = num_recompute_tokens(settings.recompute_ratio, meta.num_tokens)
        else:
            count = num_recompute_tokens(choice.cfo, meta.num_tokens)
        if mode == "fast":
            count = min(count, max_recompute_tokens(settings.fast_ratio, meta.num_tokens))
        return Decision(choice, most_contextualised(meta.token_ranking, meta.num_tokens, count))

    return [decision(choice) for choice in best_choices(chunks, candidates, mode, settings)]

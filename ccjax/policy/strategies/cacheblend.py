"""`cacheblend`: all tokens of approximately reused chunks are candidates; those whose KV deviates most are recomputed
(CacheBlend sec. 4)."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.hkvd import DEFAULT_RATIO
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, best_choices
from ccjax.policy.variants import VariantChoice
from ccjax.types import ReuseMode


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; recomputes 15 % of the rest on average, or `settings.recompute_ratio`, in mode `fast` at
    most `settings.fast_ratio`. CacheBlend reuses KV of chunks computed alone; here the variant is that of
    `cachecraft`."""
    ratio = DEFAULT_RATIO if settings.recompute_ratio is None else settings.recompute_ratio
    if mode == "fast":
        ratio = min(DEFAULT_RATIO, settings.fast_ratio)

    def decision(choice: VariantChoice | None) -> Decision:
        if choice is None or choice.exact or not ratio:
            return Decision(choice)
        candidates = tuple(range(choice.meta.num_tokens))
        return Decision(choice, candidates, ratio if ratio < 1.0 else None)

    return [decision(choice) for choice in best_choices(chunks, candidates, mode, settings)]

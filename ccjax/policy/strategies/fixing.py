"""Number of tokens to recompute in each approximately reused chunk, for all strategies that fix (CacheCraft sec.
3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ccjax.policy.reuse import max_recompute_tokens, num_recompute_tokens
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, best_choices
from ccjax.policy.variants import VariantChoice
from ccjax.types import ReuseMode, VariantMeta

ChooseOffsets = Callable[[VariantMeta, int], tuple[int, ...]]
"""From a variant and a count in [0, num_tokens]: that many distinct in-chunk offsets, ascending."""


def fix_choices(
    chunks: Sequence[PromptChunk],
    candidates: Candidates,
    mode: ReuseMode,
    settings: PlannerSettings,
    choose_offsets: ChooseOffsets,
) -> list[Decision]:
    """The best variant of each chunk: exact reuse unchanged, approximate reuse with `choose_offsets` recomputed."""

    def decision(choice: VariantChoice | None) -> Decision:
        if choice is None or choice.exact:
            return Decision(choice)
        return Decision(choice, choose_offsets(choice.meta, recompute_count(choice, mode, settings)))

    return [decision(choice) for choice in best_choices(chunks, candidates, mode, settings)]


def recompute_count(choice: VariantChoice, mode: ReuseMode, settings: PlannerSettings) -> int:
    """`ceil(CFO |C|)`; in mode `bounded` with `settings.recompute_ratio` that share instead of CFO; in mode `fast`
    CFO's number or `settings.fast_ratio` of the chunk, whichever is less."""
    num_tokens = choice.meta.num_tokens
    if mode == "bounded" and settings.recompute_ratio is not None:
        return num_recompute_tokens(settings.recompute_ratio, num_tokens)
    count = num_recompute_tokens(choice.cfo, num_tokens)
    return min(count, max_recompute_tokens(settings.fast_ratio, num_tokens)) if mode == "fast" else count


def highest(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """Offsets, ascending, of the `count` highest scores; ties by offset."""
    return tuple(sorted(sorted(range(len(scores)), key=lambda offset: (-scores[offset], offset))[:count]))

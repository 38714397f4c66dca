"""`auto`: recomputes a bounded share of a prompt's tokens: those whose KV was measured to change most with the context,
wherever they are.

Uses CacheBlend's signal, the deviation of KV (sec. 4.2), but measured earlier, when a chunk was computed behind a
second prefix: this adds no latency to a request, and covers all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.reuse import most_contextualised, num_recompute_tokens
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, best_choices, mean_deviations
from ccjax.policy.strategies.fixing import recompute_count
from ccjax.policy.variants import VariantChoice
from ccjax.types import ReuseMode


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged. Of the approximately reused chunks, recomputes as many tokens in all as `cachecraft`, but
    at most `settings.recompute_cap` of them; or, in mode `bounded` with `settings.max_deviation` and no forced share,
    all that deviate more. Variants computed behind passages or the frame are preferred to others.

    Chunks without known deviations get their own number of tokens, by attention (CacheCraft eq. 14). All others share
    theirs: the highest deviations of any chunk, each weighted by the part of its old context that is missing, so that
    chunks with a similar prefix get fewer; ties by position.
    """
    choices = best_choices(chunks, candidates, mode, settings, in_context_first=True)
    offsets: dict[int, tuple[int, ...]] = {}
    scores: list[tuple[float, int, int]] = []
    budget = num_shared = 0
    is_forced = mode == "bounded" and settings.recompute_ratio is not None
    cap = 1.0 if is_forced else settings.recompute_cap
    for index, (chunk, choice) in enumerate(zip(chunks, choices, strict=True)):
        if choice is None or choice.exact:
            continue
        count = recompute_count(choice, mode, settings)
        deviations = mean_deviations(candidates[chunk.chunk_id])
        if deviations is None:
            count = min(count, num_recompute_tokens(cap, choice.meta.num_tokens))
            offsets[index] = most_contextualised(choice.meta.token_ranking, choice.meta.num_tokens, count)
            continue
        budget += count
        num_shared += choice.meta.num_tokens
        missing = _missing(choice, settings)
        scores += [(-value * missing, index, offset) for offset, value in enumerate(deviations)]
    if num_shared:
        budget = min(budget, num_recompute_tokens(cap, num_shared))
    if mode == "bounded" and settings.recompute_ratio is None and settings.max_deviation is not None:
        budget = sum(-score > settings.max_deviation for score, _, _ in scores)
    chosen: dict[int, list[int]] = {}
    for _, index, offset in sorted(scores)[:budget]:
        chosen.setdefault(index, []).append(offset)
    offsets.update((index, tuple(sorted(own))) for index, own in chosen.items())
    return [Decision(choice, offsets.get(index, ())) for index, choice in enumerate(choices)]


def _missing(choice: VariantChoice, settings: PlannerSettings) -> float:
    """CacheCraft's 1 - beta', which eq. 12 scales to the CFO; 1 if that is undefined."""
    scale = settings.alpha * choice.meta.cci
    return min(1.0, choice.cfo / scale) if scale > 0.0 else 1.0

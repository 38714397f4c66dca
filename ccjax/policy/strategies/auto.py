"""`auto`: recomputes a bounded share of a prompt's tokens: those whose KV changes most with the context, wherever they
are.

Uses CacheBlend's signal, the deviation of KV (sec. 4.2), as measured earlier, when a chunk was computed behind a second
prefix: this adds no latency to a request, and covers all layers. Where it is not known, the question's attention
chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.reuse import most_contextualised, num_recompute_tokens
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision, best_choices, mean_deviations
from ccjax.policy.strategies.fixing import recompute_count
from ccjax.types import ReuseMode


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged. Of the approximately reused chunks, recomputes as many tokens in all as `cachecraft`, but
    at most `settings.recompute_cap` of them; or, in mode `bounded` with `settings.max_deviation` and no forced share,
    all that deviate more. Variants computed behind passages or the frame are preferred to others.

    Chunks with known deviations share their number: the highest deviations of any chunk, each weighted by the part of
    its old context that is missing, so that chunks with a similar prefix get fewer; ties by position. Other chunks get
    their own number, by attention (CacheCraft eq. 14). If most tokens of the chunks to recompute anything of are in
    these others, the question's attention chooses instead, among all of them (`ccjax.policy.question`): in mode
    `bounded` without `settings.max_deviation`.
    """
    choices = best_choices(chunks, candidates, mode, settings, in_context_first=True)
    counts = {
        index: recompute_count(choice, mode, settings)
        for index, choice in enumerate(choices)
        if choice is not None and not choice.exact
    }
    deviations = {index: mean_deviations(candidates[chunks[index].chunk_id]) for index in counts}
    is_forced = mode == "bounded" and settings.recompute_ratio is not None
    cap = 1.0 if is_forced else settings.recompute_cap
    sizes = {index: chunks[index].num_tokens for index in counts}
    by_question = False
    if mode == "bounded" and (is_forced or settings.max_deviation is None):
        wanted = {index: size for index, size in sizes.items() if counts[index]}
        by_question = sum(size if deviations[index] is None else -size for index, size in wanted.items()) > 0
    offsets: dict[int, tuple[int, ...]] = {}
    scores: list[tuple[float, int, int]] = []
    budget = num_shared = 0
    for index, count in counts.items():
        choice, values = choices[index], deviations[index]
        assert choice is not None
        if values is None:
            count = min(count, num_recompute_tokens(cap, sizes[index]))
            offsets[index] = most_contextualised(choice.meta.token_ranking, sizes[index], count)
            continue
        budget += count
        num_shared += sizes[index]
        scores += [(-value * choice.missing, index, offset) for offset, value in enumerate(values)]
    if num_shared:
        budget = min(budget, num_recompute_tokens(cap, num_shared))
    if mode == "bounded" and settings.recompute_ratio is None and settings.max_deviation is not None:
        budget = sum(-score > settings.max_deviation for score, _, _ in scores)
    chosen: dict[int, list[int]] = {}
    for _, index, offset in sorted(scores)[:budget]:
        chosen.setdefault(index, []).append(offset)
    offsets.update((index, tuple(sorted(own))) for index, own in chosen.items())
    return [
        Decision(choice, offsets.get(index, ()), by_question=by_question and counts.get(index, 0) > 0)
        for index, choice in enumerate(choices)
    ]

"""All reuse strategies. To add one: write its `decide` here, put its record into `_ALL`, and test it
(CONTRIBUTING.md has an example); nothing else names a strategy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile
from types import MappingProxyType

from ccjax.policy.hkvd import DEFAULT_RATIO
from ccjax.policy.reuse import most_contextualised, num_recompute_tokens
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategy import (
    Candidates,
    Decision,
    Strategy,
    best_choices,
    cfo_share,
    fix_choices,
    highest,
    mean_deviations,
    recompute_count,
    reusable,
)
from ccjax.policy.variants import VariantChoice, choose_variant
from ccjax.types import REUSED_ANYWHERE, ChunkId, ReuseMode, VariantMeta, leading_instructions

_Path = tuple[tuple[int, VariantMeta], ...]


def _full(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """One "compute" for each chunk."""
    return [Decision() for _ in chunks]


def _prefix(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse up to the first chunk that has no exact variant behind its prefix; all from there on is computed."""
    chain = takewhile(lambda choice: choice is not None, best_choices(chunks, candidates, "exact", settings))
    reused = [Decision(choice) for choice in chain]
    return reused + [Decision()] * (len(chunks) - len(reused))


def _set(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """The chunks of the longest path unchanged, all others computed.

    The paper reorders chunks and then "finds the longest exact prefix match". Reading: the prompt keeps its order, and
    a path is a chain of exact variants, each behind exactly those before it, that begins with the instructions that the
    prompt begins with. Longest by tokens; among equals the first in lexicographic order of the chunks' positions.
    """
    if mode == "exact":
        return _prefix(chunks, candidates, mode, settings)
    num_instructions = leading_instructions(chunk.role for chunk in chunks)
    found = dict(_longest(chunks, candidates, (), num_instructions))
    ids = tuple(chunk.chunk_id for chunk in chunks)

    def decision(index: int) -> Decision:
        if index not in found:
            return Decision()
        before = min(index, num_instructions)
        variants = reusable(chunks[index], ids[:index], {chunks[index].chunk_id: [found[index]]})
        return Decision(choose_variant(variants, ids[:index], alpha=settings.alpha, num_instructions=before))

    return [decision(index) for index in range(len(chunks))]


def _longest(chunks: Sequence[PromptChunk], candidates: Candidates, path: _Path, num_instructions: int) -> _Path:
    """The longest path that begins with `path`."""
    used = {index for index, _ in path}
    before = tuple(chunks[index].chunk_id for index, _ in path)
    best = path
    for index, chunk in enumerate(chunks):
        if index in used or (len(path) < num_instructions and index != len(path)):
            continue
        variant = _behind(candidates.get(chunk.chunk_id, ()), before)
        if variant is None:
            continue
        longer = _longest(chunks, candidates, (*path, (index, variant)), num_instructions)
        best = max(best, longer, key=_num_tokens)
    return best


def _behind(variants: Sequence[VariantMeta], prefix_ids: tuple[ChunkId, ...]) -> VariantMeta | None:
    """The exact variant behind exactly that prefix."""
    return next((meta for meta in variants if meta.prefix_ids == prefix_ids and meta.fidelity == "exact"), None)


def _num_tokens(path: _Path) -> int:
    return sum(meta.num_tokens for _, meta in path)


def _reuse(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Each chunk that has a usable variant is reused unchanged, whatever its CFO or `settings.recompute_ratio`."""
    return [Decision(choice) for choice in best_choices(chunks, candidates, mode, settings)]


def _auto(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged. Of the approximately reused chunks, recomputes as many tokens in all as `cachecraft`, but
    at most `settings.recompute_cap` of them; or, in mode `bounded` with `settings.max_deviation` and no forced share,
    all that deviate more. Variants computed behind passages or the frame are preferred to others.

    Chunks with known deviations share their number: the highest deviations of any chunk, each weighted by the part of
    its old context that is missing, so that chunks with a similar prefix get fewer; ties by position. A run of
    `settings.run_tokens` counts as its highest one, since a few tokens deviate far more than those beside them, and the
    number is rounded to whole runs. Others get their own number, by attention (CacheCraft eq. 14). If most tokens of
    the chunks to recompute anything of are in these others, the question's attention chooses instead, among all of them
    (`ccjax.policy.question`): in mode `bounded` without `settings.max_deviation`.
    """
    choices = best_choices(chunks, candidates, mode, settings, in_context_first=True)
    counts = {
        index: recompute_count(choice, mode, settings)
        for index, choice in enumerate(choices)
        if choice is not None and not choice.exact and chunks[index].role in REUSED_ANYWHERE
    }
    deviations = {index: mean_deviations(candidates[chunks[index].chunk_id]) for index in counts}
    is_forced = mode == "bounded" and settings.recompute_ratio is not None
    limit = settings.max_deviation if mode == "bounded" and not is_forced else None
    cap = 1.0 if is_forced else settings.recompute_cap
    sizes = {index: chunks[index].num_tokens for index in counts}
    by_question = False
    if mode == "bounded" and (is_forced or settings.max_deviation is None):
        wanted = {index: size for index, size in sizes.items() if counts[index]}
        by_question = sum(size if deviations[index] is None else -size for index, size in wanted.items()) > 0
    offsets: dict[int, tuple[int, ...]] = {}
    runs: list[tuple[float, int, int, int]] = []
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
        for first in range(0, len(values), settings.run_tokens):
            own = values[first : first + settings.run_tokens]
            runs.append((-max(own) * choice.missing, index, first, first + len(own)))
    if num_shared:
        budget = min(budget, num_recompute_tokens(cap, num_shared))
    if limit is not None:
        budget = sum(last - first for score, _, first, last in runs if -score > limit)
    chosen: dict[int, list[int]] = {}
    for _, index, first, last in sorted(runs):
        if last - first > 2 * budget:
            break
        budget -= last - first
        chosen.setdefault(index, []).extend(range(first, last))
    offsets.update((index, tuple(sorted(own))) for index, own in chosen.items())
    return [
        Decision(choice, offsets.get(index, ()), by_question=by_question and counts.get(index, 0) > 0)
        for index, choice in enumerate(choices)
    ]


def _cachecraft(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with its most contextualised tokens recomputed (eq. 14)."""
    return fix_choices(chunks, candidates, mode, settings, _cachecraft_offsets)


def _cachecraft_offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    return most_contextualised(meta.token_ranking, meta.num_tokens, count)


def _cacheblend(
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


def _deviation(
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


def _legolink(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with the first k tokens recomputed.

    In a chunk computed alone the first tokens served as the attention sink, which they are not behind other chunks.
    EPIC (arXiv 2410.15332) uses one k for all chunks and each chunk's KV as computed alone. To compare at equal cost, k
    and the variant are those of `cachecraft`, so k grows with the chunk.
    """
    return fix_choices(chunks, candidates, mode, settings, _legolink_offsets)


def _legolink_offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _h2o(
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
    decisions = fix_choices(chunks, usable, mode, settings, _h2o_offsets)
    return [Decision() if _is_unknown(decision) else decision for decision in decisions]


def _h2o_offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    return highest(meta.token_received, count) if meta.token_received else ()


def _is_unknown(decision: Decision) -> bool:
    choice = decision.choice
    return choice is not None and not choice.exact and not choice.meta.token_received


def _random(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with random tokens recomputed.

    Chooses the offsets with the least sha256 of variant id and offset. So each variant has one random order, a larger
    share recomputes a superset of a smaller one, and variants of one chunk are independent.
    """
    return fix_choices(chunks, candidates, mode, settings, _random_offsets)


def _random_offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    def draw(offset: int) -> bytes:
        return hashlib.sha256(f"ccjax-random-1/{meta.variant_id}/{offset}".encode()).digest()

    return tuple(sorted(sorted(range(meta.num_tokens), key=draw)[:count]))


def _capped_share(settings: PlannerSettings, cci: float) -> float:
    return min(cfo_share(settings, cci), settings.recompute_cap)


_ALL = (
    Strategy("full", "never", _full, needs=frozenset(), expected_share=None, options=frozenset(), exact_only=True),
    Strategy(
        "prefix",
        "as the longest exact prefix (RAGCache's knowledge tree)",
        _prefix,
        expected_share=None,
        options=frozenset(),
        exact_only=True,
    ),
    Strategy(
        "set",
        "as the longest stored path of chunks, in any order (CacheCraft sec. 5.1.4)",
        _set,
        expected_share=None,
        options=frozenset(),
    ),
    Strategy("reuse", "unchanged, nothing recomputed", _reuse, expected_share=None, options=frozenset()),
    Strategy(
        "auto",
        "with those tokens recomputed whose KV was measured to change most with the context, or where that is unknown "
        "those that the question attends to most, at most 15 % of a prompt's reused tokens",
        _auto,
        needs=frozenset({"mass", "deviations", "question"}),
        prepares_behind_frame=True,
        expected_share=_capped_share,
        options=frozenset({"alpha", "recompute_ratio", "recompute_cap", "max_deviation"}),
    ),
    Strategy("cachecraft", "with the tokens of CacheCraft eq. 14 recomputed", _cachecraft),
    Strategy(
        "cacheblend",
        "with the 15 % recomputed that deviate most in the first layers (CacheBlend)",
        _cacheblend,
        needs=frozenset({"mass", "prefill_deviations"}),
        expected_share=lambda settings, cci: DEFAULT_RATIO,
        options=frozenset({"recompute_ratio"}),
    ),
    Strategy(
        "deviation",
        "with those tokens of each chunk recomputed whose KV was measured to change most",
        _deviation,
        needs=frozenset({"mass", "deviations"}),
        prepares_behind_frame=True,
    ),
    Strategy("legolink", "with the head of each chunk recomputed (EPIC)", _legolink),
    Strategy(
        "h2o",
        "with the most attended tokens recomputed",
        _h2o,
        needs=frozenset({"mass", "received"}),
    ),
    Strategy("random", "with random tokens recomputed", _random),
)
STRATEGIES: MappingProxyType[str, Strategy] = MappingProxyType({strategy.name: strategy for strategy in _ALL})


def get_strategy(name: str) -> Strategy:
    """The strategy of that exact name.

    Raises:
      ValueError: no such strategy; the message lists the existing ones.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy: wanted one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name]


def expected_share(settings: PlannerSettings, cci: float) -> float:
    """The share of a variant with that CCI, in [0, 1], that a later use in mode `bounded` is expected to recompute."""
    own = get_strategy(settings.strategy).expected_share
    if own is None:
        return 0.0
    return own(settings, cci) if settings.recompute_ratio is None else settings.recompute_ratio


def adapts_to_loading(settings: PlannerSettings) -> bool:
    """Whether, in mode `bounded`, more tokens are recomputed where loading hides that (CacheBlend sec. 5.1): those
    chosen during the prefill, without a forced share."""
    return "prefill_deviations" in get_strategy(settings.strategy).needs and settings.recompute_ratio is None

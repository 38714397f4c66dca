"""What a reuse strategy is: a pure function from prompt chunks and their variants to one decision per chunk, and all
that the rest of the system must know of it. The strategies themselves are in `ccjax.policy.strategies`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ccjax.policy.reuse import cache_fix_overhead, max_recompute_tokens, num_recompute_tokens
from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.variants import VariantChoice, choose_variant
from ccjax.types import REUSED_ANYWHERE, ChunkId, ReuseMode, VariantMeta, leading_instructions

Candidates = Mapping[ChunkId, Sequence[VariantMeta]]

Signal = Literal["mass", "received", "deviations", "prefill_deviations", "question"]
"""What is measured for a strategy:
"mass": the attention mass between chunks while they are computed, from which CCI and token ranking follow;
"received": the mass that each token receives in its prompt, measured when a chunk is captured;
"deviations": how much each token's KV differs between two contexts, measured when a chunk is captured;
"prefill_deviations": how much each reused token's KV differs from the new one, in the first layers of the prefill;
"question": the attention of the question, which runs over the reused KV before the prefill."""

AT_CAPTURE: frozenset[Signal] = frozenset({"received", "deviations"})
"""The signals that are stored with a chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Reuse `choice` and recompute these ascending in-chunk offsets of it; or compute the whole chunk if it is None.

    Attributes:
      kept_ratio: if given, the offsets are candidates, of which this share is kept once deviations are known
        (`ccjax.policy.hkvd`); the same for all chunks of a prompt.
      by_question: the question's attention chooses again, as many tokens in all such chunks (`ccjax.policy.question`).
    """

    choice: VariantChoice | None = None
    recompute_offsets: tuple[int, ...] = ()
    kept_ratio: float | None = None
    by_question: bool = False


Decide = Callable[[Sequence[PromptChunk], Candidates, ReuseMode, PlannerSettings], Sequence[Decision]]
"""Not called in mode `off`. In mode `exact` it must choose exact reuse or nothing; the planner checks that."""


def cfo_share(settings: PlannerSettings, cci: float) -> float:
    """CacheCraft eq. 12 with beta' = 0, in [0, 1]: a later use is behind an unknown prefix."""
    return cache_fix_overhead(cci, 0.0, settings.alpha)


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """A reuse strategy, and all that the rest of the system asks of it.

    Attributes:
      summary: for help texts: what it reuses and recomputes, as the end of "reused ...".
      decide: one decision for each chunk.
      needs: what is measured for it. A strategy that needs nothing reuses nothing, and nothing is stored for it.
      prepares_behind_frame: passages are prepared behind the frame, not directly behind the instructions.
      expected_share: from settings without `recompute_ratio` and a variant's CCI, the share of it that a later use in
        mode `bounded` is likely to recompute; None for a strategy that recomputes nothing of what it reuses.
      options: the fields of `PlannerSettings` that change how many tokens it recomputes, besides `fast_ratio`.
      exact_only: it reuses exact variants behind their own prefix alone.
    """

    name: str
    summary: str
    decide: Decide
    needs: frozenset[Signal] = frozenset({"mass"})
    prepares_behind_frame: bool = False
    expected_share: Callable[[PlannerSettings, float], float] | None = cfo_share
    options: frozenset[str] = frozenset({"alpha", "recompute_ratio"})
    exact_only: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether it recomputes tokens of what it reuses."""
        return self.expected_share is not None


def best_choices(
    chunks: Sequence[PromptChunk],
    candidates: Candidates,
    mode: ReuseMode,
    settings: PlannerSettings,
    *,
    in_context_first: bool = False,
) -> list[VariantChoice | None]:
    """The best variant of each chunk behind those before it (`choose_variant`); in mode `exact`, exact reuse alone."""
    ids = tuple(chunk.chunk_id for chunk in chunks)
    num_instructions = leading_instructions(chunk.role for chunk in chunks)
    return [
        choose_variant(
            reusable(chunks[index], ids[:index], candidates),
            ids[:index],
            alpha=settings.alpha,
            exact_only=mode == "exact",
            num_instructions=min(index, num_instructions),
            in_context_first=in_context_first,
        )
        for index, own in enumerate(ids)
    ]


def reusable(chunk: PromptChunk, prefix_ids: tuple[ChunkId, ...], candidates: Candidates) -> Sequence[VariantMeta]:
    """The variants of a chunk that may be reused behind this prefix: of a chunk that is not `REUSED_ANYWHERE`, those
    that were computed behind the same one."""
    metas = candidates.get(chunk.chunk_id, ())
    return metas if chunk.role in REUSED_ANYWHERE else [meta for meta in metas if meta.prefix_ids == prefix_ids]


def mean_deviations(variants: Sequence[VariantMeta]) -> list[float] | None:
    """Deviation of each token of a chunk, over its variants that were compared with another one; None if none was."""
    measured = [meta.token_deviations for meta in variants if meta.token_deviations]
    if not measured:
        return None
    return [sum(values) / len(values) for values in zip(*measured, strict=True)]


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

    def decision(chunk: PromptChunk, choice: VariantChoice | None) -> Decision:
        if choice is None or choice.exact or chunk.role not in REUSED_ANYWHERE:
            return Decision(choice)
        return Decision(choice, choose_offsets(choice.meta, recompute_count(choice, mode, settings)))

    choices = best_choices(chunks, candidates, mode, settings)
    return [decision(chunk, choice) for chunk, choice in zip(chunks, choices, strict=True)]


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

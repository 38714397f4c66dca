"""`set`: reuses the longest stored path of chunks that are in the prompt, in any order (CacheCraft sec. 5.1.4
SET-CACHE). Never fixes: a chunk at another position than on its path is reused unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.policy.strategies.prefix import decide as decide_prefix
from ccjax.policy.variants import choose_variant
from ccjax.types import ChunkId, ReuseMode, VariantMeta

_Path = tuple[tuple[int, VariantMeta], ...]


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """The chunks of the longest path unchanged, all others computed.

    The paper reorders chunks and then "finds the longest exact prefix match". Reading: the prompt keeps its order, and
    a path is a chain of exact variants, each behind exactly those before it, that begins with the system prompt if the
    prompt has one. Longest by tokens; among equals the first in lexicographic order of the chunks' positions.
    """
    if mode == "exact":
        return decide_prefix(chunks, candidates, mode, settings)
    has_system = bool(chunks) and chunks[0].role == "system"
    found = dict(_longest(chunks, candidates, (), has_system=has_system))
    ids = tuple(chunk.chunk_id for chunk in chunks)
    system_id = ids[0] if has_system else None

    def decision(index: int) -> Decision:
        if index not in found:
            return Decision()
        return Decision(choose_variant([found[index]], ids[:index], alpha=settings.alpha, system_id=system_id))

    return [decision(index) for index in range(len(chunks))]


def _longest(chunks: Sequence[PromptChunk], candidates: Candidates, path: _Path, *, has_system: bool) -> _Path:
    """The longest path that begins with `path`."""
    used = {index for index, _ in path}
    before = tuple(chunks[index].chunk_id for index, _ in path)
    best = path
    for index, chunk in enumerate(chunks):
        if index in used or (has_system and not path and index):
            continue
        variant = _behind(candidates.get(chunk.chunk_id, ()), before)
        if variant is None:
            continue
        longer = _longest(chunks, candidates, (*path, (index, variant)), has_system=has_system)
        best = max(best, longer, key=_num_tokens)
    return best


def _behind(variants: Sequence[VariantMeta], prefix_ids: tuple[ChunkId, ...]) -> VariantMeta | None:
    """The exact variant behind exactly that prefix."""
    return next((meta for meta in variants if meta.prefix_ids == prefix_ids and meta.fidelity == "exact"), None)


def _num_tokens(path: _Path) -> int:
    return sum(meta.num_tokens for _, meta in path)

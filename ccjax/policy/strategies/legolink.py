"""`legolink`: recomputes the first tokens of each approximately reused chunk (EPIC's LegoLink)."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.policy.strategies.fixing import fix_choices
from ccjax.types import ReuseMode, VariantMeta


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with the first k tokens recomputed.

    In a chunk computed alone the first tokens served as the attention sink, which they are not behind other chunks.
    EPIC (arXiv 2410.15332) uses one k for all chunks and each chunk's KV as computed alone. To compare at equal cost, k
    and the variant are those of `cachecraft`, so k grows with the chunk.
    """
    return fix_choices(chunks, candidates, mode, settings, _offsets)


def _offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    return tuple(range(count))

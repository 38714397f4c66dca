"""`random`: recomputes as many tokens as `cachecraft`, drawn blindly (CacheCraft sec. 5.1.4 RANDOM-RECOMP).

Looks at no token ranking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.policy.strategies.fixing import fix_choices
from ccjax.types import ReuseMode, VariantMeta

if TYPE_CHECKING:
    from ccjax.policy.planner import PlannerSettings, PromptChunk


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with randomly drawn tokens recomputed.

    The draw takes the offsets whose sha256 of variant id and offset is least. So each variant has one random order, a
    larger share recomputes what a smaller one did and more, and variants of one chunk are drawn apart.
    """
    return fix_choices(chunks, candidates, mode, settings, _offsets)


def _offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    def draw(offset: int) -> bytes:
        return hashlib.sha256(f"ccjax-random-1/{meta.variant_id}/{offset}".encode()).digest()

    return tuple(sorted(sorted(range(meta.num_tokens), key=draw)[:count]))

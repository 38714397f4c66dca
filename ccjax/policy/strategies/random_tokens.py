"""`random`: recomputes as many tokens as `cachecraft`, chosen at random (CacheCraft sec. 5.1.4 RANDOM-RECOMP)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ccjax.policy.settings import PlannerSettings, PromptChunk
from ccjax.policy.strategies.base import Candidates, Decision
from ccjax.policy.strategies.fixing import fix_choices
from ccjax.types import ReuseMode, VariantMeta


def decide(
    chunks: Sequence[PromptChunk], candidates: Candidates, mode: ReuseMode, settings: PlannerSettings
) -> list[Decision]:
    """Exact reuse unchanged; approximate reuse with random tokens recomputed.

    Chooses the offsets with the least sha256 of variant id and offset. So each variant has one random order, a larger
    share recomputes a superset of a smaller one, and variants of one chunk are independent.
    """
    return fix_choices(chunks, candidates, mode, settings, _offsets)


def _offsets(meta: VariantMeta, count: int) -> tuple[int, ...]:
    def draw(offset: int) -> bytes:
        return hashlib.sha256(f"ccjax-random-1/{meta.variant_id}/{offset}".encode()).digest()

    return tuple(sorted(sorted(range(meta.num_tokens), key=draw)[:count]))

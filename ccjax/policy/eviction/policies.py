"""Six ways to rank what a tier holds. Knows sizes, seconds and uses, by key; no array, no budget and no other tier."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from ccjax.policy._checks import check_mass
from ccjax.policy.eviction.base import EntryInfo
from ccjax.policy.eviction.ranked import Entry, RankedPolicy, Uses
from ccjax.policy.variants import reuse_credit

HALF_LIFE = 1000.0
"""Default of `SavedSeconds(half_life=...)`, in requests. The trace of `bench.py eviction` is no longer than that and
drifts little: 300 to endless do equally well on it, 100 does worse. Interests that drift are what ageing is for."""

NUM_REMEMBERED = 100_000
"""Evicted keys whose uses are remembered, in 26 MB: less than the KV of two passages in an 8B model."""


class Lru(RankedPolicy):
    """Least recently used first; sizes, seconds and frequencies do not count."""

    def worth(self, entry: Entry) -> float:
        return entry.uses.last_use


class Lfu(RankedPolicy):
    """Least often used since insertion first."""

    def worth(self, entry: Entry) -> float:
        return entry.uses.num_uses


class CacheCraftFr(RankedPolicy):
    """Least `f_r` first, CacheCraft sec. 3.3: grows by `reuse_credit` on each reuse, 0 on insertion.

    The paper is silent on equal `f_r`, which all variants never reused have: reading, the least recently used first.
    It is silent on ageing and on what was evicted: reading, neither counts.
    """

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        if is_hit:
            uses.value += reuse_credit(info.recomputed_share, info.num_tokens)

    def worth(self, entry: Entry) -> float:
        return entry.uses.value


class Gdsf(RankedPolicy):
    """Greedy-Dual-Size-Frequency (Cherkasova 1998, RAGCache eq. 2): least `clock + frequency cost / size` first.

    `frequency` counts uses since insertion, `cost / size` is compute seconds per byte, and `clock` the greatest
    priority that was ever evicted (RAGCache eq. 3): what is not used again falls behind what comes later.
    """

    def __init__(self, *, num_remembered: int = 0) -> None:
        super().__init__(num_remembered=num_remembered)
        self._clock = 0.0

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        uses.clock = self._clock

    def worth(self, entry: Entry) -> float:
        return entry.uses.clock + entry.uses.num_uses * entry.info.compute_s / entry.info.num_bytes

    def state(self, now: float) -> dict[str, Any]:
        return {**super().state(now), "clock": self._clock}

    def restore(self, state: Any, held: Collection[str]) -> None:
        super().restore(state, held)
        clock = state.get("clock") if isinstance(state, dict) else None
        if isinstance(clock, int | float) and math.isfinite(clock):
            self._clock = max(0.0, clock)

    def on_remove(self, key: str, *, evicted: bool = True) -> None:
        if evicted:
            self._clock = max(self._clock, self._held(key).rank[0])
        super().on_remove(key, evicted=evicted)


class Pgdsf(Gdsf):
    """RAGCache eq. 2-4 and alg. 1: least `clock + frequency mean_i(cost_i / new_tokens_i)` first, the mean over the
    requests that missed the entry, and of the knowledge tree only leaves (`EntryInfo.parent`).

    Alg. 1 l. 9 sets the priority where the node was missed only; sec. 5.1 adjusts it "when a document is retrieved".
    Reading: on every use. Frequency counts "within a time window": as long as the key is held or remembered, or the
    mean of eq. 4 would never have a second term. A newcomer is always taken in, as in the paper.
    """

    is_tree = True

    def __init__(self, *, num_remembered: int = NUM_REMEMBERED) -> None:
        super().__init__(num_remembered=num_remembered)

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        super().count(uses, info, now, is_hit=is_hit)
        if not is_hit:
            uses.value += info.compute_s / info.num_tokens

    def worth(self, entry: Entry) -> float:
        return entry.uses.clock + entry.uses.num_uses * entry.uses.value / max(1, entry.uses.num_misses)


class SavedSeconds(RankedPolicy):
    """Least expected seconds saved per byte held first.

    Each use counts with the seconds that this tier saves in it (`EntryInfo.saved_s`: compute time, the share that is
    recomputed, this tier's load and the copy below), halved for every `half_life` gone by:
    `worth = sum_i saved_s_i 2^(-(now - t_i) / half_life) / num_bytes`. All worths fade alike, so their order stands
    between uses, and the logarithm of `sum_i saved_s_i 2^(t_i / half_life) / num_bytes` ranks without knowing now.

    Uses of keys that left count on: they take 260 bytes a key against megabytes of KV, and what tiers of up to a tenth
    of all bytes save grows by a fifth to a half (`bench.py eviction --ablate`). A newcomer worth less than what would
    make room for it is not taken in.

    Args:
      half_life: in the unit of `now`; more than 0.
      num_remembered: keys that left whose uses still count.

    Raises:
      ValueError: names the argument.
    """

    weighs_newcomers = True

    def __init__(self, *, half_life: float = HALF_LIFE, num_remembered: int = NUM_REMEMBERED) -> None:
        super().__init__(num_remembered=num_remembered)
        check_mass("half_life", half_life)
        if half_life == 0.0:
            raise ValueError("half_life: wanted more than 0, got 0")
        self._half_life = half_life

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        before = uses.value if uses.num_uses > 1 else -math.inf
        saved_s = info.saved_s
        uses.value = _log2_sum(before, math.log2(saved_s) + now / self._half_life) if saved_s else before

    def worth(self, entry: Entry) -> float:
        return entry.uses.value - math.log2(entry.info.num_bytes) if entry.uses.num_uses else -math.inf

    def rebased(self, uses: Uses, now: float) -> Uses:
        return dataclasses.replace(super().rebased(uses, now), value=uses.value - now / self._half_life)


def _log2_sum(first: float, second: float) -> float:
    """log2(2^first + 2^second) without overflow; one of them is finite."""
    low, high = sorted((first, second))
    return high + math.log2(1.0 + 2.0 ** (low - high))

"""Six ways to rank the entries of a tier."""

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
"""Default of `SavedSeconds(half_life=...)`, in requests. MuSiQue's retrieval trace is no longer than that and drifts
little: any half-life from 300 upwards does equally well on it, 100 does worse. Ageing is for interests that drift."""

NUM_REMEMBERED = 100_000
"""Number of evicted keys whose uses are remembered, in 26 MB: less than the KV of two passages in an 8B model."""


class Lru(RankedPolicy):
    """Evicts the least recently used entry; sizes, seconds and frequencies do not count."""

    def worth(self, entry: Entry) -> float:
        return entry.uses.last_use


class Lfu(RankedPolicy):
    """Evicts the entry used least often since its insertion."""

    def worth(self, entry: Entry) -> float:
        return entry.uses.num_uses


class CacheCraftFr(RankedPolicy):
    """Evicts the least `f_r`, CacheCraft sec. 3.3: 0 on insertion, grows by `reuse_credit` on each reuse.

    The paper does not say what to do with equal `f_r`, which all unused variants have; our reading: least recently used
    first. It does not mention ageing or evicted entries; our reading: neither counts.
    """

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        if is_hit:
            uses.value += reuse_credit(info.recomputed_share, info.num_tokens)

    def worth(self, entry: Entry) -> float:
        return entry.uses.value


class Gdsf(RankedPolicy):
    """Greedy-Dual-Size-Frequency (Cherkasova 1998, RAGCache eq. 2): evicts the least `clock + frequency cost / size`.

    `frequency` counts uses since insertion, `cost / size` is compute seconds per byte, and `clock` the greatest
    priority evicted so far (RAGCache eq. 3): unused entries fall behind later ones.
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
    """RAGCache eq. 2-4 and alg. 1: evicts the least `clock + frequency mean_i(cost_i / new_tokens_i)`, with the mean
    over the requests that missed the entry, and only leaves of the knowledge tree (`EntryInfo.parent`).

    Alg. 1 l. 9 sets the priority only where the node was missed; sec. 5.1 adjusts it "when a document is retrieved".
    Our reading: on every use. Frequency counts "within a time window": as long as the key is held or remembered, or the
    mean of eq. 4 would never have a second term. New entries are always accepted, as in the paper.
    """

    is_tree = True
    needs_profile = True

    def __init__(self, *, num_remembered: int = NUM_REMEMBERED) -> None:
        super().__init__(num_remembered=num_remembered)

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        super().count(uses, info, now, is_hit=is_hit)
        if not is_hit:
            uses.value += info.compute_s / info.num_tokens

    def worth(self, entry: Entry) -> float:
        return entry.uses.clock + entry.uses.num_uses * entry.uses.value / max(1, entry.uses.num_misses)


class SavedSeconds(RankedPolicy):
    """Evicts the least expected seconds saved per byte.

    Each use counts with the seconds this tier saved in it (`EntryInfo.saved_s`: compute time, recomputed share, this
    tier's load and the copy below), halved every `half_life`: `worth = sum_i saved_s_i 2^(-(now - t_i) / half_life) /
    num_bytes`. All values decay alike, so their order is constant between uses, and the logarithm of `sum_i saved_s_i
    2^(t_i / half_life) / num_bytes` gives the order without knowing the time.

    Uses of evicted keys are remembered: 260 bytes per key, against megabytes of KV, increase what tiers of up to a
    tenth of all bytes save by a fifth to a half on MuSiQue's trace. A new entry that is worth less than what would
    be evicted for it is not stored; an only copy that is worth less than a fourth of it, since errors of measured
    seconds would otherwise decide, and a full tier take nothing new.

    Args:
      half_life: in the unit of `now`; more than 0.
      num_remembered: number of evicted keys whose uses still count.

    Raises:
      ValueError: names the argument.
    """

    weighs_new_keys = True
    leeway = 2.0  # log2 of 4

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
    """log2(2^first + 2^second) without overflow; at least one is finite."""
    low, high = sorted((first, second))
    return high + math.log2(1.0 + 2.0 ** (low - high))

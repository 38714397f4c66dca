"""Which entries leave a tier when it needs room: one interface, and six ways to rank what a tier holds. Knows sizes,
seconds and uses, by key; no array, no budget, no other tier, and no time but the `now` of each call.

The tier's owner makes every move. To store a new entry it calls `on_insert`, then `victims` for the bytes that are
missing, evicts them, and calls `on_remove` for each one that went, or for the new one where it is not stored after all.
A tier has a policy of its own, so that RAGCache's "two separate logical clocks" (sec. 5.1) need no further thought.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Collection
from typing import Protocol

from ccjax.policy._checks import check_count, check_mass, check_ratio
from ccjax.policy.variants import reuse_credit

HALF_LIFE = 1000.0
"""Default of `SavedSeconds(half_life=...)`, in requests. The trace of `bench.py eviction` is no longer than that and
drifts little: 300 to endless do equally well on it, 100 does worse. Interests that drift are what ageing is for."""

NUM_REMEMBERED = 100_000
"""Evicted keys whose uses are remembered, in 26 MB: less than the KV of two passages in an 8B model."""


@dataclasses.dataclass(frozen=True, slots=True)
class EntryInfo:
    """What one use of an entry says about it; checked on construction (ValueError naming the field).

    Attributes:
      num_bytes: what it takes out of the tier's budget.
      num_tokens: tokens of the chunk.
      compute_s: seconds to compute the chunk from text, `num_tokens T(cached, new) / new` with the cached and new
        tokens of the request: a chunk's share of its prefill (RAGCache eq. 4).
      cfo: share of its tokens that a use recomputes (CacheCraft eq. 12): on a hit this use's, on insertion what a later
        use may expect, say `alpha CCI` as behind an unknown prefix.
      load_s: seconds to load it out of this tier.
      below_load_s: seconds to load it out of the next tier below that holds it too; None where none does.
    """

    num_bytes: int
    num_tokens: int
    compute_s: float
    cfo: float = 0.0
    load_s: float = 0.0
    below_load_s: float | None = None

    def __post_init__(self) -> None:
        check_count("num_bytes", self.num_bytes)
        check_count("num_tokens", self.num_tokens)
        check_mass("compute_s", self.compute_s)
        check_ratio("cfo", self.cfo)
        check_mass("load_s", self.load_s)
        if self.below_load_s is not None:
            check_mass("below_load_s", self.below_load_s)

    @property
    def saved_s(self) -> float:
        """Seconds that a use saves because this tier holds the entry, at least 0.

        With it, a use costs `load_s + cfo compute_s`; without, `compute_s`, or `below_load_s + cfo compute_s` where a
        tier below has a copy and loading that is faster than computing.
        """
        fix_s = self.cfo * self.compute_s
        without_s = self.compute_s if self.below_load_s is None else min(self.compute_s, self.below_load_s + fix_s)
        return max(0.0, without_s - fix_s - self.load_s)


class EvictionPolicy(Protocol):
    """What a tier's owner tells and asks. Not thread-safe. `now` never decreases; its unit is the caller's: requests
    served so far, or seconds. Same calls, same answers."""

    def on_insert(self, key: str, info: EntryInfo, now: float) -> None:
        """The tier is about to hold `key`, computed or loaded for a request at `now`, which counts as a use.

        Raises:
          ValueError: it is held already.
        """
        ...

    def on_hit(self, key: str, info: EntryInfo, now: float) -> None:
        """A request at `now` reuses `key` out of this tier; `info` replaces what was known.

        Raises:
          KeyError: it is not held.
        """
        ...

    def on_remove(self, key: str, *, evicted: bool = True) -> None:
        """The tier no longer holds `key`; `evicted=False` where no want of room was the reason (damaged, outdated).

        Raises:
          KeyError: it is not held.
        """
        ...

    def victims(
        self, bytes_wanted: int, *, pinned: Collection[str] = (), newcomer: str | None = None
    ) -> tuple[str, ...] | None:
        """Keys to evict, least worth first: the shortest such run that frees `bytes_wanted`, `()` for 0 bytes, None if
        all together cannot. Changes nothing: the caller evicts, and says so by `on_remove`.

        Args:
          pinned: never chosen.
          newcomer: the inserted key that wants the room. `(newcomer,)` means that it is worth less than what would
            have to go, and should not be stored; policies that always take newcomers in never say so.

        Raises:
          ValueError: `bytes_wanted` is negative.
          KeyError: `newcomer` is not held.
        """
        ...


Rank = tuple[float, float, str, int]
"""Worth, last use, key, and a number that tells an entry's rank from its outdated ones."""


@dataclasses.dataclass(slots=True)
class Uses:
    """What a policy keeps of a key's uses; `value` means what the policy says."""

    num_uses: int = 0
    num_misses: int = 0
    value: float = 0.0


@dataclasses.dataclass(slots=True)
class Entry:
    """A held key: its last `info` and use, its uses, and its place in the order (`Rank`)."""

    key: str
    info: EntryInfo
    last_use: float
    uses: Uses
    rank: Rank = (0.0, 0.0, "", 0)


class RankedPolicy:
    """Evicts the least `worth`; among equals the one not used for longest, then the smallest key.

    `worth` is computed at each use and stands until the next. The heap keeps outdated ranks until they surface or
    outnumber the others: an insertion, a hit or a removal costs O(log n) amortised, k victims O((k + pins met) log n).

    A subclass says what a use adds and what an entry is worth. It may remember the uses of keys that left, the last
    `num_remembered` of them, and may set `weighs_newcomers`.
    """

    weighs_newcomers = False

    def __init__(self, *, num_remembered: int = 0) -> None:
        check_count("num_remembered", num_remembered, least=0)
        self._num_remembered = num_remembered
        self._past: collections.OrderedDict[str, Uses] = collections.OrderedDict()
        self._entries: dict[str, Entry] = {}
        self._heap: list[Rank] = []
        self._num_ranked = 0

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        """Adds what is special about a use; the numbers of uses and misses are counted already."""

    def worth(self, entry: Entry) -> float:
        """What the entry is worth after its latest use, compared among entries only."""
        raise NotImplementedError

    def on_insert(self, key: str, info: EntryInfo, now: float) -> None:
        """See `EvictionPolicy`."""
        if key in self._entries:
            raise ValueError(f"key: wanted one that is not held, got {key!r}")
        entry = self._entries[key] = Entry(key, info, now, self._past.pop(key, None) or Uses())
        self._use(entry, is_hit=False)

    def on_hit(self, key: str, info: EntryInfo, now: float) -> None:
        """See `EvictionPolicy`."""
        entry = self._held(key)
        entry.info, entry.last_use = info, now
        self._use(entry, is_hit=True)

    def on_remove(self, key: str, *, evicted: bool = True) -> None:
        """See `EvictionPolicy`."""
        entry = self._held(key)
        del self._entries[key]
        if self._num_remembered:
            self._past[key] = entry.uses
            if len(self._past) > self._num_remembered:
                self._past.popitem(last=False)
        self._compact()

    def victims(
        self, bytes_wanted: int, *, pinned: Collection[str] = (), newcomer: str | None = None
    ) -> tuple[str, ...] | None:
        """See `EvictionPolicy`."""
        check_count("bytes_wanted", bytes_wanted, least=0)
        protected = {*pinned}
        if newcomer is not None:
            self._held(newcomer)
            if not self.weighs_newcomers:
                protected.add(newcomer)
        met: list[Rank] = []
        chosen: list[str] = []
        freed_bytes = 0
        while freed_bytes < bytes_wanted and self._heap:
            rank = heapq.heappop(self._heap)
            if not self._is_current(rank):
                continue
            met.append(rank)
            key = rank[2]
            if key in protected:
                continue
            if key == newcomer:  # it ranks before enough others: those that rank before it need not go either
                chosen, freed_bytes = [key], bytes_wanted
            else:
                chosen.append(key)
                freed_bytes += self._entries[key].info.num_bytes
        for rank in met:
            heapq.heappush(self._heap, rank)
        return tuple(chosen) if freed_bytes >= bytes_wanted else None

    def _held(self, key: str) -> Entry:
        if key not in self._entries:
            raise KeyError(f"key: wanted one that is held, got {key!r}")
        return self._entries[key]

    def _use(self, entry: Entry, *, is_hit: bool) -> None:
        entry.uses.num_uses += 1
        entry.uses.num_misses += not is_hit
        self.count(entry.uses, entry.info, entry.last_use, is_hit=is_hit)
        self._num_ranked += 1
        entry.rank = (self.worth(entry), entry.last_use, entry.key, self._num_ranked)
        heapq.heappush(self._heap, entry.rank)
        self._compact()

    def _is_current(self, rank: Rank) -> bool:
        entry = self._entries.get(rank[2])
        return entry is not None and entry.rank[3] == rank[3]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry.rank for entry in self._entries.values()]
            heapq.heapify(self._heap)


class Lru(RankedPolicy):
    """Least recently used first; sizes, seconds and frequencies do not count."""

    def worth(self, entry: Entry) -> float:
        return entry.last_use


class Lfu(RankedPolicy):
    """Least often used since insertion first."""

    def worth(self, entry: Entry) -> float:
        return entry.uses.num_uses


class CacheCraftFr(RankedPolicy):
    """Least `f_r` first, CacheCraft sec. 3.3: `f_r += 1/CFO` on each reuse (`reuse_credit`), 0 on insertion.

    The paper is silent on equal `f_r`, which all variants never reused have: reading, the least recently used first.
    It is silent on ageing and on what was evicted: reading, neither counts.
    """

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        if is_hit:
            uses.value += reuse_credit(info.cfo, info.num_tokens)

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

    def worth(self, entry: Entry) -> float:
        return self._clock + entry.uses.num_uses * entry.info.compute_s / entry.info.num_bytes

    def on_remove(self, key: str, *, evicted: bool = True) -> None:
        if evicted:
            self._clock = max(self._clock, self._held(key).rank[0])
        super().on_remove(key, evicted=evicted)


class Pgdsf(Gdsf):
    """RAGCache eq. 2-4 for entries without a tree: least `clock + frequency mean_i(cost_i / new_tokens_i)` first, the
    mean over the requests that missed the entry. Evicting leaves only is left to a knowledge tree.

    Alg. 1 l. 9 sets the priority where the node was missed only; sec. 5.1 adjusts it "when a document is retrieved".
    Reading: on every use. Frequency counts "within a time window": as long as the key is held or remembered, or the
    mean of eq. 4 would never have a second term. A newcomer is always taken in, as in the paper.
    """

    def __init__(self, *, num_remembered: int = NUM_REMEMBERED) -> None:
        super().__init__(num_remembered=num_remembered)

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        if not is_hit:
            uses.value += info.compute_s / info.num_tokens

    def worth(self, entry: Entry) -> float:
        return self._clock + entry.uses.num_uses * entry.uses.value / entry.uses.num_misses


class SavedSeconds(RankedPolicy):
    """Least expected seconds saved per byte held first.

    Each use counts with the seconds that this tier saves in it (`EntryInfo.saved_s`: compute time, CFO, this tier's
    load and the copy below), halved for every `half_life` gone by:
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
        return entry.uses.value - math.log2(entry.info.num_bytes)


def _log2_sum(first: float, second: float) -> float:
    """log2(2^first + 2^second) without overflow."""
    low, high = sorted((first, second))
    return high if low == -math.inf else high + math.log2(1.0 + 2.0 ** (low - high))


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "cachecraft_fr": CacheCraftFr,
    "lru": Lru,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "pgdsf": Pgdsf,
    "saved_seconds": SavedSeconds,
}
"""Name -> maker of a policy for one tier, with its default settings."""

DEFAULT_POLICY = "saved_seconds"
"""Saves most compute on a real retrieval trace in tiers of up to a third of all bytes; in larger ones, where order
matters little, no policy saves a quarter point more (`bench.py eviction`)."""


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its name in `POLICIES`.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in POLICIES:
        raise ValueError(f"eviction policy: wanted one of {sorted(POLICIES)}, got {name!r}")
    return POLICIES[name]()

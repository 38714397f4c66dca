"""The eviction policy of a tier, which evicts the lowest rank: keeps the order, while subclasses define the rank.

The tier's owner moves all data. To store a new entry it calls `on_insert`, then `victims` for the missing bytes, evicts
them, and calls `on_remove` for each entry evicted, or for the new one if it is not stored after all. Each tier has a
policy of its own, which gives RAGCache's "two separate logical clocks" (sec. 5.1).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Collection, Mapping
from typing import Any

from ccjax.policy._checks import check_count
from ccjax.policy.eviction.base import EntryInfo

Rank = tuple[float, float, str, int]
"""Worth, last use, key, and a number that distinguishes an entry's current rank from outdated ones."""


_FEW = 1000
"""With more ranks than that, the heap is built at once."""


@dataclasses.dataclass(slots=True)
class Uses:
    """The uses of a key; each policy defines `value` and `clock`."""

    num_uses: int = 0
    num_misses: int = 0
    value: float = 0.0
    last_use: float = -math.inf
    clock: float = 0.0


@dataclasses.dataclass(slots=True)
class Entry:
    """A held key: its last `info`, its uses, and its place in the order (`Rank`)."""

    key: str
    info: EntryInfo
    uses: Uses
    rank: Rank = (0.0, 0.0, "", 0)


class RankedPolicy:
    """Evicts the least `worth`; among equals the least recently used, then the smallest key. Not thread-safe. The same
    calls give the same answers. `now` never decreases; its unit is the caller's: requests served so far, or seconds.

    `worth` is computed at each use and constant until the next. The heap keeps outdated ranks until they surface or
    outnumber the others: an insertion, a hit or a removal costs O(log n) amortised, k victims O((k + pins met) log n).
    In a tree, an entry with children that surfaces stays out of the heap until it has none.

    A subclass defines what a use adds and what an entry is worth. It may remember the uses of the last `num_remembered`
    evicted keys, set `weighs_new_keys`, and set `is_tree`, so that no key is evicted before its children (RAGCache
    sec. 5.1): it is considered once its children are among the victims, and should be inserted only if its parent is
    held or it has none. It sets `needs_profile` if it ranks by how the cost of a token depends on the prefill.
    """

    weighs_new_keys = False
    leeway = 0.0
    """By how much less an only copy may be worth than what is evicted for it."""
    is_tree = False
    needs_profile = False

    def __init__(self, *, num_remembered: int = 0) -> None:
        check_count("num_remembered", num_remembered, least=0)
        self._num_remembered = num_remembered
        self._past: collections.OrderedDict[str, Uses] = collections.OrderedDict()
        self._parents: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        self._num_children: collections.Counter[str | None] = collections.Counter()
        self._heap: list[Rank] = []
        self._out_of_heap: set[str] = set()
        self._num_ranked = 0

    def count(self, uses: Uses, info: EntryInfo, now: float, *, is_hit: bool) -> None:
        """Updates the value for a use; uses and misses are counted already."""

    def worth(self, entry: Entry) -> float:
        """The value of the entry after its latest use, compared among entries only."""
        raise NotImplementedError

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def is_leaf(self, key: str) -> bool:
        """True if no child of `key` is held."""
        return not self._num_children[key]

    def on_insert(self, key: str, info: EntryInfo, now: float) -> None:
        """Records that the tier is about to hold `key`, computed or loaded for a request at `now`; counts as a use.

        Raises:
          ValueError: it is held already.
        """
        self._check_new(key)
        entry = self._entries[key] = Entry(key, info, self._past.pop(key, None) or Uses())
        self._num_children[info.parent] += 1
        self._use(entry, now, is_hit=False)

    def on_adopt(self, infos: Mapping[str, EntryInfo]) -> None:
        """Adds keys that the tier holds but no request of this process has used yet; their history is what `restore`
        brought.

        Raises:
          ValueError: one is held already; nothing changed.
        """
        for key in self._entries.keys() & infos.keys():
            self._check_new(key)
        adopted = {
            key: Entry(key, self._with_parent(key, info), self._past.pop(key, None) or Uses())
            for key, info in infos.items()
        }
        self._entries.update(adopted)
        self._num_children.update(entry.info.parent for entry in adopted.values())
        self._order(adopted.values())

    def on_hit(self, key: str, info: EntryInfo, now: float) -> None:
        """Records that a request at `now` reuses `key` from this tier; `info` replaces what was known.

        Raises:
          KeyError: it is not held.
        """
        entry = self._held(key)
        self._lose_child(entry.info.parent)
        self._num_children[info.parent] += 1
        entry.info = info
        self._use(entry, now, is_hit=True)

    def on_remove(self, key: str, *, evicted: bool = True) -> None:
        """Records that the tier no longer holds `key`; `evicted=False` if the reason was not lack of space (damaged,
        outdated).

        Raises:
          KeyError: it is not held.
        """
        entry = self._held(key)
        del self._entries[key]
        self._out_of_heap.discard(key)
        self._lose_child(entry.info.parent)
        if self._num_remembered:
            self._remember(key, entry.uses)
        self._compact()

    def victims(
        self,
        bytes_wanted: int,
        *,
        pinned: Collection[str] = (),
        new_key: str | None = None,
        is_only_copy: bool = False,
    ) -> tuple[str, ...] | None:
        """Keys to evict, lowest value first: the shortest such sequence that frees `bytes_wanted`; `()` for 0 bytes,
        None if all together do not. Changes nothing: the caller evicts and calls `on_remove`.

        Args:
          pinned: never chosen.
          new_key: the inserted key that needs the space. `(new_key,)` means that it is worth less than what would be
            evicted for it, and should not be stored; policies that always accept new entries never return it.
          is_only_copy: no other tier holds the new key, so that refusing it loses it.

        Raises:
          ValueError: `bytes_wanted` is negative.
          KeyError: `new_key` is not held.
        """
        check_count("bytes_wanted", bytes_wanted, least=0)
        protected, most = {*pinned}, math.inf
        if new_key is not None:
            worth = self._held(new_key).rank[0]
            if self.weighs_new_keys and is_only_copy and new_key not in protected:
                most = worth + self.leeway
            if not self.weighs_new_keys or is_only_copy:
                protected.add(new_key)
        met: dict[Rank, None] = {}
        chosen: list[str] = []
        freed_bytes = 0
        gone: collections.Counter[str | None] = collections.Counter()  # children among the victims
        while freed_bytes < bytes_wanted and self._heap:
            rank = heapq.heappop(self._heap)
            if not self._is_current(rank):
                continue
            met[rank] = None
            key = rank[2]
            if key in protected:
                continue
            if self.is_tree and self._num_children[key] > gone[key]:
                del met[rank]
                self._out_of_heap.add(key)
                continue
            info = self._entries[key].info
            if new_key is not None and (key == new_key or rank[0] > most):  # it ranks before enough others, which stay
                chosen, freed_bytes = [new_key], bytes_wanted
                break
            chosen.append(key)
            freed_bytes += info.num_bytes
            gone[info.parent] += 1
            if self._num_children[info.parent] == gone[info.parent]:
                self._put_back(info.parent)
        for rank in met:
            heapq.heappush(self._heap, rank)
        return tuple(chosen) if freed_bytes >= bytes_wanted else None

    def inherit(self, key: str, heir: str) -> None:
        """Transfers the uses of `key` to `heir`, which is not held yet and about to replace it."""
        self._check_new(heir)
        uses = self._entries[key].uses if key in self._entries else self._past.pop(key, None)
        if uses is not None:
            self._remember(heir, dataclasses.replace(uses))

    def state(self, now: float) -> dict[str, Any]:
        """Everything the order depends on, as JSON values with times relative to `now`."""
        uses = self._past | {key: entry.uses for key, entry in self._entries.items()}
        state: dict[str, Any] = {
            "uses": {key: _as_json(self.rebased(history, now)) for key, history in uses.items() if history.num_uses}
        }
        if self.is_tree:  # the caller that adopts them may not have checked that
            parents = {key: entry.info.parent for key, entry in self._entries.items()}
            state["parents"] = {key: parent for key, parent in parents.items() if parent is not None}
        return state

    def restore(self, state: Any, held: Collection[str]) -> None:
        """Restores a `state` of the same policy, before any other call; `held` are the keys to be adopted next. Invalid
        or damaged parts are skipped."""
        uses = state.get("uses") if isinstance(state, dict) else None
        for key, values in uses.items() if isinstance(uses, dict) else ():
            if (self._num_remembered or key in held) and (history := _uses_from_json(values)) is not None:
                self._past[key] = history
        parents = state.get("parents") if isinstance(state, dict) and self.is_tree else None
        for key, parent in parents.items() if isinstance(parents, dict) else ():
            if key in held and isinstance(parent, str) and parent != key:
                self._parents[key] = parent

    def rebased(self, uses: Uses, now: float) -> Uses:
        """The uses with times relative to `now`."""
        return dataclasses.replace(uses, last_use=uses.last_use - now)

    def _with_parent(self, key: str, info: EntryInfo) -> EntryInfo:
        """With the parent that `restore` brought, if none is known."""
        parent = self._parents.pop(key, None)
        return info if parent is None or info.parent is not None else dataclasses.replace(info, parent=parent)

    def _lose_child(self, parent: str | None) -> None:
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            self._put_back(parent)

    def _put_back(self, key: str | None) -> None:
        """Returns an entry to the heap once it has no children left, except among the victims."""
        if key is not None and key in self._out_of_heap:
            self._out_of_heap.remove(key)
            heapq.heappush(self._heap, self._entries[key].rank)

    def _check_new(self, key: str) -> None:
        if key in self._entries:
            raise ValueError(f"key: wanted one that is not held, got {key!r}")

    def _remember(self, key: str, uses: Uses) -> None:
        self._past[key] = uses
        if len(self._past) > max(1, self._num_remembered):
            self._past.popitem(last=False)

    def _held(self, key: str) -> Entry:
        if key not in self._entries:
            raise KeyError(f"key: wanted one that is held, got {key!r}")
        return self._entries[key]

    def _use(self, entry: Entry, now: float, *, is_hit: bool) -> None:
        entry.uses.num_uses += 1
        entry.uses.num_misses += not is_hit
        entry.uses.last_use = now
        self.count(entry.uses, entry.info, now, is_hit=is_hit)
        self._order((entry,))

    def _order(self, entries: Collection[Entry]) -> None:
        for entry in entries:
            self._num_ranked += 1
            entry.rank = (self.worth(entry), entry.uses.last_use, entry.key, self._num_ranked)
            self._out_of_heap.discard(entry.key)
        if len(entries) > _FEW:
            self._heap.extend(entry.rank for entry in entries)
            heapq.heapify(self._heap)
        else:
            for entry in entries:
                heapq.heappush(self._heap, entry.rank)
        self._compact()

    def _is_current(self, rank: Rank) -> bool:
        entry = self._entries.get(rank[2])
        return entry is not None and entry.rank[3] == rank[3]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry.rank for key, entry in self._entries.items() if key not in self._out_of_heap]
            heapq.heapify(self._heap)


def _as_json(uses: Uses) -> list[int | float | None]:
    """The fields in order; None for the value of a key whose uses never saved anything."""
    return [None if value == -math.inf else value for value in dataclasses.astuple(uses)]


def _uses_from_json(values: Any) -> Uses | None:
    """Inverse of `_as_json`; None for anything else."""
    if not isinstance(values, list) or len(values) != len(dataclasses.fields(Uses)):
        return None
    num_uses, num_misses, value, *times = values
    numbers = (*times, 0.0 if value is None else value)
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        return None
    if not all(map(math.isfinite, numbers)) or type(num_uses) is not int or type(num_misses) is not int:
        return None
    if not 0 <= num_misses <= num_uses or not num_uses:  # without a recorded miss: held since before counting began
        return None
    return Uses(num_uses, num_misses, -math.inf if value is None else value, *times)

"""Interface of eviction policies, in terms of sizes, seconds and uses by key.

The tier's owner moves all data. To store a new entry it calls `on_insert`, then `victims` for the missing bytes, evicts
them, and calls `on_remove` for each entry evicted, or for the new one if it is not stored after all. Each tier has a
policy of its own, which gives RAGCache's "two separate logical clocks" (sec. 5.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ccjax.policy._checks import check_count, check_mass, check_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class EntryInfo:
    """Facts about an entry at one use; checked on construction (ValueError naming the field).

    Attributes:
      num_bytes: bytes it takes from the tier's budget.
      num_tokens: tokens of the chunk.
      compute_s: seconds to compute the chunk from text, `num_tokens T(cached, new) / new` with the cached and new
        tokens of the request: the chunk's share of its prefill (RAGCache eq. 4).
      recomputed_share: share of its tokens that a use recomputes: on a hit of this use, on insertion the expected share
        of later uses (`ccjax.policy.strategies.expected_share`).
      load_s: seconds to load it from this tier.
      below_load_s: seconds to load it from the next lower tier that also holds it; None if none does.
      parent: key of its parent in RAGCache's knowledge tree, held or not; None at the root or outside the tree.
    """

    num_bytes: int
    num_tokens: int
    compute_s: float
    recomputed_share: float = 0.0
    load_s: float = 0.0
    below_load_s: float | None = None
    parent: str | None = None

    def __post_init__(self) -> None:
        check_count("num_bytes", self.num_bytes)
        check_count("num_tokens", self.num_tokens)
        check_mass("compute_s", self.compute_s)
        check_ratio("recomputed_share", self.recomputed_share)
        check_mass("load_s", self.load_s)
        if self.below_load_s is not None:
            check_mass("below_load_s", self.below_load_s)

    @property
    def saved_s(self) -> float:
        """Seconds that a use saves because this tier holds the entry, at least 0.

        With the entry, a use costs `load_s + recomputed_share compute_s`; without it `compute_s`, or the same sum with
        `below_load_s` if a lower tier has a copy and that is faster.
        """
        fix_s = self.recomputed_share * self.compute_s
        without_s = self.compute_s if self.below_load_s is None else min(self.compute_s, self.below_load_s + fix_s)
        return max(0.0, without_s - fix_s - self.load_s)


class EvictionPolicy(Protocol):
    """Eviction policy of one tier. Not thread-safe. `now` never decreases; the caller chooses its unit: requests served
    so far, or seconds. Deterministic: the same calls give the same answers."""

    @property
    def is_tree(self) -> bool:
        """True if only leaves are evicted, and entries should be inserted only if their parent is held or they have
        none."""
        ...

    def is_leaf(self, key: str) -> bool:
        """True if no child of `key` is held."""
        ...

    def __contains__(self, key: object) -> bool:
        """True while `key` is held."""
        ...

    def on_insert(self, key: str, info: EntryInfo, now: float) -> None:
        """Records that the tier is about to hold `key`, computed or loaded for a request at `now`; counts as a use.

        Raises:
          ValueError: it is held already.
        """
        ...

    def on_adopt(self, infos: Mapping[str, EntryInfo]) -> None:
        """Adds keys that the tier holds but no request of this process has used yet; their history is what `restore`
        brought.

        Raises:
          ValueError: one is held already; nothing changed.
        """
        ...

    def on_hit(self, key: str, info: EntryInfo, now: float) -> None:
        """Records that a request at `now` reuses `key` from this tier; `info` replaces what was known.

        Raises:
          KeyError: it is not held.
        """
        ...

    def on_remove(self, key: str, *, evicted: bool = True) -> None:
        """Records that the tier no longer holds `key`; `evicted=False` if the reason was not lack of space (damaged,
        outdated).

        Raises:
          KeyError: it is not held.
        """
        ...

    def victims(
        self, bytes_wanted: int, *, pinned: Collection[str] = (), new_key: str | None = None
    ) -> tuple[str, ...] | None:
        """Keys to evict, lowest value first: the shortest such sequence that frees `bytes_wanted`; `()` for 0 bytes,
        None if all together do not. Changes nothing: the caller evicts and calls `on_remove`.

        Args:
          pinned: never chosen.
          new_key: the inserted key that needs the space. `(new_key,)` means that it is worth less than what would be
            evicted for it, and should not be stored; policies that always accept new entries never return it.

        Raises:
          ValueError: `bytes_wanted` is negative.
          KeyError: `new_key` is not held.
        """
        ...

    def inherit(self, key: str, heir: str) -> None:
        """Transfers the uses of `key` to `heir`, which is not held yet and about to replace it."""
        ...

    def state(self, now: float) -> dict[str, Any]:
        """Everything the order depends on, as JSON values with times relative to `now`."""
        ...

    def restore(self, state: Any, held: Collection[str]) -> None:
        """Restores a `state` of the same policy, before any other call; `held` are the keys to be adopted next. Invalid
        or damaged parts are skipped."""
        ...

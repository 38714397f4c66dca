"""What an eviction policy is told and asked: sizes, seconds and uses, by key.

The tier's owner makes every move. To store a new entry it calls `on_insert`, then `victims` for the bytes that are
missing, evicts them, and calls `on_remove` for each one that went, or for the new one where it is not stored after all.
A tier has a policy of its own, so that RAGCache's "two separate logical clocks" (sec. 5.1) need no further thought.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ccjax.policy._checks import check_count, check_mass, check_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class EntryInfo:
    """What one use of an entry says about it; checked on construction (ValueError naming the field).

    Attributes:
      num_bytes: what it takes out of the tier's budget.
      num_tokens: tokens of the chunk.
      compute_s: seconds to compute the chunk from text, `num_tokens T(cached, new) / new` with the cached and new
        tokens of the request: a chunk's share of its prefill (RAGCache eq. 4).
      recomputed_share: of its tokens, that a use recomputes: on a hit what this one did, on insertion what a later use
        may expect (`ccjax.policy.strategies.expected_share`).
      load_s: seconds to load it out of this tier.
      below_load_s: seconds to load it out of the next tier below that holds it too; None where none does.
      parent: key of what it continues in RAGCache's knowledge tree, held or not; None at the top of it, or outside.
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

        With it, a use costs `load_s + recomputed_share compute_s`; without, `compute_s`, or that with `below_load_s`
        where a tier below has a copy and loading that is faster than computing.
        """
        fix_s = self.recomputed_share * self.compute_s
        without_s = self.compute_s if self.below_load_s is None else min(self.compute_s, self.below_load_s + fix_s)
        return max(0.0, without_s - fix_s - self.load_s)


class EvictionPolicy(Protocol):
    """What a tier's owner tells and asks. Not thread-safe. `now` never decreases; its unit is the caller's: requests
    served so far, or seconds. Same calls, same answers."""

    @property
    def is_tree(self) -> bool:
        """Only leaves are evicted, and only what has its parent here, or none, should come."""
        ...

    def is_leaf(self, key: str) -> bool:
        """True if no child of `key` is held."""
        ...

    def __contains__(self, key: object) -> bool:
        """True while `key` is held."""
        ...

    def on_insert(self, key: str, info: EntryInfo, now: float) -> None:
        """The tier is about to hold `key`, computed or loaded for a request at `now`, which counts as a use.

        Raises:
          ValueError: it is held already.
        """
        ...

    def on_adopt(self, infos: Mapping[str, EntryInfo]) -> None:
        """The tier holds these keys, and no request of this process used them yet: what `restore` brought of them
        counts.

        Raises:
          ValueError: one is held already; nothing changed.
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

    def inherit(self, key: str, heir: str) -> None:
        """`heir`, which is not held, is about to take the place of `key`: its uses are those of `key` from now on."""
        ...

    def state(self, now: float) -> dict[str, Any]:
        """All that the order rests on, as JSON values, times counted from `now`."""
        ...

    def restore(self, state: Any, held: Collection[str]) -> None:
        """Takes in, before any other call, a `state` of the same policy; `held` are the keys to be adopted next. What
        is no state, or damaged, is left out."""
        ...

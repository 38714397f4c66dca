"""Eviction policies: six ways to rank the entries of a tier, by name."""

from __future__ import annotations

from collections.abc import Callable

from ccjax.policy.eviction.base import EntryInfo
from ccjax.policy.eviction.policies import CacheCraftFr, Gdsf, Lfu, Lru, Pgdsf, SavedSeconds
from ccjax.policy.eviction.ranked import RankedPolicy

POLICIES: dict[str, Callable[[], RankedPolicy]] = {
    "cachecraft_fr": CacheCraftFr,
    "lru": Lru,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "pgdsf": Pgdsf,
    "saved_seconds": SavedSeconds,
}
"""Name -> constructor of a policy for one tier, with its default settings."""

DEFAULT_POLICY = "saved_seconds"
"""Saves the most compute on MuSiQue's retrieval trace in tiers of up to a third of all bytes; in larger ones, where
order matters little, no policy saves a quarter of a point more. `scripts/bench.py trace` compares policies."""


def make_policy(name: str) -> RankedPolicy:
    """A new policy by its name in `POLICIES`.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in POLICIES:
        raise ValueError(f"eviction policy: wanted one of {sorted(POLICIES)}, got {name!r}")
    return POLICIES[name]()


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "EntryInfo",
    "Gdsf",
    "Pgdsf",
    "RankedPolicy",
    "SavedSeconds",
    "make_policy",
]

"""Eviction scores by their formulas, recomputed from a log of all uses for each query, in O(n^2). Keeps the log and the
clock, and imports nothing from the project."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Use:
    key: str
    is_hit: bool
    info: Any
    now: int
    clock: float


class Plain:
    """The entries of one tier under the policy `name`. Infos have the fields of the project's EntryInfo, 16 tokens."""

    def __init__(self, name, half_life):
        self.name, self.half_life, self.log, self.held, self.clock = name, half_life, [], set(), 0.0

    def use(self, key, info, now):
        self.log.append(Use(key, key in self.held, info, now, self.clock))
        self.held.add(key)

    def remove(self, key, evicted):
        if evicted:
            self.clock = max(self.clock, self.score(key))
        self.held.remove(key)

    def score(self, key):
        uses = [use for use in self.log if use.key == key]
        inserted = max(index for index, use in enumerate(uses) if not use.is_hit)
        since, last = uses[inserted:], uses[-1]
        match self.name:
            case "lru":
                return max(use.now for use in uses)
            case "lfu":
                return len(since)
            case "cachecraft_fr":
                return sum(
                    min(1 / use.info.recomputed_share, 16) if use.info.recomputed_share else 16 for use in since[1:]
                )
            case "gdsf":
                return last.clock + len(since) * last.info.compute_s / last.info.num_bytes
            case "pgdsf":
                costs = [use.info.compute_s / use.info.num_tokens for use in uses if not use.is_hit]
                return last.clock + len(uses) * sum(costs) / len(costs)
            case "saved_seconds":
                return sum(self.saved(use) * 2.0 ** (use.now / self.half_life) for use in uses) / last.info.num_bytes
        raise AssertionError(self.name)

    @staticmethod
    def saved(use):
        fix = use.info.recomputed_share * use.info.compute_s
        costs = [use.info.compute_s]
        if use.info.below_load_s is not None:
            costs.append(use.info.below_load_s + fix)
        return max(0, min(costs) - fix - use.info.load_s)

    def victims(self, wanted, pinned, new_key):
        last_use = {use.key: use.now for use in self.log}
        chosen, freed = [], 0
        for key in sorted(self.held, key=lambda key: (self.score(key), last_use[key], key)):
            if freed >= wanted:
                break
            if key == new_key and self.name == "saved_seconds":
                return (key,)
            if key not in pinned and key != new_key:
                chosen.append(key)
                freed += next(use.info.num_bytes for use in self.log if use.key == key)
        return tuple(chosen) if freed >= wanted else None

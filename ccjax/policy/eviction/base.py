"""What eviction policies know of an entry: sizes and seconds."""

from __future__ import annotations

import dataclasses

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

"""Agrees with other processes on one store which of them computes which chunks of a prefill.

`ccjax.policy.loading` decides how long to wait. If the store does not respond, everything is computed here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from ccjax.cache.variants import VariantIndex
from ccjax.policy.capture import variants_to_compute
from ccjax.policy.loading import claim_s, longest_shared_wait_s
from ccjax.store.claims import Claims
from ccjax.types import ChunkId, PrefillPlan, VariantId, VariantMeta

Agreement = Literal["go", "plan", "wait"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
"""Pauses between checks of the store; each is 1.5 times the one before."""


class SharedPrefill:
    """The agreement for one prefill; ends with `release`. Nothing here blocks: `claim` says that the prefill has to
    wait, `is_wait_over` when it need not any longer.

    Attributes:
      claimed: variants whose leases this process asked for and got.
      waited_s: seconds waited for variants that other processes compute.
    """

    def __init__(self, claims: Claims, variants: VariantIndex, seconds_per_token: float | None) -> None:
        self.claimed: list[VariantId] = []
        self.waited_s = 0.0
        self._claims = claims
        self._variants = variants
        self._seconds_per_token = seconds_per_token
        self._longest_s: float | None = None
        self._taken: frozenset[str] = frozenset()
        self._checked_at = self._next_check = self._pause_s = 0.0

    def claim(self, plan: PrefillPlan, known: Mapping[ChunkId, Sequence[VariantMeta]]) -> Agreement:
        """Claims what the plan computes. Returns "go" to execute the plan, "plan" to plan again because there are more
        variants now, or "wait" to wait for other processes until `is_wait_over` and then plan again."""
        lengths = variants_to_compute(plan, known)
        wanted = [variant_id for variant_id in lengths if variant_id not in self.claimed]
        if not wanted or (self._longest_s is not None and self.waited_s >= self._longest_s):
            return "go"
        seconds = claim_s(sum(lengths.values()), self._seconds_per_token)
        won = self._claims.claim(wanted, seconds)
        self.claimed += map(VariantId, won)
        # Only after claiming: others commit before they release their claims. Some may have been stored long ago.
        arrived = self._claims.committed(wanted)
        self._taken = self._claims.taken(wanted) - set(arrived)
        has_more = self._follow(arrived)
        if not self._taken:
            return "plan" if has_more else "go"
        # The process that just won the first claim may be about to claim the rest: those count once they are seen.
        num_tokens = sum(lengths[VariantId(variant_id)] for variant_id in self._taken)
        longest_s = longest_shared_wait_s(num_tokens, self._seconds_per_token)
        self._longest_s = longest_s if self._longest_s is None else max(self._longest_s, longest_s)
        self._pause_s = _FIRST_PAUSE_S
        self._checked_at = time.perf_counter()
        self._next_check = self._checked_at + self._pause_s
        return "wait"

    def is_wait_over(self) -> bool:
        """True once every awaited variant is stored or no longer claimed, or the wait took too long. Checks the store
        only after a pause, however often it is called."""
        now = time.perf_counter()
        if now < self._next_check:
            return False
        assert self._longest_s is not None
        arrived = self._claims.committed(self._taken)
        self._follow(arrived)
        self._taken = self._claims.taken(self._taken - set(arrived))
        self.waited_s += now - self._checked_at
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_PAUSE_S)
        self._checked_at = now
        self._next_check = now + min(self._pause_s, self._longest_s - self.waited_s)
        return not self._taken or self.waited_s >= self._longest_s

    def release(self) -> None:
        """Releases all claims; those of variants that are still being written, once they are written."""
        self._claims.release(self.claimed)

    def _follow(self, arrived: Sequence[str]) -> bool:
        """Adds variants to the index; True if one was new."""
        return self._variants.apply_changes(arrived, ())[0] > 0

"""Agrees with other processes on one store who computes which chunks, for one prefill.

How long to wait is policy's (`ccjax.policy.loading`). Where the store cannot be asked, everything is computed here.
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
"""Between two looks at the store; each pause is half as long again as the last one."""


class SharedPrefill:
    """One prefill's part in the agreement; ends with `release`. Nothing here waits: `settle` says when to, and `look`
    until when.

    Attributes:
      claimed: what this process said it computes.
      waited_s: for what other processes said they compute.
    """

    def __init__(self, claims: Claims, variants: VariantIndex, seconds_per_token: float | None) -> None:
        self.claimed: list[VariantId] = []
        self.waited_s = 0.0
        self._claims = claims
        self._variants = variants
        self._seconds_per_token = seconds_per_token
        self._longest_s: float | None = None
        self._taken: frozenset[str] = frozenset()
        self._looked_at = self._next_look = self._pause_s = 0.0

    def settle(self, plan: PrefillPlan, known: Mapping[ChunkId, Sequence[VariantMeta]]) -> Agreement:
        """Claims what the plan computes: "go" on with it; "plan" anew, for there are more variants now; or "wait" for
        what others compute until `look` says so, and then plan anew."""
        lengths = variants_to_compute(plan, known)
        wanted = [variant_id for variant_id in lengths if variant_id not in self.claimed]
        if not wanted or (self._longest_s is not None and self.waited_s >= self._longest_s):
            return "go"
        seconds = claim_s(sum(lengths.values()), self._seconds_per_token)
        won = self._claims.claim(wanted, seconds)
        self.claimed += map(VariantId, won)
        # Only now, since others commit first and then give up their claims; it may also be known there for long.
        arrived = self._claims.committed(wanted)
        self._taken = self._claims.taken(wanted) - set(arrived)
        has_more = self._follow(arrived)
        if not self._taken:
            return "plan" if has_more else "go"
        # Who has just won the first may be about to claim the others: these count once they are seen.
        num_tokens = sum(lengths[VariantId(variant_id)] for variant_id in self._taken)
        longest_s = longest_shared_wait_s(num_tokens, self._seconds_per_token)
        self._longest_s = longest_s if self._longest_s is None else max(self._longest_s, longest_s)
        self._pause_s = _FIRST_PAUSE_S
        self._looked_at = time.perf_counter()
        self._next_look = self._looked_at + self._pause_s
        return "wait"

    def look(self) -> bool:
        """True once everything that is waited for is there, or its owners gave up, or it takes too long. Asks the store
        now and then only, however often it is called."""
        now = time.perf_counter()
        if now < self._next_look:
            return False
        assert self._longest_s is not None
        arrived = self._claims.committed(self._taken)
        self._follow(arrived)
        self._taken = self._claims.taken(self._taken - set(arrived))
        self.waited_s += now - self._looked_at
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_PAUSE_S)
        self._looked_at = now
        self._next_look = now + min(self._pause_s, self._longest_s - self.waited_s)
        return not self._taken or self.waited_s >= self._longest_s

    def release(self) -> None:
        """Gives up all claims, those of variants that are being written as soon as they are."""
        self._claims.release(self.claimed)

    def _follow(self, arrived: Sequence[str]) -> bool:
        """Takes variants into the index; True if one was not there."""
        return self._variants.apply_changes(arrived, ())[0] > 0

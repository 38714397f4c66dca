"""Agrees with other processes on one store who computes which chunks, for one prefill. Knows no model and no KV.

How long to wait is policy's (`ccjax.policy.loading`). Where the store cannot be asked, everything is computed here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ccjax.engine.prefill import IsCancelled, PrefillCancelledError
from ccjax.engine.variants import VariantIndex
from ccjax.policy.capture import variants_to_compute
from ccjax.policy.loading import claim_s, longest_shared_wait_s
from ccjax.types import ChunkId, PrefillPlan, VariantId, VariantMeta
from store.claims import Claims

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
"""Between two looks at the store; each pause is half as long again as the last one."""


class SharedPrefill:
    """One prefill's part in the agreement; ends with `release`.

    Attributes:
      claimed: what this process said it computes.
      waited_s: for what other processes said they compute.
    """

    def __init__(
        self,
        claims: Claims,
        variants: VariantIndex,
        seconds_per_token: float | None,
        is_cancelled: IsCancelled | None,
    ) -> None:
        self.claimed: list[VariantId] = []
        self.waited_s = 0.0
        self._claims = claims
        self._variants = variants
        self._seconds_per_token = seconds_per_token
        self._is_cancelled = is_cancelled
        self._longest_s: float | None = None

    def settle(self, plan: PrefillPlan, known: Mapping[ChunkId, Sequence[VariantMeta]]) -> bool:
        """Claims what the plan computes, and waits for what others do; True if the prompt must be planned anew, because
        there are more variants now or because their owner gave up.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True during a wait.
        """
        lengths = variants_to_compute(plan, known)
        wanted = [variant_id for variant_id in lengths if variant_id not in self.claimed]
        if not wanted or (self._longest_s is not None and self.waited_s >= self._longest_s):
            return False
        seconds = claim_s(sum(lengths.values()), self._seconds_per_token)
        won = self._claims.claim(wanted, seconds)
        self.claimed += map(VariantId, won)
        # Only now, since others commit first and then give up their claims; it may also be known there for long.
        arrived = self._claims.committed(wanted)
        taken = self._claims.taken(wanted) - set(arrived)
        if not taken:
            return self._follow(arrived)
        if self._longest_s is None:
            num_tokens = sum(lengths[VariantId(variant_id)] for variant_id in taken)
            self._longest_s = longest_shared_wait_s(num_tokens, self._seconds_per_token)
        self._follow(arrived)
        self._wait(taken)
        return True

    def release(self) -> None:
        """Gives up all claims, those of variants that are being written as soon as they are."""
        self._claims.release(self.claimed)

    def _wait(self, taken: frozenset[str]) -> None:
        """Until all of `taken` are there, or their owners gave up, or it takes too long."""
        assert self._longest_s is not None
        pause_s = _FIRST_PAUSE_S
        while taken and self.waited_s < self._longest_s:
            started = time.perf_counter()
            time.sleep(min(pause_s, self._longest_s - self.waited_s))
            arrived = self._claims.committed(taken)
            self._follow(arrived)
            taken = self._claims.taken(taken - set(arrived))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            self.waited_s += time.perf_counter() - started
            if self._is_cancelled is not None and self._is_cancelled():
                raise PrefillCancelledError

    def _follow(self, arrived: Sequence[str]) -> bool:
        """Takes variants into the index; True if one was not there."""
        return self._variants.follow(arrived, ())[0] > 0

"""What computing and loading take here, in seconds, for comparing one with the other."""

from __future__ import annotations

from ccjax.cache.rates import Rates
from ccjax.policy.prefill_cost import PrefillGrid

_BYTES_PER_S = {"device": 100e9, "host": 10e9, "disk": 1e9}
_UNMEASURED_S_PER_TOKEN = 1e-3


class MeasuredCosts:
    """Seconds per computed token and per loaded byte as measured; as usual, until there are measurements.

    Args:
      grid: what prefills cost by what is cached, where that was profiled.
    """

    def __init__(self, rates: Rates, grid: PrefillGrid | None = None) -> None:
        self._rates = rates
        self._grid = grid

    def compute_s(self, num_tokens: int, cached_tokens: int, new_tokens: int) -> float:
        """Seconds to compute so many tokens from text: their part of a prefill that computes `new_tokens` behind
        `cached_tokens` (RAGCache eq. 4), of which no more is known without a profile than what a token takes."""
        if self._grid is not None:
            return num_tokens * self._grid.prefill_s(cached_tokens, new_tokens) / new_tokens
        return num_tokens * (self._rates.seconds_per_token or _UNMEASURED_S_PER_TOKEN)

    def full_prefill_s(self, num_tokens: int) -> float | None:
        """Seconds of a prefill that computes a whole prompt; None while nothing like it was measured."""
        return self._rates.compute.like_s(num_tokens) if self._grid is None else self._grid.prefill_s(0, num_tokens)

    def usual_prefill_s(self, num_tokens: int) -> float:
        """The same, or by all prefills that were measured; as usual, until there are some."""
        known_s = self.full_prefill_s(num_tokens) or self._rates.compute_s(num_tokens)
        return num_tokens * _UNMEASURED_S_PER_TOKEN if known_s is None else known_s

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds to load so many bytes of KV out of a tier."""
        rate = self._rates.tiers.get(tier)  # reads on the device are never waited for, so they cannot be timed
        measured_s = self._rates.load_s(tier, num_bytes) if rate is not None and rate.is_settled else None
        return num_bytes / _BYTES_PER_S[tier] if measured_s is None else measured_s

"""Seconds that computing and loading KV take on this machine, so that they can be compared."""

from __future__ import annotations

from ccjax.cache.rates import Rates
from ccjax.policy.prefill_cost import PrefillGrid

_BYTES_PER_S = {"device": 100e9, "host": 10e9, "disk": 1e9}
UNMEASURED_S_PER_TOKEN = 1e-3


class MeasuredCosts:
    """Measured seconds per computed token and per loaded byte; typical values until there are measurements.

    Attributes:
      grid: prefill times by cached and new tokens; None as long as there is no profile.
    """

    def __init__(self, rates: Rates, grid: PrefillGrid | None = None) -> None:
        self._rates = rates
        self.grid = grid

    def compute_s(self, num_tokens: int, cached_tokens: int, new_tokens: int) -> float:
        """Seconds to compute `num_tokens` from text: their share of a prefill that computes `new_tokens` behind
        `cached_tokens` (RAGCache eq. 4); without a profile, `num_tokens` times the measured cost of a token."""
        if self.grid is not None:
            return num_tokens * self.grid.prefill_s(cached_tokens, new_tokens) / new_tokens
        return num_tokens * (self._rates.seconds_per_token or UNMEASURED_S_PER_TOKEN)

    def full_prefill_s(self, num_tokens: int) -> float | None:
        """Seconds of a prefill that computes a whole prompt; None until one of similar size was measured."""
        return self._rates.compute.like_s(num_tokens) if self.grid is None else self.grid.prefill_s(0, num_tokens)

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds to load `num_bytes` of KV from a tier."""
        rate = self._rates.tiers.get(tier)  # reads on the device are asynchronous, so they cannot be timed
        measured_s = self._rates.load_s(tier, num_bytes) if rate is not None and rate.is_settled else None
        return num_bytes / _BYTES_PER_S[tier] if measured_s is None else measured_s

"""What computing and loading take here, in seconds, for comparing one with the other. Knows no store and no plan."""

from __future__ import annotations

from ccjax.engine.rates import Rates

_BYTES_PER_S = {"device": 100e9, "host": 10e9, "disk": 1e9}
_UNMEASURED_S_PER_TOKEN = 1e-3


class MeasuredCosts:
    """Seconds per computed token and per loaded byte as measured; as usual, until there are measurements."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens from text."""
        return num_tokens * (self._rates.seconds_per_token or _UNMEASURED_S_PER_TOKEN)

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds to load so many bytes of KV out of a tier."""
        rate = self._rates.tiers.get(tier)  # reads on the device are never waited for, so nobody can time them
        measured_s = self._rates.load_s(tier, num_bytes) if rate is not None and rate.is_settled else None
        return num_bytes / _BYTES_PER_S[tier] if measured_s is None else measured_s

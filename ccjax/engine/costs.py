"""What computing and loading take here, in seconds, for comparing one with the other. Knows no store and no plan."""

from __future__ import annotations

from ccjax.engine.reads import ComputeRate

_BYTES_PER_S = {"host": 10e9, "disk": 1e9}
_UNMEASURED_S_PER_TOKEN = 1e-3


class MeasuredCosts:
    """Seconds per computed token as measured, seconds per loaded byte as usual."""

    def __init__(self, rate: ComputeRate) -> None:
        self._rate = rate

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens from text."""
        return num_tokens * (self._rate.seconds_per_token or _UNMEASURED_S_PER_TOKEN)

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds to load so many bytes of KV out of a tier."""
        return num_bytes / _BYTES_PER_S[tier]

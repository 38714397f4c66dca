"""A byte budget: the bytes that a tier holds and their limit."""

from __future__ import annotations

from ccjax.store.errors import TierFullError
from ccjax.store.spec import positive_int


class ByteBudget:
    """Bytes used out of `limit_bytes` (None for no limit). Not thread-safe: the owning tier's lock guards it."""

    def __init__(self, tier: str, limit_bytes: int | None):
        self.tier = tier
        self.limit_bytes = None if limit_bytes is None else positive_int(f"{tier}_bytes", limit_bytes, minimum=0)
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return self._used_bytes

    def shortfall(self, num_bytes: int) -> int:
        """Bytes to free before `num_bytes` more fit; 0 if they fit now."""
        return 0 if self.limit_bytes is None else max(0, self.used_bytes + num_bytes - self.limit_bytes)

    def can_ever_hold(self, num_bytes: int) -> bool:
        """False if `num_bytes` exceed the whole budget."""
        return self.limit_bytes is None or num_bytes <= self.limit_bytes

    def charge(self, num_bytes: int) -> None:
        """Charges `num_bytes`.

        Raises:
          TierFullError: they do not fit; nothing is charged.
        """
        short = self.shortfall(num_bytes)
        if short:
            raise TierFullError(
                f"{self.tier} tier: {num_bytes} bytes do not fit, {self.used_bytes} of {self.limit_bytes} used, "
                f"{short} must be evicted first"
            )
        self._used_bytes += num_bytes

    def recharge(self, charged: int, num_bytes: int) -> int:
        """Changes a charge from `charged` to `num_bytes` bytes, and returns the latter.

        Raises:
          TierFullError: the new charge is larger and does not fit; nothing is changed.
        """
        if num_bytes > charged:
            self.charge(num_bytes - charged)
        else:
            self.release(charged - num_bytes)
        return num_bytes

    def adopt(self, num_bytes: int) -> None:
        """Charges bytes that already exist (another process wrote them), even beyond the limit."""
        self._used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Releases `num_bytes`."""
        self._used_bytes -= num_bytes
        assert self._used_bytes >= 0

"""The host tier: KV shards as read-only NumPy arrays."""

from __future__ import annotations

import numpy as np

from ccjax.store.budget import ByteBudget
from ccjax.store.memory import MemoryTier
from ccjax.store.spec import KVSpec
from ccjax.store.usage import HOST


class HostTier(MemoryTier[np.ndarray]):
    """Variants in host memory, each as the given array `[L, 2, T, K, H]`, not a copy."""

    def __init__(self, kv_spec: KVSpec, budget_bytes: int) -> None:
        super().__init__(HOST, ByteBudget(HOST, budget_bytes))
        self._kv_spec = kv_spec

    def charge_bytes(self, num_tokens: int) -> int:
        """See `MemoryTier`."""
        return self._kv_spec.num_bytes(num_tokens)

    def _hold(self, kv: np.ndarray) -> np.ndarray:
        kv.flags.writeable = False
        return kv

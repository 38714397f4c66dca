"""The device tier: chunk KV in pages of 16 tokens, a pool per layer, keys before RoPE. Knows no plan and no policy.

A chunk is a list of pages, anywhere in the pool; who reuses it reads them where they lie. The layout is that of
`pallas_kernels.decode`.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.engine.buckets import token_bucket
from models.llama3.steps import read_pages_step, write_pages_step
from store.budget import ByteBudget
from store.errors import ShardNotFoundError, TierFullError
from store.spec import KVSpec, ShardRecord

PAGE_TOKENS = 16


class PagedShard:
    """The KV of one variant in a pool. Its pages are free again once nobody holds this object.

    Attributes:
      slots: [T] int32, page * 16 + offset of every token.
    """

    def __init__(self, pool: DevicePool, pages: Sequence[int], num_tokens: int) -> None:
        self._pool = pool
        offsets = np.arange(num_tokens, dtype=np.int32)
        self.slots = np.asarray(pages, np.int32)[offsets // PAGE_TOKENS] * PAGE_TOKENS + offsets % PAGE_TOKENS

    def read_layers(self, first: int, last: int) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` of layers `[first, last)`, copied to the host."""
        return self._pool.read_layers(self.slots, first, last)


class DevicePool:
    """Variants in device memory, all of it taken at once. Thread-safe: arrays are replaced under a lock.

    Args:
      budget_bytes: what all pages together may take; at least one page of every layer.

    Raises:
      ValueError: the budget is smaller than that.
    """

    def __init__(self, kv_spec: KVSpec, budget_bytes: int) -> None:
        self.page_bytes = kv_spec.num_bytes(PAGE_TOKENS)
        self.num_pages = budget_bytes // self.page_bytes
        if self.num_pages < 1:
            raise ValueError(
                f"device_cache_bytes: wanted at least {self.page_bytes}, a page of {PAGE_TOKENS} tokens in every "
                f"layer, got {budget_bytes}"
            )
        self.kv_spec = kv_spec
        self.budget = ByteBudget("device", self.num_pages * self.page_bytes)
        shape = (kv_spec.num_kv_heads, self.num_pages, PAGE_TOKENS, kv_spec.head_dim)
        self._layers = [
            (jnp.zeros(shape, kv_spec.np_dtype), jnp.zeros(shape, kv_spec.np_dtype)) for _ in range(kv_spec.num_layers)
        ]
        self._free = collections.deque(range(self.num_pages))
        self._shards: dict[str, tuple[ShardRecord, PagedShard]] = {}
        self._lock = threading.Lock()

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def num_slots(self) -> int:
        """Slots of the pool; a slot number from here on means none."""
        return self.num_pages * PAGE_TOKENS

    def records(self) -> list[ShardRecord]:
        """Records of all variants held, oldest first."""
        return [record for record, _ in self._shards.values()]

    def charge_bytes(self, record: ShardRecord) -> int:
        """Bytes that `record` takes out of the budget: whole pages."""
        return -(-record.num_tokens // PAGE_TOKENS) * self.page_bytes

    def charged(self, variant_id: str) -> int | None:
        """Bytes that a held variant takes out of the budget; None for others."""
        shard = self._shards.get(variant_id)
        return None if shard is None else self.charge_bytes(shard[0])

    def put(self, record: ShardRecord, kv: np.ndarray) -> None:
        """Copies `kv` `[L, 2, T, K, H]` into pages.

        Raises:
          TierFullError: it does not fit, or what was removed is still in use; nothing changed.
        """
        if record.variant_id in self._shards:
            return
        num_bytes = self.charge_bytes(record)
        self.budget.charge(num_bytes)
        num_pages = num_bytes // self.page_bytes
        if len(self._free) < num_pages:
            self.budget.release(num_bytes)
            raise TierFullError(f"device tier: wanted {num_pages} pages, {len(self._free)} are free and others in use")
        pages = [self._free.popleft() for _ in range(num_pages)]
        shard = PagedShard(self, pages, record.num_tokens)
        weakref.finalize(shard, self._free.extend, pages).atexit = False
        size = token_bucket(record.num_tokens)
        slots = np.full(size, self.num_slots, np.int32)
        slots[: record.num_tokens] = shard.slots
        padded = np.zeros(self.kv_spec.shape(size), self.kv_spec.np_dtype)
        padded[:, :, : record.num_tokens] = kv
        on_device, on_device_slots = jax.device_put((padded, slots))
        with self._lock:
            for layer, (k_pages, v_pages) in enumerate(self._layers):
                number = np.int32(layer)
                self._layers[layer] = write_pages_step(k_pages, v_pages, on_device, number, on_device_slots)
        self._shards[record.variant_id] = (record, shard)

    def get(self, variant_id: str) -> PagedShard:
        """Where the variant's KV is, valid as long as the result is held.

        Raises:
          ShardNotFoundError: the tier does not hold it.
        """
        try:
            return self._shards[variant_id][1]
        except KeyError:
            raise ShardNotFoundError(f"device tier: no variant {variant_id}") from None

    def remove(self, variant_id: str) -> bool:
        """Drops the variant; False when it was not there. Its pages are free once no reader holds them."""
        shard = self._shards.pop(variant_id, None)
        if shard is None:
            return False
        self.budget.release(self.charge_bytes(shard[0]))
        return True

    def gather(
        self, layer: int, slots: jax.Array, others: tuple[jax.Array, jax.Array] | tuple[None, None] = (None, None)
    ) -> tuple[jax.Array, jax.Array]:
        """Keys before RoPE and values `[S, K, H]` of one layer: `models.llama3.steps.read_pages_step`."""
        with self._lock:  # a `put` meanwhile would take the pages away
            return read_pages_step(*self._layers[layer], slots, *others)

    def read_layers(self, slots: np.ndarray, first: int, last: int) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` in some slots, on the host."""
        size = token_bucket(len(slots))
        padded = np.full(size, self.num_slots, np.int32)
        padded[: len(slots)] = slots
        layers = [self.gather(layer, jnp.asarray(padded)) for layer in range(first, last)]
        return np.stack([np.stack([np.asarray(part)[: len(slots)] for part in layer]) for layer in layers])

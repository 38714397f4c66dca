"""The device tier: chunk KV in pages of 16 tokens, a pool per layer, keys before RoPE.

A chunk is a list of pages, anywhere in the pool; who reuses it reads them where they lie. The layout is that of
`ccjax.kernels.decode`.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from ccjax.models.llama3.sharding import EVERYWHERE, PAGES, VARIANT, placement
from ccjax.models.llama3.steps import read_pages_step, write_pages_step
from ccjax.models.lockstep import fetch, put, zeros
from ccjax.runner.buckets import slot_bucket
from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.store.budget import ByteBudget
from ccjax.store.errors import TierFullError
from ccjax.store.memory import MemoryTier
from ccjax.store.spec import KVSpec
from ccjax.store.usage import DEVICE

PAGE_TOKENS = 16


class Paged(Protocol):
    """What a step that was given pages returns."""

    @property
    def k_pages(self) -> jax.Array: ...
    @property
    def v_pages(self) -> jax.Array: ...


Updated = TypeVar("Updated", bound=Paged)
Read = TypeVar("Read")


def num_pages(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-num_tokens // PAGE_TOKENS)


class PagedShard:
    """KV of consecutive tokens in a pool. Its pages are free again once this object is released.

    Attributes:
      slots: [T] int32, page * 16 + offset of every token.
      num_pages: that it holds.
      free: frees the pages now; for their only user.
    """

    free: weakref.finalize

    def __init__(self, pool: DevicePool, pages: Sequence[int], num_tokens: int) -> None:
        self._pool = pool
        self.num_pages = len(pages)
        offsets = np.arange(num_tokens, dtype=np.int32)
        self.slots = np.asarray(pages, np.int32)[offsets // PAGE_TOKENS] * PAGE_TOKENS + offsets % PAGE_TOKENS

    def read_layers(self, first: int, last: int) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` of layers `[first, last)`, copied to the host."""
        return self._pool.read_layers(self.slots, first, last)


class PageBudget(ByteBudget):
    """Bytes of a pool's pages that are in use, by chunks or requests: what is charged is only checked."""

    def __init__(self, num_pages: int, page_bytes: int, free: Collection[int]) -> None:
        super().__init__(DEVICE, num_pages * page_bytes)
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._free = free

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages that are not free."""
        return (self._num_pages - len(self._free)) * self._page_bytes

    def charge(self, num_bytes: int) -> None:
        """Raises TierFullError unless so many bytes are free."""
        if short := self.shortfall(num_bytes):
            raise TierFullError(f"device tier: wanted {num_bytes} bytes of pages, {short} more than are free")

    def release(self, num_bytes: int) -> None:
        """Nothing: pages become free by themselves."""


class DevicePool(MemoryTier[PagedShard]):
    """Pages in device memory, all of it taken at once, for cached variants and running requests alike. Thread-safe for
    reads, and for `update`: arrays are replaced under a lock.

    Pages are free again once no variant or request holds them: those of a removed variant after its last reader.

    Args:
      budget_bytes: what all pages together may take; at least one page of every layer.
      mesh: that the kv heads are split over; None for a single device.
      sizes: of what variants are written with.

    Raises:
      ValueError: the budget is smaller than that.
    """

    def __init__(
        self, kv_spec: KVSpec, budget_bytes: int, mesh: Mesh | None = None, sizes: CompiledSizes | None = None
    ) -> None:
        self.page_bytes = kv_spec.num_bytes(PAGE_TOKENS)
        self.num_pages = budget_bytes // self.page_bytes
        if self.num_pages < 1:
            raise ValueError(
                f"device_cache_bytes: wanted at least {self.page_bytes}, a page of {PAGE_TOKENS} tokens in every "
                f"layer, got {budget_bytes}"
            )
        self._free = collections.deque(range(self.num_pages))
        super().__init__(DEVICE, PageBudget(self.num_pages, self.page_bytes, self._free))
        self.kv_spec = kv_spec
        self._mesh = mesh
        self._sizes = CompiledSizes() if sizes is None else sizes
        self._layers = self._empty_layers()
        self._pages_lock = threading.Lock()

    @property
    def num_slots(self) -> int:
        """Slots of the pool; a slot number from here on means none."""
        return self.num_pages * PAGE_TOKENS

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    def charge_bytes(self, num_tokens: int) -> int:
        """Bytes that so many tokens take out of the budget: whole pages."""
        return num_pages(num_tokens) * self.page_bytes

    def allocate(self, lengths: Sequence[int]) -> list[PagedShard]:
        """Pages for so many tokens each; what is in them is whatever was there before.

        Raises:
          TierFullError: fewer pages are free; none is taken.
        """
        wanted = sum(map(num_pages, lengths))
        if wanted > len(self._free):
            raise TierFullError(f"device tier: wanted {wanted} pages, {len(self._free)} are free")
        shards = []
        for length in lengths:
            pages = [self._free.popleft() for _ in range(num_pages(length))]
            shard = PagedShard(self, pages, length)
            shard.free = weakref.finalize(shard, self._free.extend, pages)
            shard.free.atexit = False
            shards.append(shard)
        return shards

    def is_lost(self) -> bool:
        """True where a step that failed took pages along. Waits for the device; for use after failures."""
        with self._pages_lock:
            try:
                jax.block_until_ready(self._layers)
            except RuntimeError:  # deleted, or what a failed step gave
                return True
            return not self._layers  # `renew` found no memory

    def renew(self) -> None:
        """Empty pages in place of lost ones.

        Raises:
          RuntimeError: pages are held, or the device has no memory for them.
        """
        if self.num_free < self.num_pages:
            raise RuntimeError(f"device tier: wanted all {self.num_pages} pages free, got {self.num_free}")
        with self._pages_lock:
            self._layers = []  # the old ones' memory first
            self._layers = self._empty_layers()

    def _empty_layers(self) -> list[tuple[jax.Array, jax.Array]]:
        spec = self.kv_spec
        shape = (spec.num_kv_heads, self.num_pages, PAGE_TOKENS, spec.head_dim)
        empty = functools.partial(zeros, shape, spec.np_dtype, placement(self._mesh, PAGES))
        return [(empty(), empty()) for _ in range(spec.num_layers)]

    def close(self) -> None:
        """Gives the memory back; the pool is of no use any more. May be called twice."""
        super().close()
        with self._pages_lock:
            self._layers = []

    def update(self, layer: int, step: Callable[[jax.Array, jax.Array], Updated]) -> Updated:
        """Lets `step` take the pages of a layer, `[K, P, 16, H]` each, and give them back."""
        with self._pages_lock:
            out = step(*self._layers[layer])
            self._layers[layer] = (out.k_pages, out.v_pages)
        return out

    def compile_write(self, num_tokens: int) -> None:
        """Compiles what variants of so many tokens, a `token_bucket`, are written with."""
        kv = np.zeros(self.kv_spec.shape(num_tokens), self.kv_spec.np_dtype)
        if self._mesh is not None:
            self._write(kv, np.zeros(0, np.int32))
            return
        slots = self.put_slots(np.full(num_tokens, self.num_slots, np.int32))
        write_pages_step.compile(*self.pages(0), put(kv, None), np.int32(0), slots, mesh=None)

    def compile_gather(self, num_slots: int) -> None:
        """Compiles what contexts of so many slots are read with."""
        slots = self.put_slots(np.full(num_slots, self.num_slots, np.int32))
        jax.block_until_ready(self.gather(0, slots, self.gather(0, slots)))

    def pages(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """The pages of a layer, `[K, P, 16, H]` each, to compile steps for: the next `update` takes them away."""
        return self.read(layer, lambda k_pages, v_pages: (k_pages, v_pages))

    def _hold(self, kv: np.ndarray) -> PagedShard:
        num_tokens = kv.shape[2]
        (shard,) = self.allocate([num_tokens])
        size = self._sizes.write(num_tokens)
        padded = np.zeros(self.kv_spec.shape(size), self.kv_spec.np_dtype)
        padded[:, :, :num_tokens] = kv
        try:
            self._write(padded, shard.slots)
        except RuntimeError as error:  # the pages are lost, or memory is too short for what is to be written
            raise TierFullError(f"device tier: {num_tokens} tokens could not be written: {error}") from error
        self._sizes.note("write", (size,))
        return shard

    def _write(self, kv: np.ndarray, slots: np.ndarray) -> None:
        """Rows of `kv` `[L, 2, N, K, H]` to `slots`, the first rows first; rows beyond the slots are dropped."""
        padded = np.full(kv.shape[2], self.num_slots, np.int32)
        padded[: len(slots)] = slots
        on_device, on_device_slots = put(kv, placement(self._mesh, VARIANT)), self.put_slots(padded)
        with self._pages_lock:
            for layer, (k_pages, v_pages) in enumerate(self._layers):
                number = np.int32(layer)
                self._layers[layer] = write_pages_step(
                    k_pages, v_pages, on_device, number, on_device_slots, mesh=self._mesh
                )

    def gather(
        self, layer: int, slots: jax.Array, others: tuple[jax.Array, jax.Array] | tuple[None, None] = (None, None)
    ) -> tuple[jax.Array, jax.Array]:
        """Keys before RoPE and values `[S, K, H]` of one layer: `ccjax.models.llama3.steps.read_pages_step`."""
        return self.read(layer, lambda k_pages, v_pages: read_pages_step(k_pages, v_pages, slots, *others))

    def read(self, layer: int, step: Callable[[jax.Array, jax.Array], Read]) -> Read:
        """What `step` makes of the pages of a layer, `[K, P, 16, H]` each, which stay as they are."""
        with self._pages_lock:  # a `put` meanwhile would take the pages away
            return step(*self._layers[layer])

    def read_layers(self, slots: np.ndarray, first: int, last: int) -> np.ndarray:
        """KV `[last - first, 2, T, K, H]` in some slots, on the host."""
        padded = np.full(slot_bucket(len(slots)), self.num_slots, np.int32)  # a size that contexts have as well
        padded[: len(slots)] = slots
        on_device = self.put_slots(padded)
        layers = [self.gather(layer, on_device) for layer in range(first, last)]
        return np.stack([np.stack([fetch(part)[: len(slots)] for part in layer]) for layer in layers])

    def put_slots(self, slots: np.ndarray) -> jax.Array:
        """Slots [S] int32 on every device of the pool."""
        return put(slots, placement(self._mesh, EVERYWHERE))

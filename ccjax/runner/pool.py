"""The device tier: chunk KV in pages of 16 tokens, one pool per layer, keys before RoPE.

A chunk is a list of pages anywhere in the pool; requests that reuse it read these pages in place. The layout is that of
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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ccjax.kernels.inputs import KVPages
from ccjax.models.llama3.sharding import EVERYWHERE, PAGES, VARIANT, placement
from ccjax.models.llama3.steps import read_pages_step, write_pages_step, write_rows_step
from ccjax.runner.buckets import slot_bucket
from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.store.budget import ByteBudget
from ccjax.store.errors import TierFullError
from ccjax.store.memory import MemoryTier
from ccjax.store.spec import KVSpec
from ccjax.store.usage import DEVICE

PAGE_TOKENS = 16


class Paged(Protocol):
    """The result of a step that updates pages."""

    @property
    def pages(self) -> KVPages: ...


Updated = TypeVar("Updated", bound=Paged)
Read = TypeVar("Read")


def num_pages(num_tokens: int) -> int:
    """Number of pages for this many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class PagedShard:
    """KV of consecutive tokens in a pool. Its pages are freed when this object is garbage-collected.

    Attributes:
      slots: [T] int32, page * 16 + offset of every token.
      num_pages: number of pages that it holds.
      free: frees the pages immediately; only for their sole user.
    """

    free: weakref.finalize

    def __init__(self, pool: DevicePool, pages: Sequence[int], num_tokens: int) -> None:
        self._pool = pool
        self.num_pages = len(pages)
        offsets = np.arange(num_tokens, dtype=np.int32)
        self.slots = np.asarray(pages, np.int32)[offsets // PAGE_TOKENS] * PAGE_TOKENS + offsets % PAGE_TOKENS

    def read_layers(self, first: int, last: int) -> np.ndarray:
        """Copies the KV `[last - first, 2, T, K, H]` of layers `[first, last)` to the host."""
        return self._pool.read_layers(self.slots, first, last)


class PageBudget(ByteBudget):
    """Bytes of a pool's pages in use by chunks or requests, derived from the free pages: charging only checks them."""

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
        """Raises TierFullError unless `num_bytes` are free."""
        if short := self.shortfall(num_bytes):
            raise TierFullError(f"device tier: wanted {num_bytes} bytes of pages, {short} more than are free")

    def release(self, num_bytes: int) -> None:
        """Does nothing, since pages are freed with their `PagedShard`."""


class DevicePool(MemoryTier[PagedShard]):
    """Pages in device memory, all allocated at start, shared by cached variants and running requests. Thread-safe for
    reads and `update`: arrays are replaced under a lock.

    Pages are freed when no variant or request holds them; those of a removed variant, after its last reader.

    Args:
      budget_bytes: bytes of all pages together; at least one page in every layer.
      mesh: the mesh over which the kv heads are split; None for a single device.
      sizes: the sizes of the steps that write variants.

    Raises:
      ValueError: the budget is smaller than one page.
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
        self._allocating = threading.Lock()

    @property
    def num_slots(self) -> int:
        """Number of slots; a slot number of this value or above means none."""
        return self.num_pages * PAGE_TOKENS

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def charge_bytes(self, num_tokens: int) -> int:
        """Bytes that this many tokens take from the budget, in whole pages."""
        return num_pages(num_tokens) * self.page_bytes

    def allocate(self, lengths: Sequence[int]) -> list[PagedShard]:
        """Allocates pages for each of the given numbers of tokens; their contents are undefined.

        Raises:
          TierFullError: too few pages are free; none is allocated.
        """
        wanted = sum(map(num_pages, lengths))
        with self._allocating:
            if wanted > len(self._free):
                raise TierFullError(f"device tier: wanted {wanted} pages, {len(self._free)} are free")
            taken = [[self._free.popleft() for _ in range(num_pages(length))] for length in lengths]
        shards = []
        for length, pages in zip(lengths, taken, strict=True):
            shard = PagedShard(self, pages, length)
            shard.free = weakref.finalize(shard, self._free.extend, pages)
            shard.free.atexit = False
            shards.append(shard)
        return shards

    def is_lost(self) -> bool:
        """True if a failed step destroyed the pages. Waits for the device; for use after failures."""
        with self._pages_lock:
            try:
                jax.block_until_ready(self._layers)
            except RuntimeError:  # deleted, or the output of a failed step
                return True
            return not self._layers  # `renew` found no memory

    def renew(self) -> None:
        """Replaces lost pages by empty ones.

        Raises:
          RuntimeError: pages are still held, or the device has too little memory.
        """
        if self.num_free < self.num_pages:
            raise RuntimeError(f"device tier: wanted all {self.num_pages} pages free, got {self.num_free}")
        with self._pages_lock:
            self._layers = []  # frees the memory of the old pages first
            self._layers = self._empty_layers()

    def _empty_layers(self) -> list[KVPages]:
        spec = self.kv_spec
        shape = (spec.num_kv_heads, self.num_pages, PAGE_TOKENS, spec.head_dim)
        empty = functools.partial(jnp.zeros, shape, spec.np_dtype, device=placement(self._mesh, PAGES))
        return [KVPages(empty(), empty()) for _ in range(spec.num_layers)]

    def close(self) -> None:
        """Frees the memory; the pool cannot be used any more. May be called twice."""
        super().close()
        with self._pages_lock:
            self._layers = []

    def update(self, layer: int, step: Callable[[KVPages], Updated]) -> Updated:
        """Passes the pages of a layer to `step`, which may donate them, and keeps the returned ones."""
        with self._pages_lock:
            out = step(self._layers[layer])
            self._layers[layer] = out.pages
        return out

    def write_rows(self, layer: int, slots: jax.Array, k: jax.Array, v: jax.Array) -> None:
        """Writes keys before RoPE and values [N, K, H] of one layer to `slots`; those past the end are dropped."""
        with self._pages_lock:
            self._layers[layer] = write_rows_step(self._layers[layer], slots, k, v, mesh=self._mesh)

    def compile_write(self, num_tokens: int) -> None:
        """Compiles the step that writes variants padded to `num_tokens`, a `token_bucket`."""
        kv = np.zeros(self.kv_spec.shape(num_tokens), self.kv_spec.np_dtype)
        if self._mesh is not None:
            self._write(kv, np.zeros(0, np.int32))
            return
        slots = self.put_slots(np.full(num_tokens, self.num_slots, np.int32))
        write_pages_step.lower(self.pages(0), jax.device_put(kv), np.int32(0), slots, mesh=None).compile()

    def compile_gather(self, num_slots: int) -> None:
        """Compiles the step that gathers contexts of `num_slots` slots."""
        slots = self.put_slots(np.full(num_slots, self.num_slots, np.int32))
        jax.block_until_ready(self.gather(0, slots, self.gather(0, slots)))

    def pages(self, layer: int) -> KVPages:
        """The pages of a layer, for compiling steps; the next `update` may invalidate them."""
        return self.read(layer, lambda pages: pages)

    def _hold(self, kv: np.ndarray) -> PagedShard:
        num_tokens = kv.shape[2]
        (shard,) = self.allocate([num_tokens])
        size = self._sizes.write(num_tokens)
        padded = np.zeros(self.kv_spec.shape(size), self.kv_spec.np_dtype)
        padded[:, :, :num_tokens] = kv
        try:
            self._write(padded, shard.slots)
        except RuntimeError as error:  # the pages are lost, or memory is too short for the KV to write
            raise TierFullError(f"device tier: {num_tokens} tokens could not be written: {error}") from error
        self._sizes.note("write", (size,))
        return shard

    def _write(self, kv: np.ndarray, slots: np.ndarray) -> None:
        """Writes the first rows of `kv` `[L, 2, N, K, H]` to `slots`, in order; rows beyond the slots are dropped."""
        padded = np.full(kv.shape[2], self.num_slots, np.int32)
        padded[: len(slots)] = slots
        on_device, on_device_slots = jax.device_put(kv, placement(self._mesh, VARIANT)), self.put_slots(padded)
        with self._pages_lock:
            for layer, pages in enumerate(self._layers):
                number = np.int32(layer)
                self._layers[layer] = write_pages_step(pages, on_device, number, on_device_slots, mesh=self._mesh)

    def gather(
        self, layer: int, slots: jax.Array, others: tuple[jax.Array, jax.Array] | tuple[None, None] = (None, None)
    ) -> tuple[jax.Array, jax.Array]:
        """Gathers keys before RoPE and values `[S, K, H]` of one layer; see
        `ccjax.models.llama3.steps.read_pages_step`."""
        return self.read(layer, lambda pages: read_pages_step(pages, slots, *others))

    def read(self, layer: int, step: Callable[[KVPages], Read]) -> Read:
        """Returns the result of `step` for the pages of a layer, which it leaves unchanged."""
        with self._pages_lock:  # a concurrent write would donate the pages
            return step(self._layers[layer])

    def read_layers(self, slots: np.ndarray, first: int, last: int) -> np.ndarray:
        """Copies the KV `[last - first, 2, T, K, H]` of some slots to the host."""
        padded = np.full(slot_bucket(len(slots)), self.num_slots, np.int32)  # a size already compiled for contexts
        padded[: len(slots)] = slots
        on_device = self.put_slots(padded)
        kv = np.empty((last - first, *self.kv_spec.shape(len(slots))[1:]), self.kv_spec.np_dtype)
        for own, layer in zip(kv, range(first, last), strict=True):
            own[0], own[1] = (jax.device_get(part)[: len(slots)] for part in self.gather(layer, on_device))
        return kv

    def put_slots(self, slots: np.ndarray) -> jax.Array:
        """Copies slots [S] int32 to every device of the pool."""
        return jax.device_put(slots, placement(self._mesh, EVERYWHERE))

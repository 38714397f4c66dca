"""The device tier: chunk KV in pages of 16 tokens, one pool per layer, keys before RoPE.

A chunk is a list of pages anywhere in the pool; requests that reuse it read these pages in place. The layout is that of
`ccjax.kernels.decode`.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ccjax.kernels.inputs import KVPages
from ccjax.models.llama3.sharding import EVERYWHERE, KV_ROWS, PAGES, VARIANT, placement
from ccjax.models.llama3.steps import deviation_step, read_pages_step, write_pages_step, write_rows_step
from ccjax.runner.buckets import slot_bucket
from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.runner.held_pages import PageBudget, Pages
from ccjax.store.copies import PagedKV
from ccjax.store.errors import TierFullError
from ccjax.store.memory import MemoryTier
from ccjax.store.spec import KVSpec, ShardRecord
from ccjax.store.usage import DEVICE

PAGE_TOKENS = 16
_LAYERS_AHEAD = 2
"""Layers whose copies to the host are under way at a time."""
_LOST = (RuntimeError, ValueError)
"""What JAX raises for deleted arrays: ValueError, its INVALID_ARGUMENT, if they are deleted as a step begins."""


class Paged(Protocol):
    """The result of a step that updates pages."""

    @property
    def pages(self) -> KVPages | Sequence[KVPages]: ...


Updated = TypeVar("Updated", bound=Paged)
Read = TypeVar("Read")


def num_pages(num_tokens: int) -> int:
    """Number of pages for this many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class PagedShard(PagedKV):
    """KV of consecutive tokens in a pool. Its pages are freed when no shard that holds them is left: when they are
    garbage-collected, or after `free`.

    Attributes:
      slots: [T] int32, page * 16 + offset of every token.
      num_pages: number of pages that it holds.
      free: drops its pages immediately; only for the sole user of this object.
    """

    free: weakref.finalize

    def __init__(self, pool: DevicePool, pages: Sequence[int], slots: np.ndarray) -> None:
        self._pool = pool
        self.pages = pages
        self.num_pages = len(pages)
        self.slots = slots
        self.begins_pages = bool((slots % PAGE_TOKENS == np.arange(len(slots), dtype=np.int32) % PAGE_TOKENS).all())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens' KV."""
        return self._pool.kv_spec.num_bytes(len(self.slots))

    def part(self, first: int, last: int) -> PagedShard:
        """The tokens `[first, last)`, and a hold on their pages."""
        return self._pool.hold(self.slots[first:last])

    def is_in(self, pool: object) -> bool:
        """True if its pages belong to `pool`."""
        return self._pool is pool

    def deviations(self, other: np.ndarray | PagedShard) -> np.ndarray:
        """Distances [T] float32 of the tokens' KV from `other` KV of the same tokens, [L, 2, T, K, H] or in pages: the
        means over the layers of `deviation_step`."""
        return self._pool.deviations(self.slots, other if isinstance(other, np.ndarray) else other.slots)

    def read_layers(self, first: int, last: int) -> np.ndarray:
        """See `PagedKV`."""
        return self._pool.read_layers(self.slots, first, last)


class DevicePool(MemoryTier[PagedShard]):
    """Pages in device memory, all allocated at start, shared by cached variants and running requests. Thread-safe for
    reads and `update`: arrays are replaced under a lock.

    Pages are freed when no variant or request holds them; those of a removed variant, after its last reader. A variant
    whose KV a request computed keeps the request's pages (RAGCache sec. 5.1: nodes of the tree are pages).

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
        self._pages = Pages(self.num_pages)
        super().__init__(DEVICE, PageBudget(self.num_pages, self.page_bytes, self._pages))
        self.kv_spec = kv_spec
        self._mesh = mesh
        self._sizes = CompiledSizes() if sizes is None else sizes
        self._layers = self._empty_layers()
        self._pages_lock = threading.Lock()
        self.bytes_to_host: collections.Counter[str] = collections.Counter()
        """KV copied to host memory, by the thread that waited for it."""
        self.reused_pages: collections.Counter[str] = collections.Counter()
        """Pages of reused segments so far: read in place, written because their tokens were recomputed, or copied."""

    @property
    def num_slots(self) -> int:
        """Number of slots; a slot number of this value or above means none."""
        return self.num_pages * PAGE_TOKENS

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._pages)

    def is_in_place(self, variant_id: str) -> bool:
        """True if requests can read this variant's pages in place."""
        return variant_id in self and self.get(variant_id).begins_pages

    def num_available(self, in_use: Iterable[str] = ()) -> int:
        """Number of pages that are free or held only by variants outside `in_use`."""
        return self._pages.num_available([self.get(key).pages for key in in_use if key in self])

    def charge_bytes(self, num_tokens: int) -> int:
        """Bytes that this many tokens take from the budget, in whole pages."""
        return num_pages(num_tokens) * self.page_bytes

    def allocate(self, lengths: Sequence[int]) -> list[PagedShard]:
        """Allocates pages for each of the given numbers of tokens; their contents are undefined.

        Raises:
          TierFullError: too few pages are free; none is allocated.
        """
        pages, shards = self._pages.take(sum(map(num_pages, lengths))), []
        for length in lengths:
            own, pages = pages[: num_pages(length)], pages[num_pages(length) :]
            offsets = np.arange(length, dtype=np.int32)
            slots = np.asarray(own, np.int32)[offsets // PAGE_TOKENS] * PAGE_TOKENS + offsets % PAGE_TOKENS
            shards.append(self._shard(own, slots))
        return shards

    def hold(self, slots: np.ndarray) -> PagedShard:
        """The tokens in `slots` [T] int32, whose pages the caller holds: they stay as long as this shard."""
        pages = np.unique(slots // PAGE_TOKENS).tolist()
        self._pages.hold(pages)
        return self._shard(pages, slots)

    def _shard(self, pages: Sequence[int], slots: np.ndarray) -> PagedShard:
        shard = PagedShard(self, pages, slots)
        shard.free = weakref.finalize(shard, self._pages.drop, pages)
        shard.free.atexit = False
        return shard

    def is_lost(self) -> bool:
        """True if a failed step destroyed the pages. Waits for the device; for use after failures."""
        with self._pages_lock:
            try:
                jax.block_until_ready(self._layers)
            except _LOST:  # deleted, or the output of a failed step
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

    def update(self, layer: int | slice, step: Callable[[Any], Updated]) -> Updated:
        """Passes the pages of a layer, or the list of those of several, to `step`, which may donate them, and keeps the
        returned ones."""
        with self._pages_lock:
            out = step(self._layers[layer])
            self._layers[layer] = out.pages  # pyright: ignore[reportArgumentType, reportCallIssue]
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
        """Compiles the steps that gather and compare `num_slots` slots."""
        slots = self.put_slots(np.full(num_slots, self.num_slots, np.int32))
        kv = self.gather(0, slots)
        jax.block_until_ready(deviation_step(*kv, *kv, np.int32(1)))

    def pages(self, layer: int) -> KVPages:
        """The pages of a layer, for compiling steps; the next `update` may invalidate them."""
        return self.read(layer, lambda pages: pages)

    def is_here(self, kv: Any) -> bool:
        """True for KV in pages of this pool: they are kept."""
        return isinstance(kv, PagedShard) and kv.is_in(self)

    def put(self, record: ShardRecord, kv: Any, *, is_lossy: bool = False) -> None:
        """See `MemoryTier`."""
        was_held = self.get(record.variant_id) if record.variant_id in self else None
        super().put(record, kv, is_lossy=is_lossy)
        if (held := self.get(record.variant_id)) is not was_held:
            self._pages.count_in_tier(held.pages, 1)

    def remove(self, variant_id: str) -> bool:
        """See `MemoryTier`."""
        if variant_id in self:
            self._pages.count_in_tier(self.get(variant_id).pages, -1)
        return super().remove(variant_id)

    def _hold(self, kv: np.ndarray | PagedShard) -> PagedShard:
        return kv if isinstance(kv, PagedShard) else self.write(kv)

    def write(self, kv: np.ndarray) -> PagedShard:
        """Writes KV [L, 2, T, K, H] to free pages.

        Raises:
          TierFullError: too few pages are free, or they could not be written.
        """
        (shard,) = self.allocate([kv.shape[2]])
        self.fill(shard, kv)
        return shard

    def fill(self, shard: PagedShard, kv: np.ndarray) -> None:
        """Writes KV [L, 2, T, K, H] to the pages of a shard; may be called from any thread.

        Raises:
          TierFullError: they could not be written.
        """
        num_tokens = kv.shape[2]
        size = self._sizes.write(num_tokens)
        padded = np.zeros(self.kv_spec.shape(size), self.kv_spec.np_dtype)
        padded[:, :, :num_tokens] = kv
        try:
            self._write(padded, shard.slots)
        except _LOST as error:  # or memory is too short for the KV to write
            if isinstance(error, ValueError) and not self.is_lost():
                raise
            raise TierFullError(f"device tier: {num_tokens} tokens could not be written: {error}") from error
        self._sizes.note("write", (size,))

    def _write(self, kv: np.ndarray, slots: np.ndarray) -> None:
        """Writes the first rows of `kv` `[L, 2, N, K, H]` to `slots`, in order; rows beyond the slots are dropped."""
        padded = np.full(kv.shape[2], self.num_slots, np.int32)
        padded[: len(slots)] = slots
        on_device, on_device_slots = jax.device_put(kv, placement(self._mesh, VARIANT)), self.put_slots(padded)
        with self._pages_lock:
            for layer, pages in enumerate(self._layers):
                number = np.int32(layer)
                self._layers[layer] = write_pages_step(pages, on_device, number, on_device_slots, mesh=self._mesh)

    def gather(self, layer: int, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gathers keys before RoPE and values `[S, K, H]` of one layer; zeros for slots past the end."""
        return self.read(layer, lambda pages: read_pages_step(pages, slots))

    def read(self, layer: int, step: Callable[[KVPages], Read]) -> Read:
        """Returns the result of `step` for the pages of a layer, which it leaves unchanged."""
        with self._pages_lock:  # a concurrent write would donate the pages
            return step(self._layers[layer])

    def read_layers(self, slots: np.ndarray, first: int, last: int) -> np.ndarray:
        """Copies the KV `[last - first, 2, T, K, H]` of some slots to the host."""
        on_device = self._padded(slots)
        kv = np.empty((last - first, *self.kv_spec.shape(len(slots))[1:]), self.kv_spec.np_dtype)
        ahead: collections.deque[tuple[jax.Array, jax.Array]] = collections.deque()
        for layer in range(first, last + _LAYERS_AHEAD):
            if layer < last:
                ahead.append(self.gather(layer, on_device))
                for part in ahead[-1]:
                    part.copy_to_host_async()
            if layer >= first + _LAYERS_AHEAD:
                for own, part in zip(kv[layer - _LAYERS_AHEAD - first], ahead.popleft(), strict=True):
                    own[...] = jax.device_get(part)[: len(slots)]
        with self._pages_lock:
            thread = threading.current_thread().name.rstrip("0123456789").rstrip("_")
            self.bytes_to_host = self.bytes_to_host + collections.Counter({thread: kv.nbytes})
        return kv

    def deviations(self, slots: np.ndarray, other: np.ndarray) -> np.ndarray:
        """See `PagedShard.deviations`; `other` is KV or slots."""
        on_device, by_layer, num_tokens = self._padded(slots), [], np.int32(len(slots))
        other_slots = self._padded(other) if other.ndim == 1 else None
        padding = [(0, 0), (0, on_device.shape[0] - len(slots)), (0, 0), (0, 0)]
        for layer in range(self.kv_spec.num_layers):
            if other_slots is not None:
                theirs = self.gather(layer, other_slots)
            else:
                theirs = jax.device_put(tuple(np.pad(other[layer], padding)), placement(self._mesh, KV_ROWS))
            by_layer.append(deviation_step(*self.gather(layer, on_device), *theirs, num_tokens))
        return np.mean(jax.device_get(by_layer), 0)[: len(slots)]

    def _padded(self, slots: np.ndarray) -> jax.Array:
        """The slots, and none up to a size that is compiled for contexts, on the devices."""
        padded = np.full(slot_bucket(len(slots)), self.num_slots, np.int32)
        padded[: len(slots)] = slots
        return self.put_slots(padded)

    def put_slots(self, slots: np.ndarray) -> jax.Array:
        """Copies slots [S] int32 to every device of the pool."""
        return jax.device_put(slots, placement(self._mesh, EVERYWHERE))

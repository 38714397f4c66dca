"""The reused KV of each layer: threads merge what comes from host memory and disk, ahead of the running layer, and put
it on the device; KV that is there already is gathered. Only reused rows are copied."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ccjax.cache.reads import LoadFailedError, WaitLimit
from ccjax.runner.buckets import load_buckets
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.runner.job import LoadedRows
from ccjax.runner.plan_rows import padded_to
from ccjax.runner.pool import DevicePool
from ccjax.store.errors import StoreError
from ccjax.store.spec import KVSpec
from ccjax.store.throttle import DONE, ThrottledLink
from ccjax.store.tickets import LoadTicket
from ccjax.store.usage import DEVICE
from ccjax.types import PlannedSegment, PrefillPlan, VariantId

_MOST_MERGED = 2
"""Layers merged and not taken yet: the next one, one more to absorb jitter, or while the next one is copied."""

_ALIGNMENT = 64
"""Alignment in bytes of host memory that XLA uses without a copy."""

_POLL_S = 0.05
"""How often a wait checks whether it should end."""


class LayerLoader:
    """Reads and merges the planned variants layer by layer; a context manager that ends its thread on exit.

    CacheCraft alg. 2: beyond the layer being merged, at most the plan's next `preload_depth` layers are being read, so
    that reads in flight are bounded and other requests get their share of the link. By default layer 0 may run once its
    own KV is loaded, instead of that of all Lp layers (`lead`): no layer ever runs later because of that, and none
    waits because Lp was estimated too high.

    Attributes:
      waited_s: seconds that `take` waited.
    """

    def __init__(
        self,
        ticket: LoadTicket,
        plan: PrefillPlan,
        *,
        kv_spec: KVSpec,
        wait_limit: WaitLimit,
        pool: DevicePool | None = None,
        skip: Collection[int] = (),
        is_cancelled: IsCancelled | None = None,
        lead: int = 1,
        on_merge: Callable[[int, float], Any] = lambda num_bytes, seconds: None,
        turn: Callable[[np.ndarray, int], np.ndarray] | None = None,
        placement: jax.sharding.Sharding | None = None,
        link: ThrottledLink | None = None,
        on_layer: Callable[[int, float, float], None] | None = None,
    ) -> None:
        """
        Args:
          ticket: holds all of the plan's variants.
          kv_spec: shape and dtype of the variants.
          wait_limit: bounds the waits; must expect the variants.
          pool: the pool with the ticket's variants on the device.
          skip: segments of the plan to leave out.
          is_cancelled: polled while `take` waits.
          lead: layers whose KV must be loaded before the first one is returned.
          on_merge: called, from the thread, with the bytes of all layers and the seconds that merging them took.
          turn: rotates keys [T, K, H] by a number of positions, for plans whose segments have a `key_shift`.
          placement: sharding of the rows; None for a single device.
          link: throttles copies to the device.
          on_layer: called, from the thread, with each layer and the start and end of its load (`time.perf_counter`),
            waits for reads included.
        """
        self.waited_s = 0.0
        self._ticket = ticket
        reused: list[tuple[VariantId, PlannedSegment]] = [
            (segment.variant_id, segment)
            for index, segment in enumerate(plan.segments)
            if segment.variant_id is not None and index not in skip
        ]
        self._num_layers, self._row_shape = kv_spec.num_layers, (kv_spec.num_kv_heads, kv_spec.head_dim)
        self._dtype, self._row_bytes = kv_spec.np_dtype, kv_spec.num_bytes(1) // kv_spec.num_layers
        self._reused = [(key, segment) for key, segment in reused if ticket.tiers[key] != DEVICE]
        self._variants = tuple(dict.fromkeys(variant_id for variant_id, _ in self._reused))
        self._merged_bytes = self._gathered_bytes = 0
        self._merge_s = self._copy_s = self._copied_at_s = 0.0
        self._num_copied = 0
        self._pool = pool
        self._merged_pieces = _pieces(_positions([segment for _, segment in self._reused]))
        self._gathered_pieces = self._paged([(key, segment) for key, segment in reused if ticket.tiers[key] == DEVICE])
        self._depth, self._lead = plan.preload_depth, min(lead, self._num_layers)
        self._wait_limit = wait_limit
        self._is_cancelled = is_cancelled
        self._on_merge = on_merge
        self._turn = turn
        self._placement, self._link = placement, link
        self._on_layer = on_layer
        self._changed = threading.Condition()
        self._ready: dict[int, list[LoadedRows]] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self._num_started = self._num_taken = 0
        self._is_copied = jax.default_backend() != "cpu"
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self._copies: ThreadPoolExecutor | None = None
        if self._is_copied or link is not None:  # else the device uses the merged rows where they are
            self._copies = ThreadPoolExecutor(_MOST_MERGED, thread_name_prefix="ccjax-copy")
        self._thread = threading.Thread(target=self._work, name="ccjax-load", daemon=True)

    def _paged(self, reused: list[tuple[VariantId, PlannedSegment]]) -> list[tuple[np.ndarray, jax.Array]]:
        """The pieces of what is on the device: positions, and their slots in the pool, padded."""
        if not reused:
            return []
        assert self._pool is not None
        pool, first, pieces = self._pool, 0, []
        slots = np.concatenate([self._ticket.slots(variant_id)[segment.rows] for variant_id, segment in reused])
        for positions, size in _pieces(_positions([segment for _, segment in reused])):
            own = slots[first : first + len(positions)]
            pieces.append((positions, pool.put_slots(padded_to(own, size, pool.num_slots))))
            first += len(positions)
        return pieces

    def __enter__(self) -> LayerLoader:
        if self._variants:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._variants:
            self._thread.join()
        if self._copies is not None:
            self._copies.shutdown(cancel_futures=True)

    @property
    def loaded_bytes(self) -> int:
        """KV bytes merged and gathered so far."""
        return self._merged_bytes + self._gathered_bytes

    @property
    def is_reading(self) -> bool:
        """True while a started read has not ended; may be called from any thread."""
        with self._changed:  # the ticket is completed only after `__exit__`
            return not self._stopped and bool(self._late(0, self._num_started))

    @property
    def is_loading(self) -> bool:
        """True while layers are still to come over the link to the device; may be called from any thread."""
        return bool(self._variants) and not self._stopped and self._num_taken < self._num_layers

    def is_ready(self, layer: int) -> bool:
        """True if `take` of the layer would not wait."""
        return not self._variants or layer in self._ready or self._failure is not None

    def take(self, layer: int) -> Sequence[LoadedRows]:
        """The reused rows of a layer. Layers are requested in order, each once.

        Raises:
          LoadFailedError: variants could not be read, or not in time.
          PrefillCancelledError: `is_cancelled` returned True during a wait.
        """
        rows = self._take_merged(layer) if self._variants else []
        for positions, slots in self._gathered_pieces:
            assert self._pool is not None
            rows.append(LoadedRows(positions, *self._pool.gather(layer, slots)))
            self._gathered_bytes += len(positions) * self._row_bytes
        return rows

    def _take_merged(self, layer: int) -> list[LoadedRows]:
        with self._changed:
            last = max(layer + 1, self._lead)
            late = self._late(layer, last)  # charge all until the end: which one is last depends on the order of reads
            while layer not in self._ready:
                if self._failure is not None:
                    raise self._failure
                self._wait(late)
                self._wait_limit.check(self._late(layer, last))
            rows = self._ready.pop(layer)
            self._num_taken += 1
            self._changed.notify_all()
        return rows

    def _wait(self, late: list[VariantId]) -> None:
        """Waits up to `_POLL_S` for a layer that `late` delay."""
        started = time.perf_counter()
        self._changed.wait(_POLL_S)
        waited_s = time.perf_counter() - started
        self.waited_s += waited_s
        self._wait_limit.spend(late, waited_s)
        if self._is_cancelled is not None and self._is_cancelled():
            raise PrefillCancelledError

    def _late(self, first: int, last: int) -> list[VariantId]:
        """Variants of which not all layers in `[first, last)` are loaded."""
        return [key for key in self._variants if first < last and not self._ticket.ready(key, first, last)]

    # -- the threads -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Merges the layers, each while the one before it is copied to the device. Its own copy queues behind that one,
        so that the link is not idle in between."""
        try:
            for layer in range(self._num_layers):
                started_s = time.perf_counter()
                self._start_reads(max(layer + 1 + self._depth, self._lead))
                for other in range(layer, max(layer + 1, self._lead)):
                    for variant_id in self._late(other, other + 1):
                        self._read(variant_id, other)
                merged = self._merge(layer)
                if self._copies is None:
                    self._copy(layer, merged, started_s)
                else:
                    self._copies.submit(self._copy, layer, merged, started_s)
                with self._changed:
                    most = layer + 2 - _MOST_MERGED
                    self._changed.wait_for(lambda most=most: self._stopped or self._num_taken >= most)
                if self._stopped:
                    return
        except BaseException as error:
            self._fail(error)

    def _copy(self, layer: int, merged: tuple[np.ndarray, np.ndarray], started_s: float) -> None:
        """Puts the merged rows of a layer on the device, whose load began at `started_s`."""
        try:
            began_s = time.perf_counter()
            arrived = None if self._link is None else self._link(DONE, sum(rows.nbytes for rows in merged))
            ends = itertools.accumulate(size for _, size in self._merged_pieces)
            sizes = [(size, end) for (_, size), end in zip(self._merged_pieces, ends, strict=True)]
            parts = [tuple(rows[end - size : end] for rows in merged) for size, end in sizes]
            on_device = jax.device_put(parts, self._placement)
            jax.block_until_ready(on_device)
            if arrived is not None:
                arrived.result()
            ended_s = time.perf_counter()
            with self._changed:
                self._copy_s += ended_s - max(began_s, self._copied_at_s)  # two share the link
                self._copied_at_s = ended_s
                self._num_copied += 1
                is_last = self._num_copied == self._num_layers
            if is_last:
                in_turn = self._copies is None
                self._on_merge(self._merged_bytes, (sum if in_turn else max)((self._merge_s, self._copy_s)))
            if self._on_layer is not None:
                self._on_layer(layer, started_s, ended_s)
            pieces = zip(self._merged_pieces, on_device, strict=True)
            with self._changed:
                self._ready[layer] = [LoadedRows(positions, k, v) for (positions, _), (k, v) in pieces]
                self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Notes an error, any of which must reach the thread that prefills."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _start_reads(self, last: int) -> None:
        """Starts the reads of all layers before `last`, in layer order."""
        for layer in range(self._num_started, min(last, self._num_layers)):
            for variant_id in self._variants:
                self._ticket.prefetch(variant_id, layer, layer + 1)
        self._num_started = max(self._num_started, min(last, self._num_layers))

    def _read(self, variant_id: VariantId, layer: int) -> np.ndarray:
        """Waits for a layer's KV [2, T, K, H] and returns it."""
        while not self._stopped:
            try:
                with contextlib.suppress(TimeoutError):
                    return self._ticket.read_layers(variant_id, layer, layer + 1, timeout_s=_POLL_S)[0]
            except StoreError as error:
                raise LoadFailedError({variant_id: error}) from error
        raise PrefillCancelledError

    def _merge(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The reused keys and values of a layer whose KV is loaded, one behind the other, padded."""
        started, first = time.perf_counter(), 0
        k_buffer, v_buffer = self._buffers(layer)
        for variant_id, segment in self._reused:
            kv = self._read(variant_id, layer)[:, segment.rows]
            where = slice(first, first + segment.num_tokens)
            k_buffer[where], v_buffer[where] = kv[0], kv[1]
            if segment.key_shift:
                assert self._turn is not None
                k_buffer[where] = self._turn(kv[0], segment.key_shift)
            first += segment.num_tokens
        self._merged_bytes += first * self._row_bytes
        self._merge_s += time.perf_counter() - started
        return k_buffer, v_buffer

    def _buffers(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory for a layer's keys and values. An accelerator has copied all but the last ones by then: their memory
        is used again, for new memory costs more than the copies."""
        if len(self._kept) == _MOST_MERGED:
            return self._kept[layer % _MOST_MERGED]
        shape = (sum(size for _, size in self._merged_pieces), *self._row_shape)
        buffers = _aligned(shape, self._dtype), _aligned(shape, self._dtype)
        if self._is_copied:
            self._kept.append(buffers)
        return buffers


def _positions(segments: Sequence[PlannedSegment]) -> np.ndarray:
    """[n] int32, the positions of the segments' tokens."""
    ranges = [np.arange(segment.start, segment.start + segment.num_tokens, dtype=np.int32) for segment in segments]
    return np.concatenate([np.zeros(0, np.int32), *ranges])


def _pieces(positions: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The positions, divided into pieces, with the size that each piece is padded to."""
    sizes = load_buckets(len(positions))
    parts = np.split(positions, np.cumsum(sizes)[:-1]) if sizes else []
    return list(zip(parts, sizes, strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in aligned memory, which a CPU device uses without a copy, and parts of 256 rows as well. The copy would
    wait until the device's threads finish a layer: reusing 2,048 tokens in 16 layers took 0.18 s instead of 0.16."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + num_bytes].view(dtype).reshape(shape)

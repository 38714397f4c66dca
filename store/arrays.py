"""One variant as one immutable zarr3 object: written whole, read layer by layer into one buffer. Knows no records and
no budget; what a failed read means is for the caller to say."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from store.spec import KVSpec

OnRead = Callable[[Any, int], Any]
"""Called with the future of each read of a layer that begins, and its bytes; what it returns is waited for instead."""


class ArrayDriver:
    """Writes and opens the data objects of one root; see `store.objects.Root` for `context` and `longest_wait_s`."""

    def __init__(self, kv_spec: KVSpec, context: ts.Context | None, longest_wait_s: float | None):
        self.kv_spec = kv_spec
        self._longest_wait_s = longest_wait_s
        # No cache: it would keep decoded layers beside the buffers, outside every budget, and serve what is deleted.
        # Reading the shard index again for every layer costs nothing measurable on a file (1.2 ms per 2 MiB layer).
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}}, parent=context)

    def write(self, kvstore: dict[str, Any], kv: np.ndarray, head_groups: int) -> None:
        """Writes `kv` `[L, 2, T, K, H]` as one object, visible whole or not at all.

        Raises:
          ValueError: what tensorstore makes of every failure.
          TimeoutError: it was not done after `longest_wait_s`; it may still be.
        """
        writing = self._open(kvstore, kv.shape[2], head_groups, write=True).write(kv)
        try:
            writing.result(timeout=self._longest_wait_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._longest_wait_s:g} s") from None

    def open(self, kvstore: dict[str, Any], num_tokens: int, head_groups: int) -> ts.TensorStore:
        """The array for reading. Reads no byte yet: the metadata comes from the arguments."""
        return self._open(kvstore, num_tokens, head_groups, write=False)

    def _open(self, kvstore: dict[str, Any], num_tokens: int, head_groups: int, *, write: bool) -> ts.TensorStore:
        shape = list(self.kv_spec.shape(num_tokens))
        checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {
            "chunk_shape": [1, 2, num_tokens, self.kv_spec.num_kv_heads // head_groups, self.kv_spec.head_dim],
            "codecs": checked,
            "index_codecs": checked,
            "index_location": "end",
        }
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": self.kv_spec.dtype,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        spec = {
            "driver": "zarr3",
            "kvstore": kvstore,
            "metadata": metadata,
            "fill_missing_data_reads": False,  # a missing object would read as zeros, without an error
            "store_data_equal_to_fill_value": True,  # an all-zero layer would not be stored, and then count as missing
            "recheck_cached_data": False,  # objects never change
        }
        mode: dict[str, Any] = {"write": True} if write else {"read": True}
        return ts.open(spec, open=True, assume_metadata=True, context=self._context, **mode).result()


def layer_crc32(layer: np.ndarray) -> int:
    """crc32 of the bytes of a contiguous array."""
    return zlib.crc32(layer.view(np.uint8).data)


class ShardReader:
    """Reads of one variant's layers into one buffer `[L, 2, T, K, H]`; each layer is read and checked once.

    Thread-safe: one thread may prefetch while another waits.

    Args:
      array: the opened data object, dtype and shape of the buffer.
      crc32_by_layer: what each layer must hash to.
      explain: turns tensorstore's ValueError, the TimeoutError of a read that took `longest_wait_s`, or None where the
        checksum differs, into the error to raise.
      longest_wait_s: a layer that is not there after it has failed; None waits for ever.
      failure: raised by every `wait`; nothing is read then.
    """

    def __init__(
        self,
        array: ts.TensorStore,
        dtype: np.dtype,
        crc32_by_layer: Sequence[int],
        explain: Callable[[ValueError | TimeoutError | None], Exception],
        *,
        longest_wait_s: float | None = None,
        failure: Exception | None = None,
    ):
        self._array = array
        self._crc32_by_layer = crc32_by_layer
        self._explain = explain
        self._longest_wait_s = longest_wait_s
        self._buffer = np.empty(array.shape, dtype)  # untouched pages cost nothing until a layer arrives
        self._target = ts.array(self._buffer, copy=False, write=True)
        self._futures: list[Any] = [None] * len(crc32_by_layer)
        self._verified = [False] * len(crc32_by_layer)
        self._failure = failure
        self._on_read: OnRead = lambda future, num_bytes: future
        self._lock = threading.Lock()

    def watch(self, on_read: OnRead) -> None:
        """Has `on_read` called with every read from now on, in the thread that starts it."""
        self._on_read = on_read

    def start(self, first: int, last: int) -> None:
        """Starts reading layers `[first, last)` in the background; layers already under way are left alone. Nothing
        starts after a failure."""
        with self._lock:
            for layer in range(first, last) if self._failure is None else ():
                if self._futures[layer] is None:
                    future = self._target[layer].write(self._array[layer])
                    self._futures[layer] = self._on_read(future, self._buffer[layer].nbytes)

    def ready(self, first: int, last: int) -> bool:
        """True when `wait` for these layers would not block."""
        return self._failure is not None or self._num_done(first, last) == last - first

    def wait(self, first: int, last: int, timeout_s: float | None = None) -> np.ndarray:
        """A read-only view `[last - first, 2, T, K, H]`, once it is there and checked.

        Raises:
          ShardCorruptError, ShardNotFoundError, StoreUnavailableError: as `explain` has it.
          TimeoutError: it was not there after `timeout_s`; the reads go on.
        """
        self.start(first, last)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for layer in range(first, last):
            if not self._verified[layer]:
                self._finish(layer, None if deadline is None else max(0.0, deadline - time.monotonic()))
        view = self._buffer[first:last]
        view.flags.writeable = False
        return view

    def _finish(self, layer: int, timeout_s: float | None) -> None:
        if self._failure is not None:  # one bad layer condemns the variant, and is counted once
            raise self._failure
        limit_s = self._longest_wait_s
        is_ours = timeout_s is None or (limit_s is not None and limit_s < timeout_s)  # else it is the caller who leaves
        try:
            self._futures[layer].result(timeout=limit_s if is_ours else timeout_s)
            failure = None if layer_crc32(self._buffer[layer]) == self._crc32_by_layer[layer] else self._explain(None)
        except TimeoutError:
            if not is_ours:
                raise
            failure = self._explain(TimeoutError(f"no answer within {limit_s:g} s"))
        except ValueError as error:
            failure = self._explain(error)
        if failure is not None:
            self._failure = failure
            raise failure
        self._verified[layer] = True

    def _num_done(self, first: int, last: int) -> int:
        return sum(future is not None and future.done() for future in self._futures[first:last])

    @property
    def bytes_read(self) -> int:
        """KV bytes read and checked so far."""
        return sum(self._verified) * self._buffer[0].nbytes

    @property
    def bytes_there(self) -> int:
        """KV bytes that arrived so far, checked or not."""
        return self._num_done(0, len(self._futures)) * self._buffer[0].nbytes

    @property
    def has_failed(self) -> bool:
        """True once no `wait` will succeed any more."""
        return self._failure is not None

    def whole(self) -> np.ndarray | None:
        """The buffer itself when every layer was read and checked, else None."""
        return self._buffer if all(self._verified) else None

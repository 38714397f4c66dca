"""Stores a variant as one immutable zarr3 object: written as a whole, read layer by layer into one buffer.

The object contains no checksums: those in its record detect every wrong byte, on every read path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from ccjax.store.formats import ObjectLayout, checksum, dequantize
from ccjax.store.local import LocalObject, shard_index, write_object
from ccjax.store.spec import KVSpec

OnRead = Callable[[Any, int], Any]
"""Called at the start of each read of a layer with its future and its bytes; the returned future is awaited instead."""

_NO_CACHE = {"cache_pool": {"total_bytes_limit": 0}}
_OBJECT_KEY = "c.0.0.0.0.0"  # zarr3's name of the only chunk


class ArrayDriver:
    """Writes and opens the data objects of one root. `context` returns `store.objects.Root.context`, which
    has `longest_wait_s`, too."""

    def __init__(self, kv_spec: KVSpec, context: Callable[[], ts.Context | None], longest_wait_s: float | None):
        self.kv_spec = kv_spec
        self._longest_wait_s = longest_wait_s
        self._find_parent = context
        # No cache: it would hold decoded layers in addition to the buffers, outside every budget, and return deleted
        # data. Rereading the shard index for every layer has no measurable cost on a file (1.2 ms per 2 MiB layer).
        self._parent = context()
        self._context = ts.Context(_NO_CACHE, parent=self._parent)

    def write(self, kvstore: dict[str, Any], stored: np.ndarray, folder: Path | None = None) -> None:
        """Writes an array of `store.formats.encode` as one object, durably.

        Args:
          folder: local directory of `kvstore`, if any: the file is then written directly.

        Raises:
          OSError: the file system refused.
          ValueError: any failure in tensorstore.
          TimeoutError: the write took longer than `longest_wait_s`; it may still be in progress.
        """
        if folder is not None:
            write_object(folder / _OBJECT_KEY, [*stored, shard_index(stored)])
            return
        writing = self._open(kvstore, stored.shape, str(stored.dtype), {"write": True}).write(stored)
        try:
            writing.result(timeout=self._longest_wait_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._longest_wait_s:g} s") from None

    def open(
        self,
        kvstore: dict[str, Any],
        num_tokens: int,
        layout: ObjectLayout,
        explain: Callable[[ValueError | TimeoutError | None], Exception],
        failure: Exception | None = None,
        *,
        folder: Path | None = None,
    ) -> ShardReader:
        """A reader of an object; see `ShardReader` for `explain` and `failure`, `write` for `folder`. Reads nothing
        yet: the metadata comes from the arguments."""
        shape = layout.shape(self.kv_spec, num_tokens)
        buffer = np.empty(self.kv_spec.shape(num_tokens), self.kv_spec.np_dtype)  # lazily allocated by the OS
        stored = np.empty(shape, np.uint8) if layout.is_lossy else buffer
        if folder is not None:
            read_layer = LocalObject(folder / _OBJECT_KEY, stored).read
        else:
            read_layer = _ts_reader(self._open(kvstore, shape, layout.dtype(self.kv_spec), {"read": True}), stored)
        return ShardReader(
            read_layer,
            layout,
            stored,
            buffer,
            explain,
            longest_wait_s=self._longest_wait_s,
            failure=failure,
        )

    def _open(
        self, kvstore: dict[str, Any], shape: tuple[int, ...], dtype: str, mode: dict[str, Any]
    ) -> ts.TensorStore:
        to_bytes = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            "chunk_shape": [1, *shape[1:]],
            "codecs": [to_bytes],
            "index_codecs": [to_bytes],
            "index_location": "end",
        }
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
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
        parent = self._find_parent()
        if parent is not self._parent:
            self._parent, self._context = parent, ts.Context(_NO_CACHE, parent=parent)
        return ts.open(spec, open=True, assume_metadata=True, context=self._context, **mode).result()


def _ts_reader(array: ts.TensorStore, target: np.ndarray) -> Callable[[int], Any]:
    return lambda layer: ts.array(target[layer], copy=False, write=True).write(array[layer])


class ShardReader:
    """Reads one variant's layers into one buffer `[L, 2, T, K, H]`; each layer is read and checked once.

    Thread-safe: one thread may prefetch while another waits. The waiting thread checks an encoded layer and then
    decodes it; unverified bytes are never decoded.

    Args:
      read_layer: starts reading a layer of the data object into `stored`; returns a future.
      layout: format of the KV in the object, and the checksum of each layer.
      stored: filled by `read_layer`.
      buffer: filled in the KV's own dtype; the same array as `stored` if the KV is not encoded.
      explain: maps the ValueError of a read, the TimeoutError of a read that took `longest_wait_s`, or None for a
        checksum mismatch, to the exception to raise.
      longest_wait_s: timeout of a layer; None to wait forever.
      failure: if set, every `wait` raises it and nothing is read.
    """

    def __init__(
        self,
        read_layer: Callable[[int], Any],
        layout: ObjectLayout,
        stored: np.ndarray,
        buffer: np.ndarray,
        explain: Callable[[ValueError | TimeoutError | None], Exception],
        *,
        longest_wait_s: float | None = None,
        failure: Exception | None = None,
    ):
        self._read_layer = read_layer
        self._layout = layout
        self._explain = explain
        self._longest_wait_s = longest_wait_s
        self._buffer = buffer
        self._stored = stored
        self._futures: list[Any] = [None] * len(buffer)
        self._verified = [False] * len(buffer)
        self._failure = failure
        self._on_read: OnRead = lambda future, num_bytes: future
        self._lock = threading.Lock()

    @property
    def is_lossy(self) -> bool:
        """True if the KV read may differ from the KV written."""
        return self._layout.is_lossy

    def watch(self, on_read: OnRead) -> None:
        """Sets `on_read`, which is called for every later read, on the thread that starts it."""
        self._on_read = on_read

    def start(self, first: int, last: int) -> None:
        """Starts reading layers `[first, last)` in the background, except those already started. Starts nothing after a
        failure."""
        with self._lock:
            for layer in range(first, last) if self._failure is None else ():
                if self._futures[layer] is None:
                    future = self._read_layer(layer)
                    self._futures[layer] = self._on_read(future, self._buffer[layer].nbytes)

    def ready(self, first: int, last: int) -> bool:
        """True when `wait` for these layers would not block."""
        return self._failure is not None or self._num_done(first, last) == last - first

    def wait(self, first: int, last: int, timeout_s: float | None = None) -> np.ndarray:
        """Waits until the layers are read and checked; returns a read-only view `[last - first, 2, T, K, H]`.

        Raises:
          ShardCorruptError, ShardNotFoundError, StoreUnavailableError: as `explain` decides.
          TimeoutError: the layers were not read within `timeout_s`; the reads continue.
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
        if self._failure is not None:  # one bad layer makes the variant unusable, and is counted once
            raise self._failure
        limit_s = self._longest_wait_s
        is_ours = timeout_s is None or (
            limit_s is not None and limit_s < timeout_s
        )  # otherwise only the caller gives up
        try:
            self._futures[layer].result(timeout=limit_s if is_ours else timeout_s)
            failure = None if checksum(self._stored[layer]) == self._layout.checksums[layer] else self._explain(None)
        except TimeoutError:
            if not is_ours:
                raise
            failure = self._explain(TimeoutError(f"no answer within {limit_s:g} s"))
        except ValueError as error:
            failure = self._explain(error)
        if failure is not None:
            self._failure = failure
            raise failure
        if self.is_lossy:
            dequantize(self._stored[layer], self._buffer[layer])
        self._verified[layer] = True

    def _num_done(self, first: int, last: int) -> int:
        return sum(future is not None and future.done() for future in self._futures[first:last])

    @property
    def bytes_read(self) -> int:
        """KV bytes read and checked so far."""
        return sum(self._verified) * self._buffer[0].nbytes

    @property
    def bytes_there(self) -> int:
        """KV bytes read so far, checked or not."""
        return self._num_done(0, len(self._futures)) * self._buffer[0].nbytes

    @property
    def has_failed(self) -> bool:
        """True if every further `wait` will fail."""
        return self._failure is not None

    def whole(self) -> np.ndarray | None:
        """The buffer itself if every layer was read and checked, else None."""
        return self._buffer if all(self._verified) else None

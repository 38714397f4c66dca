"""Direct reads and writes of data objects in the local file system, in the format of tensorstore.

tensorstore itself copies a layer twice and reads at a third of the disk's speed (`bench.py store`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

_ENTRY = np.dtype("<u8")
_readers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="store-read")


def shard_index(layers: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    """zarr3's index of a shard that begins with `layers`, in order: offset and size of each."""
    sizes = np.asarray([layer.nbytes for layer in layers], _ENTRY)
    return np.stack([np.cumsum(sizes, dtype=_ENTRY) - sizes, sizes], axis=1)


def write_object(path: Path, parts: Sequence[np.ndarray]) -> None:
    """Writes a new file of contiguous `parts` in a new folder and makes both survive a power failure. The file may be
    visible half written, because it is not read before its record commits it.

    Raises:
      OSError: the file system refused.
    """
    path.parent.mkdir()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for part in parts:
            rest = part.reshape(-1).view(np.uint8).data
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


def sync_folder(path: Path) -> None:
    """Makes names added directly in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalObject:
    """One object, opened by the first read and closed after every layer was read or the last reference is dropped; the
    file may be deleted in between.

    Args:
      stored: one inner chunk per layer; `read` fills them, each once.
    """

    def __init__(self, path: Path, stored: np.ndarray | Sequence[np.ndarray]) -> None:
        self._path = path
        self._stored = stored
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._index = np.empty((0, 2), _ENTRY)
        self._num_unread = len(stored)
        self._close: Callable[[], object] = lambda: None

    def read(self, layer: int) -> Future[None]:
        """Starts reading a layer. The future raises ValueError with tensorstore's codes: NOT_FOUND if the file is
        missing, OUT_OF_RANGE if it is too short, DATA_LOSS if its index is wrong; else the system's message."""
        return _readers.submit(self._read, layer)

    def _read(self, layer: int) -> None:
        try:
            descriptor = self._open()
            offset, num_bytes = (int(number) for number in self._index[layer])
            rest = self._stored[layer].reshape(-1).view(np.uint8).data
            if num_bytes != len(rest):
                raise ValueError(f"DATA_LOSS: {self._path}: layer {layer} has {num_bytes} bytes, wanted {len(rest)}")
            _read_all(descriptor, rest, offset, self._path)
            with self._lock:
                self._num_unread -= 1
                if not self._num_unread:  # readers live as long as their request, and descriptors are few
                    self._close()
        except FileNotFoundError as error:
            raise ValueError(f"NOT_FOUND: {error}") from error
        except OSError as error:
            raise ValueError(str(error)) from error

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                descriptor = os.open(self._path, os.O_RDONLY)
                self._close = weakref.finalize(self, os.close, descriptor)
                index = np.empty((len(self._stored), 2), _ENTRY)
                start = max(0, os.fstat(descriptor).st_size - index.nbytes)
                _read_all(descriptor, index.reshape(-1).view(np.uint8).data, start, self._path)
                self._index, self._descriptor = index, descriptor
            return self._descriptor


def _read_all(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    if offset > os.fstat(descriptor).st_size:  # a damaged index may have offsets that the system rejects
        raise ValueError(f"OUT_OF_RANGE: {path} ends before {offset}")
    while target:
        count = os.preadv(descriptor, [target], offset)
        if not count:
            raise ValueError(f"OUT_OF_RANGE: {path} ends at {offset}")
        target, offset = target[count:], offset + count

"""Parts of a snapshot: Orbax checkpoints of packs, in a directory, or staged in a temporary one for a bucket.

A pack holds many variants because Orbax writes 5,000 arrays of 100 KB six times slower than the same bytes in arrays of
16 MiB (60 s against 10 s). Without OCDBT and compression, each pack is a file of its own: a restore from a bucket
fetches only the packs it needs, and saving is as fast as plain files (0.5 s for 400 MB, 3.1 s with both). Orbax cannot
open `s3://`, and `gs://` only with gcsfs; staging each part works for both without gcsfs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ccjax.store.errors import StoreUnavailableError
from ccjax.store.files import FileRoot
from ccjax.store.objects import Root, for_each

logger = logging.getLogger(__name__)

TRANSFER_S = 600.0
"""Timeout for copying one file of a part to or from a bucket; a dead connection is detected much earlier."""


class PackFolder:
    """The parts below one prefix of a root."""

    def __init__(self, root: Root, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self._directory = root.path / prefix if isinstance(root, FileRoot) else None

    @property
    def is_local(self) -> bool:
        """True for a directory, where a failed call has had no effect."""
        return self._directory is not None

    def write(self, part: int, packs: Mapping[int, np.ndarray]) -> None:
        """Stores a part durably: pack number -> array `[L, 2, tokens, K, H]`. No other process may write there.

        Raises:
          OSError: the disk or bucket rejected the write.
        """
        arrays = {_name(number): array for number, array in packs.items()}
        with self._naming("write", _part(part)):
            if self._directory is not None:
                self._root.make_prefix(self._prefix)
                _save(self._directory / _part(part), arrays)
                _sync(self._directory / _part(part))
                return
            with _staging() as directory:
                _save(directory / _part(part), arrays)
                self._upload(directory / _part(part), _part(part))

    def read(self, part: int, numbers: Collection[int]) -> dict[int, np.ndarray]:
        """The arrays of these packs; unreadable or damaged ones are left out.

        Raises:
          StoreUnavailableError: the bucket does not respond.
        """
        if self._directory is not None:
            return _load(self._directory / _part(part), numbers)
        with _staging() as directory:
            with self._naming("read", _part(part)):
                self._download(_part(part), directory, {_name(number) for number in numbers})
            return _load(directory, numbers)

    def delete(self) -> None:
        """Removes all parts. Raises OSError."""
        self._root.delete(self._prefix)

    # -- buckets -----------------------------------------------------------------------------------------------

    def _open(self, part: str) -> ts.KvStore:
        outage = self._root.outage()
        if outage is not None:
            raise outage
        spec = self._root.kvstore(f"{self._prefix}/{part}")
        return ts.KvStore.open(spec, context=self._root.context).result()

    def _upload(self, directory: Path, part: str) -> None:
        bucket = self._open(part)
        files = [path for path in directory.rglob("*") if path.is_file()]
        for_each(self._root, lambda path: _put(bucket, path.relative_to(directory).as_posix(), path), files)

    def _download(self, part: str, directory: Path, packs: Collection[str]) -> None:
        bucket = self._open(part)
        keys = [key.decode(errors="replace") for key in bucket.list().result(timeout=TRANSFER_S)]
        wanted = [key for key in keys if _is_wanted(key, packs)]
        for_each(self._root, lambda key: _get(bucket, key, directory / key), wanted)

    @contextlib.contextmanager
    def _naming(self, verb: str, part: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TimeoutError) as error:  # the only errors of tensorstore
            self._root.record_failure(error)
            reason = str(error).partition(" [")[0]  # without the whole HTTP response
            raise StoreUnavailableError(f"snapshot: cannot {verb} {self._prefix}/{part}: {reason}") from error


def _part(number: int) -> str:
    return f"{number:05d}"


def _name(number: int) -> str:
    return f"pack-{number:05d}"


@contextlib.contextmanager
def _staging() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ccjax-snapshot-") as directory:
        yield Path(directory)


def _put(bucket: ts.KvStore, key: str, path: Path) -> None:
    bucket.write(key, path.read_bytes()).result(timeout=TRANSFER_S)


def _get(bucket: ts.KvStore, key: str, path: Path) -> None:
    found = bucket.read(key).result(timeout=TRANSFER_S)
    if found.state == "value":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.value)


def _is_wanted(key: str, packs: Collection[str]) -> bool:
    """True for Orbax's own files and those of the packs; False for other keys, which may lead outside the directory."""
    first, *rest = key.split("/")
    return (not rest or first in packs) and not {"", ".", ".."} & {first, *rest}


# -- Orbax -----------------------------------------------------------------------------------------------------


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))


def _save(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with _without_merge_warning(), contextlib.closing(_checkpointer()) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(dict(arrays)))


def _load(directory: Path, numbers: Iterable[int]) -> dict[int, np.ndarray]:
    # One at a time: if one of several arrays is damaged, Orbax closes its event loop while it reads the others.
    found: dict[int, np.ndarray] = {}
    with contextlib.closing(_checkpointer()) as checkpointer:
        for number in numbers:
            name = _name(number)
            # Orbax does not check the requested shape or dtype, and returns the value passed in, here 0, for an array
            # that does not exist.
            args = ocp.args.PyTreeRestore(
                {name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
            )
            try:
                array = checkpointer.restore(directory, args=args)[name]
            except Exception as error:  # damage may raise anything: OSError, ValueError, KeyError, AssertionError
                logger.warning("snapshot: cannot read %s of %s: %s", name, directory, str(error).partition(" [")[0])
                continue
            if isinstance(array, np.ndarray):
                found[number] = array
    return found


@contextlib.contextmanager
def _without_merge_warning() -> Iterator[None]:
    """Suppresses Orbax's warning, for every checkpoint without OCDBT, that there is no OCDBT to merge."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().count("Skipping merge of OCDBT checkpoints")

    absl = logging.getLogger("absl")
    absl.addFilter(is_other)
    try:
        yield
    finally:
        absl.removeFilter(is_other)


def _sync(directory: Path) -> None:
    """Makes a finished checkpoint survive a power failure: Orbax does not sync its own small files."""
    for path in [*directory.rglob("*"), directory, directory.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

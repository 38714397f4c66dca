"""Small objects below a directory; writes are atomic and durable."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ccjax.store.errors import StoreUnavailableError
from ccjax.store.local import sync_folder


class FileRoot:
    """A directory, `file:///absolute/path`, as a `store.objects.Root`.

    Raises (constructor):
      ValueError: the URL is malformed.
      StoreUnavailableError: the path is not a directory or, unless `read_only`, cannot be created or written, has no
        space, or does not support hard links.
    """

    context = None
    longest_wait_s = None
    num_parallel = 1

    def __init__(self, url: str, *, read_only: bool = False, is_optional: bool = False):
        parts = urllib.parse.urlsplit(url)
        if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ValueError(f"store: wanted file:///absolute/path, got {url!r}")
        self.path = Path(urllib.parse.unquote(parts.path))
        if read_only:
            if not self.path.is_dir():
                raise StoreUnavailableError(f"store: wanted a directory, got {self.path}")
            return
        probe = f".probe-{uuid.uuid4().hex}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Writes a block with the same calls as a commit, to detect a full disk, missing permissions and a file
            # system without hard links at open instead of at the first request.
            try:
                self.create(probe, bytes(4096))
            finally:
                self.delete(probe)
        except OSError as error:
            raise StoreUnavailableError(
                f"store: cannot use {self.path} as a KV store: {error.strerror or error}. Wanted a directory that this "
                "process can write to, with free space and hard links"
            ) from error

    def kvstore(self, prefix: str) -> dict[str, Any]:
        # tensorstore 0.1.86: the default lock mode leaves KEY.__lock after a kill, and the next writer keeps its tail.
        # Mode "none" writes a unique temporary name and renames it, which is correct for keys that are written once.
        return {"driver": "file", "path": f"{self.path}/{prefix}/", "file_io_locking": {"mode": "none"}}

    def folder(self, prefix: str) -> Path | None:
        return self.path / prefix

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def outage(self) -> StoreUnavailableError | None:
        return None  # every call to a file system reports its own failure

    def begin(self) -> None:
        pass

    def renew(self, error: Exception) -> bool:
        return False

    def record_failure(self, error: Exception) -> bool:
        return False

    def read(self, key: str) -> bytes | None:
        try:
            return (self.path / key).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        final = self.path / key
        try:
            # Atomic, and fails if the name exists; with rename the second writer would win.
            self._place(final, data, os.link, durable)
        except FileExistsError:
            return False
        if not durable:
            return True
        try:
            self.sync(os.path.dirname(key))
        except OSError:
            final.unlink(missing_ok=True)  # an error must mean that nothing was created
            raise
        return True

    def replace(self, key: str, data: bytes, *, durable: bool = True) -> None:
        final = self.path / key
        self._place(final, data, os.replace, durable)
        if durable:
            self.sync(os.path.dirname(key))

    def _place(self, final: Path, data: bytes, place: Callable[[Path, Path], object], durable: bool) -> None:
        """Writes a temporary file and has `place` move it to `final`."""
        for is_last in (False, False, True):
            with self._temporary(final, data, durable) as temporary:
                try:
                    place(temporary, final)
                    return
                except FileNotFoundError:  # an erasure by another process sweeps temporary files of any age
                    if is_last:
                        raise

    @contextlib.contextmanager
    def _temporary(self, final: Path, data: bytes, durable: bool) -> Iterator[Path]:
        """A temporary file beside `final` that contains `data`; its name is removed afterwards."""
        temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def make_prefix(self, prefix: str) -> None:
        (self.path / prefix).mkdir(parents=True, exist_ok=True)
        self.sync(os.path.dirname(prefix))

    def sync(self, prefix: str) -> None:
        """Makes names added directly below `prefix` survive a power failure."""
        sync_folder(self.path / prefix)

    def names(self, prefix: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path / prefix))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def left_overs(self, prefixes: Iterable[str]) -> list[str]:
        names = ((prefix, name) for prefix in prefixes for name in self.names(prefix) if name.endswith(".tmp"))
        return [f"{prefix}/{name}".lstrip("/") for prefix, name in names]

    def age_s(self, key: str) -> float:
        path = self.path / key
        try:
            newest = max(entry.lstat().st_mtime for entry in [path, *path.glob("*")])
        except FileNotFoundError:
            return 0.0
        return time.time() - newest

    def move(self, key: str, new_key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path / key, self.path / new_key)

    def delete(self, key: str) -> None:
        path = self.path / key
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

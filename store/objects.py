"""Small objects under one root: read, create-if-absent, replace, list, move, delete. Knows nothing of KV, records or
tensorstore's arrays; a bucket needs one more class with these methods and one more line in `_ROOTS`."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store.errors import StoreUnavailableError


class FileRoot:
    """A directory. Keys are paths below it, with `/`.

    Raises (constructor):
      StoreUnavailableError: the path is no directory, cannot be created or written, has no space, or cannot hard-link.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        probe = f".probe-{uuid.uuid4().hex}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A real write of a block, through the very calls a commit uses: finds a full disk, missing rights and a
            # file system without hard links now instead of at the first request.
            try:
                self.create(probe, bytes(4096))
            finally:
                self.delete(probe)
        except OSError as error:
            raise StoreUnavailableError(
                f"store: cannot use {path} as a KV store: {error.strerror or error}. Wanted a directory that this "
                "process can write to, with free space and hard links"
            ) from error

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """tensorstore's kvstore spec of everything below `prefix`."""
        # tensorstore 0.1.86: the default lock mode leaves KEY.__lock after a kill, and the next writer keeps its tail.
        # Mode "none" writes a unique temporary name and renames it, which is right for keys that are written once.
        return {"driver": "file", "path": f"{self.path}/{prefix}/", "file_io_locking": {"mode": "none"}}

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None when there is none."""
        try:
            return (self.path / key).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, key: str, data: bytes) -> bool:
        """Writes `data` whole and durably, or not at all; False when the key existed already (it stays as it was)."""
        final = self.path / key
        try:
            with self._temporary(final, data) as temporary:
                os.link(temporary, final)  # atomic, and refuses to replace: rename would let the second writer win
        except FileExistsError:
            return False
        try:
            self.sync(os.path.dirname(key))
        except OSError:
            final.unlink(missing_ok=True)  # an error must mean that nothing was created
            raise
        return True

    def replace(self, key: str, data: bytes) -> None:
        """Writes `data` over whatever was there; a reader sees the old bytes or the new ones, never a mixture."""
        final = self.path / key
        with self._temporary(final, data) as temporary:
            os.replace(temporary, final)

    @contextlib.contextmanager
    def _temporary(self, final: Path, data: bytes) -> Iterator[Path]:
        """A file beside `final` that durably holds `data`; gone afterwards, under this name."""
        temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def make_prefix(self, prefix: str) -> None:
        """Makes the prefix exist, durably."""
        (self.path / prefix).mkdir(parents=True, exist_ok=True)
        self.sync(os.path.dirname(prefix))

    def sync(self, prefix: str) -> None:
        """Makes names that were added right below `prefix` survive a power cut."""
        descriptor = os.open(self.path / prefix, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def names(self, prefix: str) -> list[str]:
        """Names right below `prefix`, sorted; empty when the prefix does not exist."""
        try:
            return sorted(os.listdir(self.path / prefix))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def age_s(self, key: str) -> float:
        """Seconds since the object, or anything below it, was last written; 0 when it is gone."""
        path = self.path / key
        try:
            newest = max(entry.lstat().st_mtime for entry in [path, *path.glob("*")])
        except FileNotFoundError:
            return 0.0
        return time.time() - newest

    def move(self, key: str, new_key: str) -> None:
        """Renames an object; nothing happens when it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path / key, self.path / new_key)

    def delete(self, key: str) -> None:
        """Deletes an object, or everything below a prefix; nothing happens when it is gone."""
        path = self.path / key
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


_ROOTS = {"file": FileRoot}


def open_root(url: str) -> FileRoot:
    """The root of a store URL.

    Raises:
      ValueError: no URL, a scheme that is not known, or a relative path.
      StoreUnavailableError: see the root's class.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in _ROOTS:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_ROOTS))
        raise ValueError(f"store: wanted a URL that starts with one of {known} (file:///absolute/path), got {url!r}")
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"store: wanted file:///absolute/path, got {url!r}")
    return _ROOTS[parts.scheme](urllib.parse.unquote(parts.path))

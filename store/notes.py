"""Small JSON values, stored with the variants of one identity and shared by its processes: notes and hints.

Notes are never changed, so that processes can add and delete notes without overwriting those of other processes. Hints
are replaced as a whole, and may be lost without harm.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ccjax.store.objects import Root, for_each

_log = logging.getLogger(__name__)


class Notes:
    """The notes of one identity. Thread-safe. Without a root they are kept in memory.

    Args:
      root, prefix: notes are stored in `root` as `PREFIX/NAME.json`.
      run: runs a function on a thread that may block on the disk, in order, and before variants that are stored later.
      is_open: False while nothing can be read, because the root did not answer since the start.
    """

    def __init__(
        self,
        root: Root | None = None,
        prefix: str = "",
        run: Callable[[Callable[[], None]], Future[None]] | None = None,
        is_open: Callable[[], bool] = lambda: True,
    ):
        self._root = root
        self._prefix = prefix
        self._run = run
        self._is_open = is_open
        self._lock = threading.Lock()
        self._disk_lock = threading.Lock()  # serialises changes on disk, so that no write undoes a deletion
        self._values: dict[str, Mapping[str, Any]] = {}
        self._unwritten: dict[str, Mapping[str, Any]] = {}

    def items(self) -> dict[str, Mapping[str, Any]]:
        """All known notes: name -> value."""
        with self._lock:
            return dict(self._values)

    def put(self, name: str, value: Mapping[str, Any], *, wait: bool = False) -> None:
        """Adds a note; an existing note of that name is kept. It is written in the background, and retried at every
        `refresh` until the disk accepts it.

        Args:
          wait: write the note before returning.

        Raises:
          OSError: with `wait`, the disk refused; the note is still known in this process, and written later.
        """
        with self._lock:
            if name in self._values:
                return
            self._values[name] = value
            if self._root is None or self._run is None:
                return
            self._unwritten[name] = value
        if wait:
            self._write(name)
        else:
            self._run(lambda: self._write_quietly(name))

    def delete(self, name: str) -> None:
        """Deletes a note; does nothing if there is none.

        Raises:
          OSError: the disk refused, and the note still exists.
        """
        with self._disk_lock:
            if self._root is not None:
                self._root.delete(self._key(name))
            with self._lock:
                self._values.pop(name, None)
                self._unwritten.pop(name, None)

    def flush(self) -> bool:
        """Waits until every note added so far is written or has failed; returns True."""
        if self._run is not None and self._unwritten:
            self._run(lambda: None).result()
        return True

    def refresh(self) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Applies additions and deletions of other processes: `(added, removed names)`. Retries failed writes.

        Raises:
          OSError: the directory or bucket cannot be listed or read.
        """
        root = self._root
        if root is None or not self._is_open():
            return {}, ()
        for name in tuple(self._unwritten):
            self._write_quietly(name)
        with self._lock:
            known = self._values.keys() - self._unwritten.keys()
        listed = {name.removesuffix(".json") for name in root.names(self._prefix) if name.endswith(".json")}
        new = sorted(listed - known)
        values = for_each(root, lambda name: _decoded(root.read(self._key(name))), new)
        added = {name: value for name, value in zip(new, values, strict=True) if value is not None}
        removed = tuple(sorted(known - listed))
        with self._lock:
            self._values.update(added)
            for name in removed:
                self._values.pop(name, None)
        return added, removed

    def _write(self, name: str) -> None:
        assert self._root is not None
        with self._disk_lock:
            with self._lock:
                value = self._unwritten.get(name)
            if value is None:  # written or deleted meanwhile
                return
            self._root.create(self._key(name), json.dumps(dict(value)).encode())
            with self._lock:
                del self._unwritten[name]

    def _write_quietly(self, name: str) -> None:
        try:
            self._write(name)
        except OSError as error:
            # During an outage, which writers and the refresh report, only at debug level.
            level = logging.WARNING if self._root is None or self._root.outage() is None else logging.DEBUG
            _log.log(level, "store: cannot write the note %s: %s; it will be retried", name, error)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}.json"


def _decoded(raw: bytes | None) -> dict[str, Any] | None:
    """Decodes a note; empty if it is damaged, None if it is gone."""
    if raw is None:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Hints:
    """One object that is replaced as a whole; `warn(message, key, error)` logs disk failures."""

    def __init__(self, root: Root, key: str, warn: Callable[..., None]):
        self._root = root
        self._key = key
        self._warn = warn

    def read(self) -> dict[str, Any]:
        """The last written values; empty if there are none or they cannot be read."""
        try:
            raw = self._root.read(self._key)
            hints = {} if raw is None else json.loads(raw)
        except (OSError, ValueError, RecursionError) as error:
            self._warn("store: cannot read the hints in %s: %s", self._key, error)
            return {}
        return hints if isinstance(hints, dict) else {}

    def write(self, hints: Mapping[str, Any]) -> None:
        """Replaces the values. They may be lost, or overwritten by another process. A disk failure is logged."""
        try:
            self._root.replace(self._key, json.dumps(dict(hints)).encode())
        except OSError as error:
            self._warn("store: cannot write the hints in %s: %s", self._key, error)

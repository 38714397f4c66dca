"""A SQLite file shared by several processes of a host. A lost or damaged file is recreated."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ccjax.store.errors import IndexUnavailableError
from ccjax.store.index.outage import ANSWER_S, Outage

APPLICATION_ID = 0x63636A78
"""Marks our files, so that another program's database is not treated as a damaged file of ours."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PARTS = ("", "-wal", "-shm")

T = TypeVar("T")


class Database:
    """Connection to the file. Thread-safe.

    Each call compares inodes, to detect that the file was deleted or moved under an open connection. The process that
    finds a damaged file moves it to `PATH.damaged` (only the last one is kept, for inspection) and creates an empty
    one; a lock file ensures that only one process does so and that no other opens the file meanwhile.

    Args:
      schema: statements that create missing tables and rows; run whenever the file is opened.
      version: version of the schema.
    """

    def __init__(self, path: Path, schema: Sequence[str], version: int) -> None:
        self.path = path
        self._schema = schema
        self._version = version
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._outage = Outage(f"index {path}", self._probe)

    def run(self, work: Callable[[sqlite3.Connection], T], *, writes: bool = True) -> T:
        """Runs `work` in one transaction and returns its result; `work` may be called twice.

        Raises:
          IndexUnavailableError: the file cannot be used, or another process has locked it for too long.
        """
        self._outage.check()
        with self._lock:
            self._outage.check()  # an outage may have begun while waiting for the lock
            try:
                try:
                    return self._transact(work, writes)
                except sqlite3.DatabaseError as error:
                    if _is_damage(error):
                        self._set_aside()
                    elif "no such table" in str(error):  # the file was truncated: reopening recreates the tables
                        self._disconnect()
                    else:
                        raise
                return self._transact(work, writes)
            except IndexUnavailableError:
                raise
            except (sqlite3.Error, OSError) as error:
                self._disconnect()
                raise self._outage.begin(error) from error

    def close(self) -> None:
        """Closes the file; a later `run` opens it again."""
        with self._lock:
            self._disconnect()

    def _transact(self, work: Callable[[sqlite3.Connection], T], writes: bool) -> T:
        connection = self._connected()
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            result = work(connection)
            connection.execute("COMMIT")
            return result
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._inode_now() != self._inode:
            self._disconnect()
            with self._guard():
                self._connect()
        assert self._connection is not None
        return self._connection

    def _connect(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=ANSWER_S, isolation_level=None, check_same_thread=False)
        try:
            self._check_owner(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {self._version}")
            for statement in self._schema:
                connection.execute(statement)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection, self._inode = connection, self._inode_now()

    def _check_owner(self, connection: sqlite3.Connection) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables and (application, version) != (APPLICATION_ID, self._version):
            raise IndexUnavailableError(
                f"index {self.path}: wanted an index of version {self._version} or no file, got a database of "
                "another program or version; name another file"
            )

    def _set_aside(self) -> None:
        """Moves a damaged file away, unless another process did so since it was opened."""
        inode = self._inode
        self._disconnect()
        with self._guard():
            if inode is None or self._inode_now() != inode:
                try:
                    self._connect()
                    return
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
            # The latest writes are in a separate file, which the next database must not read.
            for part in _PARTS:
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{part}", f"{self.path}.damaged{part}")
            self._connect()

    def _inode_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _disconnect(self) -> None:
        connection, self._connection, self._inode = self._connection, None, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Prevents other processes from opening or moving the file. Raises TimeoutError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end_s = time.monotonic() + ANSWER_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise TimeoutError("another process has been opening it for too long") from None
                    time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)

    def _probe(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.path, timeout=ANSWER_S, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):  # else the next call sets it aside
                    raise


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED

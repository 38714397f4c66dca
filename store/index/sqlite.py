"""A shared index in one SQLite file, for the processes of one host.

Uses the host's clock, which all of its processes share.
"""

from __future__ import annotations

import sqlite3
import time
import urllib.parse
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ccjax.store.index.api import (
    CHANGES_AT_ONCE,
    CHANGES_KEPT,
    MOST_ORDERS,
    LeaseTable,
    Order,
    OrderBoard,
    StoreChanges,
    changes_read,
    changes_to_send,
)
from ccjax.store.index.database import Database
from ccjax.store.leases import Lease

_VERSION = 1

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, "
    "origin TEXT NOT NULL, kind TEXT NOT NULL, variant_id TEXT NOT NULL, record BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS leases (namespace TEXT, key TEXT, holder TEXT NOT NULL, expires_s REAL NOT NULL, "
    "PRIMARY KEY (namespace, key)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, "
    "key TEXT NOT NULL, value BLOB NOT NULL, expires_s REAL NOT NULL, free_s REAL NOT NULL, attempt INTEGER NOT NULL, "
    "UNIQUE (namespace, key))",
    # Generation and number of the last deleted change show whether changes since a cursor are missing.
    "INSERT OR IGNORE INTO facts VALUES ('generation', lower(hex(randomblob(16)))), ('forgotten', '0')",
)


class SqliteIndex:
    """One namespace of an index in a SQLite file, a `store.index.api.SharedIndex`.

    Args:
      clock: time in seconds, shared by all processes.
    """

    def __init__(self, path: Path, namespace: str, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(path, _SCHEMA, _VERSION)
        self._namespace = namespace
        self._origin = uuid.uuid4().hex
        self.leases: LeaseTable = SqliteLeases(self._database, namespace, clock)
        self.orders: OrderBoard = SqliteOrders(self._database, namespace, clock)

    @classmethod
    def of_url(cls, url: str, namespace: str) -> SqliteIndex:
        """The index of `sqlite:///absolute/path.db`. Raises ValueError."""
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.parse.unquote(parts.path))
        if parts.netloc or parts.query or parts.fragment or not path.name or not path.is_absolute():
            raise ValueError(f"store_index: wanted sqlite:///absolute/path.db, got {url!r}")
        if path.is_dir():
            raise ValueError(f"store_index: wanted the path of a file, got the directory {str(path)!r}")
        return cls(path, namespace)

    def notify(
        self, added: Mapping[str, bytes | None], removed: Mapping[str, str | None], *, is_complete: bool = True
    ) -> None:
        found = changes_to_send(added, removed, is_complete)
        rows = [(self._namespace, self._origin, *change) for change in found]

        def write(connection: sqlite3.Connection) -> None:
            statement = "INSERT INTO changes (namespace, origin, kind, variant_id, record) VALUES (?, ?, ?, ?, ?)"
            connection.executemany(statement, rows)
            forgotten = _newest(connection) - CHANGES_KEPT
            if forgotten > 0:
                connection.execute("DELETE FROM changes WHERE number <= ?", (forgotten,))
                connection.execute("UPDATE facts SET value = ? WHERE name = 'forgotten'", (str(forgotten),))

        if rows:
            self._database.run(write)

    def changes(self, cursor: str | None) -> StoreChanges:
        def read(connection: sqlite3.Connection) -> StoreChanges:
            facts = dict(connection.execute("SELECT name, value FROM facts"))
            generation, newest = facts["generation"], _newest(connection)
            if cursor is None:
                return StoreChanges(f"{generation} {newest}", {}, {}, True)
            theirs, _, number = cursor.partition(" ")
            if theirs != generation or not int(facts["forgotten"]) <= int(number) <= newest:
                return StoreChanges(f"{generation} {newest}", {}, {}, False)
            statement = (
                "SELECT number, namespace, origin, kind, variant_id, record FROM changes WHERE number > ? "
                "ORDER BY number LIMIT ?"
            )
            rows = connection.execute(statement, (int(number), CHANGES_AT_ONCE)).fetchall()
            ours = [row[3:] for row in rows if row[1] == self._namespace and row[2] != self._origin]
            return changes_read(f"{generation} {rows[-1][0] if rows else newest}", ours, True)

        return self._database.run(read, writes=False)

    def close(self) -> None:
        self._database.close()


class SqliteLeases:
    """A `LeaseTable`."""

    def __init__(self, database: Database, namespace: str, clock: Callable[[], float]) -> None:
        self._database = database
        self._namespace = namespace
        self._clock = clock

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        holder, until_s = uuid.uuid4().hex, self._clock() + seconds

        def write(connection: sqlite3.Connection) -> int:
            now_s = self._clock()
            for number, key in enumerate(keys):
                place = (self._namespace, key)
                expired = "DELETE FROM leases WHERE (namespace, key) = (?, ?) AND expires_s <= ?"
                connection.execute(expired, (*place, now_s))
                taken = "INSERT OR IGNORE INTO leases VALUES (?, ?, ?, ?)"
                if not connection.execute(taken, (*place, holder, now_s + seconds)).rowcount:
                    return number
            return len(keys)

        return [Lease(key, 0, holder, until_s) for key in keys[: self._database.run(write)]] if keys else []

    def held(self, keys: Collection[str]) -> frozenset[str]:
        def read(connection: sqlite3.Connection) -> frozenset[str]:
            statement = "SELECT 1 FROM leases WHERE (namespace, key) = (?, ?) AND expires_s > ?"
            now_s = self._clock()
            found = (key for key in keys if connection.execute(statement, (self._namespace, key, now_s)).fetchone())
            return frozenset(found)

        return self._database.run(read, writes=False)

    def release(self, lease: Lease) -> None:
        statement = "DELETE FROM leases WHERE (namespace, key, holder) = (?, ?, ?)"
        place = (self._namespace, lease.key, lease.holder)
        self._database.run(lambda connection: connection.execute(statement, place))

    def sweep(self) -> None:
        statement = "DELETE FROM leases WHERE expires_s <= ?"
        self._database.run(lambda connection: connection.execute(statement, (self._clock(),)))


class SqliteOrders:
    """An `OrderBoard`."""

    def __init__(self, database: Database, namespace: str, clock: Callable[[], float]) -> None:
        self._database = database
        self._namespace = namespace
        self._clock = clock

    def place(self, key: str, value: bytes, seconds: float) -> bool:
        def write(connection: sqlite3.Connection) -> bool:
            now_s = self._purge(connection)
            statement = (
                "INSERT OR IGNORE INTO orders (namespace, key, value, expires_s, free_s, attempt) "
                "VALUES (?, ?, ?, ?, 0, 0)"
            )
            row = (self._namespace, key, value, now_s + seconds)
            is_new = bool(connection.execute(statement, row).rowcount)
            statement = (
                "DELETE FROM orders WHERE namespace = ?1 AND number <= "
                "(SELECT number FROM orders WHERE namespace = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)"
            )
            connection.execute(statement, (self._namespace, MOST_ORDERS))
            return is_new

        return self._database.run(write)

    def take(self, seconds: float) -> Order | None:
        def write(connection: sqlite3.Connection) -> Order | None:
            now_s = self._purge(connection)
            statement = (
                "UPDATE orders SET free_s = ?, attempt = attempt + 1 WHERE number = "
                "(SELECT min(number) FROM orders WHERE namespace = ? AND free_s <= ?) RETURNING key, value, attempt"
            )
            row = connection.execute(statement, (now_s + seconds, self._namespace, now_s)).fetchone()
            return None if row is None else Order(*row)

        return self._database.run(write)

    def finish(self, key: str) -> None:
        statement = "DELETE FROM orders WHERE (namespace, key) = (?, ?)"
        self._database.run(lambda connection: connection.execute(statement, (self._namespace, key)))

    def __len__(self) -> int:
        statement = "SELECT count(*) FROM orders WHERE namespace = ? AND expires_s > ?"
        place = (self._namespace, self._clock())
        return self._database.run(lambda connection: connection.execute(statement, place).fetchone()[0], writes=False)

    def _purge(self, connection: sqlite3.Connection) -> float:
        """Deletes expired orders; returns the current time."""
        now_s = self._clock()
        connection.execute("DELETE FROM orders WHERE expires_s <= ?", (now_s,))
        return now_s


def _newest(connection: sqlite3.Connection) -> int:
    """The number of the last change, which may be deleted already."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
    return 0 if row is None else row[0]

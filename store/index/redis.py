"""A shared index in Redis, for the processes of several hosts.

Uses the clock of Redis. Needs the package `redis`, imported when an index is created.
"""

from __future__ import annotations

import time
import urllib.parse
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ccjax.store.index import scripts
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
from ccjax.store.index.outage import ANSWER_S, Outage
from ccjax.store.leases import Lease

_WANTED = "store_index: wanted redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]"
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}


class Server:
    """Connection to one Redis server. Thread-safe.

    Args:
      settings: arguments of `redis.Redis`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise ValueError(
                "store_index: a redis:// URL needs the package redis, which is not installed: "
                "pip install 'ccjax[cluster]'"
            ) from error
        self._no_answer = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._refusal = redis.RedisError
        self._client: Any = redis.Redis(
            **settings,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # the default retries for seconds
            protocol=2,
        )
        name = f"index redis://{settings['host']}:{settings['port']}/{settings['db']}"
        self._outage = Outage(name, self._client.ping)
        self._scripts: dict[str, Any] = {}

    def run(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Runs one of `store.index.scripts` and returns its result.

        Raises:
          IndexUnavailableError: no answer, or an error reply.
        """
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        return self._try(lambda: self._scripts[script](keys, arguments))

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of the keys; raises as `run`."""
        return self._try(lambda: self._client.mget(keys)) if keys else []

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _try(self, call: Callable[[], Any]) -> Any:
        self._outage.check()
        try:
            return call()
        except self._no_answer as error:
            raise self._outage.begin(error) from error
        except self._refusal as error:
            raise self._outage.refusal(error) from error


class RedisIndex:
    """One namespace of an index in Redis, a `store.index.api.SharedIndex`.

    Changes are a stream, trimmed to about the newest `CHANGES_KEPT`. A cursor consists of the generation of the stream,
    which is new whenever the stream is created, and the id of an entry. Each entry names its predecessor, so that
    trimming, flushing, and a restart from an older snapshot are detected.
    """

    def __init__(self, server: Server, namespace: str) -> None:
        self._server = server
        prefix = f"ccjax:{{{namespace}}}"
        self._keys = (f"{prefix}:generation", f"{prefix}:changes")
        self._origin = uuid.uuid4().hex
        self.leases: LeaseTable = RedisLeases(server, f"{prefix}:lease")
        self.orders: OrderBoard = RedisOrders(server, f"{prefix}:orders")

    @classmethod
    def of_url(cls, url: str, namespace: str) -> RedisIndex:
        """The index of a `redis://` or `rediss://` URL, see `store.index.open_index`. Raises ValueError."""
        return cls(Server(_settings(url)), namespace)

    def notify(
        self, added: Mapping[str, bytes | None], removed: Mapping[str, str | None], *, is_complete: bool = True
    ) -> None:
        found = changes_to_send(added, removed, is_complete)
        if found:
            flat = [part for change in found for part in change]
            self._server.run(scripts.NOTIFY, self._keys, uuid.uuid4().hex, self._origin, CHANGES_KEPT, *flat)

    def changes(self, cursor: str | None) -> StoreChanges:
        theirs, _, entry = (cursor or "").partition(" ")
        reply = self._server.run(
            scripts.CHANGES, self._keys, uuid.uuid4().hex, self._origin, theirs, entry, CHANGES_AT_ONCE
        )
        generation, newest, is_complete, *flat = reply
        found = [
            (kind.decode(), variant_id.decode(), record)
            for kind, variant_id, record in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]
        return changes_read(f"{generation.decode()} {newest.decode()}", found, cursor is None or bool(is_complete))

    def close(self) -> None:
        self._server.close()


class RedisLeases:
    """A `LeaseTable`. Redis deletes expired leases by its own clock."""

    def __init__(self, server: Server, prefix: str) -> None:
        self._server = server
        self._prefix = prefix

    def acquire(self, keys: Sequence[str], seconds: float) -> list[Lease]:
        if not keys:
            return []
        holder, until_s = uuid.uuid4().hex, time.time() + seconds
        num_won = self._server.run(scripts.ACQUIRE, self._places(keys), _milliseconds(seconds), holder)
        return [Lease(key, 0, holder, until_s) for key in keys[:num_won]]

    def held(self, keys: Collection[str]) -> frozenset[str]:
        wanted = tuple(keys)
        found = zip(wanted, self._server.values(self._places(wanted)), strict=True)
        return frozenset(key for key, holder in found if holder is not None)

    def release(self, lease: Lease) -> None:
        self._server.run(scripts.RELEASE, self._places([lease.key]), lease.holder)

    def sweep(self) -> None:
        """Does nothing: Redis deletes expired leases itself."""

    def _places(self, keys: Collection[str]) -> list[str]:
        return [f"{self._prefix}:{key}" for key in keys]


class RedisOrders:
    """An `OrderBoard`."""

    def __init__(self, server: Server, prefix: str) -> None:
        self._server = server
        names = ("values", "numbers", "attempts", "expiry", "free", "taken", "next")
        self._keys = [f"{prefix}:{name}" for name in names]

    def place(self, key: str, value: bytes, seconds: float) -> bool:
        return bool(self._server.run(scripts.PLACE, self._keys, key, value, _milliseconds(seconds), MOST_ORDERS))

    def take(self, seconds: float) -> Order | None:
        found = self._server.run(scripts.TAKE, self._keys, _milliseconds(seconds))
        return None if found is None else Order(found[0].decode(), found[1], found[2])

    def finish(self, key: str) -> None:
        self._server.run(scripts.FINISH, self._keys, key)

    def __len__(self) -> int:
        return self._server.run(scripts.COUNT, self._keys)


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def _settings(url: str) -> dict[str, Any]:
    """The arguments of `redis.Redis` in a URL. Raises ValueError, without quoting any part of the URL: if a password
    was not percent-encoded, parts of it may be anywhere."""
    try:
        parts = urllib.parse.urlsplit(url)
        port, database = parts.port, parts.path.removeprefix("/")
        options = urllib.parse.parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError(f"{_WANTED}, got a malformed one (percent-encode special characters of a password)") from None
    if not parts.hostname or parts.fragment or not (database.isdecimal() or not database):
        raise ValueError(f"{_WANTED}, got one without host, or with a path that is no number")
    allowed = _TLS_OPTIONS if parts.scheme == "rediss" else set()
    if not options.keys() <= allowed or any(len(values) != 1 for values in options.values()):
        raise ValueError(f"{_WANTED} with {sorted(allowed) or 'no'} options, each once; got others")
    return {
        "host": parts.hostname,
        "port": port or 6379,
        "db": int(database or 0),
        "username": urllib.parse.unquote(parts.username) if parts.username else None,
        "password": urllib.parse.unquote(parts.password) if parts.password else None,
        "ssl": parts.scheme == "rediss",
        **{name: values[0] for name, values in options.items()},
    }

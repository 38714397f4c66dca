"""The shared index of the processes on one store: which class a URL means."""

from __future__ import annotations

import urllib.parse

from ccjax.store.index.api import SharedIndex
from ccjax.store.spec import StoreIdentity


def open_index(url: str, namespace: str, identity: StoreIdentity | None = None) -> SharedIndex:
    """The part of an index that belongs to one namespace of a store. Asks no server yet: whether there is one shows in
    the first call.

    Args:
      url: `sqlite:///absolute/path.db` for processes of one host (not on a network file system), made if missing;
        `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` for several hosts, `rediss://` for the same over TLS, with
        `?ssl_ca_certs=`, `ssl_certfile=` and `ssl_keyfile=` naming files. Redis 6.2 or later, no cluster of Redis.
      identity: whose the namespace is; its keys, if it has some, seal leases and orders. Records bring their own seals.

    Raises:
      ValueError: another URL, or the package that it needs is missing; the message shows no password.
    """
    scheme = urllib.parse.urlsplit(url).scheme if isinstance(url, str) else ""
    if scheme == "sqlite":
        from ccjax.store.index.sqlite import SqliteIndex

        return SqliteIndex.of_url(url, namespace, identity)
    if scheme in ("redis", "rediss"):
        from ccjax.store.index.redis import RedisIndex

        return RedisIndex.of_url(url, namespace, identity)
    raise ValueError(
        "store_index: wanted a URL that starts with one of sqlite://, redis://, rediss:// (sqlite:///absolute/path.db, "
        f"redis://HOST:PORT/DB), got one that starts with {scheme!r}"
    )

"""The shared index of the processes on one store: maps URLs to implementations."""

from __future__ import annotations

import urllib.parse

from ccjax.store.index.api import SharedIndex


def open_index(url: str, namespace: str) -> SharedIndex:
    """Opens the part of an index that belongs to one namespace of a store. Does not contact the server yet; the first
    call fails if it is unreachable.

    Args:
      url: `sqlite:///absolute/path.db` for processes of one host (not on a network file system), created if missing;
        `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` for several hosts, `rediss://` for the same over TLS, with the file
        options `?ssl_ca_certs=`, `ssl_certfile=` and `ssl_keyfile=`. Redis 6.2 or later, not a Redis cluster.

    Raises:
      ValueError: an unknown URL, or the package it needs is missing; the message shows no password.
    """
    scheme = urllib.parse.urlsplit(url).scheme if isinstance(url, str) else ""
    if scheme == "sqlite":
        from ccjax.store.index.sqlite import SqliteIndex

        return SqliteIndex.of_url(url, namespace)
    if scheme in ("redis", "rediss"):
        from ccjax.store.index.redis import RedisIndex

        return RedisIndex.of_url(url, namespace)
    raise ValueError(
        "store_index: wanted a URL that starts with one of sqlite://, redis://, rediss:// (sqlite:///absolute/path.db, "
        f"redis://HOST:PORT/DB), got one that starts with {scheme!r}"
    )

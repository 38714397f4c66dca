"""Small objects under one root: the interface used by the disk tier, and the mapping of URLs to implementations."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import tensorstore as ts

from ccjax.store.buckets import BucketRoot
from ccjax.store.errors import StoreUnavailableError
from ccjax.store.files import FileRoot


class Root(Protocol):
    """Objects whose keys are paths with `/`. Thread-safe; every method may raise OSError.

    Attributes:
      context: resources for a `kvstore` spec; None for tensorstore's defaults.
      longest_wait_s: timeout for reads and writes of KV; None for no limit.
      num_parallel: useful number of concurrent calls.
    """

    context: ts.Context | None
    longest_wait_s: float | None
    num_parallel: int

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """tensorstore's kvstore spec of everything below `prefix`."""
        ...

    def folder(self, prefix: str) -> Path | None:
        """The local directory with everything below `prefix`; None if it is not local."""
        ...

    def new_id(self) -> str:
        """A new unique id of 32 hex digits; `age_s` can derive the age of a key that ends with it."""
        ...

    def outage(self) -> StoreUnavailableError | None:
        """The error that calls would raise now; None if the root is available. Returns at once."""
        ...

    def begin(self) -> None:
        """Completes what `open_root` left undone because nobody answered; call it before the first write."""
        ...

    def renew(self, error: Exception) -> bool:
        """True if tensorstore was denied access and credentials were read again, so that another try may succeed."""
        ...

    def record_failure(self, error: Exception) -> bool:
        """Reports that tensorstore failed to read or write KV; True if that may be the start of an outage."""
        ...

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None if it does not exist."""
        ...

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """Writes `data` completely and durably, or not at all; False if the key already exists (it is not changed). May
        return True if an object with the same bytes exists, possibly from an earlier attempt. Without `durable` a power
        failure may undo the write.

        Raises:
          CommitUnknownError: the object may have been written, or may be written later.
        """
        ...

    def replace(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Replaces the object durably; a reader sees the old bytes or the new ones, never a mixture. Without `durable`
        the contents are undefined after a power failure."""
        ...

    def make_prefix(self, prefix: str) -> None:
        """Prepares a prefix for objects, durably."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Names directly below `prefix`, sorted; empty if the prefix does not exist."""
        ...

    def left_overs(self, prefixes: Iterable[str]) -> list[str]:
        """Temporary keys directly below `prefixes`, in use by a running process or left by a killed one."""
        ...

    def age_s(self, key: str) -> float:
        """Seconds since the object, or anything below it, was written; 0 if it is gone or unknown."""
        ...

    def move(self, key: str, new_key: str) -> None:
        """Renames an object; does nothing if it is gone."""
        ...

    def delete(self, key: str) -> None:
        """Deletes an object, or everything below a prefix; does nothing if it is gone."""
        ...


def for_each(root: Root, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Applies `function` to every item, with the root's number of concurrent calls; results are in order."""
    waiting = list(items)
    if len(waiting) < 2 or root.num_parallel == 1:
        return [function(item) for item in waiting]
    with ThreadPoolExecutor(root.num_parallel, thread_name_prefix="store-root") as pool:
        return list(pool.map(function, waiting))


_ROOTS = {"file": FileRoot, "gs": BucketRoot, "s3": BucketRoot}


def open_root(url: str, *, read_only: bool = False, is_optional: bool = False) -> Root:
    """Opens the root of a store URL: `file:///absolute/path`, or a bucket as in `BucketRoot`.

    Args:
      read_only: do not check for write permission, and create no directory; only `read`, `names`, `kvstore` and other
        read calls are allowed.
      is_optional: open a bucket also if it does not answer now; `begin` has to be called once it does.

    Raises:
      ValueError: the URL is malformed or has an unknown scheme.
      StoreUnavailableError: see the root's class.
    """
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in _ROOTS:
        raise ValueError(
            "store: wanted a URL that starts with one of file://, gs://, s3:// (file:///absolute/path, "
            f"s3://bucket/prefix), got {url!r}"
        )
    return _ROOTS[scheme](url, read_only=read_only, is_optional=is_optional)

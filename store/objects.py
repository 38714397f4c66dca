"""Small objects under one root: the interface that the disk tier is written against, and which class a URL means."""

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
      context: the resources that a `kvstore` spec needs; None = tensorstore's defaults.
      longest_wait_s: a read or write of KV that takes longer has failed; None = there is no telling.
      num_parallel: how many calls are worth making at once.
    """

    context: ts.Context | None
    longest_wait_s: float | None
    num_parallel: int

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """tensorstore's kvstore spec of everything below `prefix`."""
        ...

    def folder(self, prefix: str) -> Path | None:
        """The directory of this machine where everything below `prefix` is; None where there is none."""
        ...

    def new_id(self) -> str:
        """32 hex digits that nobody used before; in a key that ends with them, `age_s` can tell how old it is."""
        ...

    def outage(self) -> StoreUnavailableError | None:
        """Why nothing is tried just now, None where all is well. Returns at once."""
        ...

    def record_failure(self, error: Exception) -> None:
        """Takes in that tensorstore failed to read or write KV here, which may be the begin of an outage."""
        ...

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None when there is none."""
        ...

    def create(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """Writes `data` whole and durably, or not at all; False when the key existed already, and stays as it was. A
        root may answer True where these very bytes are there, which can be by its own doing. Without `durable` a power
        cut may undo it.

        Raises:
          CommitUnknownError: it may have been written, or may still be.
        """
        ...

    def replace(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Writes `data` over whatever was there, durably; a reader sees the old bytes or the new ones, never a mixture.
        Without `durable` a power cut may leave anything."""
        ...

    def make_prefix(self, prefix: str) -> None:
        """Makes the prefix ready for objects, durably."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Names right below `prefix`, sorted; empty when the prefix does not exist."""
        ...

    def left_overs(self, prefixes: Iterable[str]) -> list[str]:
        """Keys right below `prefixes` that only a killed process leaves behind, and one that is just at work uses."""
        ...

    def age_s(self, key: str) -> float:
        """Seconds since the object, or anything below it, was written; 0 when it is gone or cannot be told."""
        ...

    def move(self, key: str, new_key: str) -> None:
        """Gives an object another name; nothing happens when it is gone."""
        ...

    def delete(self, key: str) -> None:
        """Deletes an object, or everything below a prefix; nothing happens when it is gone."""
        ...


def for_each(root: Root, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """`function` of every item, in order; as many at once as `root` can use."""
    waiting = list(items)
    if len(waiting) < 2 or root.num_parallel == 1:
        return [function(item) for item in waiting]
    with ThreadPoolExecutor(root.num_parallel, thread_name_prefix="store-root") as pool:
        return list(pool.map(function, waiting))


_ROOTS = {"file": FileRoot, "gs": BucketRoot, "s3": BucketRoot}


def open_root(url: str, *, read_only: bool = False) -> Root:
    """The root of a store URL: `file:///absolute/path`, or a bucket as `BucketRoot` has it.

    Args:
      read_only: nothing is written to find out whether that is possible, nor a directory made; only `read`, `names`,
        `kvstore` and the other looks are allowed.

    Raises:
      ValueError: no URL, a scheme that is not known, or another form than the scheme has.
      StoreUnavailableError: see the root's class.
    """
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in _ROOTS:
        raise ValueError(
            "store: wanted a URL that starts with one of file://, gs://, s3:// (file:///absolute/path, "
            f"s3://bucket/prefix), got {url!r}"
        )
    return _ROOTS[scheme](url, read_only=read_only)

"""The catalog: copies of many commit records in a few objects, so that a large store opens without reading each record.

It is never authoritative. A variant counts as committed while its own record is listed; if a part is damaged or
missing, its records are read one by one, and an outdated entry is detected by the first read of its data.

ROOT/NAMESPACE/catalog/K-of-P.bin, replaced as a whole, has the variants whose id has a crc32 of K modulo P: one line of
JSON (namespace, length and sha256 of the table), the table (columns as JSON), the records.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection

from ccjax.store.objects import Root, for_each
from ccjax.store.records import KnownShard
from ccjax.store.spec import is_id

RECORDS_PER_PART = 256
"""Approximate number of records per part: less than 1 MB, which a bucket accepts within the timeout of a small
object."""

_PART = re.compile(r"\d+-of-\d+\.bin")
_COLUMNS = ("variant_id", "chunk_id", "num_tokens", "object_id", "charge_bytes", "is_lossy", "crc32")


class CatalogError(ValueError):
    """A part of the catalog is damaged, or of another namespace."""


def encode_part(shards: Collection[KnownShard], namespace: str) -> bytes:
    """Encodes one object of the catalog."""
    columns = {name: [getattr(shard, name) for shard in shards] for name in _COLUMNS}
    columns["record_bytes"] = [len(shard.raw) for shard in shards]
    table = json.dumps(columns, separators=(",", ":")).encode()
    head = {
        "namespace": namespace,
        "table_bytes": len(table),
        "table_sha256": hashlib.sha256(table).hexdigest(),
    }
    return b"".join((json.dumps(head).encode(), b"\n", table, *(shard.raw for shard in shards)))


def decode_part(raw: bytes, namespace: str) -> list[KnownShard]:
    """Decodes one object of the catalog. Checks every byte of the table, but not the records: `decode_known` checks
    each record when it is used.

    Raises:
      CatalogError: the part cannot be used.
    """
    line = raw[: raw.find(b"\n") + 1]
    try:
        head = json.loads(line)
        owner = head["namespace"]
        start, num_bytes, digest = len(line), head["table_bytes"], head["table_sha256"]
        if owner != namespace:
            raise CatalogError(f"it belongs to namespace {owner!r}")
        table = raw[start : start + num_bytes]
        if hashlib.sha256(table).hexdigest() != digest:
            raise CatalogError("checksum failed")
        columns = json.loads(table)
        lengths = columns.pop("record_bytes")
        ends = list(itertools.accumulate(lengths, initial=start + num_bytes))
        if ends[-1] != len(raw):
            raise CatalogError(f"wanted {ends[-1]} bytes, got {len(raw)}")
        for name in ("variant_id", "chunk_id", "object_id"):
            if not all(map(is_id, columns[name])):
                raise CatalogError(f"one {name} is no id")
        raws = [raw[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
        return list(map(KnownShard, *(columns[name] for name in _COLUMNS), raws))
    except CatalogError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CatalogError(f"cannot be parsed: {error}") from error


def read_catalog(root: Root, namespace: str) -> tuple[list[KnownShard], list[str]]:
    """The shards of all usable parts, and the problems of the other parts. A variant may occur twice.

    Raises:
      OSError: the root refused.
    """
    wrong = []

    def read(name: str) -> list[KnownShard]:
        raw = root.read(_key(namespace, name))
        try:
            if raw is None:  # another process just deleted it
                return []
            return decode_part(raw, namespace)
        except CatalogError as error:
            wrong.append(f"{name}: {error}")
            return []

    names = [name for name in root.names(f"{namespace}/catalog") if _PART.fullmatch(name)]
    return list(itertools.chain.from_iterable(for_each(root, read, names))), wrong


def write_catalog(root: Root, namespace: str, shards: Collection[KnownShard]) -> None:
    """Replaces the catalog part by part; concurrent readers see a harmless mixture of old and new parts.

    Raises:
      OSError: the root refused; some parts may already be replaced.
    """
    num_parts = 1
    while num_parts * RECORDS_PER_PART < len(shards):
        num_parts *= 2
    parts: list[list[KnownShard]] = [[] for _ in range(num_parts)]
    for shard in shards:
        parts[zlib.crc32(shard.variant_id.encode()) % num_parts].append(shard)
    root.make_prefix(f"{namespace}/catalog")
    names = [f"{number}-of-{num_parts}.bin" for number in range(num_parts)]

    def write(number: int) -> None:
        root.replace(_key(namespace, names[number]), encode_part(parts[number], namespace), durable=False)

    for_each(root, write, range(num_parts))
    outdated = set(root.names(f"{namespace}/catalog")) - set(names)
    for name in filter(_PART.fullmatch, outdated):
        root.delete(_key(namespace, name))


def delete_catalog(root: Root, namespace: str, delete: Callable[[str], bool]) -> tuple[str, ...]:
    """Deletes all parts with `delete`, which returns whether a key is gone; returns
    the keys that are not.

    Raises:
      OSError: the root cannot be listed.
    """
    keys = [_key(namespace, name) for name in root.names(f"{namespace}/catalog")]
    went = for_each(root, delete, keys)
    return tuple(key for key, is_gone in zip(keys, went, strict=True) if not is_gone)


def _key(namespace: str, name: str) -> str:
    return f"{namespace}/catalog/{name}"

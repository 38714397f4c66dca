"""Records in formats unknown to this version. They belong to another release that still uses them, so they are never
read, replaced or treated as damaged, and their data objects do not count as orphans."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Mapping

from ccjax.store.errors import UnknownFormatError
from ccjax.store.objects import Root, for_each

_log = logging.getLogger(__name__)


class ForeignRecords:
    """Unknown records found so far in the namespace below `url`. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._objects: dict[str, str] = {}

    def __contains__(self, variant_id: str) -> bool:
        return variant_id in self._objects

    def objects(self) -> Mapping[str, str]:
        """Variant id -> its data object."""
        with self._lock:
            return dict(self._objects)

    def add(self, variant_id: str, error: UnknownFormatError) -> None:
        """Adds an unknown record; logs the first one."""
        with self._lock:
            is_first, self._objects[variant_id] = not self._objects, error.object_id
        if is_first:
            _log.warning("store: %s; records of another release in %s are left alone", error, self._url)

    def discard(self, variant_id: str) -> None:
        """Drops a variant whose unknown record is gone or was replaced by a known one."""
        with self._lock:
            self._objects.pop(variant_id, None)

    def keep(self, listed: Container[str]) -> None:
        """Drops all variants except these."""
        with self._lock:
            self._objects = {key: name for key, name in self._objects.items() if key in listed}

    def erase(
        self, root: Root, namespace: str, delete: Callable[[str], bool], deleted: Callable[[str, str], None]
    ) -> tuple[str, ...]:
        """Deletes all unknown records and their data with `delete`, which returns whether a key is gone, and reports
        each variant to `deleted`; returns the keys that could not be deleted."""

        def erase_one(variant_id: str, object_id: str) -> str | None:
            record, data = f"{namespace}/records/{variant_id}.json", f"{namespace}/data/{object_id}"
            if not delete(record):
                return record
            deleted(variant_id, object_id)
            self.discard(variant_id)
            return None if delete(data) else data

        return tuple(filter(None, for_each(root, lambda item: erase_one(*item), self.objects().items())))

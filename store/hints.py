"""JSON values of one identity that may be lost without harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ccjax.store.objects import Root


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

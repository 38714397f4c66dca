"""API keys and admin keys, from settings and from files that are reread when they change."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path

from ccjax.errors import ConfigError
from ccjax.server.settings import ServerSettings

logger = logging.getLogger(__name__)

LEAST_KEY_LENGTH = 16
"""Shorter keys in a file are refused, because they can be guessed."""

_LOOK_EVERY_S = 1.0
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class KeyRing:
    """The keys of one kind. Thread-safe.

    A file has one key per line, `TENANT:KEY` or `KEY`; blank lines and lines that begin with `#` are skipped. On use,
    it is checked for changes at most once a second. If it cannot be used then, the previous keys stay valid and a
    warning is logged; a file without any key accepts no one. Replace it by renaming a new file over it.

    Args:
      setting: name of the setting, for messages.
      key: one key that is always valid.
      path: the file.
      has_tenants: lines may name a tenant.

    Raises:
      ConfigError: the file cannot be read, has no keys, or has a malformed line; the message shows no line.
    """

    def __init__(self, setting: str, key: str | None, path: str | None, *, has_tenants: bool = True) -> None:
        self._setting = setting
        self._path = None if path is None else Path(path)
        self._has_tenants = has_tenants
        self._fixed = {} if key is None else {_digest(key): ""}
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._is_failing = False
        self._stamp: tuple[int, ...] = ()
        self._keys = self._fixed
        if self._path is not None:
            self._stamp = self._stamp_of(self._path)
            self._keys = self._fixed | self._read(self._path)
            if not self._keys:
                raise ConfigError(f"{setting}: wanted at least one key in {path}, got none")

    @property
    def is_asked_for(self) -> bool:
        """True unless there is neither a key nor a file."""
        return self._path is not None or bool(self._fixed)

    def find(self, token: str | None) -> str | None:
        """The tenant of the key that equals `token`, "" if it has none; None if no key does. Compares with every key in
        constant time."""
        if token is None:
            return None
        given = hashlib.sha256(token.encode("latin-1", "replace")).digest()  # as HTTP headers are decoded
        found = None
        for digest, tenant in self._current().items():
            if hmac.compare_digest(given, digest):
                found = tenant
        return found

    def has_tenant(self, tenant: str) -> bool:
        """True if one of the keys belongs to that tenant; "" is no tenant."""
        return bool(tenant) and tenant in self._current().values()

    def overlaps(self, other: KeyRing) -> bool:
        """True if both contain the same key."""
        return not self._current().keys().isdisjoint(other._current())

    def _current(self) -> dict[bytes, str]:
        path = self._path
        if path is None:
            return self._keys
        with self._lock:
            if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = time.monotonic()
                try:
                    stamp = self._stamp_of(path)  # first: a change while reading is noticed next time
                    if stamp != self._stamp:
                        self._keys = self._fixed | self._read(path)
                        self._stamp = stamp
                        logger.warning("%s: %s was read again, %d keys now", self._setting, path, len(self._keys))
                    self._is_failing = False
                except ConfigError as error:
                    if not self._is_failing:
                        logger.warning("%s; the previous keys stay valid", error)
                    self._is_failing = True
            return self._keys

    def _stamp_of(self, path: Path) -> tuple[int, ...]:
        try:
            found = os.stat(path)
        except OSError as error:
            raise ConfigError(f"{self._setting}: cannot read {path}: {error.strerror}") from None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)

    def _read(self, path: Path) -> dict[bytes, str]:
        try:
            lines = path.read_text("utf-8").splitlines()
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"{self._setting}: cannot read {path}: {reason}") from None  # the cause may show keys
        if mode & 0o077:
            logger.warning("%s: others than its owner may use %s; wanted mode 600", self._setting, path)
        found: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            tenant, colon, key = text.rpartition(":")
            if colon and not (self._has_tenants and _TENANT.fullmatch(tenant)):
                wanted = "TENANT:KEY (1 to 64 letters, digits, '_', '.', '-') or KEY" if self._has_tenants else "KEY"
                raise ConfigError(f"{self._setting}: {path}, line {number}: wanted {wanted}, without a colon in KEY")
            if len(key) < LEAST_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                wanted = f"a key of at least {LEAST_KEY_LENGTH} ASCII characters without spaces"
                raise ConfigError(f"{self._setting}: {path}, line {number}: wanted {wanted}")
            if _digest(key) in found:
                raise ConfigError(f"{self._setting}: {path}, line {number}: wanted each key once")
            found[_digest(key)] = tenant
        return found


class Keys:
    """All keys of a server.

    Attributes:
      api: of clients.
      admin: of operators, who may change the caches.

    Raises:
      ConfigError: as `KeyRing`, or a key is of both kinds.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.api = KeyRing("api_key_file", settings.api_key, settings.api_key_file)
        self.admin = KeyRing("admin_key_file", settings.admin_key, settings.admin_key_file, has_tenants=False)
        if self.api.overlaps(self.admin):
            raise ConfigError("admin_key: wanted another key than API keys: clients must not be able to erase")

    def is_admin(self, token: str | None) -> bool:
        """True if an admin key equals `token`. A key that a changed file also made an API key is not accepted."""
        return self.admin.find(token) is not None and self.api.find(token) is None


def salt_of(cache_salt: str, tenant: str) -> str:
    """The salt of the chunk-caches for a tenant's requests with that `cache_salt`: no tenant can choose a value that
    leads to another's caches. Without a tenant, ""."""
    return json.dumps([tenant, cache_salt]) if tenant else cache_salt and json.dumps([cache_salt])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

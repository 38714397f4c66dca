"""Keys with which the processes on a store authenticate each other's data.

A seal is `-hmac-sha256-` and the HMAC-SHA256 (RFC 2104), in hex, of the identity of the data (kind, namespace and name,
as JSON) and of the bytes. So sealed data can neither be changed nor moved to another name or to another model's or
tenant's part of a store. It can be replayed after a deletion, because a seal contains no time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
import os
import re
import stat
from pathlib import Path

import xxhash

_log = logging.getLogger(__name__)

LEAST_KEY_BYTES = 32
"""Shorter keys are refused; `openssl rand -hex 32` creates one of 64 characters."""

_MARK = b"-hmac-sha256-"
SEAL_BYTES = len(_MARK) + 2 * hashlib.sha256().digest_size

_SEAL = re.compile(re.escape(_MARK) + rb"[0-9a-f]{64}")

DIGESTS = {"xxh3": 16, "sha256": 64}
"""Digests that bind KV bytes to their record -> number of hex digits."""


class SealError(ValueError):
    """The bytes have no seal by one of the keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreKeys:
    """One or more secret keys: the first one seals, all of them are tried for reading.

    Raises:
      ValueError: there is no key, or a key is too short or given twice; the message does not show keys.
    """

    keys: tuple[bytes, ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not self.keys:
            raise ValueError("store keys: wanted at least one, got none")
        for number, key in enumerate(self.keys, 1):
            if len(key) < LEAST_KEY_BYTES:
                raise ValueError(
                    f"store keys: wanted keys of at least {LEAST_KEY_BYTES} characters, number {number} has {len(key)}"
                )
        if len(set(self.keys)) < len(self.keys):
            raise ValueError("store keys: wanted different keys, got one twice")

    @classmethod
    def of_file(cls, path: str | Path) -> StoreKeys:
        """Reads keys from a file, one per line; blank lines and lines that begin with `#` are skipped. Warns if other
        users may read the file.

        Raises:
          ValueError: as for the class, or the file cannot be read; the message names the file.
        """
        try:
            lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                _log.warning("store_key_file: others than its owner may use %s; wanted mode 600", path)
            return cls(tuple(line.encode() for line in lines if line and not line.startswith("#")))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"store_key_file: cannot read {path}: {reason}") from None  # the cause may show the bytes
        except ValueError as error:
            raise ValueError(f"store_key_file: {path}: {error}") from None

    def seal(self, what: tuple[str, ...], data: bytes) -> bytes:
        """`data` followed by its seal; `what` is the identity of the data."""
        return data + _seal(self.keys[0], what, data)

    def unseal(self, what: tuple[str, ...], sealed: bytes) -> bytes:
        """Inverse of `seal`.

        Raises:
          SealError: the data was not sealed with one of these keys and this identity.
        """
        data, found = without_seal(sealed), sealed[-SEAL_BYTES:]
        # Always checks all keys, so that timing reveals nothing.
        if sum(hmac.compare_digest(found, _seal(key, what, data)) for key in self.keys) != 1:
            raise SealError(f"{' '.join(what)}: the seal is missing, or not from one of this store's keys")
        return data


def without_seal(sealed: bytes) -> bytes:
    """The sealed data, unchecked."""
    return sealed[:-SEAL_BYTES]


def body_of(raw: bytes) -> bytes:
    """The sealed data, unchecked, or all bytes if there is no seal; only for display."""
    return without_seal(raw) if _SEAL.fullmatch(raw[-SEAL_BYTES:]) else raw


def digest_of(kind: str, data: memoryview) -> int:
    """Digest of contiguous bytes, one of `DIGESTS`: xxh3 (64 bits, at memory speed) detects damage, sha256 (1.8 GB/s on
    processors with instructions for it) also detects forgery."""
    if kind == "sha256":
        return int.from_bytes(hashlib.sha256(data).digest(), "big")
    return xxhash.xxh3_64_intdigest(data)


def _seal(key: bytes, what: tuple[str, ...], data: bytes) -> bytes:
    made = hmac.new(key, json.dumps(what).encode() + b"\n", hashlib.sha256)  # this JSON contains no line break
    made.update(data)
    return _MARK + made.hexdigest().encode()

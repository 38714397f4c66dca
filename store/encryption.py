"""Encryption of the contents of a store, with keys derived from those of its key file.

Encrypted data consists of `ccjaxAE1`, the id of the key (8 bytes), a random nonce (12 bytes), and the output of
AES-256-GCM (NIST SP 800-38D) with its tag (16 bytes) at the end. The identity of the data (kind, namespace and name, as
JSON) is associated data, so that data cannot be moved to another name. Each name has its own key, derived from that of
the file (HKDF, RFC 5869), so that the limit of 2^32 nonces per key applies to one name.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from ccjax.store.signing import SealError, StoreKeys

_MAGIC = b"ccjaxAE1"
_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 8, 12, 16
_HEAD_BYTES = len(_MAGIC) + _ID_BYTES + _NONCE_BYTES

OVERHEAD_BYTES = _HEAD_BYTES + _TAG_BYTES
"""Bytes that encryption adds."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreCipher:
    """Encrypts with the first of the keys, and decrypts with the key named in the data.

    Raises:
      ValueError: the package `cryptography` is missing.
    """

    keys: StoreKeys
    _secrets: dict[bytes, bytes] = dataclasses.field(init=False, repr=False, compare=False)
    _library: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_library", _Library())
        secrets = {}
        for key in self.keys.keys:
            name = self._library.derive(key, b"ccjax store key id 1", _ID_BYTES)
            secrets[name] = self._library.derive(key, b"ccjax store encryption 1", 32)
        object.__setattr__(self, "_secrets", secrets)

    def encrypt(self, what: tuple[str, ...], data: bytes) -> bytes:
        """Encrypts `data`; `what` is its identity."""
        out = np.empty(len(data) + OVERHEAD_BYTES, np.uint8)
        self.encrypt_into(what, memoryview(data), out)
        return out.tobytes()

    def decrypt(self, what: tuple[str, ...], raw: bytes) -> bytes:
        """Inverse of `encrypt`. Raises SealError: see `decrypt_into`."""
        out = np.empty(max(0, len(raw) - OVERHEAD_BYTES), np.uint8)
        self.decrypt_into(what, memoryview(raw), out)
        return out.tobytes()

    def encrypt_into(self, what: tuple[str, ...], data: memoryview, out: np.ndarray) -> None:
        """Encrypts into `out` `uint8[OVERHEAD_BYTES + bytes of data]`, contiguous like `data`."""
        name = next(iter(self._secrets))
        nonce = os.urandom(_NONCE_BYTES)
        out[:_HEAD_BYTES] = np.frombuffer(_MAGIC + name + nonce, np.uint8)
        cipher, said = self._cipher(name, what)
        cipher.encrypt_into(nonce, data, said, out[_HEAD_BYTES:].data)

    def decrypt_into(self, what: tuple[str, ...], raw: memoryview, out: np.ndarray) -> None:
        """Decrypts into `out`, contiguous; after an error its contents are undefined.

        Raises:
          SealError: `raw` was not encrypted with one of these keys, has another identity, or was changed.
        """
        head = bytes(raw[:_HEAD_BYTES])
        name, nonce = head[len(_MAGIC) : -_NONCE_BYTES], head[-_NONCE_BYTES:]
        if not head.startswith(_MAGIC) or len(raw) != out.nbytes + OVERHEAD_BYTES:
            raise SealError(f"{' '.join(what)}: it is not encrypted, or incomplete")
        if name not in self._secrets:
            raise SealError(f"{' '.join(what)}: none of this store's keys encrypted it")
        cipher, said = self._cipher(name, what)
        try:
            cipher.decrypt_into(nonce, raw[_HEAD_BYTES:], said, out.reshape(-1).view(np.uint8).data)
        except self._library.invalid_tag:
            raise SealError(f"{' '.join(what)}: it does not match this store's key and that name") from None

    def _cipher(self, name: bytes, what: tuple[str, ...]) -> tuple[Any, bytes]:
        """AES-GCM with the key for the name in `what`, and `what` as associated data."""
        said = json.dumps(what).encode()
        return self._library.aes_gcm(self._library.expand(self._secrets[name], said)), said


class KVCipher:
    """Applies a `StoreCipher` to the layers of the data objects of one namespace."""

    def __init__(self, cipher: StoreCipher, namespace: str) -> None:
        self._cipher = cipher
        self._namespace = namespace

    def encrypt(self, object_id: str, stored: np.ndarray) -> np.ndarray:
        """Encrypts each layer of an object `[L, ...]`, which must be written only once: `uint8[L, 1, 1, 1, B]`."""
        frames = np.empty((len(stored), 1, 1, 1, stored[0].nbytes + OVERHEAD_BYTES), np.uint8)
        for number, layer in enumerate(stored):
            data = np.ascontiguousarray(layer).reshape(-1).view(np.uint8).data
            self._cipher.encrypt_into(self._what(object_id, number), data, frames[number].reshape(-1))
        return frames

    def decrypt(self, object_id: str, number: int, frame: np.ndarray, out: np.ndarray) -> None:
        """Decrypts a layer of the object into `out`, contiguous. Raises SealError as `StoreCipher.decrypt_into`."""
        self._cipher.decrypt_into(self._what(object_id, number), frame.reshape(-1).data, out)

    def _what(self, object_id: str, number: int) -> tuple[str, ...]:
        return "kv", self._namespace, object_id, str(number)


class _Library:
    """The used parts of the package `cryptography`, imported only if a store is encrypted."""

    def __init__(self) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
        except ModuleNotFoundError as error:
            raise ValueError(
                "encrypt_store: wanted the package cryptography, which is not installed: "
                "pip install 'ccjax[encryption]'"
            ) from error
        self.aes_gcm: Any = AESGCM
        self.invalid_tag: type[Exception] = InvalidTag
        self._hash, self._hkdf, self._hkdf_expand = SHA256, HKDF, HKDFExpand

    def derive(self, key: bytes, info: bytes, num_bytes: int) -> bytes:
        """HKDF-SHA256 of a key from the key file."""
        return self._hkdf(self._hash(), num_bytes, None, info).derive(key)

    def expand(self, secret: bytes, info: bytes) -> bytes:
        """Expands a key derived by HKDF to another one of 32 bytes."""
        return self._hkdf_expand(self._hash(), 32, info).derive(secret)

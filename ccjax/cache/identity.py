"""The identity of a store's variants: model, tenant, and the keys that seal or encrypt them."""

from __future__ import annotations

from ccjax.config import EngineConfig
from ccjax.errors import ConfigError
from ccjax.store.encryption import StoreCipher
from ccjax.store.signing import StoreKeys
from ccjax.store.spec import StoreIdentity


def identity_for(config: EngineConfig, model_fingerprint: str) -> StoreIdentity:
    """The identity of the variants that an engine with these settings stores and reads; reads the key file.

    Raises:
      ConfigError: the key file cannot be read, or has no usable keys; the package for encryption is missing; encryption
        is combined with compression.
    """
    if config.encrypt_store and config.disk_compression != "none":
        raise ConfigError(f"disk_compression: wanted 'none' with encrypt_store, got {config.disk_compression!r}")
    return identity_of(model_fingerprint, config.tenant_salt, config.store_key_file, config.encrypt_store)


def identity_of(
    model_fingerprint: str, tenant_salt: str, store_key_file: str | None, encrypt_store: bool = False
) -> StoreIdentity:
    """As `identity_for`, for programs without an engine."""
    try:
        keys = None if store_key_file is None else StoreKeys.of_file(store_key_file)
        cipher = StoreCipher(keys) if encrypt_store and keys is not None else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return StoreIdentity(model_fingerprint, tenant_salt, keys, cipher)

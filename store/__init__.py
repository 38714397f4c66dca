"""Chunk KV shards in memory, on disk and in buckets."""

from ccjax.store.disk import TensorStoreTier
from ccjax.store.encryption import StoreCipher
from ccjax.store.errors import (
    CommitUnknownError,
    IndexUnavailableError,
    ShardCorruptError,
    ShardForgedError,
    ShardNotFoundError,
    StoreError,
    StoreIdentityError,
    StoreUnavailableError,
    TierFullError,
)
from ccjax.store.formats import StorageFormat
from ccjax.store.host import HostTier
from ccjax.store.signing import StoreKeys
from ccjax.store.spec import FORMAT_VERSION, KVSpec, ShardRecord, ShardSummary, StoreIdentity
from ccjax.store.tickets import LoadTicket, StoreTicket
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import TierUsage

__all__ = [
    "FORMAT_VERSION",
    "CommitUnknownError",
    "HostTier",
    "IndexUnavailableError",
    "KVSpec",
    "LoadTicket",
    "ShardCorruptError",
    "ShardForgedError",
    "ShardNotFoundError",
    "ShardRecord",
    "ShardSummary",
    "StorageFormat",
    "StoreCipher",
    "StoreError",
    "StoreIdentity",
    "StoreIdentityError",
    "StoreKeys",
    "StoreTicket",
    "StoreUnavailableError",
    "TensorStoreTier",
    "TierFullError",
    "TierUsage",
    "TieredStore",
]

"""Chunk KV shards in memory, on disk and in buckets. Knows arrays and bytes, no model, policy or device."""

from store.disk import TensorStoreTier
from store.encryption import StoreCipher
from store.errors import (
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
from store.formats import StorageFormat
from store.host import HostTier
from store.signing import StoreKeys
from store.spec import FORMAT_VERSION, KVSpec, ShardRecord, ShardSummary, StoreIdentity
from store.tickets import LoadTicket, StoreTicket
from store.tiered import TieredStore
from store.usage import TierUsage

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

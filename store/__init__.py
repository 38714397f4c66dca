"""Chunk KV shards in memory, on disk and in buckets. Knows arrays and bytes, no model, policy or device."""

from store.disk import TensorStoreTier
from store.errors import (
    CommitUnknownError,
    ShardCorruptError,
    ShardNotFoundError,
    StoreError,
    StoreIdentityError,
    StoreUnavailableError,
    TierFullError,
)
from store.formats import StorageFormat
from store.host import HostTier
from store.spec import FORMAT_VERSION, KVSpec, ShardRecord, ShardSummary, StoreIdentity
from store.tickets import LoadTicket, StoreTicket
from store.tiered import TieredStore
from store.usage import TierUsage

__all__ = [
    "FORMAT_VERSION",
    "CommitUnknownError",
    "HostTier",
    "KVSpec",
    "LoadTicket",
    "ShardCorruptError",
    "ShardNotFoundError",
    "ShardRecord",
    "ShardSummary",
    "StorageFormat",
    "StoreError",
    "StoreIdentity",
    "StoreIdentityError",
    "StoreTicket",
    "StoreUnavailableError",
    "TensorStoreTier",
    "TierFullError",
    "TierUsage",
    "TieredStore",
]

"""Chunk KV shards in memory, on disk and in buckets."""

from ccjax.store.disk import TensorStoreTier
from ccjax.store.errors import (
    CommitUnknownError,
    IndexUnavailableError,
    ShardCorruptError,
    ShardNotFoundError,
    StoreError,
    StoreIdentityError,
    StoreUnavailableError,
    TierFullError,
)
from ccjax.store.memory import HostTier
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
    "ShardNotFoundError",
    "ShardRecord",
    "ShardSummary",
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

"""Exceptions of the store, all subclasses of `StoreError`."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of this package; a caller can treat any failed load as a miss."""


class ShardNotFoundError(StoreError, KeyError):
    """No tier holds the variant, or it was evicted (by this or another process) after it was looked up."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would print the repr, with quotes


class ShardCorruptError(StoreError):
    """Stored bytes differ from those written, or belong to another variant or model: `discard` the variant."""


class StoreIdentityError(StoreError, ValueError):
    """The store belongs to another model, another KV shape or another format version."""


class TierFullError(StoreError):
    """The bytes do not fit in the tier's budget; evict first."""


class StoreUnavailableError(StoreError, OSError):
    """The file system or object store refused the operation; the stored data may be sound."""


class CommitUnknownError(StoreUnavailableError):
    """The committing write got no answer: it may have happened, or may happen later."""


class IndexUnavailableError(StoreError, OSError):
    """The shared index did not answer, or refused. No data is lost, because the store is authoritative."""

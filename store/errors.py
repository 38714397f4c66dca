"""Exceptions that the store raises on purpose, all under `StoreError`."""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error of this package; lets a caller turn any failed load into a miss."""


class ShardNotFoundError(StoreError, KeyError):
    """No tier holds the variant, or it was evicted (by this or another process) after it was looked up."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would print the repr, quotes and all


class ShardCorruptError(StoreError):
    """Stored bytes are not what was written, or belong to another variant or model: `discard` the variant."""


class UnknownFormatError(ShardCorruptError):
    """The record is sound but in a format unknown to this version: it belongs to another release.

    Attributes:
      object_id: its data object.
    """

    def __init__(self, message: str, object_id: str) -> None:
        super().__init__(message)
        self.object_id = object_id


class ShardForgedError(ShardCorruptError):
    """The bytes were not sealed, with one of this store's keys, under the name that they are read by."""


class StoreIdentityError(StoreError, ValueError):
    """The store belongs to another model, another KV shape or another format version."""


class TierFullError(StoreError):
    """The bytes do not fit in the tier's budget; evict first."""


class StoreUnavailableError(StoreError, OSError):
    """The file system or object store refused the operation; the stored data may well be sound."""


class CommitUnknownError(StoreUnavailableError):
    """The committing write got no answer: it may have happened, or may still happen."""


class IndexUnavailableError(StoreError, OSError):
    """The shared index did not answer, or refused. Nothing is lost: the store is authoritative."""

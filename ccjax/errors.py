"""Exceptions that name what the caller did wrong; the server maps them to status codes."""

from __future__ import annotations

from collections.abc import Sequence


class RequestError(ValueError):
    """A request cannot be served. `argument` names the field; the message has the accepted values and the given one."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class ContextLengthError(RequestError):
    """The prompt and the requested answer do not fit into the model's context."""


class UnknownDocumentError(RequestError):
    """The document id is unknown, or this version of it is."""


class PinLimitError(RequestError):
    """The pin would exceed the limit on pinned documents."""


class ReadOnlyError(RequestError):
    """The engine is read-only."""


class OverloadError(RuntimeError):
    """The admission queue is full, in total or for this user; `retry_after_s` estimates when to retry."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(RuntimeError):
    """The answer was not complete before its deadline."""


class DeviceMemoryError(RuntimeError):
    """The device ran out of memory in a step of this request; a retry may succeed."""


class LogitsError(RuntimeError):
    """The model's logits for this request are not finite, so that there is no answer."""


class EraseIncompleteError(RuntimeError):
    """Some data could not be deleted yet. It is no longer used, and its deletion is retried.

    `remaining` lists what is left: keys of the store, or the reason why they are unknown.
    """

    def __init__(self, message: str, remaining: Sequence[str]) -> None:
        super().__init__(message)
        self.remaining = tuple(remaining)


class ConfigError(ValueError):
    """The engine cannot start with this configuration; the message names the argument."""


class SnapshotError(ValueError):
    """A snapshot cannot be written or read here: it is missing, damaged, or of another model, shape or version."""

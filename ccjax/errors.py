"""Errors that name what the caller did wrong. They know nothing of HTTP; the server maps them to status codes."""

from __future__ import annotations

from collections.abc import Sequence


class RequestError(ValueError):
    """A request cannot be served as it stands: `argument` names the field, the message what was wanted and got."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class ContextLengthError(RequestError):
    """The prompt and the wanted answer do not fit into the model's context."""


class UnknownDocumentError(RequestError):
    """Nothing is known under this document id, or under this version of it."""


class PinLimitError(RequestError):
    """More would be pinned than may be."""


class ReadOnlyError(RequestError):
    """The engine was started to change nothing in its store."""


class OverloadError(RuntimeError):
    """As many requests wait as may, in all or from this one who asks; `retry_after_s` says about when one may come."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(OverloadError):
    """Who asks has used up what it may."""


class DeadlineError(RuntimeError):
    """The answer was not complete within the time after which it is of no use."""


class DeviceMemoryError(RuntimeError):
    """The device had no memory left for a step that this request was part of; the next may find some."""


class EraseIncompleteError(RuntimeError):
    """Something could not be deleted yet; it is not used any more, and its deletion is tried again.

    `remaining` names it: keys of the store, or why they cannot be known.
    """

    def __init__(self, message: str, remaining: Sequence[str]) -> None:
        super().__init__(message)
        self.remaining = tuple(remaining)


class ConfigError(ValueError):
    """The engine cannot start with this configuration; the message names the argument."""


class SnapshotError(ValueError):
    """A snapshot cannot be taken there, or not be used here: none, damaged, of another model, shape or version."""

"""What ends a request before its answer is complete, as the one who asked is told."""

from __future__ import annotations

import jax

from ccjax.errors import ContextLengthError, DeadlineError, DeviceMemoryError
from ccjax.policy.scheduling import NeverFitsError
from ccjax.runner.cancellation import PrefillCancelledError


class CancelledError(Exception):
    """The request was cancelled before its answer was complete."""


def too_late() -> DeadlineError:
    """For a request whose deadline has come."""
    return DeadlineError("timeout_s: the answer was not complete in that time")


def as_request_error(error: Exception) -> Exception:
    """`error` in the caller's terms; one that has none stays what it is."""
    if isinstance(error, PrefillCancelledError):
        return CancelledError()
    if isinstance(error, NeverFitsError):
        return ContextLengthError("prompt", str(error))
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return DeviceMemoryError("the device had too little memory for a step that this request was part of")
    return error

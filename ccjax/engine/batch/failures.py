"""The errors that end a request before its answer is complete, as the caller sees them."""

from __future__ import annotations

import jax

from ccjax.errors import ContextLengthError, DeadlineError, DeviceMemoryError
from ccjax.policy.scheduling import NeverFitsError
from ccjax.runner.cancellation import PrefillCancelledError


class CancelledError(Exception):
    """The request was cancelled before its answer was complete."""


def too_late() -> DeadlineError:
    """The error of a request whose deadline has passed."""
    return DeadlineError("timeout_s: the answer was not complete in that time")


def as_request_error(error: Exception) -> Exception:
    """Translates an internal error for the caller; other errors are returned unchanged."""
    if isinstance(error, PrefillCancelledError):
        return CancelledError()
    if isinstance(error, NeverFitsError):
        return ContextLengthError("prompt", str(error))
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return DeviceMemoryError("the device had too little memory for a step that this request was part of")
    return error

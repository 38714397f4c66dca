"""Errors in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ccjax.errors import (
    ContextLengthError,
    DeadlineError,
    DeviceMemoryError,
    EraseIncompleteError,
    LogitsError,
    OverloadError,
    PinLimitError,
    ReadOnlyError,
    RequestError,
    UnknownDocumentError,
)
from ccjax.server.idle_thread import QueueFullError, WorkerClosedError

_CODES = {404: "not_found", 405: "method_not_allowed"}
_REFUSALS: dict[type[RequestError], tuple[int, str]] = {
    ContextLengthError: (400, "context_length_exceeded"),
    UnknownDocumentError: (404, "document_not_found"),
    PinLimitError: (409, "pin_limit"),
    ReadOnlyError: (409, "read_only"),
}
_MOST_REMAINING = 5


class ApiError(Exception):
    """A refusal with its HTTP status.

    `param` names the request's field, `code` the reason, as in OpenAI's API; None where that has no code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def reason(self) -> str:
        """Label of the error counter; one of a fixed few."""
        return self.code or "invalid_request"

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """The error for clients; an unforeseen exception becomes a 500 without details.

    Args:
      names: engine argument -> field of the API, if they differ.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        argument = (names or {}).get(error.argument, error.argument)
        message = argument + str(error).removeprefix(error.argument)
        status, code = _REFUSALS.get(type(error), (400, None))
        return ApiError(status, message, param=argument, code=code)
    if isinstance(error, OverloadError):
        wait_s = max(1, math.ceil(error.retry_after_s))
        message = f"{error}; try again in about {wait_s} s"
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait_s)})
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), param="timeout_s", code="deadline_exceeded")
    if isinstance(error, DeviceMemoryError):
        return ApiError(503, f"{error}; try again", code="out_of_memory", headers={"Retry-After": "1"})
    if isinstance(error, LogitsError):
        return ApiError(500, str(error), code="logits_not_finite")
    if isinstance(error, EraseIncompleteError):
        shown = [*error.remaining[:_MOST_REMAINING], *(["..."] if len(error.remaining) > _MOST_REMAINING else [])]
        message = f"{error}: {'; '.join(shown)}"
        return ApiError(503, message, code="erase_incomplete", headers={"Retry-After": "10"})
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def shutting_down() -> ApiError:
    """The refusal of a server, or of a cluster's front, that is shutting down."""
    return ApiError(503, "the server is shutting down", code="not_ready", headers={"Retry-After": "1"})


@contextlib.contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Turns the engine's refusals into `ApiError`s that name the fields of the API.

    Args:
      names: engine argument -> field of the API, if they differ.
    """
    try:
        yield
    except RequestError as error:
        raise as_api_error(error, names) from error


@contextlib.contextmanager
def refusals_of_worker() -> Iterator[None]:
    """Turns the worker's refusals into `ApiError`s."""
    try:
        yield
    except QueueFullError:
        message = "too many cache operations are queued already; try again later"
        raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
    except WorkerClosedError:
        raise shutting_down() from None

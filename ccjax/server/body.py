"""Reads request bodies: size limit first, then UTF-8, JSON and types, each with its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest

from ccjax.server.documented import EXAMPLES, narrow
from ccjax.server.errors import ApiError

Model = TypeVar("Model", bound=BaseModel)
_SCHEMAS = "#/components/schemas/{model}"
_MOST_ERRORS = 3


def json_body(model: type[Model]) -> Callable[[HttpRequest], Awaitable[Model]]:
    """A FastAPI dependency that parses the body as `model`; `app.state.max_body_bytes` limits its size.

    FastAPI's own body parameters read without limit, parse on the event loop, and report encoding and content type
    errors differently from release to release.
    """

    async def read(request: HttpRequest) -> Model:
        data = await _read_limited(request, request.app.state.max_body_bytes)
        return await asyncio.to_thread(parse_body, model, data)

    return read


def describe(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with that body."""
    schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
    content = {"schema": schema, "example": EXAMPLES[model.__name__]}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def add_schemas(openapi: dict[str, Any], models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """`openapi` with the schemas that `describe` refers to."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_SCHEMAS)
    narrow(definitions["$defs"])
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    return openapi


async def _read_limited(request: HttpRequest, limit: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"Content-Type: wanted application/json, got {kind or 'none'}", code="unsupported_media_type"
        )
    too_large = ApiError(413, f"body: wanted at most {limit} bytes, got more", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_large
    return bytes(data)


def parse_body(model: type[Model], data: bytes) -> Model:
    """Parses the body as `model`.

    Raises:
      ApiError: 400, naming what is wrong.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"body: wanted UTF-8, got byte 0x{data[error.start]:02x} at offset {error.start}"
        raise ApiError(400, message, code="invalid_encoding") from None
    if "NaN" in text or "Infinity" in text:  # Python's own JSON, which no answer may have either
        try:
            pydantic_core.from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"body: wanted JSON, got {error}", code="invalid_json") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise _as_api_error(error, model) from None


def _as_api_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    details = error.errors(include_url=False)
    first = details[0]
    if first["type"] == "json_invalid":
        return ApiError(
            400, "body: wanted JSON, got " + first["msg"].removeprefix("Invalid JSON: "), code="invalid_json"
        )
    messages = [_message(detail, model) for detail in details[:_MOST_ERRORS]]
    if len(details) > _MOST_ERRORS:
        messages.append(f"and {len(details) - _MOST_ERRORS} more")
    return ApiError(400, "; ".join(messages), param=_path(first["loc"]))


def _message(detail: Any, model: type[BaseModel]) -> str:
    path, message = _path(detail["loc"]) or "body", detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{path}: this field is required"
    if detail["type"] == "extra_forbidden":
        return f"{path}: no such field, wanted one of {', '.join(model.model_fields)}"
    shown = repr(detail["input"])
    kind = type(detail["input"]).__name__
    return f"{path}: {message[0].lower()}{message[1:]}, got {shown if len(shown) <= 80 else kind}"


def _path(loc: Sequence[int | str]) -> str | None:
    """`("documents", 2, "text")` as `documents[2].text`; union members, in CamelCase or brackets, are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "RetrievalIn"):
            path += f".{part}" if path else part
    return path or None

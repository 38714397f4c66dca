"""HTTP routes for operators: cached documents, pins, warm jobs. Disabled without an admin key.

A document id is the rest of the path and may contain slashes, line breaks and whatever else an id may have, each
percent-encoded, so operations on it come before it or in the method.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from starlette.convertors import Convertor, register_url_convertor  # codespell:ignore

from ccjax.engine import CachedDocument
from ccjax.server.body import describe, json_body
from ccjax.server.errors import ApiError, as_api_error
from ccjax.server.keys import Keys
from ccjax.server.schemas import PinBody, WarmBody
from ccjax.server.service import Service
from ccjax.server.warming import WarmJob
from ccjax.types import LONGEST_ID

ADMIN_BODIES = (PinBody, WarmBody)
WHOLE_LISTING = "ccjax.whole_listing"
"""ASGI scope key, true if the caller of the application merges listings and paginates them itself; clients cannot set
it."""

DEFAULT_PAGE = 1000
_LARGEST_PAGE = 10_000
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "an argument is wrong; the error names it"},
    401: {"description": "no admin key, or a wrong one"},
    403: {"description": "the key of a client, or a server without an admin key"},
    404: {"description": "nothing of this document or version is cached, or there is no such job"},
    409: {"description": "more than may be pinned, a read-only engine, or a job that is over"},
    429: {"description": "the queue is full; try again later"},
    503: {"description": "not ready, or something could not be deleted yet and will be retried"},
}
_ID: dict[str, Any] = {"minLength": 1, "maxLength": LONGEST_ID}
Version = Annotated[str | None, Query(description="one version; all of them if omitted", json_schema_extra=_ID)]
Erase = Annotated[str, Query(json_schema_extra={"enum": ["true", "false"]})]


class _DocumentId(Convertor[str]):  # codespell:ignore
    """The rest of a path; Starlette's own `path` ends at a line break."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return urllib.parse.quote(value, safe="")


register_url_convertor("document_id", _DocumentId())


def admin_routes(service: Service) -> APIRouter:
    """Routes for operators, protected by the admin key."""
    router = APIRouter(
        prefix="/v1/cache", tags=["cache"], dependencies=[Depends(_admin_check(service.keys))], responses=_ERRORS
    )

    def counted(operation: str) -> Callable[..., Awaitable[Any]]:
        async def run(work: Awaitable[Any]) -> Any:
            status = 200
            try:
                return await work
            except Exception as error:
                status = as_api_error(error).status
                raise
            finally:
                service.metrics.count_admin(operation, status)

        return run

    @router.get("/documents", summary="Documents in the cache")
    async def documents(request: Request, limit: str = str(DEFAULT_PAGE), offset: str = "0") -> dict[str, Any]:
        _check_query(request, "limit", "offset")
        count = _number("limit", limit, 1, _LARGEST_PAGE)
        start = _number("offset", offset, 0, 10**9)
        found: Sequence[CachedDocument] = await counted("list")(service.between(lambda engine: engine.documents.list()))
        page = found if request.scope.get(WHOLE_LISTING) else found[start : start + count]
        data = [_document(item) for item in page]
        return {"object": "list", "data": data, "total": len(found), "has_more": start + count < len(found)}

    @router.get("/documents/{document_id:document_id}", summary="One document, by version")
    async def document(request: Request, document_id: str, version: Version = None) -> dict[str, Any]:
        _check_query(request, "version")
        found = await counted("get")(service.between(lambda engine: engine.documents.list(document_id, version)))
        return {"object": "list", "data": [_document(item) for item in found]}

    @router.delete("/documents/{document_id:document_id}", summary="Invalidate a document, or erase every trace of it")
    async def remove(
        request: Request, document_id: str, version: Version = None, erase: Erase = "false"
    ) -> JSONResponse:
        _check_query(request, "version", "erase")
        whole = _flag("erase", erase)
        operation = "erase" if whole else "invalidate"
        removal = await counted(operation)(
            service.between(lambda engine: getattr(engine.documents, operation)(document_id, version))
        )
        body = {
            "object": "cache.removal",
            "id": removal.document_id,
            "version": removal.version,
            "erased": whole,
            "chunks": removal.chunks,
            "kept_chunks": removal.kept_chunks,
            "variants": removal.variants,
            "bytes": removal.num_bytes,
            "in_documents_directory": service.has_own(document_id),
        }
        return JSONResponse(body)

    @router.put("/pins/{document_id:document_id}", summary="Pin a document for a time", openapi_extra=describe(PinBody))
    async def pin(
        request: Request,
        document_id: str,
        body: Annotated[PinBody, Depends(json_body(PinBody))],
        version: Version = None,
    ) -> dict[str, Any]:
        _check_query(request, "version")
        made = await counted("pin")(
            service.between(lambda engine: engine.documents.pin(document_id, version, ttl_s=body.ttl_s, host=body.host))
        )
        return {"object": "cache.pin", "id": document_id, "version": version, "until": made.until, "host": made.host}

    @router.delete("/pins/{document_id:document_id}", summary="Remove a pin of exactly this document and version")
    async def unpin(request: Request, document_id: str, version: Version = None) -> dict[str, Any]:
        _check_query(request, "version")

        async def take_back() -> None:
            if not await service.between(lambda engine: engine.documents.unpin(document_id, version)):
                named = f"document {document_id!r}" + (f", version {version!r}" if version is not None else "")
                raise ApiError(404, f"document_id: there is no pin of {named}", param="document_id", code="no_pin")

        await counted("unpin")(take_back())
        return {"object": "cache.pin", "id": document_id, "version": version, "deleted": True}

    @router.post("/warm", status_code=202, summary="Compute documents ahead", openapi_extra=describe(WarmBody))
    async def warm(request: Request, body: Annotated[WarmBody, Depends(json_body(WarmBody))]) -> JSONResponse:
        _check_query(request)
        job: WarmJob = await counted("warm")(service.warm(body))
        return JSONResponse(job.as_json(), 202, {"Location": f"/v1/cache/warm/{job.id}"})

    @router.get("/warm/{job_id}", summary="Progress of a warm job")
    async def warm_job(job_id: str) -> dict[str, Any]:
        return service.warm_job(job_id).as_json()

    @router.delete("/warm/{job_id}", summary="Cancel a warm job; what it computed stays")
    async def end_warm_job(job_id: str) -> dict[str, Any]:
        job = service.warm_job(job_id)
        if not service.backend.warm_jobs.cancel(job):
            raise ApiError(409, f"job_id: wanted a job that runs, {job_id} is {job.status}", code="job_over")
        return job.as_json()

    return router


def bearer_token(request: Request) -> str | None:
    """The token of `Authorization: Bearer TOKEN`."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _admin_check(keys: Keys) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if not keys.admin.is_asked_for:
            # Required even from this machine: behind a proxy every client seems to be local.
            message = "this server's cache cannot be administered; start it with an admin key (--admin-key-file)"
            raise ApiError(403, message, code="admin_disabled")
        token = bearer_token(request)
        if keys.is_admin(token):
            return
        if keys.api.find(token) is not None:
            raise ApiError(403, "wanted the admin key, got the API key of clients", code="admin_key_required")
        message = "wanted the server's admin key as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_admin_key", headers={"WWW-Authenticate": "Bearer"})

    return check


def _check_query(request: Request, *known: str) -> None:
    """Refuses unknown query parameters: `?versoin=1` must not erase every version."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            wanted = f"one of {', '.join(known)}" if known else "none"
            raise ApiError(400, f"{name}: no such query parameter, wanted {wanted}", param=name)
        if names.count(name) > 1:
            raise ApiError(400, f"{name}: wanted it once, got it {names.count(name)} times", param=name)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise ApiError(400, f"{name}: wanted a number from {least} to {most}, got {text!r}", param=name)
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ApiError(400, f"{name}: wanted true or false, got {text!r}", param=name)
    return text == "true"


def _document(item: CachedDocument) -> dict[str, Any]:
    fields = dataclasses.asdict(item)
    renamed = {"object": "cache.document", "id": fields.pop("document_id"), "version": fields.pop("version")}
    return renamed | {"bytes": fields.pop("num_bytes")} | fields

"""The HTTP routes: OpenAI's API, health, readiness and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import ccjax
from ccjax.engine import Delta
from ccjax.engine import Response as Answer
from ccjax.errors import RequestError
from ccjax.server.admin import ADMIN_BODIES, admin_routes, bearer_token
from ccjax.server.body import add_schemas, describe, json_body
from ccjax.server.errors import ApiError, as_api_error, field_names
from ccjax.server.keys import KeyRing
from ccjax.server.openai_format import DONE, Formatter, Kind, event
from ccjax.server.page import live_routes, page_routes
from ccjax.server.schemas import ChatBody, CompletionBody, Generation, TokenizeBody
from ccjax.server.service import Service
from ccjax.server.telemetry import RequestTelemetry
from ccjax.server.trace_format import trace_json
from ccjax.server.worker import Job, JobCancelledError

logger = logging.getLogger(__name__)

PASSAGES = "ccjax.passages"
"""ASGI scope key for passages of the server's own documents that the caller of the application already retrieved;
clients cannot set it."""

WAITED_S = "ccjax.waited_s"
"""ASGI scope key for the seconds since the caller received the request; they count towards its `timeout_s`."""

_BODIES = (ChatBody, CompletionBody, TokenizeBody, *ADMIN_BODIES)
_CLIENT_DISCONNECTED = 499  # nginx's code; the client does not see it
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Content type besides JSON if the body says `stream`; the schema describes each event, as in OpenAPI 3.2."""

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer events


def create_app(service: Service) -> FastAPI:
    """The ASGI application of `service`, which may still be loading; shutting it down closes the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        fresh = asyncio.create_task(service.keep_fresh())
        yield
        fresh.cancel()
        await asyncio.to_thread(service.close)

    app = FastAPI(title="ccjax", version=ccjax.__version__, lifespan=lifespan)
    app.state.max_body_bytes = service.settings.max_body_bytes
    _add_error_handlers(app, service)
    app.include_router(_public_routes(service))
    app.include_router(admin_routes(service))
    with_key = [Depends(_bearer_check(service.keys.api))]
    app.include_router(_api_routes(service), dependencies=with_key)
    if service.settings.page:
        app.include_router(live_routes(service), dependencies=with_key)
        app.router.routes += page_routes()

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = add_schemas(schema, _BODIES)
        return app.openapi_schema

    app.openapi = openapi
    return app


def _public_routes(service: Service) -> APIRouter:
    """Routes for probes and scrapers, without a key."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        is_ready, status = service.readiness
        return JSONResponse(status, 200 if is_ready else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _api_routes(service: Service) -> APIRouter:
    """Routes for clients, protected by the API key if there is one."""
    router = APIRouter()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": ccjax.__version__}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @router.post("/tokenize", openapi_extra=describe(TokenizeBody))
    async def tokenize(body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))]) -> dict[str, Any]:
        return await service.tokenize(body)

    @router.post("/v1/chat/completions", openapi_extra=describe(ChatBody), responses=_ANSWERS)
    async def chat(request: Request, body: Annotated[ChatBody, Depends(json_body(ChatBody))]) -> Response:
        return await _generate(service, request, body, "chat")

    @router.post("/v1/completions", openapi_extra=describe(CompletionBody), responses=_ANSWERS)
    async def complete(
        request: Request, body: Annotated[CompletionBody, Depends(json_body(CompletionBody))]
    ) -> Response:
        return await _generate(service, request, body, "completion")

    return router


def _model(service: Service) -> dict[str, Any]:
    backend = service.backend
    return {
        "id": backend.model,
        "object": "model",
        "created": service.started_at,
        "owned_by": "ccjax",
        "max_model_len": backend.engine.max_model_len,
    }


async def _generate(service: Service, request: Request, body: Generation, kind: Kind) -> Response:
    telemetry = service.telemetry(kind, request.headers)
    try:
        id_prefix = "chatcmpl" if kind == "chat" else "cmpl"
        job, documents = await service.start_job(
            body,
            id_prefix=id_prefix,
            passages=request.scope.get(PASSAGES),
            tenant=request.state.tenant or "",
            waited_s=request.scope.get(WAITED_S, 0.0),
        )
        telemetry.job = job
        watcher = asyncio.create_task(_cancel_on_disconnect(request, telemetry, job))
        formatter = Formatter(
            kind,
            id=job.request.request_id,
            model=service.backend.model,
            created=int(time.time()),
            documents=documents,
        )
        deltas = job.deltas()
        with field_names(body.argument_names()):
            # A stream starts with the first token, so that any earlier failure has a status code of its own.
            first = await anext(deltas)
            if body.stream:
                events = _events(service, telemetry, first, deltas, formatter, body.include_usage, watcher)
                return StreamingResponse(events, media_type="text/event-stream", headers=_SSE_HEADERS)
            async for _ in deltas:
                pass
        assert job.response is not None
        await _add_trace(service, job, job.response, formatter)
        telemetry.end()
        return JSONResponse(formatter.answer(job.response))
    except JobCancelledError:
        telemetry.end()
        return Response(status_code=_CLIENT_DISCONNECTED)
    except Exception as error:
        refusal = _refusal(service, error)
        telemetry.end(refusal)
        return refusal.response()


async def _events(
    service: Service,
    telemetry: RequestTelemetry,
    first: Delta,
    rest: AsyncIterator[Delta],
    formatter: Formatter,
    include_usage: bool,
    watcher: asyncio.Task[None],
) -> AsyncIterator[str]:
    """Streams all answers; `watcher` is only kept alive by the reference."""
    job = telemetry.job
    assert job is not None
    try:
        await _add_trace(service, job, first.response, formatter)
        for chunk in formatter.chunks(first, include_usage=include_usage):
            yield event(chunk)
        async for delta in rest:
            await _add_trace(service, job, delta.response, formatter)
            for chunk in formatter.chunks(delta, include_usage=include_usage):
                yield event(chunk)
    except JobCancelledError:
        return
    except Exception as error:
        refusal = _refusal(service, error)
        telemetry.end(refusal)
        yield event(refusal.body())
    finally:
        job.cancel()
        telemetry.end()
    yield DONE


async def _add_trace(service: Service, job: Job, response: Answer | None, formatter: Formatter) -> None:
    """Gives the formatter the trace of a response, if there is one and it was requested."""
    if response is not None and response.trace is not None:
        # In a thread: the text of thousands of tokens takes tens of milliseconds.
        trace = await asyncio.to_thread(
            trace_json,
            response.trace,
            service.backend.engine.tokenizer,
            arrived_s=job.arrived_s,
            found_s=job.found_s,
            submitted_s=job.submitted_s,
        )
        formatter.add_trace(trace)


async def _cancel_on_disconnect(request: Request, telemetry: RequestTelemetry, job: Job) -> None:
    """Cancels the job when the client hangs up; also returns when the response is complete."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()
    telemetry.end()


def _bearer_check(keys: KeyRing) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        request.state.tenant = keys.find(bearer_token(request))
        if keys.is_asked_for and request.state.tenant is None:
            message = "wanted the server's API key as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    return check


def _refusal(service: Service, error: Exception) -> ApiError:
    """The error for the client; counted, and logged if the server is at fault."""
    refusal = as_api_error(error)
    service.metrics.count_error(refusal.reason)
    if refusal.code == "internal_error":
        logger.error("request failed", exc_info=error)
    return refusal


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def refuse(_: Request, error: Exception) -> Response:
        return _refusal(service, error).response()

    async def gone(_: Request, __: Exception) -> Response:
        service.metrics.count_error("cancelled")
        return Response(status_code=_CLIENT_DISCONNECTED)

    for kind in (ApiError, RequestError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(ClientDisconnect, gone)

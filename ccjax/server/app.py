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
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

import ccjax
from ccjax.engine import Response as Answer
from ccjax.errors import RequestError
from ccjax.retrieval import RefreshReport
from ccjax.server.admin import ADMIN_BODIES, admin_routes, bearer_token
from ccjax.server.body import add_schemas, describe, json_body
from ccjax.server.completions import CompletionBody, JoinedJobs
from ccjax.server.embeddings import EmbeddingsBody
from ccjax.server.errors import ApiError, as_api_error, field_names
from ccjax.server.keys import KeyRing
from ccjax.server.openai_format import COMMENT, Formatter, Kind
from ccjax.server.own_documents import index_summary
from ccjax.server.page import live_routes, page_routes
from ccjax.server.responses import NOT_KEPT, ResponsesBody
from ccjax.server.responses_format import ResponsesFormatter
from ccjax.server.rules import REQUEST_ID, with_rules
from ccjax.server.schemas import ChatBody, Generation
from ccjax.server.service import Service
from ccjax.server.telemetry import RequestTelemetry
from ccjax.server.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from ccjax.server.trace_format import trace_json
from ccjax.server.worker import Job, JobCancelledError
from ccjax.types import Document

logger = logging.getLogger(__name__)

PASSAGES = "ccjax.passages"
"""ASGI scope key for passages of the server's own documents that the caller of the application already retrieved;
clients cannot set it."""

WAITED_S = "ccjax.waited_s"
"""ASGI scope key for the seconds since the caller received the request; they count towards its `timeout_s`."""

AnyFormatter = Formatter | ResponsesFormatter
_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, EmbeddingsBody, ResponsesBody, *ADMIN_BODIES)
_CLIENT_DISCONNECTED = 499  # nginx's code; the client does not see it
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Content type besides JSON if the body says `stream`; the schema describes each event, as in OpenAPI 3.2."""

PAUSE_S = 15.0
"""Longest time without an event of a stream."""
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer events


def create_app(service: Service) -> FastAPI:
    """The ASGI application of `service`, which may still be loading; shutting it down closes the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        fresh = asyncio.create_task(service.keep_fresh())
        yield
        fresh.cancel()
        await asyncio.to_thread(service.close)

    # No pages of the document: their scripts come from another server, which some networks do not reach.
    app = FastAPI(title="ccjax", version=ccjax.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
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
    # Around the handler of unforeseen errors, too, whose replies need an id like others.
    app.middleware_stack = with_rules(app.build_middleware_stack(), service.settings, service.keys)
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

    @router.get("/v1/documents/problems", summary="Files of --docs that are not served, and why")
    async def problems() -> dict[str, Any]:
        retriever = service.backend.retriever
        report = RefreshReport() if retriever is None else retriever.report
        data = [{"path": path, "reason": reason} for path, reason in report.failed]
        summary = index_summary(retriever) | {"unsupported": dict(report.unsupported)}
        return {"object": "list", "data": data} | summary

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @router.post("/tokenize", openapi_extra=describe(TokenizeBody), response_model=dict[str, Any])
    async def tokens(body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))]) -> Response:
        service.check_model(body.model)
        return await _as_json(await tokenize(service.backend.engine, body))

    @router.post("/detokenize", openapi_extra=describe(DetokenizeBody), response_model=dict[str, Any])
    async def text(body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))]) -> Response:
        service.check_model(body.model)
        return await _as_json(await detokenize(service.backend.engine, body))

    @router.post("/v1/embeddings", openapi_extra=describe(EmbeddingsBody), response_model=dict[str, Any])
    async def embeddings(body: Annotated[EmbeddingsBody, Depends(json_body(EmbeddingsBody))]) -> Response:
        return await _as_json(await service.backend.vectors.answer(body, service.backend.model))

    @router.post("/v1/rerank", include_in_schema=False)
    async def rerank() -> None:
        message = "this server ranks no documents: it has no cross-encoder; send them as documents of a chat"
        raise ApiError(501, message, code="not_supported")

    @router.post("/v1/chat/completions", openapi_extra=describe(ChatBody), responses=_ANSWERS)
    async def chat(request: Request, body: Annotated[ChatBody, Depends(json_body(ChatBody))]) -> Response:
        return await _generate(service, request, body, "chat")

    @router.post("/v1/completions", openapi_extra=describe(CompletionBody), responses=_ANSWERS)
    async def complete(
        request: Request, body: Annotated[CompletionBody, Depends(json_body(CompletionBody))]
    ) -> Response:
        return await _generate(service, request, body, "completion")

    @router.post("/v1/responses", openapi_extra=describe(ResponsesBody), responses=_ANSWERS)
    async def respond(request: Request, body: Annotated[ResponsesBody, Depends(json_body(ResponsesBody))]) -> Response:
        return await _generate(service, request, await asyncio.to_thread(body.as_chat), "chat", body)

    @router.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def kept_response(name: str) -> None:
        raise ApiError(404, f"response_id: {NOT_KEPT}", param="response_id", code="not_found")

    return router


async def _as_json(content: dict[str, Any]) -> Response:
    """A response with as much as millions of numbers, written outside of the event loop by what takes a quarter of the
    time that `json` would keep other threads waiting. JSON has no NaN and no infinity: they are null."""
    return Response(await asyncio.to_thread(to_json, content, inf_nan_mode="null"), media_type="application/json")


def _model(service: Service) -> dict[str, Any]:
    backend = service.backend
    return {
        "id": backend.model,
        "object": "model",
        "created": service.started_at,
        "owned_by": "ccjax",
        "max_model_len": backend.engine.max_model_len,
    }


async def _generate(
    service: Service, request: Request, body: Generation, kind: Kind, asked: ResponsesBody | None = None
) -> Response:
    """The answer to a body, of which `asked` is the original if it was translated."""
    telemetry = service.telemetry(kind, request.headers)
    jobs: list[Job] = []
    try:
        id_prefix = "resp" if asked is not None else "chatcmpl" if kind == "chat" else "cmpl"
        documents: list[Document] = []
        for part in body.parts():
            job, found = await service.start_job(
                part,
                id_prefix=id_prefix,
                passages=request.scope.get(PASSAGES),
                tenant=request.state.tenant or "",
                waited_s=request.scope.get(WAITED_S, 0.0),
            )
            jobs.append(job)
            documents += found
        job = jobs[0] if len(jobs) == 1 else JoinedJobs(jobs)
        telemetry.job = job
        watcher = asyncio.create_task(_cancel_on_disconnect(request, telemetry, job))
        about = {"id": job.request.request_id, "model": service.backend.model}
        created = int(time.time())
        formatter: AnyFormatter = Formatter(
            kind,
            **about,
            created=created,
            documents=documents,
            tool_use=body.tool_use(),
            call_form=service.call_form,
            **_echo_fields(service, body, job),
        )
        if asked is not None:
            formatter = ResponsesFormatter(formatter, asked, {**about, "created_at": created})
        if body.stream:  # at once: proxies give up after a minute without a status
            events = _events(service, request, telemetry, formatter, body, watcher)
            return StreamingResponse(events, media_type="text/event-stream", headers=_SSE_HEADERS)
        with field_names(body.argument_names()):
            async for _ in job.deltas():
                pass
        assert job.response is not None
        await _add_trace(service, job, job.response, formatter)
        telemetry.end()
        return await _as_json(await asyncio.to_thread(formatter.answer, job.response))
    except JobCancelledError:
        telemetry.end()
        return Response(status_code=_CLIENT_DISCONNECTED)
    except Exception as error:
        for job in jobs:
            job.cancel()
        refusal = _refusal(service, request, error)
        telemetry.end(refusal)
        return refusal.response()


def _echo_fields(service: Service, body: Generation, job: Job) -> dict[str, Any]:
    """What the formatter has to know of a completion's prompts."""
    if not isinstance(body, CompletionBody):
        return {}
    return {
        "echoes": body.echoes(service.backend.engine.tokenizer),
        "echoes_logprobs": bool(body.echo),
        "has_answer": body.has_answer,
        "num_answers": job.request.sampling.n,
    }


async def _events(
    service: Service,
    request: Request,
    telemetry: RequestTelemetry,
    formatter: AnyFormatter,
    body: Generation,
    watcher: asyncio.Task[None],
) -> AsyncIterator[str]:
    """Streams all answers, with a comment whenever there is no token, or none with text, for `PAUSE_S`. `watcher` is
    only kept alive by the reference."""
    job = telemetry.job
    assert job is not None
    try:
        with field_names(body.argument_names()):
            async for delta in job.deltas(PAUSE_S):
                if delta is None:
                    yield COMMENT
                    continue
                await _add_trace(service, job, delta.response, formatter)
                for chunk in formatter.chunks(delta, include_usage=body.include_usage):
                    yield formatter.event(chunk)
    except JobCancelledError:
        return
    except Exception as error:
        refusal = _refusal(service, request, error)
        telemetry.end(refusal)
        yield formatter.event(formatter.failure(refusal))
    finally:
        job.cancel()
        telemetry.end()
    if formatter.done:
        yield formatter.done


async def _add_trace(service: Service, job: Job, response: Answer | None, formatter: AnyFormatter) -> None:
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


def _refusal(service: Service, request: Request, error: Exception) -> ApiError:
    """The error for the client; counted, and logged if the server is at fault."""
    refusal = as_api_error(error)
    service.metrics.count_error(refusal.reason)
    if refusal.code == "internal_error":
        request_id = request.headers.get(REQUEST_ID)
        logger.error("request %s failed", request_id, exc_info=error, extra={"x_request_id": request_id})
    return refusal


def _methods(request: Request) -> list[str]:
    """The methods with which this path is served."""

    def is_served(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)

    methods = [method for method in ("DELETE", "GET", "POST", "PUT") if is_served(method)]
    return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            allow = {"Allow": ", ".join(_methods(request))}
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=allow)
            error = HTTPException(405, error.detail, allow)
        return _refusal(service, request, error).response()

    async def gone(_: Request, __: Exception) -> Response:
        service.metrics.count_error("cancelled")
        return Response(status_code=_CLIENT_DISCONNECTED)

    for kind in (ApiError, RequestError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(ClientDisconnect, gone)

"""The page at /: its files from the package, and the endpoint for its live view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ccjax.server.errors import ApiError, as_api_error
from ccjax.server.live import live_json
from ccjax.server.service import Service

_FILES = Path(__file__).resolve().parent / "static"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Forbids turning text into markup: passages and answers are untrusted.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # always revalidated (ETag), so that a new server never meets old scripts
}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """The page at / and its files below /page/, without a key: they contain only what is in the package."""
    files = _Files(directory=_FILES)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", page), Mount("/page", files)]


def page_app() -> Starlette:
    """The page and its files alone, for a front: so they are of one release, and available while no server answers."""

    async def refuse(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    return Starlette(routes=page_routes(), exception_handlers={HTTPException: refuse})


def live_routes(service: Service) -> APIRouter:
    """Serves the live view; requires a client's key. Tenants' keys are refused, because it shows the requests of all
    clients."""
    router = APIRouter()

    @router.get("/v1/live")
    def live(request: Request) -> dict[str, Any]:
        if request.state.tenant:
            raise ApiError(403, "wanted a key without a tenant: this shows all requests", code="forbidden")
        backend = service.backend
        return live_json(backend.engine, backend.retriever, backend.model, service.live)

    return router

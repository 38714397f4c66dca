"""Rules for all HTTP requests: who may ask by host and origin, request ids, HEAD, trailing slashes, CORS.

Without API keys, requests are refused that a web page could send in the name of a visitor: a page reaches a server of
this machine by a name of its own (DNS rebinding), which then stands in `Host`, or from another origin (`Origin`).
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ccjax.server.errors import ApiError
from ccjax.server.keys import Keys
from ccjax.server.settings import ServerSettings

REQUEST_ID = "x-request-id"
PUBLIC = ("/health", "/ready", "/metrics")
"""Paths for probes and scrapers, which ask under any name."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_WITH_IDS = ("/v1/cache/documents/", "/v1/cache/pins/")
"""Paths that end with the id of a document, which may end with a slash."""


def with_rules(app: Callable[..., Awaitable[None]], settings: ServerSettings, keys: Keys) -> ASGIApp:
    """The application behind the rules for hosts, origins, methods, paths and request ids."""
    if not keys.api.is_asked_for or settings.allowed_hosts:
        app = _HostCheck(app, settings.allowed_hosts, settings.allowed_origins)
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After", "Location"],
        )
    return _RequestForm(app)


class _HostCheck:
    """Refuses hosts and origins that are neither of this machine nor named."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = tuple(host.lower() for host in hosts)
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and scope["path"] not in PUBLIC
        refusal = self._refusal(Headers(scope=scope)) if is_checked else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_allowed(host):  # browsers always send one
            message = f"Host: wanted localhost, an IP address or a name of --allowed-hosts, got {host[:80]!r}"
            return ApiError(403, message, param="Host", code="host_not_allowed")
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        place = origin.partition("://")[2]
        if place == host or (place and _is_loopback(_name(place))):
            return None
        message = f"Origin: wanted this server's own page, or one of --allowed-origins, got {origin[:80]!r}"
        return ApiError(403, message, param="Origin", code="origin_not_allowed")

    def _is_allowed(self, host: str) -> bool:
        name = _name(host)
        # No name server leads a browser astray under an address.
        return _is_loopback(name) or _address(name) is not None or any(_matches(name, one) for one in self._hosts)


class _RequestForm:
    """Gives each request an id, serves HEAD like GET without the body, and paths with a slash at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _GIVEN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        is_head = scope["method"] == "HEAD"
        scope = _as_served(scope, request_id)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive, send_on)


def _as_served(scope: Scope, request_id: str) -> Scope:
    own = REQUEST_ID.encode()
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != own]
    changed: dict[str, Any] = {"headers": [*headers, (own, request_id.encode())]}
    if scope["method"] == "HEAD":
        changed["method"] = "GET"
    path, raw_path = scope["path"], scope.get("raw_path") or b""
    # An encoded slash at the end belongs to a name.
    if (
        path.endswith("/")
        and path.strip("/")
        and not path.startswith(_WITH_IDS)
        and not raw_path.lower().endswith(b"%2f")
    ):
        changed |= {"path": path.rstrip("/"), "raw_path": raw_path.rstrip(b"/")}
    return {**scope, **changed}


def _name(host: str) -> str:
    """The host without its port, brackets and the dot of a root."""
    found = re.fullmatch(r"\[([^]]*)\](?::\d*)?|([^:]*)(?::\d*)?", host)
    name = (found[1] or found[2] or "") if found else host
    return name.lower().removesuffix(".")


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _matches(name: str, wanted: str) -> bool:
    return wanted in ("*", name) or (wanted.startswith("*.") and name.endswith(wanted[1:]))

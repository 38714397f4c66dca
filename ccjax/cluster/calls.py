"""An HTTP request as a value that goes to another process, and its answer as pieces that come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from ccjax.server.admin import WHOLE_LISTING
from ccjax.server.app import PASSAGES, WAITED_S
from ccjax.types import Document

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
"""An ASGI application."""

_TO_LEAVE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request, its body read.

    Attributes:
      path: percent-encoded, without the query.
      passages: what was retrieved for it; None where nothing was looked for.
      waited_s: how long ago it came, when it was passed on.
      is_whole_listing: the answer may not be cut into pages, whatever the query says.
    """

    method: str
    path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    passages: tuple[Document, ...] | None = None
    waited_s: float = 0.0
    is_whole_listing: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaResponse:
    """A whole answer."""

    head: Head
    body: bytes


async def perform(app: App, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """What the application answers: a `Head`, then the body in the pieces that it is sent in.

    Closing the iterator early tells the application that the client is gone.

    Raises:
      RuntimeError: the application ended without an answer.
    """
    pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue(1)
    is_gone, is_read = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if is_gone.is_set():
            return
        if message["type"] == "http.response.start":
            await pieces.put(Head(message["status"], tuple(message.get("headers", ()))))
        else:
            if message.get("body"):
                await pieces.put(message["body"])
            if not message.get("more_body", False):
                await pieces.put(None)

    running = asyncio.ensure_future(app(_scope(call), receive, send))
    is_whole = False
    try:
        while True:
            taking = asyncio.ensure_future(pieces.get())
            try:
                await asyncio.wait({taking, running}, return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():  # the application ended; what it sent last is in the queue
                    await running
                    if pieces.empty():
                        raise RuntimeError(f"{call.method} {call.path!r}: the application ended without an answer")
                piece = await taking
            finally:
                taking.cancel()
            if piece is None:
                is_whole = True
                return
            yield piece
    finally:
        is_gone.set()
        if not is_whole:
            while not pieces.empty():  # whoever waits to send may end
                pieces.get_nowait()
        _, left = await asyncio.wait({running}, timeout=_TO_LEAVE_S)
        for task in left:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await running  # what it raised was told with the answer, or nobody is left to tell


async def perform_whole(app: App, call: Call) -> ReplicaResponse:
    """The whole answer of the application; raises as `perform`."""
    return await collect(perform(app, call))


async def collect(pieces: AsyncIterator[Head | bytes]) -> ReplicaResponse:
    """The pieces of an answer put together."""
    head, body = None, []
    async for piece in pieces:
        if isinstance(piece, Head):
            head = piece
        else:
            body.append(piece)
    if head is None:
        raise RuntimeError("an answer without a beginning")
    return ReplicaResponse(head, b"".join(body))


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        # 2.3: from 2.4 on a server must raise in `send` once the client is gone, which nobody here could tell in time.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": urllib.parse.unquote_to_bytes(call.path).decode("utf-8", "replace"),
        "raw_path": call.path,
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
        PASSAGES: call.passages,
        WAITED_S: call.waited_s,
        WHOLE_LISTING: call.is_whole_listing,
    }

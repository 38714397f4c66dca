"""HTTP requests as values that can be sent to another process, and their answers as streams of parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ccjax.server.admin import WHOLE_LISTING
from ccjax.server.app import PASSAGES, WAITED_S
from ccjax.types import Document

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
"""An ASGI application."""

_TO_LEAVE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request whose body has been read.

    Attributes:
      path: percent-encoded, without the query.
      passages: retrieved for it; None if nothing was searched.
      waited_s: time since it arrived, when it was passed on.
      is_whole_listing: the answer must not be paginated, whatever the query says.
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
    """Status and headers of an answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaResponse:
    """A complete answer."""

    head: Head
    body: bytes


async def perform(app: App, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Runs the application on a call: yields a `Head`, then the body in the parts in which it is sent.

    Closing the iterator early tells the application that the client disconnected.

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
                if not taking.done():  # the application ended; its last message is in the queue
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
            while not pieces.empty():  # lets a blocked sender finish
                pieces.get_nowait()
        _, left = await asyncio.wait({running}, timeout=_TO_LEAVE_S)
        for task in left:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await running  # its exception was passed on with the answer, or the caller is gone


async def perform_whole(app: App, call: Call) -> ReplicaResponse:
    """The complete answer of the application; raises as `perform`."""
    head, *body = [piece async for piece in perform(app, call)]
    assert isinstance(head, Head)
    return ReplicaResponse(head, b"".join(piece for piece in body if isinstance(piece, bytes)))


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        # 2.3: from 2.4 on a server must raise in `send` once the client is gone, which cannot be known in time here.
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

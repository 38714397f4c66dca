"""The ASGI application for clients of a cluster: forwards requests to replicas, and their answers back.

If the replica of a request is lost before its answer began, the request is retried on another one; if the answer had
begun, it ends with one clear error. A request waits a bounded time while no replica runs (`ccjax.cluster.waiting`).
Changes of the caches, and queries about all replicas, go to every replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from ccjax.cluster.calls import Call, Head, ReplicaResponse
from ccjax.cluster.merging import LIVE, can_merge, merged
from ccjax.cluster.metrics import FrontMetrics
from ccjax.cluster.prompts import PromptReader, Seen
from ccjax.cluster.waiting import NO_REPLICA_S, REAL, Clock, NoLiveReplicaError, ReplicaWait
from ccjax.policy.routing import PromptSummary
from ccjax.server.admin import bearer_token
from ccjax.server.errors import ApiError, as_api_error, shutting_down
from ccjax.server.fields import RESPONSES
from ccjax.server.keys import Keys
from ccjax.server.openai_format import DONE, event
from ccjax.server.page import page_app
from ccjax.server.responses_format import error_event
from ccjax.server.rules import with_rules
from ccjax.server.settings import ServerSettings

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

MAX_RETRIES = 2
_EVERYWHERE_S = 60.0
_LIVE_S = 5.0
_TO_ALL = (b"/v1/cache/documents", b"/v1/cache/pins/", b"/v1/cache/warm/")
"""Paths of calls that go to every replica."""


class ReplicaLostError(Exception):
    """The replica died, or cannot be reached."""


class NoReplicaError(Exception):
    """There is no replica; the message says why."""


class Replicas(Protocol):
    """Access to the replicas, however they are run."""

    def answer(self, call: Call, prompt: PromptSummary) -> AsyncGenerator[Head | bytes, None]:
        """Streams the answer of one replica, chosen by the prompt. Raises ReplicaLostError, NoReplicaError."""
        ...

    async def answers(self, call: Call, timeout_s: float) -> Sequence[ReplicaResponse | Exception]:
        """The answers of all replicas."""
        ...

    async def counts(self) -> dict[str, int]:
        """State -> number of replicas in it; "running" ones answer requests."""
        ...

    async def generator_metrics(self) -> Sequence[str]:
        """The metrics of each reachable generator in the Prometheus text format."""
        ...


class Front:
    """Forwards requests until it is drained.

    Args:
      no_replica_s: how long a request without a `timeout_s` may wait while no replica runs.
      clock: for these waits.
    """

    def __init__(
        self,
        replicas: Replicas,
        reader: PromptReader,
        settings: ServerSettings,
        *,
        no_replica_s: float = NO_REPLICA_S,
        clock: Clock = REAL,
    ) -> None:
        self.metrics = FrontMetrics()
        self._replicas = replicas
        self._reader = reader
        self._settings = settings
        self._no_replica_s = no_replica_s
        self._clock = clock
        self._keys = Keys(settings)
        self._page = page_app() if settings.page else None
        self._app = with_rules(self._respond, settings, self._keys)
        self._under_way: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._is_draining = self._is_closing = False

    # -- its end, as `ccjax.server.draining` wants it ----------------------------------------------------------

    def drain(self) -> None:
        """Refuses new requests with 503; accepted ones continue. May be repeated."""
        self._is_draining = True

    @property
    def is_drained(self) -> bool:
        """True once `drain` was called and all requests accepted before are answered."""
        return self._is_draining and not self._under_way

    @property
    def is_closing(self) -> bool:
        """True once nothing is left to wait for."""
        return self._is_closing

    def break_off(self) -> None:
        """Ends all accepted requests with 503, or with an error in the stream."""
        self._is_closing = True
        for task in tuple(self._answering):
            task.cancel()

    # -- requests ----------------------------------------------------------------------------------------------

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        task = asyncio.current_task()
        assert task is not None and scope["type"] == "http"
        self._under_way.add(task)
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way.discard(task)

    async def _respond(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        if path == b"/health":
            await _send_json(send, 200, {"status": "alive"})
        elif path == b"/ready":
            await self._ready(send)
        elif self._is_draining:
            await _refuse(send, shutting_down())
        elif self._page is not None and scope["method"] in ("GET", "HEAD") and _is_of_page(path):
            await self._page(scope, receive, send)
        else:
            begun_s = self._clock.now()
            try:
                call = await _read(Request(scope, receive), path, self._settings.max_body_bytes)
            except ClientDisconnect:
                return
            if path == b"/metrics":
                await self._metrics(call, send)
            elif (call.method != "POST" and path.startswith(_TO_ALL)) or (call.method == "GET" and path == LIVE):
                await self._everywhere(call, send)
            else:
                await self._pass_on(scope, call, receive, send, begun_s)

    async def _ready(self, send: Send) -> None:
        counts = await self._replicas.counts()
        is_ready = bool(counts.get("running")) and not self._is_draining
        status = "shutting down" if self._is_draining else "ready" if is_ready else "no replica runs"
        documents = self._reader.documents if is_ready else None
        told = {} if documents is None else {"documents": documents}
        await _send_json(send, 200 if is_ready else 503, {"status": status, "replicas": counts, **told})

    async def _metrics(self, call: Call, send: Send) -> None:
        answers = await self._replicas.answers(call, _EVERYWHERE_S)
        texts = [
            answer.body.decode()
            for answer in answers
            if isinstance(answer, ReplicaResponse) and answer.head.status == 200
        ]
        counts, generators = await asyncio.gather(self._replicas.counts(), self._replicas.generator_metrics())
        body = self.metrics.render(texts, counts, generators)
        await _send(
            send, ReplicaResponse(Head(200, ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)), body)
        )

    async def _everywhere(self, call: Call, send: Send) -> None:
        """Calls all replicas; returns the worst failure if there is one, else the merged answers of those that know the
        subject. Only the live view accepts that some replicas do not answer."""
        is_merged = can_merge(call)
        call = dataclasses.replace(call, is_whole_listing=is_merged)
        answers = await self._replicas.answers(call, _LIVE_S if call.path == LIVE else _EVERYWHERE_S)
        whole = [answer for answer in answers if isinstance(answer, ReplicaResponse)]
        told = [answer.body for answer in whole if answer.head.status == 200]
        if not answers:
            await _refuse(send, _no_replica("there is no replica"))
            return
        if not whole or (len(whole) < len(answers) and call.path != LIVE):
            lost = f"{len(answers) - len(whole)} of {len(answers)} replicas"
            await _refuse(send, _lost(f"{lost} could not be reached; try again"))
            return
        worst = min(whole, key=lambda answer: _rank(answer.head.status))
        if is_merged and told and (worst.head.status == 200 or call.path == LIVE):
            await _send_json(send, 200, await asyncio.to_thread(merged, call, told, len(answers)))
        else:
            await _send(send, worst)

    async def _pass_on(self, scope: dict[str, Any], call: Call, receive: Receive, send: Send, begun_s: float) -> None:
        seen = Seen()
        key = self._keys.api.find(bearer_token(Request(scope)))
        if key is not None or not self._keys.api.is_asked_for:
            seen = await asyncio.to_thread(self._reader.read, call, key or "")
            call = dataclasses.replace(call, passages=seen.passages)
        replica_wait = ReplicaWait(self._replicas.counts, begun_s, seen.timeout_s, self._no_replica_s, self._clock)
        answering = asyncio.ensure_future(self._forward(call, seen.prompt, _Reply(send, call.path), replica_wait))
        leaving = asyncio.ensure_future(_gone(receive))
        self._answering.add(answering)
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
            self._answering.discard(answering)

    async def _forward(self, call: Call, prompt: PromptSummary, reply: _Reply, replica_wait: ReplicaWait) -> None:
        try:
            error = shutting_down() if self._is_closing else await self._answer(call, prompt, reply, replica_wait)
        except asyncio.CancelledError:
            if not self._is_closing:  # the client is gone
                raise
            error = shutting_down()
        except Exception as unforeseen:
            logger.exception("a request failed")
            error = as_api_error(unforeseen)
        if error is not None:
            await reply.fail(error)

    async def _answer(
        self, call: Call, prompt: PromptSummary, reply: _Reply, replica_wait: ReplicaWait
    ) -> ApiError | None:
        """Forwards an answer; returns the error to send if there is no answer or it breaks off."""
        num_lost = 0
        while True:
            call = dataclasses.replace(call, waited_s=replica_wait.waited_s)
            try:
                async with contextlib.aclosing(self._replicas.answer(call, prompt)) as pieces:
                    await reply.take(await replica_wait.first(pieces))
                    async for piece in pieces:
                        await reply.take(piece)
                await reply.end()
                return None
            except NoLiveReplicaError:
                if await replica_wait.wait_for_replica():
                    continue
                return _no_replica(f"no replica runs, and none started within {replica_wait.waited_s:.0f} s")
            except NoReplicaError as error:
                return _no_replica(str(error))
            except ReplicaLostError:
                num_lost += 1
                logger.warning("a replica was lost with a request, attempt %d", num_lost)
                if reply.has_begun:
                    self.metrics.count_lost("answer begun")
                    return _lost("the replica was lost during the answer; try again")
            self.metrics.count_lost("tried again" if num_lost <= MAX_RETRIES else "given up")
            if num_lost > MAX_RETRIES:
                return _lost("the replica was lost, and so were those tried after it; try again")


class _Reply:
    """The reply to a client. It starts with the first part of the body: until then another replica may answer
    instead."""

    def __init__(self, send: Send, path: bytes) -> None:
        self.has_begun = False
        self._send = send
        self._is_of_responses = path.rstrip(b"/") == RESPONSES.encode()
        self._line, self._num_events = b"", 0
        self._head: Head | None = None

    async def take(self, piece: Head | bytes) -> None:
        """Sends the next part of the answer."""
        if isinstance(piece, Head):
            self._head = piece
            return
        await self._begin()
        if self._is_of_responses:
            *lines, self._line = (self._line + piece).split(b"\n")
            self._num_events += sum(line.startswith(b"event: ") for line in lines)
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """Completes the answer."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Ends with an error: a response of its own or, within a started event stream, one event. Any other started
        body stays shorter than its declared length."""
        if not self.has_begun:
            await _refuse(self._send, error)
        elif self._is_stream:
            tail = event(error.body()) + DONE
            if self._is_of_responses:
                tail = error_event(error, self._num_events)
            await self._send({"type": "http.response.body", "body": tail.encode(), "more_body": False})

    async def _begin(self) -> None:
        assert self._head is not None
        if not self.has_begun:
            self.has_begun = True
            head = self._head
            await self._send({"type": "http.response.start", "status": head.status, "headers": list(head.headers)})

    @property
    def _is_stream(self) -> bool:
        headers = () if self._head is None else self._head.headers
        return any(key.lower() == b"content-type" and value.startswith(b"text/event-stream") for key, value in headers)


async def _read(request: Request, path: bytes, limit: int) -> Call:
    """Reads the request; of a body that is too long, only enough for the replica to see that it is."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            break
    scope = request.scope
    client = scope.get("client")
    return Call(
        scope["method"],
        path,
        scope["query_string"],
        tuple((bytes(key), bytes(value)) for key, value in scope["headers"]),
        bytes(body),
        None if client is None else tuple(client),
    )


async def _gone(receive: Receive) -> None:
    """Returns when the client disconnects or has its answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _rank(status: int) -> tuple[int, int]:
    """Failures first, then successes, then refusals: one replica may know what the others do not."""
    return (0, -status) if status >= 500 else (1, status) if status < 300 else (2, status)


def _is_of_page(path: bytes) -> bool:
    return path == b"/" or path.startswith(b"/page/")


async def _refuse(send: Send, error: ApiError) -> None:
    await _send_response(send, error.response())


async def _send_json(send: Send, status: int, value: Any) -> None:
    await _send_response(send, JSONResponse(value, status))


async def _send_response(send: Send, response: JSONResponse) -> None:
    await _send(send, ReplicaResponse(Head(response.status_code, tuple(response.raw_headers)), bytes(response.body)))


async def _send(send: Send, answer: ReplicaResponse) -> None:
    head = answer.head
    await send({"type": "http.response.start", "status": head.status, "headers": list(head.headers)})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _lost(message: str) -> ApiError:
    return ApiError(503, message, code="replica_lost", headers={"Retry-After": "1"})


def _no_replica(message: str) -> ApiError:
    return ApiError(503, f"{message}; try again", code="no_replica", headers={"Retry-After": "1"})

"""What stands between the routes and the engine: readiness, retrieval, checks before the line, the line itself.

Knows neither URLs nor response shapes. Whatever may take long runs in a thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ccjax
from ccjax.engine import Engine, Request
from ccjax.errors import RequestError
from ccjax.retrieval import Retriever
from ccjax.server.errors import ApiError, as_api_error
from ccjax.server.metrics import ServerMetrics
from ccjax.server.schemas import Generation, TokenizeBody
from ccjax.server.settings import ServerSettings
from ccjax.server.worker import EngineWorker, IdleWork, Job, QueueFullError, WorkerClosedError
from ccjax.types import Document

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Backend:
    """What answers once everything is loaded."""

    engine: Engine
    worker: EngineWorker
    retriever: Retriever | None
    model: str


class Service:
    """One server's state: first loading, then ready, then closed.

    `progress` and `open` are called by whoever loads, on any thread; `close` ends everything that `open` took over.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.started_at = int(time.time())
        self._stage: tuple[str, int, int] = ("start", 0, 0)
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._closed = False

    def progress(self, stage: str, done: int, total: int) -> None:
        """Notes how far loading is, for `/ready`."""
        self._stage = (stage, done, total)

    def open(self, engine: Engine, retriever: Retriever | None = None) -> None:
        """Takes over a loaded (and warm) engine and retriever: from now on requests are answered.

        Raises:
          RuntimeError: the service is open or closed already; engine and retriever stay the caller's then.
        """
        with self._lock:
            if self._closed or self._backend is not None:
                raise RuntimeError("service: opened or closed already")
            worker = EngineWorker(
                engine.stream,
                max_queue=self.settings.max_queue,
                on_end=self.metrics.end,
                idle_work=_repairs(engine) if self.settings.repair_when_idle else None,
            )
            model = self.settings.served_model_name or engine.model_name
            self._backend = Backend(engine, worker, retriever, model)
            self.metrics.attach(
                version=ccjax.__version__, model=model, engine=engine, worker=worker, retriever=retriever
            )

    def close(self, *, drain: bool = True) -> None:
        """Ends the worker, after the requests in line or at once, then closes engine and retriever. May be repeated."""
        with self._lock:
            backend, self._backend, self._closed = self._backend, None, True
        if backend is not None:
            backend.worker.close(drain=drain)
            backend.engine.close()
            if backend.retriever is not None:
                backend.retriever.close()

    @property
    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are answered, and what to tell about it."""
        if self._backend is not None:
            return True, {"status": "ready", "model": self._backend.model}
        if self._closed:
            return False, {"status": "closed"}
        stage, done, total = self._stage
        return False, {"status": "loading", "stage": stage, "done": done, "total": total}

    @property
    def backend(self) -> Backend:
        """Engine and company.

        Raises:
          ApiError: 503 while there is none.
        """
        if self._backend is None:
            status = self.readiness[1]["status"]
            raise ApiError(
                503, f"the server is {status}, try again later", code="not_ready", headers={"Retry-After": "1"}
            )
        return self._backend

    async def submit(self, body: Generation, *, id_prefix: str) -> tuple[Job, Sequence[Document]]:
        """The job of a request that passed every check, and the passages it asked for.

        Raises:
          ApiError: it is refused.
        """
        backend = self.backend
        if backend.worker.is_full:  # before the costly part; `submit` asks again
            raise _queue_full(self.settings.max_queue)
        self._check_access(body)
        with renamed(body.argument_names()):
            documents = await self._documents(backend, body)
            request = body.to_request(
                documents, reuse=self.settings.reuse, request_id=f"{id_prefix}-{uuid.uuid4().hex}"
            )
            await asyncio.to_thread(backend.engine.validate, request)
        try:
            return backend.worker.submit(request), documents
        except QueueFullError:
            raise _queue_full(self.settings.max_queue) from None
        except WorkerClosedError:
            raise ApiError(503, "the server is shutting down", code="not_ready") from None

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """vLLM's answer of /tokenize; `tokens` is null for messages, of which only the number is known here."""
        engine = self.backend.engine
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: wanted exactly one of prompt and messages", param="prompt")
        tokens = None
        with renamed({"prompt": "messages"}):
            if body.messages is not None:
                count = await asyncio.to_thread(
                    engine.validate, Request(messages=body.messages, documents=body.own_documents())
                )
            else:
                assert body.prompt is not None
                tokens = await asyncio.to_thread(_encode, engine, body.prompt, body.add_special_tokens)
                count = len(tokens)
        return {"count": count, "max_model_len": engine.max_model_len, "tokens": tokens}

    def check_model(self, name: str | None) -> None:
        """Nothing, where `name` is the served model or not given.

        Raises:
          ApiError: 404, as OpenAI answers.
        """
        served = self.backend.model
        if name is not None and name != served:
            message = f"model: wanted {served!r}, the one served here, got {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def keep_fresh(self) -> None:
        """Looks for changed documents every `refresh_interval_s`, and at the store every `store_refresh_interval_s`,
        until cancelled."""
        await asyncio.gather(
            self._repeat(self.settings.refresh_interval_s, _refresh_documents),
            self._repeat(self.settings.store_refresh_interval_s, _refresh_store),
        )

    async def _repeat(self, interval_s: float | None, look: Callable[[Backend], None]) -> None:
        while interval_s is not None:
            await asyncio.sleep(interval_s)
            if self._backend is None:
                continue
            try:
                await asyncio.to_thread(look, self._backend)
            except Exception:
                if not self._closed:
                    logger.exception("the look for changes failed, everything stays as it was")

    def _check_access(self, body: Generation) -> None:
        self.check_model(body.model)
        # A salt names a tenant: answering under another one would show this tenant's passages to the other.
        if body.cache_salt is not None and not hmac.compare_digest(
            body.cache_salt.encode(), self.backend.engine.config.tenant_salt.encode()
        ):
            raise RequestError("cache_salt", "wanted none, or the one this server was started with")

    async def _documents(self, backend: Backend, body: Generation) -> Sequence[Document]:
        own = body.own_documents()
        if own is not None and body.retrieval:
            raise RequestError("retrieval", "wanted one of documents and retrieval, got both")
        if own is not None or body.retrieval is False:
            return own or ()
        if backend.retriever is None:
            if body.retrieval:
                raise RequestError("retrieval", "this server has no documents of its own; send documents")
            return ()
        query = body.query()
        if query is None:  # the engine will say what is wrong with the question
            return ()
        top_k = (body.retrieval.top_k if body.retrieval else None) or self.settings.top_k
        with self.metrics.retrieval_time.time():
            passages = await asyncio.to_thread(backend.retriever.search, query, top_k)
        return tuple(
            Document(
                passage.text, passage.passage_id, passage.title, passage.version, passage.score, passage.document_id
            )
            for passage in passages
        )


def _repairs(engine: Engine) -> IdleWork:
    return lambda is_cancelled: engine.repair_one(is_cancelled=is_cancelled)


def _refresh_documents(backend: Backend) -> None:
    if backend.retriever is None:
        return
    report = backend.retriever.refresh()
    if report.added or report.changed or report.removed:
        logger.info(
            "documents: %d added, %d changed, %d removed",
            len(report.added),
            len(report.changed),
            len(report.removed),
        )


def _refresh_store(backend: Backend) -> None:
    backend.engine.refresh()


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Turns the engine's refusals into `ApiError`s that name the fields of the API."""
    try:
        yield
    except RequestError as error:
        raise as_api_error(error, names) from error


def _queue_full(max_queue: int) -> ApiError:
    message = f"wanted at most {max_queue} requests in line (max_queue), and so many wait already; try again later"
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


def _encode(engine: Engine, prompt: str, add_special_tokens: bool) -> list[int]:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("model", "wanted a model with tokenizer files for text; this one takes token ids only")
    bos = [tokenizer.bos_id] if add_special_tokens and tokenizer.bos_id is not None else []
    return bos + tokenizer.encode(prompt, allow_special=False)

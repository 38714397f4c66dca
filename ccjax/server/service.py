"""The service between the HTTP routes and the engine: readiness, retrieval, admission checks, submission.

Searches, tokenization and calls of the engine run in threads, not on the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hmac
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ccjax
import ccjax.server.own_documents as own_documents
from ccjax.engine import Engine, Request
from ccjax.engine.speculation import SearchTimes, SpeculativeAnswer
from ccjax.errors import DeadlineError, RequestError
from ccjax.retrieval import Retriever, default_embedder
from ccjax.server.backend import Backend
from ccjax.server.embeddings import SentenceVectors
from ccjax.server.errors import ApiError, field_names, refusals_of_worker, shutting_down
from ccjax.server.fresh import keep_fresh
from ccjax.server.idle_thread import IdleWork, WorkerClosedError
from ccjax.server.keys import Keys, salt_of
from ccjax.server.live import LiveCounts
from ccjax.server.metrics import ServerMetrics
from ccjax.server.openai_format import Kind
from ccjax.server.preparing import DocumentPreparation
from ccjax.server.schemas import Generation, WarmBody
from ccjax.server.settings import ServerSettings
from ccjax.server.telemetry import RequestTelemetry
from ccjax.server.tracing import Tracing
from ccjax.server.warming import MOST_JOBS, WarmJob, WarmJobs
from ccjax.server.worker import EngineWorker, Job
from ccjax.text import CallForm
from ccjax.types import Document

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Service:
    """State of one server: first loading, then ready, then closed.

    The loader calls `progress` and `open` on any thread; `close` ends everything passed to `open`.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.keys = Keys(settings)
        self.metrics = ServerMetrics()
        self.live = LiveCounts()
        endpoint = settings.otlp_traces_endpoint
        self._tracing = None if endpoint is None else Tracing(endpoint)
        self._searches = SearchTimes()
        self.started_at = int(time.time())
        self._stage: tuple[str, int, int] = ("start", 0, 0)
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._draining = False
        self._closed = False

    def progress(self, stage: str, done: int, total: int) -> None:
        """Records the loading progress shown by `/ready`."""
        self._stage = (stage, done, total)

    def open(self, engine: Engine, retriever: Retriever | None = None, embedder: str = "auto") -> None:
        """Takes ownership of a loaded (and warm) engine and retriever and starts answering requests.

        Args:
          embedder: names the encoder of /v1/embeddings (`default_embedder`) if the retriever has none.

        Raises:
          RuntimeError: the service is open or closed already; engine and retriever stay the caller's then.
        """
        with self._lock:
            if self._closed or self._draining or self._backend is not None:
                raise RuntimeError("service: opened or closed already")
            jobs = WarmJobs(engine, self.metrics.count_warmed)
            preparation = None
            if retriever is not None and self.settings.prepare:
                preparation = DocumentPreparation(engine, retriever, self.metrics.count_prepared)
            worker = EngineWorker(
                engine.submit,
                on_start=self.metrics.start,
                on_end=self._end,
                idle_work=_idle_work(engine, jobs, preparation, self.settings.repair),
                preload=engine.preload,
            )
            if retriever is not None:
                retriever.give_way(worker.thread.is_wanted)
            model = self.settings.served_model_name or engine.model_name
            vectors = SentenceVectors(lambda: (retriever and retriever.embedder) or default_embedder(embedder))
            self._backend = Backend(engine, worker, retriever, model, jobs, preparation, vectors)
            if retriever is not None and (retriever.report.changed or retriever.report.removed):
                drop = functools.partial(own_documents.drop_old_versions, retriever, engine, worker, retriever.report)
                threading.Thread(target=drop, name="ccjax-drop", daemon=True).start()
            self.metrics.attach(
                version=ccjax.__version__,
                model=model,
                engine=engine,
                retriever=retriever,
                preparation=preparation,
                prepares_passages=self.settings.repair,
            )

    def drain(self) -> None:
        """Refuses new requests with 503; accepted ones continue. May be repeated."""
        with self._lock:
            self._draining = True
            backend = self._backend
        if backend is not None:
            backend.worker.shut()

    def break_off(self) -> None:
        """Ends all accepted requests with 503."""
        with self._lock:
            backend = self._backend
        if backend is not None:
            backend.worker.break_off(shutting_down())

    @property
    def is_drained(self) -> bool:
        """True once `drain` was called and every request and order accepted before is done."""
        return self._draining and (self._backend is None or self._backend.worker.is_idle)

    @property
    def is_closing(self) -> bool:
        """True once `close` was called."""
        return self._closed

    def close(self, *, drain: bool = True) -> None:
        """Ends the worker, after the queued requests or at once, then closes engine and retriever. May be repeated."""
        with self._lock:
            backend, self._backend, self._closed = self._backend, None, True
            tracing, self._tracing = self._tracing, None
        if backend is not None:
            backend.worker.close(drain=drain)
            backend.engine.close()
            if backend.retriever is not None:
                backend.retriever.close()
        if tracing is not None:
            tracing.close()

    @property
    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are answered, and details to report about it."""
        if self._closed or self._draining:
            return False, {"status": "closed" if self._closed else "shutting down"}
        if self._backend is not None:
            told: dict[str, Any] = {"status": "ready", "model": self._backend.model}
            if (retriever := self._backend.retriever) is not None:
                told["documents"] = own_documents.index_summary(retriever)
            return True, told
        stage, done, total = self._stage
        return False, {"status": "loading", "stage": stage, "done": done, "total": total}

    @property
    def backend(self) -> Backend:
        """The backend.

        Raises:
          ApiError: 503 while it is loading or closed.
        """
        if self._backend is None:
            status = self.readiness[1]["status"]
            raise ApiError(
                503, f"the server is {status}, try again later", code="not_ready", headers={"Retry-After": "1"}
            )
        return self._backend

    @property
    def call_form(self) -> CallForm:
        """The form in which the model is expected to call tools."""
        return self.settings.tool_call_parser or self.backend.engine.call_form

    def telemetry(self, kind: Kind, headers: Mapping[str, str]) -> RequestTelemetry:
        """Telemetry of a request that just arrived with these HTTP headers."""
        model = self.settings.served_model_name if self._backend is None else self._backend.model
        return RequestTelemetry(kind, headers, model or "", None if self._tracing is None else self._tracing.record)

    async def start_job(
        self,
        body: Generation,
        *,
        id_prefix: str,
        passages: Sequence[Document] | None = None,
        tenant: str = "",
        waited_s: float = 0.0,
    ) -> tuple[Job, Sequence[Document]]:
        """Submits a request that passed every check; returns its job and the documents in its prompt.

        Args:
          passages: result of an earlier search of the server's own documents, used instead of searching again.
          tenant: of the client's key, with caches and a scheduling flow of its own; "" for none.
          waited_s: how long ago the front received the request.

        Raises:
          ApiError: it is refused.
        """
        arrived_s = time.perf_counter() - waited_s
        backend = self.backend
        if backend.worker.is_closed:
            raise shutting_down()
        salt = self._check_access(body, tenant)
        flow = tenant or body.flow
        backend.engine.check_queue_limit(flow)  # before the costly part; `Engine.submit` checks again
        request_of = functools.partial(
            body.to_request,
            reuse=self.settings.reuse,
            timeout_s=self.settings.request_timeout_s,
            request_id=f"{id_prefix}-{uuid.uuid4().hex}",
            cache_salt=salt,
            flow=flow,
            call_form=self.call_form,
        )
        begun = None
        if self._searches.is_slow and passages is None:
            begun = SpeculativeAnswer(
                backend.engine.submit,
                lambda found: _what_is_left(request_of(found), arrived_s),
                lambda: backend.engine.batch_counts.waiting,
                max_pending=self.settings.max_prefill_bs,
            )
        try:
            with field_names(body.argument_names()), backend.worker.thread.paused():
                documents = await self._documents(backend, body, begun, passages)
                found_s = time.perf_counter()
                request = await asyncio.to_thread(request_of, documents)
                prompt = await asyncio.to_thread(backend.engine.assemble, request)
                with refusals_of_worker():
                    start = functools.partial(backend.engine.submit, prompt=prompt) if begun is None else begun.start
                    job = backend.worker.submit(_what_is_left(request, arrived_s), start)
                job.arrived_s, job.found_s = arrived_s, found_s
        except BaseException:  # also when the client disconnects
            if begun is not None:
                begun.close()
            raise
        if begun is not None:
            self.metrics.count_speculations(begun)
        return job, documents[: len(prompt.documents)]

    async def between(self, function: Callable[[Engine], Result]) -> Result:
        """Runs `function` on the engine, on the worker's thread, while requests run.

        Raises:
          ApiError: the server is not ready, is shutting down, has a full queue, or the store did not answer.
        """
        backend = self.backend
        with refusals_of_worker():
            future = backend.worker.thread.call(lambda: function(backend.engine))
        try:
            # Shielded: an accepted operation is carried out even if the client does not wait for it.
            return await asyncio.shield(asyncio.wrap_future(future))
        except WorkerClosedError:
            raise shutting_down() from None
        except OSError as error:
            raise ApiError(503, f"the store does not answer: {error}", code="store_unavailable") from error

    async def warm(self, body: WarmBody) -> WarmJob:
        """Starts the job that warms the documents of a body.

        Raises:
          ApiError, RequestError: it is refused; nothing is computed.
        """
        backend = self.backend
        if (body.documents is None) == (body.document_ids is None):
            raise ApiError(400, "documents: wanted exactly one of documents and document_ids", param="documents")
        if body.tenant is not None and not self.keys.api.has_tenant(body.tenant):
            raise RequestError("tenant", f"wanted a tenant of the API key file, got {body.tenant!r}")
        salt = self._salt(body.cache_salt, body.tenant or "")
        if body.document_ids is None:
            documents = body.own_documents()
        else:
            documents = own_documents.chosen(backend.retriever, body.document_ids)
        begin = functools.partial(
            backend.engine.documents.begin_warming, system_prompt=body.system_prompt, cache_salt=salt
        )
        warming = await asyncio.to_thread(begin, documents)
        with refusals_of_worker():
            job = backend.warm_jobs.add(warming, backend.worker, at_once=body.at_once)
        if job is None:
            message = f"wanted at most {MOST_JOBS} warm jobs at a time, as many as already exist; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "10"})
        return job

    def warm_job(self, job_id: str) -> WarmJob:
        """A warm job.

        Raises:
          ApiError: 404, unknown id.
        """
        job = self.backend.warm_jobs.get(job_id)
        if job is None:
            raise ApiError(404, f"job_id: there is no warm job {job_id!r}", param="job_id", code="job_not_found")
        return job

    def has_own(self, document_id: str) -> bool:
        """True if this is one of the server's own documents, so that the next question may cache it again."""
        retriever = self.backend.retriever
        return retriever is not None and retriever.has_document(document_id)

    def check_model(self, name: str | None) -> None:
        """Checks that `name` is the served model or not given.

        Raises:
          ApiError: 404, as OpenAI answers.
        """
        served = self.backend.model
        if name is not None and name != served:
            message = f"model: wanted {served!r}, the one served here, got {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def keep_fresh(self) -> None:
        """Looks for changed documents, for changes of the store and for requests that wait long, until cancelled."""
        await keep_fresh(self.settings, lambda: self._backend)

    def _end(self, job: Job) -> None:
        self.metrics.end(job)
        if self.settings.page and job.response is not None:
            self.live.record(job)

    def _check_access(self, body: Generation, tenant: str) -> str:
        """The salt of the request's chunk-caches."""
        self.check_model(body.model)
        if body.trace and not self.settings.page:
            raise RequestError("trace", "wanted false or null: this server was started without it (--no-page)")
        return self._salt(body.cache_salt, tenant)

    def _salt(self, cache_salt: str | None, tenant: str) -> str:
        salt, ours = cache_salt or "", self.backend.engine.config.tenant_salt
        # A server with a salt belongs to one tenant: answering under another salt would expose its passages.
        if ours and salt:
            if not hmac.compare_digest(salt.encode(), ours.encode()):
                raise RequestError("cache_salt", "wanted none, or the one this server was started with")
            salt = ""
        return salt_of(salt, tenant)

    async def _documents(
        self,
        backend: Backend,
        body: Generation,
        begun: SpeculativeAnswer | None,
        passages: Sequence[Document] | None,
    ) -> Sequence[Document]:
        own = await asyncio.to_thread(body.own_documents)
        if own is not None and body.retrieval:
            raise RequestError("retrieval", "wanted one of documents and retrieval, got both")
        is_without = passages is None and backend.retriever is None and not body.retrieval
        if is_without or not await asyncio.to_thread(body.searches):
            return own or ()
        if passages is not None:
            return passages
        if backend.retriever is None:
            raise RequestError("retrieval", "this server has no documents of its own; send documents")
        with self.metrics.retrieval_time.time():
            search = functools.partial(own_documents.search, begun=begun, times=self._searches)
            found = await asyncio.to_thread(search, backend.retriever, body, self.settings)
        return found or ()  # without a question the engine reports what is wrong with it


def _idle_work(engine: Engine, jobs: WarmJobs, preparation: DocumentPreparation | None, repair: bool) -> IdleWork:
    """Warm jobs first, since a client asked for them, then the server's own documents; most others take turns, so that
    none of them, hundreds of sizes or of passages, keeps the next from being done. Last comes what measures how long
    prefills take, which needs all sizes and no compilation beside it."""
    others = collections.deque([engine.compile_one, engine.cache.check_one])
    if repair:
        others.append(engine.cache.repair_one)

    def step(is_wanted: Callable[[], bool]) -> bool:
        if jobs.step(is_wanted) or (preparation is not None and preparation.step(is_wanted)):
            return True
        for _ in range(len(others)):
            if is_wanted():  # what was interrupted returns False, too, and a compilation could not be stopped
                return True
            others.rotate(-1)
            if others[-1](is_cancelled=is_wanted):
                return True
        return is_wanted() or engine.profile_one(is_cancelled=is_wanted) or is_wanted()

    return step


def _what_is_left(request: Request, arrived_s: float) -> Request:
    """The request with its remaining time as `timeout_s`."""
    if request.timeout_s is None:
        return request
    left_s = request.timeout_s - (time.perf_counter() - arrived_s)
    if left_s <= 0.0:
        raise DeadlineError("timeout_s: no time was left when the prompt was ready")
    return dataclasses.replace(request, timeout_s=left_s)

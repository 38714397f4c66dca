"""Runs one request after the other on a thread of its own, in order of arrival; idle time goes to other work. Knows no
HTTP and no model.

Verbs: `submit` puts a request in line, `Job.deltas` follows its answer, `Job.cancel` takes it out of line or stops it,
`call` runs a function between two requests, `close` ends the thread.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ccjax.engine import Delta, Request, Response

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 0.1
"""Without a request for this long, idle work begins: not in the moment between two requests of one client."""

Result = TypeVar("Result")

IdleWork = Callable[[Callable[[], bool]], bool]
"""Does a piece of work, asks its argument often and stops once that returns True; returns whether more may be left."""


class Stream(Protocol):
    """Answers a request; stops between two steps once `is_cancelled` returns True."""

    def __call__(self, request: Request, *, is_cancelled: Callable[[], bool]) -> Iterator[Delta]: ...


class Preload(Protocol):
    """What was begun for a request in line."""

    def close(self) -> None:
        """Ends it; may be called twice."""
        ...


class QueueFullError(Exception):
    """As many requests wait as may."""


class WorkerClosedError(Exception):
    """The worker takes no more requests."""


class JobCancelledError(Exception):
    """The job was cancelled before its answer was complete."""


class Job:
    """One request in line or running. Times are `time.perf_counter` seconds, None until reached.

    `response` is set once the answer is complete.
    """

    def __init__(self, request: Request, worker: EngineWorker) -> None:
        self.request = request
        self.submitted_s = time.perf_counter()
        self.started_s: float | None = None
        self.first_delta_s: float | None = None
        self.response: Response | None = None
        self.cancelled = False
        self.preload: Preload | None = None
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answer piece by piece, up to the delta with the response.

        Raises:
          JobCancelledError: `cancel` was called first.
          Exception: whatever the engine raised.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.response is not None:
                return

    def cancel(self) -> None:
        """Takes the job out of line, or stops it after the layer or token that runs; no effect on a complete answer."""
        self._worker._cancel(self)

    def end_preload(self) -> None:
        """Closes what was read ahead for the request, if anything was."""
        if self.preload is not None:
            self.preload.close()

    def _emit(self, event: Delta | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: a forced exit, nobody listens any more
            self.cancelled = True


class EngineWorker:
    """The line of requests and the thread that works it off; at most `max_queue` wait behind the running one."""

    def __init__(
        self,
        stream: Stream,
        *,
        max_queue: int,
        on_end: Callable[[Job], None] = lambda job: None,
        idle_work: IdleWork | None = None,
        preload: Callable[[Request], Preload] | None = None,
    ) -> None:
        """
        Args:
          stream: if it returns a generator, closing that must cancel the request, too.
          on_end: called when a job has its response or is cancelled.
          preload: told of a request that must wait for others, must return at once; what comes back is closed with the
            request's first token, or with the request.
          idle_work: done on the same thread whenever no request came for a while, until nothing is left to do.
        """
        self._stream = stream
        self._idle_work = idle_work
        self._preload = preload
        self._max_queue = max_queue
        self._on_end = on_end
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._calls: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._called_last = False
        self._running: Job | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ccjax-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """1 while a request runs, else 0."""
        return int(self._running is not None)

    @property
    def is_full(self) -> bool:
        """True when `submit` would refuse a request now."""
        # The running one counts whether or not the thread has picked it up yet.
        return self.num_waiting + self.num_running > self._max_queue

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    def submit(self, request: Request) -> Job:
        """The job of a request that is now in line; call it on the event loop that reads the answer.

        Raises:
          QueueFullError, WorkerClosedError: it was not taken.
        """
        job = Job(request, self)
        with self._changed:
            if self._closed:
                raise WorkerClosedError
            if self.is_full:
                raise QueueFullError
            if self._preload is not None and self.num_waiting + self.num_running:
                job.preload = self._preload(request)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function on the worker's thread, so that no request runs meanwhile, ahead of the requests in line; of
        several calls, one between two requests. From any thread; afterwards idle work is looked for again.

        Raises:
          QueueFullError, WorkerClosedError: it was not taken.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise WorkerClosedError
            if len(self._calls) > self._max_queue:
                raise QueueFullError
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def close(self, *, drain: bool = True) -> None:
        """Ends the thread: after all jobs, or without `drain` after the step that runs, with the rest cancelled."""
        with self._changed:
            self._closed = True
            jobs = [] if drain else [*self._waiting, *([self._running] if self._running else [])]
            futures = [] if drain else [future for _, future in self._calls]
            if not drain:
                self._calls.clear()
            self._changed.notify()
        for job in jobs:
            job.cancel()
        for future in futures:
            future.set_exception(WorkerClosedError())
        self._thread.join()

    def _cancel(self, job: Job) -> None:
        with self._changed:
            if job.response is not None or job.cancelled:
                return
            job.cancelled = True
            waits = job in self._waiting
            if waits:
                self._waiting.remove(job)
        job._emit(JobCancelledError())
        if waits:
            job.end_preload()
            self._on_end(job)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            self._answer(job)

    def _next_job(self) -> Job | None:
        """The next one in line, None once there is none and never will be. Waits, and works meanwhile."""
        is_more_to_do = self._idle_work is not None
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(self._is_wanted, _IDLE_AFTER_S if is_more_to_do else None)
                is_call = bool(self._calls) and not (self._waiting and self._called_last)
                self._called_last = is_call
                if is_call:
                    function, future = self._calls.popleft()
                elif self._waiting:
                    self._running = self._waiting.popleft()
                    return self._running
                elif self._closed:
                    return None
            if is_call:
                _complete(future, function)
                is_more_to_do = self._idle_work is not None
            else:
                is_more_to_do = self._work_idly()

    def _is_wanted(self) -> bool:
        """True when the thread has better to do than wait or idle work."""
        return bool(self._waiting or self._calls) or self._closed

    def _work_idly(self) -> bool:
        assert self._idle_work is not None
        try:
            return self._idle_work(self._is_wanted)
        except Exception:
            logger.exception("idle work failed")
            return False

    def _answer(self, job: Job) -> None:
        job.started_s = time.perf_counter()
        try:
            deltas = self._stream(job.request, is_cancelled=lambda: job.cancelled)
            for delta in deltas:
                job.first_delta_s = job.first_delta_s or time.perf_counter()
                job.end_preload()
                job.response = delta.response
                if delta.response is not None:
                    self._on_end(job)
                job._emit(delta)
                if job.cancelled and job.response is None:
                    if isinstance(deltas, Generator):
                        deltas.close()
                    break
        except Exception as error:
            # After the response only the bookkeeping of the engine can have failed: the client has its answer.
            if job.response is not None:
                logger.exception("failed after the answer of %s", job.request.request_id)
            job._emit(error)
        finally:
            job.end_preload()
        if job.cancelled and job.response is None:
            self._on_end(job)


def _complete(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)

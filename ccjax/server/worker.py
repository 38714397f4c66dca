"""Jobs that hand requests to the engine, and a thread for work between requests.

Verbs: `submit` hands a request to the engine, `Job.deltas` streams its answer, `Job.cancel` stops it at any stage,
`call` runs a function on the thread, which otherwise does idle work, and `shut` and `close` end both.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ccjax.engine import Delta, Request, Response

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 0.1
"""Idle work starts after this long without a request, not in the gap between two requests of one client."""

_MOST_CALLS = 128
"""Most calls that may wait for the thread."""

Result = TypeVar("Result")

IdleWork = Callable[[Callable[[], bool]], bool]
"""Does one piece of idle work, polls its argument and stops once that returns True; returns whether more work may be
left."""


class Start(Protocol):
    """`ccjax.engine.Engine.submit`."""

    def __call__(
        self, request: Request, emit: Callable[[Delta | Exception], None], *, on_start: Callable[[], None]
    ) -> Callable[[], None]: ...


class OpenPreload(Protocol):
    """KV reads started for a queued request."""

    def close(self) -> None:
        """Ends the reads; may be called twice."""
        ...


class QueueFullError(Exception):
    """The call queue is full."""


class WorkerClosedError(Exception):
    """The worker accepts no more requests."""


class JobCancelledError(Exception):
    """The job was cancelled before its answer was complete."""


class Job:
    """A queued or running request. Times are seconds of the worker's clock, None until reached.

    `response` is set once the answer is complete. The submitter sets `arrived_s` and `found_s` (when the server had the
    request and its passages) and `least_ttft_s`: if the first token comes sooner than that after the job was started,
    the whole answer is delayed by the difference. The delay is in the reader, not in the engine.
    """

    def __init__(
        self,
        request: Request,
        worker: EngineWorker,
        on_leave: Callable[[Response | None], None] = lambda response: None,
    ) -> None:
        self.request = request
        self.on_leave = on_leave
        self.submitted_s = self.arrived_s = self.found_s = worker.clock()
        self.started_s: float | None = None
        self.first_delta_s: float | None = None
        self.ended_s: float | None = None
        self.response: Response | None = None
        self.least_ttft_s = 0.0
        self.cancelled = False
        self.preload: OpenPreload | None = None
        self.stop: Callable[[], None] = lambda: None
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[float, Delta | Exception]] = asyncio.Queue()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Streams the answer, up to the delta with the response.

        Raises:
          JobCancelledError: `cancel` was called first.
          Exception: whatever the engine raised.
        """
        held_s: float | None = None
        while True:
            came_s, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if held_s is None:
                held_s = max(0.0, max(self.started_s or 0.0, self.submitted_s) + self.least_ttft_s - came_s)
            # Later deltas are delayed equally: delivered at once, they would reveal the same.
            wait_s = came_s + held_s - self._worker.clock()
            if wait_s > 0.0:
                await self._worker.sleep(wait_s)
            yield event
            if event.response is not None:
                return

    def cancel(self) -> None:
        """Cancels a queued job, or stops a running one after the current layer or token; has no effect on a complete
        answer."""
        self._worker._cancel(self)

    def end_preload(self) -> None:
        """Closes the reads started for the request, if any."""
        if self.preload is not None:
            self.preload.close()

    def _emit(self, event: Delta | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._worker.clock(), event))
        except RuntimeError:  # the loop is closed: a forced exit, the client is gone
            self.stop()


class EngineWorker:
    """Hands requests to the engine, which queues them."""

    def __init__(
        self,
        start: Start,
        *,
        on_start: Callable[[Job], None] = lambda job: None,
        on_end: Callable[[Job], None] = lambda job: None,
        idle_work: IdleWork | None = None,
        preload: Callable[[Request], OpenPreload] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        on_start: called when a job leaves the queue.
        on_end: called when a job has its response or, if cancelled, has left the engine.
        preload: called for a request that is queued behind others, must return at once; what it returns is closed
          with the request's first token, or with the request.
        idle_work: run on a thread whenever no request came for a while, until no work is left.
        clock, sleep: used to delay answers.
        """
        self.clock, self.sleep = clock, sleep
        self._start = start
        self._idle_work = idle_work
        self._is_idle_work_left = idle_work is not None
        self._preload = preload
        self._on_start = on_start
        self._on_end = on_end
        self._changed = threading.Condition()
        self._jobs: dict[Job, None] = {}
        self._calls: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._is_calling = False
        self._num_expected = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ccjax-idle", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of queued requests."""
        with self._changed:
            return sum(job.started_s is None for job in self._jobs)

    @property
    def num_running(self) -> int:
        """Number of requests that the engine is running."""
        with self._changed:
            return sum(job.started_s is not None for job in self._jobs)

    @property
    def is_idle(self) -> bool:
        """True when no request and no call is left."""
        with self._changed:
            return not (self._jobs or self._calls or self._is_calling)

    @property
    def is_closed(self) -> bool:
        """True once `shut` or `close` was called."""
        return self._closed

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Context in which a request is being prepared and may already run in part: idle work pauses."""
        with self._changed:
            self._num_expected += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_expected -= 1
                # Interrupted idle work resumes, even if no request came.
                self._is_idle_work_left = self._idle_work is not None
                self._changed.notify_all()

    def submit(
        self,
        request: Request,
        start: Start | None = None,
        on_leave: Callable[[Response | None], None] = lambda response: None,
    ) -> Job:
        """Queues a request and returns its job; call it on the event loop that reads the answer.

        Args:
          start: hands this request to the engine; None for `Engine.submit`.
          on_leave: called once the job is over, however it ended, with the response if there is one.

        Raises:
          WorkerClosedError: the worker is closed.
          Exception: an immediate refusal by the engine, such as `ccjax.errors.OverloadError` if its queue is full.
        """
        job = Job(request, self, on_leave)
        with self._changed:
            if self._closed:
                raise WorkerClosedError
            if self._preload is not None and self._jobs:
                job.preload = self._preload(request)
            self._jobs[job] = None
            self._is_idle_work_left = self._idle_work is not None
            self._changed.notify_all()
        try:
            start = start or self._start
            job.stop = start(request, lambda event: self._handle_event(job, event), on_start=lambda: self._begin(job))
        except BaseException:
            self._leave(job)
            raise
        return job

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function on the worker's thread, after earlier calls. From any thread; idle work is reconsidered
        afterwards.

        Raises:
          QueueFullError, WorkerClosedError: the call was not accepted.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise WorkerClosedError
            if len(self._calls) >= _MOST_CALLS:
                raise QueueFullError
            self._calls.append((function, future))
            self._is_idle_work_left = self._idle_work is not None
            self._changed.notify_all()
        return future

    def shut(self) -> None:
        """Accepts nothing more; existing jobs and calls continue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def break_off(self, reason: Exception) -> None:
        """Ends all jobs with `reason`, which their clients receive."""
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            self._cancel(job, reason)

    def close(self, *, drain: bool = True) -> None:
        """Ends the thread: after all jobs and calls or, without `drain`, as soon as the running ones have stopped."""
        self.shut()
        with self._changed:
            jobs = [] if drain else list(self._jobs)
            futures = [] if drain else [future for _, future in self._calls]
            if not drain:
                self._calls.clear()
            self._changed.notify_all()
        for job in jobs:
            job.cancel()
        for future in futures:
            future.set_exception(WorkerClosedError())
        self._thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    # -- jobs --------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        """Records that the engine started a job; on the engine's thread."""
        job.started_s = self.clock()
        self._on_start(job)

    def _cancel(self, job: Job, reason: Exception | None = None) -> None:
        with self._changed:
            if job.response is not None or job.cancelled:
                return
            job.cancelled = True
            is_queued = job.started_s is None
        job._emit(reason or JobCancelledError())
        job.stop()
        if is_queued:  # no need to wait for the engine to notice
            self._end_cancelled(job)

    def _handle_event(self, job: Job, event: Delta | Exception) -> None:
        """Processes an event of a job; on the engine's thread."""
        if isinstance(event, Exception):
            if job.cancelled:
                self._end_cancelled(job)
            else:
                job._emit(event)
                self._leave(job)
            return
        with self._changed:
            is_cancelled = job.cancelled
            if not is_cancelled:
                job.response = event.response
        if is_cancelled:
            if event.response is not None:  # complete before the engine noticed the cancellation
                self._end_cancelled(job)
            return
        job.first_delta_s = job.first_delta_s or self.clock()
        job.end_preload()
        if event.response is not None:
            self._leave(job)
            self._on_end(job)
        job._emit(event)

    def _end_cancelled(self, job: Job) -> None:
        """Ends a cancelled job; only the first call has an effect."""
        if self._leave(job):
            self._on_end(job)

    def _leave(self, job: Job) -> bool:
        """Removes a job; False if it was removed already."""
        job.end_preload()
        with self._changed:
            was_here = job in self._jobs
            job.ended_s = job.ended_s or self.clock()
            self._jobs.pop(job, None)
            self._changed.notify_all()
        if was_here:
            job.on_leave(job.response)
        return was_here

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed or self._may_work_idly)
                call = self._calls.popleft() if self._calls else None
                self._is_calling = call is not None
                if call is None and self._closed:
                    return
                if call is None and self._changed.wait_for(self._is_wanted, _IDLE_AFTER_S):
                    continue
            if call is not None:
                _complete(call[1], call[0])
                self._is_calling = False
            else:
                self._work_idly()

    @property
    def _may_work_idly(self) -> bool:
        """True when no request is present and idle work may be left."""
        return self._is_idle_work_left and not (self._jobs or self._num_expected)

    def _is_wanted(self) -> bool:
        """True when something more urgent than idle work is waiting."""
        return bool(self._jobs or self._calls or self._num_expected) or self._closed

    def _work_idly(self) -> None:
        assert self._idle_work is not None
        with self._changed:
            self._is_idle_work_left = False  # work arriving meanwhile may leave more behind
        try:
            is_left = self._idle_work(self._is_wanted)
        except Exception:
            logger.exception("idle work failed")
            return
        if is_left:
            with self._changed:
                self._is_idle_work_left = True


def _complete(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)

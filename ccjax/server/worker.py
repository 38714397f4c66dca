"""Jobs that hand requests to the engine: `EngineWorker.submit` hands one over, `Job.deltas` streams its answer,
`Job.cancel` stops it at any stage, and `EngineWorker.shut` and `close` end all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ccjax.engine import Delta, Request, Response
from ccjax.server.idle_thread import IdleThread, IdleWork, WorkerClosedError


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


class JobCancelledError(Exception):
    """The job was cancelled before its answer was complete."""


class Job:
    """A queued or running request. Times are seconds of `time.perf_counter`, None until reached.

    `response` is set once the answer is complete. The submitter sets `arrived_s` and `found_s` (when the server had the
    request and its passages).
    """

    def __init__(self, request: Request, worker: EngineWorker) -> None:
        self.request = request
        self.submitted_s = self.arrived_s = self.found_s = time.perf_counter()
        self.started_s: float | None = None
        self.first_delta_s: float | None = None
        self.ended_s: float | None = None
        self.response: Response | None = None
        self.cancelled = False
        self.preload: OpenPreload | None = None
        self.stop: Callable[[], None] = lambda: None
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    async def deltas(self, pause_s: float | None = None) -> AsyncIterator[Delta | None]:
        """Streams the answer, up to the delta with the response; None whenever nothing came for `pause_s`.

        Raises:
          JobCancelledError: `cancel` was called first.
          Exception: whatever the engine raised.
        """
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
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
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: a forced exit, the client is gone
            self.stop()


class EngineWorker:
    """Hands requests to the engine, which queues them.

    Attributes:
      thread: runs calls, and idle work while there is no job.
    """

    def __init__(
        self,
        start: Start,
        *,
        on_start: Callable[[Job], None] = lambda job: None,
        on_end: Callable[[Job], None] = lambda job: None,
        idle_work: IdleWork | None = None,
        preload: Callable[[Request], OpenPreload] | None = None,
    ) -> None:
        """Args:
        on_start: called when a job leaves the queue.
        on_end: called when a job has its response or, if cancelled, has left the engine.
        preload: called for a request that is queued behind others, must return at once; what it returns is closed
          with the request's first token, or with the request.
        idle_work: run on a thread whenever no request came for a while, until no work is left.
        """
        self._start = start
        self._preload = preload
        self._on_start = on_start
        self._on_end = on_end
        self._changed = threading.Condition()
        self._jobs: dict[Job, None] = {}
        self._closed = False
        self.thread = IdleThread(lambda: bool(self._jobs), idle_work)

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
        return not self._jobs and not self.thread.is_calling

    @property
    def is_closed(self) -> bool:
        """True once `shut` or `close` was called."""
        return self._closed

    def submit(self, request: Request, start: Start | None = None) -> Job:
        """Queues a request and returns its job; call it on the event loop that reads the answer.

        Args:
          start: hands this request to the engine; None for `Engine.submit`.

        Raises:
          WorkerClosedError: the worker is closed.
          Exception: an immediate refusal by the engine, such as `ccjax.errors.OverloadError` if its queue is full.
        """
        job = Job(request, self)
        with self._changed:
            if self._closed:
                raise WorkerClosedError
            if self._preload is not None and self._jobs:
                job.preload = self._preload(request)
            self._jobs[job] = None
        self.thread.wake()
        try:
            start = start or self._start
            job.stop = start(request, lambda event: self._handle_event(job, event), on_start=lambda: self._begin(job))
        except BaseException:
            self._leave(job)
            raise
        return job

    def shut(self) -> None:
        """Accepts nothing more; existing jobs and calls continue."""
        with self._changed:
            self._closed = True
        self.thread.shut()

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
        for job in jobs:
            job.cancel()
        self.thread.close(drain=drain)
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    # -- jobs --------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        """Records that the engine started a job; on the engine's thread."""
        job.started_s = time.perf_counter()
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
        job.first_delta_s = job.first_delta_s or time.perf_counter()
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
            job.ended_s = job.ended_s or time.perf_counter()
            self._jobs.pop(job, None)
            self._changed.notify_all()
        self.thread.wake()
        return was_here

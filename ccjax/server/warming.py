"""Warm jobs: documents that are computed before questions arrive, in idle time or, if urgent, while requests run.

`step` is idle work of the engine's worker; urgent jobs use its `call`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from ccjax.engine import Engine, Warming
from ccjax.server.idle_thread import QueueFullError, WorkerClosedError
from ccjax.server.worker import EngineWorker

logger = logging.getLogger(__name__)

MOST_JOBS = 16
"""Most unfinished jobs."""

_MOST_KEPT = 100
"""Finished jobs that can still be queried."""

WarmJobStatus = Literal["running", "completed", "cancelled", "failed"]


class WarmJob:
    """A list of documents to warm, and its progress."""

    def __init__(self, warming: Warming, at_once: bool) -> None:
        self.id = f"warm-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.warming = warming
        self.at_once = warming.is_urgent = at_once
        self.status: WarmJobStatus = "running"

    def as_json(self) -> dict[str, Any]:
        """The job as the API shows it."""
        done = tuple(self.warming.done)
        counts = {status: sum(item.status == status for item in done) for status in ("present", "computed", "no_room")}
        return {
            "id": self.id,
            "object": "cache.warm",
            "created": self.created,
            "status": self.status,
            "at_once": self.at_once,
            "total": self.warming.total,
            "done": len(done),
            **counts,
        }


class WarmJobs:
    """The jobs of one engine. Thread-safe."""

    def __init__(self, engine: Engine, count: Callable[[str], None]) -> None:
        """Args:
        count: called with the status of each finished document.
        """
        self._engine = engine
        self._count = count
        self._lock = threading.Lock()
        self._jobs: dict[str, WarmJob] = {}

    def add(self, warming: Warming, worker: EngineWorker, *, at_once: bool) -> WarmJob | None:
        """Starts a warm job; None if too many are unfinished.

        Raises:
          QueueFullError, WorkerClosedError: the worker does not accept it.
        """
        job = WarmJob(warming, at_once)
        with self._lock:
            if sum(other.status == "running" for other in self._jobs.values()) >= MOST_JOBS:
                return None
            worker.thread.call((lambda: self._go_on(job, worker)) if at_once else (lambda: None))  # wakes it up
            self._jobs[job.id] = job
            finished = [key for key, other in self._jobs.items() if other.status != "running"]
            for key in finished[: max(0, len(finished) - _MOST_KEPT)]:
                del self._jobs[key]
        return job

    def get(self, job_id: str) -> WarmJob | None:
        """The job, or None if it is unknown or forgotten."""
        return self._jobs.get(job_id)

    def cancel(self, job: WarmJob) -> bool:
        """Cancels a job; what it computed stays. False if it was over already."""
        with self._lock:
            if job.status != "running":
                return False
            job.status = "cancelled"
        return True

    def step(self, is_wanted: Callable[[], bool]) -> bool:
        """Processes a document of the oldest job, unless `is_wanted`; False if no work is left now."""
        for job in tuple(self._jobs.values()):
            if job.status == "running" and not job.at_once:
                self._warm_one(job, is_wanted)
                return not is_wanted()
        return False

    def _go_on(self, job: WarmJob, worker: EngineWorker) -> None:
        """Processes a document of an urgent job and queues itself for the next one."""
        if job.status == "running":
            self._warm_one(job, lambda: False)
        if job.status == "running":
            try:
                worker.thread.call(lambda: self._go_on(job, worker))
            except (QueueFullError, WorkerClosedError):
                job.at_once = job.warming.is_urgent = False  # then in idle time

    def _warm_one(self, job: WarmJob, is_wanted: Callable[[], bool]) -> None:
        num_done = len(job.warming.done)
        try:
            self._engine.documents.warm_one(job.warming, is_cancelled=lambda: is_wanted() or job.status != "running")
        except Exception:
            logger.exception("warm job %s failed at document %d", job.id, len(job.warming.done))
            self._end(job, "failed")
            return
        for document in job.warming.done[num_done:]:
            self._count(document.status)
        if job.warming.is_finished:
            self._end(job, "completed")

    def _end(self, job: WarmJob, status: WarmJobStatus) -> None:
        with self._lock:
            if job.status == "running":
                job.status = status

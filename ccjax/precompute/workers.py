"""The coordinator's view of the worker processes: sends commands, receives replies, detects deaths."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from ccjax.precompute.messages import Failure, Settings

POLL_S = 0.2
"""Interval of checks whether the user requested the end."""

_END_S = 60.0

Kind = Literal["progress", "done", "failed", "died"]


class WorkerError(RuntimeError):
    """A worker died or met a defect, and the run cannot continue without it."""


class StoppedError(Exception):
    """The user requested the end."""


@dataclasses.dataclass(eq=False)
class WorkerProcess:
    """One worker; `is_busy` while a reply is awaited."""

    number: int
    process: BaseProcess
    connection: multiprocessing.connection.Connection
    is_busy: bool = True

    def send(self, command: str, *arguments: Any) -> None:
        """Sends a command; a dead worker is detected by `Workers.next_event`."""
        self.is_busy = True
        with contextlib.suppress(OSError):
            self.connection.send((command, *arguments))

    @property
    def how_it_died(self) -> str:
        """Name for messages."""
        self.process.join(_END_S)
        return f"worker {self.number} died (exit code {self.process.exitcode})"


class Workers:
    """Processes started with `spawn`, busy loading until they reply.

    Args:
      settings: one for each worker.
      on_progress: called with (worker's number, stage, done, total).
      is_stopped: True once the user requested the end.
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        on_progress: Callable[[int, str, int, int], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._on_progress = on_progress
        self._is_stopped = is_stopped
        self.alive: list[WorkerProcess] = []
        self._ready: list[WorkerProcess] = []
        try:
            for number, own in enumerate(settings):
                ours, theirs = context.Pipe()
                process = context.Process(target=_run, args=(theirs, own), name=f"ccjax-precompute-{number}")
                process.start()
                theirs.close()  # so that a dead worker shows as an end of file
                self.alive.append(WorkerProcess(number, process, ours))
        except BaseException:
            self.kill()
            raise

    def next_event(self) -> tuple[WorkerProcess, Kind, Any] | None:
        """The next reply of a busy worker, or None if there is none for a moment; progress is passed on. A dead worker
        is no longer `alive`.

        Raises:
          StoppedError: the user requested the end.
        """
        if self._is_stopped():
            raise StoppedError
        if not self._ready:
            by_connection: dict[Any, WorkerProcess] = {worker.connection: worker for worker in self.alive}
            found = multiprocessing.connection.wait(list(by_connection), POLL_S)
            self._ready = [by_connection[connection] for connection in found]
        if not self._ready:
            return None
        worker = self._ready.pop()
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self.alive.remove(worker)
            return worker, "died", None
        if kind == "progress":
            self._on_progress(worker.number, *value)
            return None
        worker.is_busy = False
        return worker, kind, value

    def answers(self) -> list[Any]:
        """The replies of all busy workers, in their order.

        Raises:
          ValueError: one refused; its message.
          WorkerError: one died, or met a defect.
          StoppedError: as `next_event`.
        """
        found: dict[int, Any] = {}
        while any(worker.is_busy for worker in self.alive):
            event = self.next_event()
            if event is None:
                continue
            worker, kind, value = event
            if kind == "died":
                raise WorkerError(worker.how_it_died)
            if isinstance(value, Failure):
                raise ValueError(value.message) if value.is_refusal else WorkerError(value.message)
            found[worker.number] = value
        return [found[number] for number in sorted(found)]

    def ask(self, command: str, *arguments: Any) -> Any:
        """The reply of the first worker; raises as `answers`."""
        self.alive[0].send(command, *arguments)
        return self.answers()[0]

    def ask_all(self, command: str, *arguments: Any) -> list[Any]:
        """The reply of each worker; raises as `answers`."""
        for worker in self.alive:
            worker.send(command, *arguments)
        return self.answers()

    def end(self) -> list[tuple[WorkerProcess, Any]]:
        """Asks all workers to end; those that compute are interrupted, and their last replies are returned. Kills
        workers that do not end within a minute."""
        last = []
        deadline = time.monotonic() + _END_S
        busy = [worker for worker in self.alive if worker.is_busy]
        for worker in self.alive:
            worker.send("end")
        for worker in busy:
            with contextlib.suppress(EOFError, OSError):
                while worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    kind, value = worker.connection.recv()
                    if kind == "done":
                        last.append((worker, value))
                    if kind != "progress":
                        break
        for worker in self.alive:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        return last

    def kill(self) -> None:
        """Kills the remaining workers at once."""
        for worker in self.alive:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self.alive = []


def _run(connection: multiprocessing.connection.Connection, settings: Settings) -> None:
    from ccjax.precompute.worker import run

    run(connection, settings)

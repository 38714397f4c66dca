"""A thread that runs calls one after the other, and idle work while no request is present."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 0.1
"""Idle work starts, or goes on, this long after the last request or call, not in the gap between two requests of one
client."""

_MOST_CALLS = 128
"""Most calls that may wait for the thread."""

Result = TypeVar("Result")

IdleWork = Callable[[Callable[[], bool]], bool]
"""Does one piece of idle work, polls its argument and stops once that returns True; returns whether more work may be
left."""


class QueueFullError(Exception):
    """The call queue is full."""


class WorkerClosedError(Exception):
    """The worker accepts no more requests and calls."""


class IdleThread:
    """Runs calls and, whenever there was no request for a while, idle work. All methods may be called from any thread.

    Args:
      is_busy: True while a request is present; call `wake` whenever that changes.
      idle_work: called until no work is left, and again after each `wake`.
    """

    def __init__(self, is_busy: Callable[[], bool], idle_work: IdleWork | None) -> None:
        self._is_busy = is_busy
        self._idle_work = idle_work
        self._is_idle_work_left = idle_work is not None
        self._changed = threading.Condition()
        self._calls: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._is_calling = False
        self._num_expected = 0
        self._is_quiet = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ccjax-idle", daemon=True)
        self._thread.start()

    @property
    def is_calling(self) -> bool:
        """True while a call runs or waits."""
        with self._changed:
            return bool(self._calls) or self._is_calling

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context without idle work, except what cannot stop at once."""
        with self._changed:
            self._num_expected += 1
            self._is_quiet = False
        try:
            yield
        finally:
            with self._changed:
                self._num_expected -= 1
            self.wake()  # interrupted idle work resumes

    def wake(self) -> None:
        """Makes the thread reconsider what it may do."""
        with self._changed:
            self._is_idle_work_left = self._idle_work is not None
            self._is_quiet = False
            self._changed.notify_all()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function after earlier calls; idle work is reconsidered afterwards.

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
        self.wake()
        return future

    def shut(self) -> None:
        """Accepts no more calls; existing ones continue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, *, drain: bool) -> None:
        """Ends the thread: after all calls or, without `drain`, as soon as the running one is done."""
        self.shut()
        futures: list[Future[Any]] = []
        if not drain:
            with self._changed:
                futures = [future for _, future in self._calls]
                self._calls.clear()
        for future in futures:
            future.set_exception(WorkerClosedError())
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed or self._may_work_idly)
                call = self._calls.popleft() if self._calls else None
                self._is_calling = call is not None
                if call is None and self._closed:
                    return
                if call is None and not self._is_quiet:
                    self._is_quiet = not self._changed.wait_for(self.is_wanted, _IDLE_AFTER_S)
                    if not self._is_quiet:
                        continue
            if call is not None:
                _complete(call[1], call[0])
                self._is_calling = False
            else:
                self._work_idly()

    @property
    def _may_work_idly(self) -> bool:
        """True when no request is present and idle work may be left."""
        return self._is_idle_work_left and not (self._is_busy() or self._num_expected)

    def is_wanted(self) -> bool:
        """True when something more urgent than idle work is waiting."""
        return self._is_busy() or bool(self._calls or self._num_expected) or self._closed

    def _work_idly(self) -> None:
        assert self._idle_work is not None
        with self._changed:
            self._is_idle_work_left = False  # work arriving meanwhile may leave more behind
        try:
            is_left = self._idle_work(self.is_wanted)
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

"""The thread of a batch loop, and the ways to it: the line, cancelling, guests, the end."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator

from ccjax.engine.batch.failures import CancelledError, as_request_error, too_late
from ccjax.engine.batch.line import SharedScheduler
from ccjax.engine.batch.serving import Serving
from ccjax.engine.pool import DevicePool
from ccjax.errors import OverloadError
from ccjax.policy.scheduling import AdmissionQueueFullError, NeverFitsError, SchedulerSettings, StepCosts

logger = logging.getLogger(__name__)

_GUEST_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class BatchCounts:
    """How a loop stands: requests that run and that wait, prompt tokens that are to be computed for them, preemptions
    and retries behind failed steps so far, pages of the pool."""

    running: int
    waiting: int
    unserved_tokens: int
    preemptions: int
    retries: int
    free_pages: int
    num_pages: int


class Doors(abc.ABC):
    """What of `BatchLoop` any thread may call, and the thread that calls `_work` while there are requests.

    `_changed` guards all that more than one thread uses: the scheduler, `_new`, and who is in. `_servings`, the
    requests that the loop knows, belong to its thread; what `submit` put in line waits in `_new` for it.
    """

    def __init__(self, pool: DevicePool, settings: SchedulerSettings) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._scheduler = SharedScheduler(settings, self._changed)
        self._servings: dict[str, Serving] = {}
        self._new: collections.deque[Serving] = collections.deque()
        self._num_preemptions = 0
        self._num_retries = 0
        self._num_guests = 0
        self._has_guest = False
        self._is_standing = True
        self._closed = False
        self._thread: threading.Thread | None = None

    @abc.abstractmethod
    def _work(self) -> None:
        """Some steps for the requests that there are."""

    @abc.abstractmethod
    def _fail(self, serving: Serving, error: Exception) -> None:
        """Ends all answers of a request with an error."""

    @abc.abstractmethod
    def _start_over(self) -> None:
        """Forgets what was under way, once all requests have failed."""

    @abc.abstractmethod
    def _costs(self) -> StepCosts:
        """What things take here."""

    # -- from any thread ---------------------------------------------------------------------------------------

    @property
    def counts(self) -> BatchCounts:
        """Who runs (in prefill or decoding) and waits (in line, preempted ones among them), and what they need."""
        scheduler, pool = self._scheduler, self._pool
        return BatchCounts(
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.unserved_tokens(),
            self._num_preemptions,
            self._num_retries,
            pool.num_free,
            pool.num_pages,
        )

    def in_line(self) -> list[Serving]:
        """The requests that never left the line, in no order; one may just do so."""
        with self._changed:  # the loop's thread changes `_servings` without it, but copying the values is one step
            known = [*self._servings.values(), *self._new]
        return [one for one in known if one.siblings.started_s is None]

    def check_queue_limit(self, flow: str) -> None:
        """Raises OverloadError where `submit` would for a request of that flow."""
        with self._changed, self._refusing(flow):
            self._scheduler.check_queue_limit(flow)

    def submit(self, serving: Serving) -> None:
        """Puts a request in line.

        Raises:
          OverloadError: there is no place for it.
          ContextLengthError: the pool is too small for it.
          RuntimeError: the loop is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("engine: closed already")
            with self._refusing(serving.siblings.flow):
                self._scheduler.settings.check_fits(serving.most_work)
                self._scheduler.add(serving.work(lambda _: None))
            self._new.append(serving)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ccjax-batch", daemon=True)
                self._thread.start()

    @contextlib.contextmanager
    def _refusing(self, flow: str) -> Iterator[None]:
        try:
            yield
        except AdmissionQueueFullError as error:
            raise OverloadError(str(error), self._scheduler.retry_after_s(flow, self._costs())) from None
        except NeverFitsError as error:
            raise as_request_error(error) from None

    def wake(self) -> None:
        """Lets the loop look which requests were cancelled."""
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self, *, wait: bool = True) -> Iterator[bool]:
        """Lets this thread in; without `wait`, False where a request, or another thread, would have to be waited for.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            if not wait and (self._servings or self._new or self._num_guests):
                is_let_in = False
            else:
                is_let_in = True
                self._num_guests += 1
                self._changed.wait_for(lambda: self._is_standing and not self._has_guest)
                self._has_guest = True
        try:
            if is_let_in and self._closed:
                raise RuntimeError("engine: closed already")
            yield is_let_in
        finally:
            if is_let_in:
                with self._changed:
                    self._has_guest = False
                    self._num_guests -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread once all requests have their answer. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._stand():
            try:
                self._work()
            except Exception as error:
                logger.exception("the batch failed; everything that was under way or in line fails with it")
                with self._changed:
                    self._welcome()
                    while self._servings:
                        self._fail(next(iter(self._servings.values())), error)
                    self._scheduler = SharedScheduler(self._scheduler.settings, self._changed)
                self._start_over()

    def _stand(self) -> bool:
        """Lets guests in, and waits for work; False once there is none and never will be."""
        is_prefilling = any(serving.job is not None and not serving.is_decoding for serving in self._servings.values())
        with self._changed:
            while not is_prefilling and (self._num_guests or not (self._new or self._servings or self._closed)):
                self._is_standing = True
                self._changed.notify_all()
                self._changed.wait(_GUEST_LOOK_S if self._new or self._servings else None)
                self._attend_line()
            self._is_standing = not (self._new or self._servings)
            return bool(self._new or self._servings)

    def _welcome(self) -> None:
        """Takes in new requests; under the lock, so that the scheduler names nobody who is not known here."""
        while self._new:
            serving = self._new.popleft()
            self._servings[serving.request_id] = serving

    def _attend_line(self) -> None:
        """Lets go of cancelled and late requests while guests are in, if they never left the line: those hold nothing
        that a guest may use."""
        self._welcome()
        now_s = time.perf_counter()
        for serving in tuple(self._servings.values()):
            siblings = serving.siblings
            if siblings.started_s is None and siblings.is_cancelled():
                self._fail(serving, CancelledError())
            elif siblings.started_s is None and siblings.deadline_s is not None and siblings.deadline_s <= now_s:
                self._fail(serving, too_late())

"""Answers that start while their passages are still being searched for (RAGCache sec. 5.3)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ccjax.engine.batch.group import Emit
from ccjax.errors import DeadlineError, OverloadError, RequestError
from ccjax.policy.speculation import Speculation
from ccjax.requests import Delta, Request
from ccjax.types import Document

NUM_STAGES = 16
"""Stages of a search during which an answer may begin."""
_SLOW_S = 0.2


class SearchTimes:
    """Decides whether answers begin during searches (RAGCache sec. 5.3), by the time that recent searches took.

    TTFT falls by at most the part of a search that is hidden, and answers from other passages than the final ones cost
    other requests time: so only where searches take 0.2 s in the mean, and until they take half of that. One slow
    search alone does not count: the first one compiles the encoder.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._is_slow = False

    @property
    def is_slow(self) -> bool:
        """True if answers should begin during searches."""
        return self._is_slow

    def add(self, seconds: float) -> None:
        """Adds a search that took so long, without what began meanwhile."""
        self._mean_s = 0.8 * self._mean_s + 0.2 * min(seconds, 4 * _SLOW_S)
        self._is_slow = self._mean_s >= (0.5 * _SLOW_S if self._is_slow else _SLOW_S)


class Submit(Protocol):
    """`Engine.submit`."""

    def __call__(self, request: Request, emit: Emit, *, on_start: Callable[[], None]) -> Callable[[], None]: ...


class _Attempt:
    """An answer whose deltas are held back until its passages are known to be the right ones."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self.documents = documents
        self.cancel: Callable[[], None] = lambda: None
        self.held: list[Delta | Exception] = []
        self.has_started = False
        self.emit: Emit | None = None
        self.on_start: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def take(self, event: Delta | Exception) -> None:
        """Holds an event back or passes it on; called on the engine's thread."""
        with self._lock:
            if self.emit is None:
                self.held.append(event)
            else:
                self.emit(event)

    def begin(self) -> None:
        """Records that the request left the queue."""
        with self._lock:
            self.has_started = True
            self.on_start()

    def release(self, emit: Emit, on_start: Callable[[], None]) -> None:
        """Sends what was held back, and all that follows, to `emit`."""
        with self._lock:
            self.on_start = on_start
            if self.has_started:
                on_start()
            for event in self.held:
                emit(event)
            self.held.clear()
            self.emit = emit


class SpeculativeAnswer:
    """The answer to one request, started speculatively from the passages that `offer` reports. One thread calls
    `offer`; another may call `start`, after the last offer, and `close`.

    Passages that a wrong answer prepared stay cached, and are prepared further if the next list has them: of that, in
    any order, only the rest has to be computed.

    Attributes:
      num_started: answers started before the search was complete.
      was_right: whether the last of them used the passages given to `start`; None before `start`.
    """

    def __init__(
        self,
        submit: Submit,
        request_of: Callable[[Sequence[Document]], Request],
        num_pending: Callable[[], int],
        *,
        max_pending: int,
    ) -> None:
        """
        Args:
          request_of: builds the request over some documents.
          num_pending: returns the current number of waiting requests.
          max_pending: see `ccjax.policy.speculation.Speculation`.
        """
        self._submit = submit
        self._request_of = request_of
        self._num_pending = num_pending
        self._policy = Speculation(max_pending)
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._is_closed = False
        self.num_started = 0
        self.was_right: bool | None = None

    def offer(self, documents: Sequence[Document]) -> None:
        """Reports what the search has found so far, best first, before the final list. Does not raise for an invalid
        request, which `start` will report."""
        own = self._attempt is not None and not self._attempt.has_started
        step = self._policy.next_step(_keys(documents), is_final=False, num_pending=self._num_pending() - own)
        begun = None
        if step.begin and not self._is_closed:
            begun = _Attempt(tuple(documents))
            try:
                begun.cancel = self._submit(self._request_of(documents), begun.take, on_start=begun.begin)
                self.num_started += 1
            except (RequestError, OverloadError, DeadlineError):  # the request with the final passages may succeed
                self._policy.refused()
                begun = None
        if step.give_up:  # only now: so what is being computed of passages of both goes on
            self._give_up()
        if begun is not None:
            with self._lock:
                self._attempt = begun
            if self._is_closed:  # closed meanwhile, so nothing else would cancel the attempt
                self._give_up()

    def start(self, request: Request, emit: Emit, *, on_start: Callable[[], None]) -> Callable[[], None]:
        """As `Engine.submit`, for the request with the final documents; continues the speculative answer if that used
        the same ones."""
        attempt = self._attempt
        self.was_right = attempt is not None and _keys(attempt.documents) == _keys(request.documents or ())
        if attempt is not None and self.was_right:
            with self._lock:
                self._attempt = None
            attempt.release(emit, on_start)
            return attempt.cancel
        try:
            return self._submit(request, emit, on_start=on_start)
        finally:
            self.close()

    def close(self) -> None:
        """Cancels a speculative answer that `start` has not released, even one from an `offer` still running. May be
        called twice."""
        self._is_closed = True
        self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()


def _keys(documents: Sequence[Document]) -> tuple[str, ...]:
    """Keys by which lists of passages are compared: all fields except the score, which does not enter the prompt."""
    return tuple(repr(dataclasses.replace(document, score=None)) for document in documents)

"""Answers that begin while their passages are still searched for (RAGCache sec. 5.3)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ccjax.engine.batch.sequence import Emit
from ccjax.errors import DeadlineError, OverloadError, RequestError
from ccjax.policy.speculation import Speculation
from ccjax.requests import Delta, Request
from ccjax.types import Document


class Submit(Protocol):
    """`Engine.submit`."""

    def __call__(self, request: Request, emit: Emit, *, on_start: Callable[[], None]) -> Callable[[], None]: ...


class _Attempt:
    """An answer whose pieces are held back until it is known to be the right one."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self.documents = documents
        self.cancel: Callable[[], None] = lambda: None
        self.held: list[Delta | Exception] = []
        self.has_started = False
        self.emit: Emit | None = None
        self.on_start: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def take(self, event: Delta | Exception) -> None:
        """On the engine's thread."""
        with self._lock:
            if self.emit is None:
                self.held.append(event)
            else:
                self.emit(event)

    def begin(self) -> None:
        """It leaves the line."""
        with self._lock:
            self.has_started = True
            self.on_start()

    def release(self, emit: Emit, on_start: Callable[[], None]) -> None:
        """It is the right one: what was held back, and all that follows, goes to `emit`."""
        with self._lock:
            self.on_start = on_start
            if self.has_started:
                on_start()
            for event in self.held:
                emit(event)
            self.held.clear()
            self.emit = emit


class SpeculativeAnswer:
    """The answer to one request, begun from what `offer` says was found so far. One thread offers; `start`, after the
    last offer, and `close` may be called by another.

    What a wrong answer computed to the end stays cached: where the right list holds some of its passages, in whatever
    order, only the rest is left to compute.

    Attributes:
      num_started: answers that were begun before the search was through.
      was_right: the last of them was from the passages that `start` was given; None before that.
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
          request_of: the request over some documents.
          num_pending: waiting requests now.
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
        """What the search has found so far, best first; not the final list. Never fails: what is wrong with the request
        shows when it is started."""
        own = self._attempt is not None and not self._attempt.has_started
        step = self._policy.next_step(_keys(documents), is_final=False, num_pending=self._num_pending() - own)
        if step.give_up:
            self._give_up()
        if step.begin and not self._is_closed:
            attempt = _Attempt(tuple(documents))
            try:
                attempt.cancel = self._submit(self._request_of(documents), attempt.take, on_start=attempt.begin)
            except (RequestError, OverloadError, DeadlineError):  # the final passages may fit, and find a place
                self._policy.refused()
                return
            self.num_started += 1
            with self._lock:
                self._attempt = attempt
            if self._is_closed:  # meanwhile: nothing else will end it
                self._give_up()

    def start(self, request: Request, emit: Emit, *, on_start: Callable[[], None]) -> Callable[[], None]:
        """`Engine.submit` for the request over the final documents: the answer that was begun, if it is from these."""
        attempt = self._attempt
        self.was_right = attempt is not None and _keys(attempt.documents) == _keys(request.documents or ())
        if attempt is not None and self.was_right:
            with self._lock:
                self._attempt = None
            attempt.release(emit, on_start)
            return attempt.cancel
        self.close()
        return self._submit(request, emit, on_start=on_start)

    def close(self) -> None:
        """Gives up what was begun and not started, now or by an offer that is under way. May be called twice."""
        self._is_closed = True
        self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()


def _keys(documents: Sequence[Document]) -> tuple[str, ...]:
    """What tells lists of passages apart: all of them but their scores, which no prompt shows."""
    return tuple(repr(dataclasses.replace(document, score=None)) for document in documents)

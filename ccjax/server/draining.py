"""Graceful shutdown: the first signal finishes accepted requests, the second aborts them."""

from __future__ import annotations

import math
import signal
from types import FrameType
from typing import Any, Protocol

import uvicorn


class Drainable(Protocol):
    """Something that can be drained: a `ccjax.server.service.Service`, or a front that passes requests on."""

    def drain(self) -> None:
        """Refuses new requests; may be repeated."""
        ...

    def break_off(self) -> None:
        """Aborts all accepted requests."""
        ...

    @property
    def is_drained(self) -> bool:
        """True once `drain` was called and all requests accepted before are answered."""
        ...

    @property
    def is_closing(self) -> bool:
        """True once only a kill can end it sooner."""
        ...


_REFUSAL_S = 2


class DrainingServer(uvicorn.Server):
    """A uvicorn server that, on a signal, first answers all accepted requests and meanwhile refuses others with 503. It
    keeps listening, because a refused or waiting connection would tell a client less.

    A second signal aborts running requests, with 503 or an error in the stream. A signal while caches are being written
    out, or a third one, kills the process, which never damages a store.
    """

    def __init__(self, app: Any, service: Drainable, *, keep_alive_s: float) -> None:
        """
        Args:
          keep_alive_s: how long a connection stays open between requests.
        """
        quiet = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, ws="none", timeout_keep_alive=math.ceil(keep_alive_s), **quiet))
        self._service = service
        self._is_draining = self._is_breaking_off = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. Takes no lock, because it may interrupt this thread anywhere."""
        if not self._is_draining:
            self._is_draining = True
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if self._service.is_closing:
            signal.raise_signal(sig)
        self.force_exit = self.should_exit  # only clients that do not read their answers are still waited for
        self._is_breaking_off = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True once it is time to exit."""
        if self._is_draining:
            self._service.drain()
            self.should_exit |= self._service.is_drained or self._is_breaking_off
        if self._is_breaking_off:
            self._service.break_off()
            self.config.timeout_graceful_shutdown = _REFUSAL_S
        return await super().on_tick(counter)

"""How the server ends: the first signal lets it finish what it took, the second breaks that off."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Protocol

import uvicorn


class Drainable(Protocol):
    """Whatever answers: a `ccjax.server.service.Service`, or what passes requests on."""

    def drain(self) -> None:
        """Refuses all that is new; may be repeated."""
        ...

    def break_off(self) -> None:
        """Ends all that was taken."""
        ...

    @property
    def is_drained(self) -> bool:
        """True once `drain` was called and all that was taken before is answered."""
        ...

    @property
    def is_closing(self) -> bool:
        """True once only a kill is left."""
        ...


_REFUSAL_S = 2


class DrainingServer(uvicorn.Server):
    """uvicorn that, told to end, first answers all that its service took, and meanwhile refuses the rest with 503: it
    goes on listening, for a refused connection would tell a client less, and one that waits in the backlog nothing.

    A second signal breaks off what runs, with 503 or an error in the stream; one that comes while caches are written
    out, or a third, kills the process, which a store stands at any time.
    """

    def __init__(self, config: uvicorn.Config, service: Drainable) -> None:
        super().__init__(config)
        self._service = service
        self._is_draining = self._is_breaking_off = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal. It may come anywhere in this thread, so no lock is taken here."""
        if not self._is_draining:
            self._is_draining = True
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if self._service.is_closing:
            signal.raise_signal(sig)
        self.force_exit = self.should_exit  # only those who do not read their answers are waited for any more
        self._is_breaking_off = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: True once it is time to end."""
        if self._is_draining:
            self._service.drain()
            self.should_exit |= self._service.is_drained or self._is_breaking_off
        if self._is_breaking_off:
            self._service.break_off()
            self.config.timeout_graceful_shutdown = _REFUSAL_S
        return await super().on_tick(counter)

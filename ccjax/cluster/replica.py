"""One engine behind the server's own HTTP application, as an actor of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ccjax.cluster.calls import Call, Head, ReplicaResponse, perform, perform_whole
from ccjax.config import DocumentOptions
from ccjax.policy.routing import PromptSummary
from ccjax.server import ServerSettings, Service, create_app
from ccjax.server.loading import load_engine, open_documents, use_compile_cache
from ccjax.server.logs import LogFormat, configure_logging

logger = logging.getLogger(__name__)

STATS = "summary"
"""Key under which a replica's `ccjax.policy.routing.Summary` is in what it publishes."""

NUMBER = "number"
"""Key of a number that is another one with each publication."""


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """What every replica is made of; it goes to other processes and hosts.

    Attributes:
      model: directory of a model, the same path on each host, or "demo".
      engine: fields of `EngineConfig`.
      compile_cache_dir: for compiled steps; the same path on each host.
      num_processes: that each replica's model is split over, with as many devices each; see `ccjax.engine.hosts`.
      warmup: compile all steps before the first request.
      log_level, log_format: see `ccjax.server.logs.configure_logging`.
    """

    model: str
    engine: Mapping[str, Any]
    documents: DocumentOptions
    server: ServerSettings
    compile_cache_dir: str
    num_processes: int = 1
    warmup: bool = True
    log_level: str = "WARNING"
    log_format: LogFormat = "text"


@dataclasses.dataclass(frozen=True)
class ReplicaScale:
    """How many replicas there are to be.

    Attributes:
      least, most: equal for a fixed number; else as many as the requests under way want.
      requests_each: requests under way that a replica is wanted for, where the number may change.
      up_after_s, down_after_s: how long more must be wanted before one is begun, and fewer before one ends.
    """

    least: int
    most: int
    requests_each: float = 16.0
    up_after_s: float = 30.0
    down_after_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"replicas: wanted N or LEAST:MOST with 1 <= LEAST <= MOST, got {self.least}:{self.most}")
        for name in ("up_after_s", "down_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"scale_{name}: wanted seconds from 0 on, got {value}")


@contextlib.contextmanager
def _alone_on_host(directory: Path) -> Iterator[None]:
    """One process of this host at a time: those after the first find in the directory what it compiled."""
    with (directory / "warmup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process dies
        yield


class Replica:
    """A server without a socket."""

    async def __init__(
        self, options: ReplicaOptions, scale: ReplicaScale, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Loads everything; until that is done Ray sends nothing here.

        Args:
          scale: only told to who asks.
          begin: called before the model loads.
        """
        configure_logging(options.log_level, options.log_format)
        self._made_of = (options, scale)
        self._service = Service(options.server)
        self._app = create_app(self._service)
        self._number = 0
        self._stack = contextlib.AsyncExitStack()
        await asyncio.to_thread(self._load, options, begin)
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))

    def _load(self, options: ReplicaOptions, begin: Callable[[], None]) -> None:
        use_compile_cache(Path(options.compile_cache_dir))
        begin()
        engine = load_engine(options.model, options.engine)
        try:
            retriever = open_documents(options.model, options.documents, engine.tokenizer)
            if options.warmup:
                with _alone_on_host(Path(options.compile_cache_dir)):
                    engine.warmup()
        except BaseException:
            engine.close()
            raise
        self._service.open(engine, retriever)

    async def answer(self, call: Call, prompt: PromptSummary | None = None) -> AsyncGenerator[Head | bytes, None]:
        """The answer to a request, piece by piece; closing the iterator ends the request.

        Args:
          prompt: for the router, which looks at it on the way here.
        """
        del prompt
        async with contextlib.aclosing(perform(self._app, call)) as pieces:
            async for piece in pieces:
                yield piece

    async def answer_whole(self, call: Call) -> ReplicaResponse:
        """The whole answer to a request that goes to every replica."""
        return await perform_whole(self._app, call)

    def dtype(self) -> str:
        """Of its KV."""
        return self._service.backend.engine.config.dtype

    def made_of(self) -> tuple[ReplicaOptions, ReplicaScale]:
        """What it was told when it was made."""
        return self._made_of

    def record_routing_stats(self) -> dict[str, Any]:
        """What Ray gives to every router, now and then."""
        self._number += 1
        return {NUMBER: self._number, STATS: self._service.backend.engine.summary()}

    async def check_health(self) -> None:
        """Raises where this replica should be replaced."""
        if self._service.is_closing:
            raise RuntimeError("the replica is closed")

    async def __del__(self) -> None:
        """Ray calls it once the requests that are here have ended, or took too long."""
        with contextlib.suppress(AttributeError):  # it failed to load
            await self._stack.aclose()

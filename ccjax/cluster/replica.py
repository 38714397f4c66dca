"""One engine behind the server's HTTP application, as a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
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
"""Key of the `ccjax.policy.routing.Summary` in what a replica publishes."""

NUMBER = "number"
"""Key of a number that changes with each publication."""


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """Options of every replica; sent to other processes and hosts.

    Attributes:
      model: directory of a model, the same path on each host, or "demo".
      engine: fields of `EngineConfig`.
      compile_cache_dir: for compiled steps; the same path on each host.
      warmup: compile all steps before the first request.
      log_level, log_format: see `ccjax.server.logs.configure_logging`.
    """

    model: str
    engine: Mapping[str, Any]
    documents: DocumentOptions
    server: ServerSettings
    compile_cache_dir: str
    warmup: bool = True
    log_level: str = "WARNING"
    log_format: LogFormat = "text"


@dataclasses.dataclass(frozen=True)
class ReplicaScale:
    """Number of replicas to run.

    Attributes:
      least, most: equal for a fixed number; otherwise the number follows the requests in progress.
      requests_each: target number of requests in progress per replica when scaling.
      down_after_s: how long fewer replicas must be needed before one is stopped.
    """

    least: int
    most: int
    requests_each: float = 16.0
    down_after_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"replicas: wanted N or LEAST:MOST with 1 <= LEAST <= MOST, got {self.least}:{self.most}")
        if not (math.isfinite(self.down_after_s) and self.down_after_s >= 0):
            raise ValueError(f"scale_down_after_s: wanted seconds from 0 on, got {self.down_after_s}")

    @property
    def up_after_s(self) -> float:
        """How long more replicas must be needed before one is started: waiting costs answers, a spare one only time."""
        return self.down_after_s / 20


@contextlib.contextmanager
def _alone_on_host(directory: Path) -> Iterator[None]:
    """Lets one process of this host compile at a time: later ones find its results in the directory."""
    with (directory / "warmup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process dies
        yield


class Replica:
    """A server without a socket."""

    async def __init__(self, options: ReplicaOptions, scale: ReplicaScale) -> None:
        """Loads everything; Ray sends no requests before that is done.

        Args:
          scale: only reported.
        """
        configure_logging(options.log_level, options.log_format)
        self._made_of = (options, scale)
        self._service = Service(options.server)
        self._app = create_app(self._service)
        self._number = 0
        self._stack = contextlib.AsyncExitStack()
        await asyncio.to_thread(self._load, options)
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))

    def _load(self, options: ReplicaOptions) -> None:
        use_compile_cache(Path(options.compile_cache_dir))
        engine = load_engine(options.model, options.engine)
        try:
            retriever = open_documents(options.model, options.documents, engine.tokenizer)
            if options.warmup:
                with _alone_on_host(Path(options.compile_cache_dir)):
                    if retriever is not None:
                        retriever.warmup()
                    engine.warmup()
        except BaseException:
            engine.close()
            raise
        self._service.open(engine, retriever, options.documents.embedder)

    async def answer(self, call: Call, prompt: PromptSummary | None = None) -> AsyncGenerator[Head | bytes, None]:
        """Streams the answer to a request; closing the iterator cancels the request.

        Args:
          prompt: for the router, which reads it on the way here.
        """
        del prompt
        async with contextlib.aclosing(perform(self._app, call)) as pieces:
            async for piece in pieces:
                yield piece

    async def answer_whole(self, call: Call) -> ReplicaResponse:
        """The complete answer to a request that goes to every replica."""
        return await perform_whole(self._app, call)

    def dtype(self) -> str:
        """The dtype of its KV."""
        return self._service.backend.engine.config.dtype

    def made_of(self) -> tuple[ReplicaOptions, ReplicaScale]:
        """The arguments it was created with."""
        return self._made_of

    def record_routing_stats(self) -> dict[str, Any]:
        """What Ray periodically sends to every router."""
        self._number += 1
        return {NUMBER: self._number, STATS: self._service.backend.engine.cache.summary()}

    async def check_health(self) -> None:
        """Raises if this replica should be replaced."""
        if self._service.is_closing:
            raise RuntimeError("the replica is closed")

    async def __del__(self) -> None:
        """Called by Ray once its requests have ended, or took too long."""
        with contextlib.suppress(AttributeError):  # it failed to load
            await self._stack.aclose()

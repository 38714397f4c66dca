"""Replicas in this process: the real server application behind the front, without Ray, with simulated losses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

from ccjax.cluster.calls import App, Call, Head, ReplicaResponse, perform, perform_whole
from ccjax.cluster.front import Front, ReplicaLostError
from ccjax.cluster.prompts import PromptReader
from ccjax.cluster.waiting import NO_REPLICA_S, REAL, Clock, has_live_replica
from ccjax.loading.model import load_prompt_builder
from ccjax.policy.routing import PromptSummary
from ccjax.server import ServerSettings
from tests.server.conftest import Server, running_app

API_KEY, ADMIN_KEY = "sesame", "root"
MAX_BODY_BYTES = 20_000


class LocalReplicas:
    """`ccjax.cluster.front.Replicas` over applications, called in turn.

    Attributes:
      calls, prompts: received ones, in order.
      plan: for each of the next calls, the error to raise and after how many parts; None for none.
      unreachable: replicas, by number, that calls to all replicas do not reach.
      generators: metrics of each.
      states: reported states in place of running replicas. If they have no live replica, calls wait, as with Ray.
    """

    def __init__(self, *apps: App) -> None:
        self.apps = apps
        self.calls: list[Call] = []
        self.prompts: list[PromptSummary] = []
        self.plan: list[tuple[Exception, int] | None] = []
        self.unreachable: set[int] = set()
        self.states: dict[str, int] | None = None
        self.generators: list[str] = []

    async def answer(self, call: Call, prompt: PromptSummary) -> AsyncGenerator[Head | bytes, None]:
        while not has_live_replica(await self.counts()):
            await asyncio.sleep(0.01)
        app = self.apps[len(self.calls) % len(self.apps)]
        self.calls.append(call)
        self.prompts.append(prompt)
        error, num_pieces = (self.plan.pop(0) if self.plan else None) or (None, 0)
        if error is not None and num_pieces == 0:
            raise error
        async with contextlib.aclosing(perform(app, call)) as pieces:
            async for piece in pieces:
                yield piece
                num_pieces -= 1
                if error is not None and num_pieces == 0:
                    raise error

    async def answers(self, call: Call, timeout_s: float) -> Sequence[ReplicaResponse | Exception]:
        if not has_live_replica(await self.counts()):
            return []
        return [
            ReplicaLostError("gone") if number in self.unreachable else await perform_whole(app, call)
            for number, app in enumerate(self.apps)
        ]

    async def generator_metrics(self) -> Sequence[str]:
        return self.generators

    async def counts(self) -> dict[str, int]:
        if self.states is not None:
            return self.states
        return {"running": len(self.apps) - len(self.unreachable)}


@contextlib.contextmanager
def running_front(
    model: Path,
    server: Server,
    replicas: LocalReplicas,
    *,
    settings: ServerSettings | None = None,
    no_replica_s: float = NO_REPLICA_S,
    clock: Clock = REAL,
) -> Iterator[tuple[Front, str]]:
    """A front with the documents of `server`, and by default its settings, and its URL."""
    settings = settings or server.service.settings
    reader = PromptReader(load_prompt_builder(model), server.retriever, settings)
    front = Front(replicas, reader, settings, no_replica_s=no_replica_s, clock=clock)
    with running_app(front) as url:
        yield front, url

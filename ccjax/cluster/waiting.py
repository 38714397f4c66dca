"""How long a request waits while no replica is available."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

NO_REPLICA_S = 30.0
"""Longest such wait of a request without a `timeout_s` of its own. It is enough to replace a killed replica of a small
model (6 to 17 s, docs/cluster.md), and ends, with Retry-After, before proxies give up: nginx and the load balancers of
the large clouds do so after 60 s. A large model takes minutes to load, too long to hold a connection."""

CHECK_EVERY_S = 0.25
_NUM_CHECKS = 2
"""This many consecutive checks must find no replica."""

_NOT_THERE = frozenset({"starting", "stopped"})

Piece = TypeVar("Piece")


@dataclasses.dataclass(frozen=True)
class Clock:
    """Clock for waiting, in seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL = Clock()


class NoLiveReplicaError(Exception):
    """No replica is available for the request."""


def has_live_replica(counts: Mapping[str, int]) -> bool:
    """True if a replica runs, or may still answer what it accepted (a stopping one, say).

    Args:
      counts: state, in lower case -> replicas in it.
    """
    return any(number for state, number in counts.items() if state not in _NOT_THERE)


class ReplicaWait:
    """Waits of one request; not for concurrent tasks.

    Args:
      counts: input of `has_live_replica`; called every `CHECK_EVERY_S` while nothing arrives.
      begun_s: when the request arrived, by the clock.
      timeout_s: the request's own timeout from then on; None for none.
      no_replica_s: if it has none, the total time that may pass without a replica.
    """

    def __init__(
        self,
        counts: Callable[[], Awaitable[Mapping[str, int]]],
        begun_s: float,
        timeout_s: float | None,
        no_replica_s: float = NO_REPLICA_S,
        clock: Clock = REAL,
    ) -> None:
        self._counts = counts
        self._clock = clock
        self._begun_s = begun_s
        self._end_s = None if timeout_s is None else begun_s + timeout_s
        self._left_s = no_replica_s
        self._without_replica_since: float | None = None

    @property
    def waited_s(self) -> float:
        """Time since the request arrived."""
        return self._clock.now() - self._begun_s

    async def first(self, pieces: AsyncIterator[Piece]) -> Piece:
        """The first of `pieces`, however long it takes while a replica is available.

        Raises:
          NoLiveReplicaError: several consecutive checks found no replica; `pieces` was cancelled.
          RuntimeError: there are no pieces.
        """
        taking = asyncio.ensure_future(_first(pieces))
        num_missed = 0
        try:
            while num_missed < _NUM_CHECKS:
                looking = asyncio.ensure_future(self._check_later())
                try:
                    await asyncio.wait({taking, looking}, return_when=asyncio.FIRST_COMPLETED)
                    if taking.done():
                        return taking.result()
                    num_missed = 0 if looking.result() else num_missed + 1
                finally:
                    looking.cancel()
            raise NoLiveReplicaError
        finally:
            if not taking.done():
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await taking

    async def wait_for_replica(self) -> bool:
        """Waits until a replica is available; False if the time is over first."""
        while (left_s := self._time_left_s()) > 0:
            await self._clock.sleep(min(CHECK_EVERY_S, left_s))
            if await self._check():
                return True
        return False

    async def _check_later(self) -> bool:
        await self._clock.sleep(CHECK_EVERY_S)
        return await self._check()

    async def _check(self) -> bool:
        now_s = self._clock.now()
        is_there = has_live_replica(await self._counts())
        if not is_there:
            self._without_replica_since = now_s if self._without_replica_since is None else self._without_replica_since
        elif self._without_replica_since is not None:
            self._left_s -= now_s - self._without_replica_since
            self._without_replica_since = None
        return is_there

    def _time_left_s(self) -> float:
        now_s = self._clock.now()
        if self._end_s is not None:
            return self._end_s - now_s
        return self._left_s - (0.0 if self._without_replica_since is None else now_s - self._without_replica_since)


async def _first(pieces: AsyncIterator[Piece]) -> Piece:
    async for piece in pieces:
        return piece
    raise RuntimeError("an answer without a beginning")

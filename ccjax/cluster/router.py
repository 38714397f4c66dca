"""Ray request router based on `ccjax.policy.routing`, with one ledger per sending process."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ccjax.cluster.replica import NUMBER, STATS
from ccjax.policy.routing import OLDEST_SUMMARY_S, PromptSummary, ReplicaState, Summary, missing_tokens, rank

_UNDER_WAY_S = 0.25
"""Calls sent this shortly before a summary arrived may be missing from it."""


@dataclasses.dataclass
class _ReplicaLedger:
    """This process's view of one replica; timed by its own clock, so that clocks of hosts do not matter."""

    number: int | None = None
    summary: Summary | None = None
    seen_s: float = 0.0
    sent: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    under_way: set[str] = dataclasses.field(default_factory=set)

    def update(self, stats: dict[str, Any], now_s: float) -> None:
        """Records a publication, if it is new."""
        if not stats or stats.get(NUMBER) == self.number:
            return
        self.number, self.summary, self.seen_s = stats[NUMBER], stats[STATS], now_s
        self.sent = [entry for entry in self.sent if entry[0] > now_s - _UNDER_WAY_S]

    def state(self, replica_id: str, now_s: float) -> ReplicaState:
        is_fresh = now_s - self.seen_s <= OLDEST_SUMMARY_S
        sent = sum(tokens for _, tokens in self.sent)
        return ReplicaState(replica_id, self.summary if is_fresh else None, sent, len(self.under_way))


class CacheAwareRouter(RequestRouter):
    """Sends a call to the replica that `rank` puts first or, if it cannot be reached, to the next."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray once."""
        self._books: dict[str, _ReplicaLedger] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates in order, each a rank of its own."""
        now_s = time.monotonic()
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name, replica in by_name.items():
            self._book(name).update(replica.routing_stats, now_s)
        states = [self._books[name].state(name, now_s) for name in by_name]
        order = rank(states, _prompt_of(pending_request), random.random())
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray once a replica accepted the call."""
        now_s, name = time.monotonic(), replica_id.unique_id
        book = self._book(name)
        book.sent.append((now_s, missing_tokens(book.state(name, now_s), _prompt_of(pending_request))))
        book.under_way.add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray once the answer ended, successfully or not."""
        self._book(replica_id.unique_id).under_way.discard(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray; a replica's name is never reused."""
        super().on_replica_actor_died(replica_id)
        self._books.pop(replica_id.unique_id, None)

    def _book(self, name: str) -> _ReplicaLedger:
        return self._books.setdefault(name, _ReplicaLedger())


def _prompt_of(pending: PendingRequest | None) -> PromptSummary:
    prompt = None if pending is None else pending.kwargs.get("prompt")
    return prompt if isinstance(prompt, PromptSummary) else PromptSummary()

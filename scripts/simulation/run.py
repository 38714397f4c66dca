"""A simulation run: a workload over one or several replicas, routed as in a cluster."""

from __future__ import annotations

import random
from collections.abc import Callable

from ccjax.policy.routing import ChunkFilter, PromptSummary, ReplicaState, Summary, load_cost, rank
from ccjax.store.usage import DISK
from ccjax.types import ChunkId
from scripts.simulation.outcome import SimulationResults
from scripts.simulation.replica import Deployment, SimulatedReplica
from scripts.simulation.workload import Workload

_ADVANCE_EVERY = 1000
_SUMMARY_EVERY_S = 0.5
"""How often each replica publishes its chunks and queued tokens to the router."""


class Simulation:
    """A run; `run` processes all requests, and may be called for a continuation.

    Attributes:
      replicas: with their caches, as the run left them.
    """

    def __init__(self, deployment: Deployment, workload: Workload, *, seed: int = 0) -> None:
        self.outcome = SimulationResults(len(workload))
        self._workload = workload
        self._rng = random.Random(seed)
        self.replicas = [
            SimulatedReplica(deployment, workload, self.outcome, index) for index in range(deployment.replicas)
        ]
        self._router = _Router(self.replicas, deployment) if deployment.replicas > 1 else None

    def run(self, progress: Callable[[int], None] = lambda done: None) -> SimulationResults:
        """Runs all requests to their last tokens.

        Args:
          progress: called now and then with the number of requests that arrived since the last call.
        """
        workload = self._workload
        times, which = workload.arrival_s.tolist(), workload.which.tolist()
        answers, lists = workload.answer_tokens.tolist(), workload.lists
        replica = self.replicas[0]
        for number, (at_s, place, answer) in enumerate(zip(times, which, answers, strict=True)):
            passages = lists[place]
            if self._router is not None:
                for peer in self.replicas:
                    peer.advance(at_s)
                prompt = self._summary(number, replica)
                replica = self._router.choose(at_s, prompt, self._rng.random())
            else:
                replica.advance(at_s)
            replica.submit(number, passages, at_s, answer)
            if number % _ADVANCE_EVERY == _ADVANCE_EVERY - 1:
                progress(_ADVANCE_EVERY)
        for replica in self.replicas:
            replica.finish()
        progress(len(workload) % _ADVANCE_EVERY)
        return self.outcome

    def _summary(self, number: int, replica: SimulatedReplica) -> PromptSummary:
        passages = self._workload.lists[int(self._workload.which[number])]
        view = replica.cache.view(passages, self._workload.system_tokens)
        chunks = tuple((chunk.chunk_id, chunk.num_tokens) for chunk in view.chunks if chunk.role == "document")
        return PromptSummary(chunks, self._workload.question_tokens + self._workload.system_tokens)


class _Router:
    """The state of `ccjax.cluster.router`: each replica's last summary, and the requests sent there since."""

    def __init__(self, replicas: list[SimulatedReplica], deployment: Deployment) -> None:
        self._replicas = {str(name): replica for name, replica in enumerate(replicas)}
        self._next_s = 0.0
        self._summaries: dict[str, Summary] = {}
        self._filters: dict[str, tuple[int, ChunkFilter]] = {}
        self._sent = dict.fromkeys(self._replicas, 0.0)
        token_bytes = deployment.kv_spec.num_bytes(1)
        has_disk = bool(deployment.cache.disk_cache_bytes)
        costs = deployment.costs
        token_s = costs.compute_s(1024, 0, 1024) / 1024
        self._load_cost = load_cost(costs.load_s(DISK, token_bytes) if has_disk else None, token_s)

    def choose(self, now_s: float, prompt: PromptSummary, draw: float) -> SimulatedReplica:
        """The replica for a request."""
        if now_s >= self._next_s:
            self._publish()
            self._next_s = now_s + _SUMMARY_EVERY_S
        states = [
            ReplicaState(name, self._summaries[name], self._sent[name], replica.num_under_way)
            for name, replica in self._replicas.items()
        ]
        name = rank(states, prompt, draw)[0]
        self._sent[name] += prompt.other_tokens + sum(length for _, length in prompt.chunks)
        return self._replicas[name]

    def _publish(self) -> None:
        for name, replica in self._replicas.items():
            count, store = replica.cache.index.changes.count, replica.cache.store
            if name not in self._filters or self._filters[name][0] != count:
                held = (ChunkId(key) for key in store.chunk_ids(store.memory_tiers))
                self._filters[name] = (count, ChunkFilter.of(held))
            waiting = replica.scheduler.waiting_tokens()
            self._summaries[name] = Summary(self._filters[name][1], waiting, self._load_cost)
            self._sent[name] = 0.0

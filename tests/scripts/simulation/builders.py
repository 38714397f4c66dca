"""Small runs with costs that are easy to work out by hand."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ccjax.policy.scheduling import SchedulerSettings
from ccjax.store.spec import KVSpec
from scripts.simulation.cache import SimulatedCacheSettings
from scripts.simulation.costs import CostModel, SimulatedPiece
from scripts.simulation.replica import Deployment
from scripts.simulation.run import Simulation
from scripts.simulation.workload import Passages, Workload

KV = KVSpec(num_layers=4, num_kv_heads=1, head_dim=1, dtype="float32")
"""32 bytes a token."""


@dataclasses.dataclass(frozen=True)
class PerToken(CostModel):
    """A millisecond a computed token, 10 ms a decode step, links of so many bytes a second."""

    host_bytes_per_s: float = 1e12
    disk_bytes_per_s: float = 1e12

    def pack_s(self, pieces: Sequence[SimulatedPiece]) -> float:
        return 1e-3 * sum(piece.new for piece in pieces)

    def decode_s(self, num_seqs: int, context_tokens: int) -> float:
        return 0.01

    def link_s(self, tier: str, num_bytes: int) -> float:
        return num_bytes / (self.host_bytes_per_s if tier == "host" else self.disk_bytes_per_s)


def workload(arrivals, lists, *, answers=1, question=10, system=0):
    """Requests at these times for these lists of (number, tokens)."""
    made = [Passages(tuple(n for n, _ in pairs), tuple(t for _, t in pairs)) for pairs in lists]
    distinct = list(dict.fromkeys(made))
    which = np.array([distinct.index(passages) for passages in made])
    return Workload(np.array(arrivals, float), which, distinct, question, np.full(len(made), answers), system)


def deployment(costs=PerToken(), *, scheduler=None, **settings):
    """A replica with room in host memory unless told otherwise."""
    of_run = {name: settings.pop(name) for name in ("replicas", "loading", "preloads") if name in settings}
    cache = SimulatedCacheSettings(**{"host_cache_bytes": 1 << 20, "recompute_ratio": 0.3, **settings})
    limits = {"num_pages": 1000, "max_num_batched_tokens": 4096, **(scheduler or {})}
    return Deployment(costs, KV, cache, SchedulerSettings(**limits), **of_run)


def simulated(work, deployed, seed=0):
    """The run, done."""
    simulation = Simulation(deployed, work, seed=seed)
    simulation.run()
    return simulation

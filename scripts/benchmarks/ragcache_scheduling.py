"""The time for decisions per request over a large knowledge tree (RAGCache sec. 7.5): look-up, plan, uses, insertion
with eviction, scheduler, all with the engine's own code but without a model.

The KV of a node is one small layer, since its size affects nothing that is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.cache.variants import VariantIndex
from ccjax.policy.capture import make_variant_id
from ccjax.policy.planner import plan_prefill
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.policy.scheduling import Scheduler, SchedulerSettings, SequenceWork, StepCosts
from ccjax.policy.settings import PlannerSettings
from ccjax.prompts import Prompt, chunk_id
from ccjax.store import KVSpec, StoreIdentity, TieredStore
from ccjax.types import Chunk, ChunkId, PrefillPlan, VariantMeta
from scripts.benchmarks.common import CallCost, Say, timed
from scripts.benchmarks.ragcache_replay import BATCHED_TOKENS

POLICY = "pgdsf"
WINDOW = 32
NUM_TOKENS = 128
"""Tokens of a passage, approximately as in the trace."""
QUESTION_TOKENS = 32
KV_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")
GRID = PrefillGrid((0, 512), (16, 512), ((0.01, 0.1), (0.02, 0.2)))
"""Costs for eviction; their values affect nothing that is timed."""
SETTINGS = PlannerSettings(strategy="prefix")
_COSTS = StepCosts(token_s=1e-3, decode_step_s=1e-2)
_PAGE_TOKENS = 16
_NEVER_FULL = 1 << 20
_IDS = range(128_000)


@dataclasses.dataclass
class Spent:
    """Times of each kind of decision by request; `window` once for many requests, the others for one."""

    plan: list[CallCost] = dataclasses.field(default_factory=list)
    uses: list[CallCost] = dataclasses.field(default_factory=list)
    insert: list[CallCost] = dataclasses.field(default_factory=list)
    schedule: list[CallCost] = dataclasses.field(default_factory=list)
    window: list[CallCost] = dataclasses.field(default_factory=list)


class Tree:
    """The engine's index over its store in host memory, filled by a tree: the system prompt, passages behind it, and
    passages behind these."""

    def __init__(self, num_nodes: int, num_passages: int):
        self._rng = random.Random(0)
        self._kv = np.zeros(KV_SPEC.shape(NUM_TOKENS), np.float32)
        self.store = TieredStore.open(
            None, kv_spec=KV_SPEC, identity=StoreIdentity("benchmark"), host_bytes=num_nodes * self._kv.nbytes
        )
        costs = MeasuredCosts(Rates(), GRID)
        self.index = VariantIndex(self.store, costs, policy=POLICY, max_variants=None)
        self.system = self._new_chunk()
        self.prompts: list[Prompt] = []
        while len(self.index) < num_nodes:
            prompt = self.prompt_of([self._new_chunk() for _ in range(num_passages)])
            self.insert(prompt, self.plan(prompt))
            self.prompts.append(prompt)

    def prompt_of(self, passages: Sequence[Chunk]) -> Prompt:
        """A question behind the system prompt and some passages."""
        return Prompt((self.system, *passages), True, tuple(range(QUESTION_TOKENS)), max_new_tokens=1)

    def drawn(self, number: int) -> Prompt:
        """In turns: an earlier prompt, one that begins like an earlier one, and a new one."""
        passages = list(self._rng.choice(self.prompts).chunks[1:])
        kept = (len(passages), len(passages) // 2, 0)[number % 3]
        return self.prompt_of(passages[:kept] + [self._new_chunk() for _ in passages[kept:]])

    def plan(self, prompt: Prompt) -> PrefillPlan:
        """Matches the prompt in the tree, and plans it."""
        candidates = self.index.of_chunks({chunk.chunk_id for chunk in prompt.chunks})
        return plan_prefill(prompt.planned_chunks, len(prompt.question), candidates, mode="bounded", settings=SETTINGS)

    def use(self, plan: PrefillPlan) -> None:
        """Informs the policy of a prefill, and credits the reused variants."""
        num_new = computed_tokens(plan)
        self.index.describe_prefill(plan.num_tokens - num_new, num_new)
        self.index.credit(
            [(segment.variant_id, segment.cfo or 0.0) for segment in plan.segments if segment.variant_id is not None]
        )

    def insert(self, prompt: Prompt, plan: PrefillPlan) -> None:
        """Stores the computed chunks, evicting those worth least."""
        ids = [chunk.chunk_id for chunk in prompt.chunks]
        pinned = set(plan.pin)
        for place, (segment, chunk) in enumerate(zip(plan.segments, prompt.chunks, strict=False)):
            if segment.action == "compute":
                meta = _meta(chunk, ids[:place])
                if self.index.add(meta, self._kv, prompt, pinned=pinned, seen=frozenset(ids[: place + 1])):
                    pinned.add(meta.variant_id)

    def _new_chunk(self) -> Chunk:
        ids = tuple(self._rng.choices(_IDS, k=NUM_TOKENS))
        return Chunk(chunk_id(ids), ids)


def _meta(chunk: Chunk, prefix: Sequence[ChunkId]) -> VariantMeta:
    num_tokens = len(chunk.token_ids)
    return VariantMeta(
        variant_id=make_variant_id(chunk.chunk_id, prefix, "exact"),
        chunk_id=chunk.chunk_id,
        prefix_ids=tuple(prefix),
        inter_by_prefix=(0.1,) * len(prefix),
        a_mean=0.1,
        b_mean=0.2,
        cci=0.6,
        token_ranking=tuple(range(num_tokens)),
        num_tokens=num_tokens,
        num_bytes=KV_SPEC.num_bytes(num_tokens),
    )


def computed_tokens(plan: PrefillPlan) -> int:
    """Tokens that a plan runs through the model."""
    return sum(
        segment.num_tokens if segment.action == "compute" else len(segment.recompute_offsets)
        for segment in plan.segments
    )


def work_of(sequence_id: str, plan: PrefillPlan) -> SequenceWork:
    """A planned request as the scheduler knows it."""
    num_new = computed_tokens(plan)
    num_pages = -(-plan.num_tokens // _PAGE_TOKENS)
    return SequenceWork(sequence_id, num_new, num_pages, max_new_tokens=1, cached_tokens=plan.num_tokens - num_new)


class FullQueue:
    """The engine's scheduler with `WINDOW` queued requests at all times."""

    def __init__(self, tree: Tree, num_slots: int) -> None:
        self._tree = tree
        self._numbers = itertools.count()
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_pages=_NEVER_FULL,
                page_tokens=_PAGE_TOKENS,
                max_num_batched_tokens=BATCHED_TOKENS,
                max_num_seqs=num_slots,
                max_queue=_NEVER_FULL,
                reorder_window=WINDOW,
            )
        )
        self.waiting: dict[str, Prompt] = {}
        self.fill()

    def fill(self) -> None:
        """Queues requests until there are `WINDOW`."""
        while len(self.waiting) < WINDOW:
            prompt = self._tree.drawn(next(self._numbers))
            self.come(prompt, self._tree.plan(prompt))

    def come(self, prompt: Prompt, plan: PrefillPlan) -> None:
        """Adds a planned request."""
        sequence_id = str(next(self._numbers))
        self.scheduler.add(
            SequenceWork(sequence_id, plan.num_tokens, -(-plan.num_tokens // _PAGE_TOKENS), max_new_tokens=1)
        )
        self.scheduler.replan(work_of(sequence_id, plan))
        self.waiting[sequence_id] = prompt

    def serve(self) -> None:
        """Forms a pack and ends it, with the answers in it."""
        self.scheduler.expire(0.0)
        self.scheduler.next_pack(0.0, _NEVER_FULL, _COSTS)
        self.scheduler.after_layer(0.0)
        for sequence_id in self.scheduler.pack_done(0.0):
            self.scheduler.remove(sequence_id)
            del self.waiting[sequence_id]

    def plan_window(self) -> None:
        """Plans all queued requests again, as the engine does before a pack if the cache has changed."""
        for sequence_id, prompt in self.waiting.items():
            self.scheduler.replan(work_of(sequence_id, self._tree.plan(prompt)))


def spend(tree: Tree, num_requests: int, num_slots: int) -> Spent:
    """Makes the decisions for a number of requests, in the order of the engine's loop."""
    queue, spent = FullQueue(tree, num_slots), Spent()
    for number in range(num_requests):
        prompt = tree.drawn(number)
        planned, plan = timed(lambda prompt=prompt: tree.plan(prompt))
        spent.plan.append(planned)
        spent.uses.append(timed(lambda plan=plan: tree.use(plan))[0])
        spent.insert.append(timed(lambda prompt=prompt, plan=plan: tree.insert(prompt, plan))[0])
        came = timed(lambda prompt=prompt, plan=plan: queue.come(prompt, plan))[0]
        spent.window.append(timed(queue.plan_window)[0])
        served = timed(queue.serve)[0]
        spent.schedule.append(CallCost(came.wall_s + served.wall_s, came.cpu_s + served.cpu_s))
        queue.fill()
    return spent


def figures(spent: Spent) -> list[dict[str, Any]]:
    """Milliseconds of each kind of decision, and of all for one request (without `window`)."""
    parts = {name: getattr(spent, name) for name in ("plan", "uses", "insert", "schedule")}
    total = [
        CallCost(sum(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs))
        for costs in zip(*parts.values(), strict=True)
    ]
    rows = []
    for name, costs in {**parts, "total": total, "window": spent.window}.items():
        wall_ms = [1e3 * cost.wall_s for cost in costs]
        rows.append(
            {
                "part": name,
                "mean_ms": float(np.mean(wall_ms)),
                "p99_ms": float(np.percentile(wall_ms, 99)),
                "mean_cpu_ms": float(np.mean([1e3 * cost.cpu_s for cost in costs])),
            }
        )
    return rows


def measure(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Measures decisions over a full tree."""
    say(f"scheduling: tree of {options.nodes} nodes")
    tree = Tree(options.nodes, options.passages)
    try:
        say(f"scheduling: {options.decisions} decisions")
        spent = spend(tree, options.decisions, options.seats)
        num_nodes = len(tree.index)
    finally:
        tree.store.close()
    about = {"nodes": num_nodes, "requests": options.decisions, "window": WINDOW, "policy": POLICY}
    return {**about, "cases": figures(spent)}

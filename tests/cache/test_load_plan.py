"""Which planned loads are started, over two links: from disk, and from host memory to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from ccjax.cache.load_plan import LoadPlanner
from ccjax.cache.rates import Rates
from ccjax.policy.loading import EXPLORE_EVERY
from ccjax.store.spec import KVSpec
from ccjax.types import ChunkId, PlannedSegment, PrefillPlan, VariantId

SPEC = KVSpec(2, 1, 4, "float32")
NUM_TOKENS = 100
NUM_BYTES = SPEC.num_bytes(NUM_TOKENS)
"""Of each chunk."""


@dataclasses.dataclass
class Tiers:
    """What a load plan asks the store."""

    tier_of_id: Mapping[str, str]
    kv_spec: KVSpec = SPEC

    def tier_of(self, variant_id: str) -> str:
        return self.tier_of_id[variant_id]

    def unread_bytes(self, variant_id: str) -> int:
        return NUM_BYTES if self.tier_of(variant_id) == "disk" else 0


def make_plan(without: frozenset[VariantId]) -> PrefillPlan:
    """Chunks a, b and c, computed if they are in `without`, and a question."""
    segments = []
    for index, name in enumerate("abc"):
        reused = {"action": "reuse", "variant_id": VariantId(name)} if name not in without else {"action": "compute"}
        start = index * NUM_TOKENS
        segments.append(PlannedSegment("passage", start=start, num_tokens=NUM_TOKENS, chunk_id=ChunkId(name), **reused))
    segments.append(PlannedSegment("question", start=3 * NUM_TOKENS, num_tokens=1, action="compute"))
    return PrefillPlan(tuple(segments))


def planner(tiers: Mapping[str, str], *, host_s: float, disk_s: float, num_samples: int = 5) -> LoadPlanner:
    """A planner where computing a chunk takes a second, and loading one over a link as long as given."""
    rates = Rates()
    for count in (10, 1000):
        rates.compute.add(count, count / NUM_TOKENS)
    for link, seconds in (("host", host_s), ("disk", disk_s)):
        for _ in range(num_samples):
            rates.tiers[link].add(NUM_BYTES, seconds)
    return LoadPlanner(Tiers(tiers), rates, SPEC.num_layers)


@pytest.mark.parametrize(
    ("tiers", "host_s", "disk_s", "expected"),
    [
        ("host host host", 0.5, 9.0, ""),
        ("host host host", 5.0, 0.1, "abc"),
        ("device host host", 5.0, 0.1, "bc"),  # what is on the device need not get there
        ("device device device", 5.0, 0.1, ""),
        ("disk disk disk", 5.0, 0.1, "abc"),  # what comes from disk takes both ways
        ("disk disk disk", 0.5, 5.0, "abc"),
        ("host disk host", 0.5, 5.0, "b"),
        ("host host host", 1.8, 0.1, "ac"),  # computing a hides more than half of b
    ],
)
def test_a_chunk_is_computed_if_either_link_is_slower(tiers, host_s, disk_s, expected):
    loads = planner(dict(zip("abc", tiers.split(), strict=True)), host_s=host_s, disk_s=disk_s)
    plan, without = loads.plan_loads(make_plan)
    assert without == frozenset(expected)
    assert {segment.variant_id for segment in plan.segments} == {*"abc", None} - {*expected}


def test_nothing_is_given_up_before_a_rate_is_settled():
    loads = planner(dict.fromkeys("abc", "host"), host_s=99.0, disk_s=99.0, num_samples=4)
    assert loads.plan_loads(make_plan)[1] == frozenset()


def test_a_slow_disk_is_tried_again_while_loads_from_host_memory_are_kept():
    loads = planner({"a": "host", "b": "disk", "c": "disk"}, host_s=0.1, disk_s=9.0)
    given_up = [len(loads.plan_loads(make_plan)[1]) for _ in range(EXPLORE_EVERY + 2)]
    assert given_up == [2] * EXPLORE_EVERY + [1, 2]

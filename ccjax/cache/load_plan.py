"""Load times of a plan's variants from measured rates: the preload depth, and which variants to compute instead.

KV passes two links: disk to host memory, and host memory to the context of a request on the device.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from ccjax.cache.rates import Rates
from ccjax.policy.hkvd import counts_by_layer, hidden_ratio
from ccjax.policy.loading import LoadHabit, PlannedLoad, load_to_explore, loads_to_give_up
from ccjax.policy.preload import preload_depth
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.types import PlannedSegment, PrefillPlan, VariantId


class LoadPlanner:
    """Settles the loads of one engine's plans; remembers only if the last plans abandoned loads over a link. Not
    thread-safe."""

    def __init__(self, store: TieredStore, rates: Rates, num_layers: int) -> None:
        self._store = store
        self._rates = rates
        self._num_layers = num_layers
        self._habits = {DISK: LoadHabit(), HOST: LoadHabit()}

    def unread_bytes(self, plan: PrefillPlan) -> int:
        """KV bytes of the plan that are only on disk and not read yet."""
        return sum(self._store.unread_bytes(variant_id) for variant_id in plan.pin)

    def disk_bytes(self, plan: PrefillPlan) -> int:
        """KV bytes of the plan's variants that no faster tier holds, whether preloaded or not."""
        on_disk = (self._store.get_summary(key) for key in plan.pin if self._store.tier_of(key) == DISK)
        return sum(summary.num_bytes for summary in on_disk if summary is not None)

    def load_s(self, plan: PrefillPlan, disk_bytes: int) -> float | None:
        """CacheCraft's Tload when `disk_bytes` of the plan's KV come from disk; None while nothing is measured. KV on
        the device takes no time."""
        reused = [(segment.variant_id, segment) for segment in plan.segments if segment.variant_id is not None]
        merged = sum(self._num_bytes(segment) for key, segment in reused if self._store.tier_of(key) != DEVICE)
        return self._rates.load_behind_s(merged, disk_bytes)

    def _depth(self, plan: PrefillPlan) -> int:
        """The plan's Lp (CacheCraft eq. 16); all layers while rates are unknown."""
        prefill_s = self._prefill_s(plan)
        load_s = self.load_s(plan, self.unread_bytes(plan))
        if prefill_s is None or load_s is None:
            return self._num_layers
        return preload_depth(self._num_layers, prefill_s, load_s)

    def plan_loads(
        self, make_plan: Callable[[frozenset[VariantId]], PrefillPlan], *, adapts_ratio: bool = False
    ) -> tuple[PrefillPlan, frozenset[VariantId]]:
        """The plan to execute, and the variants in host memory or on disk that it leaves out because computing them is
        faster. Each link counts for itself, since what passes one while the device computes also passes the other.

        Args:
          make_plan: returns the prompt's plan without the given variants.
          adapts_ratio: where tokens to recompute are chosen by deviation, recompute as many as loading hides
            (CacheBlend sec. 5.1), but no fewer than planned.
        """
        without: frozenset[VariantId] = frozenset()
        gave_up: dict[str, bool] = {}
        while True:
            plan, more = make_plan(without), frozenset()
            for link, habit in self._habits.items():
                loads, hidden_s = self._loads(plan, link)
                given_up = loads_to_give_up(loads, hidden_s, habit)
                if loads:
                    gave_up[link] = gave_up.get(link, False) or bool(given_up)
                more |= given_up - {load_to_explore(loads, given_up, habit)}
            if not more:
                break
            without |= more
        for link, did in gave_up.items():
            self._habits[link] = self._habits[link].after(did)
        if adapts_ratio:
            plan = self._with_hidden_ratio(plan)
        return dataclasses.replace(plan, preload_depth=self._depth(plan)), without

    def _with_hidden_ratio(self, plan: PrefillPlan) -> PrefillPlan:
        counts = plan.hkvd_counts_by_layer
        load_s = self.load_s(plan, self.unread_bytes(plan))
        prefill_s = self._rates.compute_s(counts[0]) if counts else None
        if load_s is None or prefill_s is None:
            return plan
        ratio = hidden_ratio(load_s, prefill_s)
        return dataclasses.replace(plan, hkvd_counts_by_layer=counts_by_layer(counts[0], ratio, self._num_layers))

    def _loads(self, plan: PrefillPlan, link: str) -> tuple[list[PlannedLoad], float]:
        """The plan's loads over a link (from disk, or from host memory), and the seconds of compute that hide them; no
        loads until its rate is settled."""
        num_bytes: collections.Counter[VariantId] = collections.Counter()
        saved: dict[VariantId, float] = collections.defaultdict(float)
        for segment in plan.segments:
            key = segment.variant_id
            if key is None:
                continue
            if link == HOST and self._store.tier_of(key) != DEVICE:
                num_bytes[key] += self._num_bytes(segment)
            elif link == DISK:
                num_bytes[key] = self._store.unread_bytes(key)
            saved[key] += segment.num_tokens - plan.recomputed_tokens(segment)
        total = num_bytes.total()
        load_s, prefill_s = self._rates.load_s(link, total), self._prefill_s(plan)
        token_s = self._rates.seconds_per_token
        if not total or load_s is None or prefill_s is None or token_s is None:
            return [], 0.0
        if not self._rates.tiers[link].is_settled:
            return [], 0.0
        loads = [
            PlannedLoad(key, load_s * size / total, saved[key] * token_s) for key, size in num_bytes.items() if size
        ]
        return loads, prefill_s * (self._num_layers - 1) / self._num_layers  # layer 0 has nothing to hide behind

    def _prefill_s(self, plan: PrefillPlan) -> float | None:
        return self._rates.compute_s(round(sum(map(plan.computed_tokens, plan.segments))))

    def _num_bytes(self, segment: PlannedSegment) -> int:
        return self._store.kv_spec.num_bytes(segment.num_tokens)

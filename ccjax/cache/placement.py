"""Which variants each tier of the store keeps. An eviction policy per tier is informed of every variant that enters, is
used or leaves, and chooses the victims when space is needed.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ccjax.policy.eviction import EntryInfo, make_policy
from ccjax.store.copies import KV, PagedKV
from ccjax.store.spec import ShardRecord
from ccjax.store.tickets import LoadTicket
from ccjax.store.tiered import TieredStore
from ccjax.types import VariantId


class Costs(Protocol):
    """Estimated seconds to compute and to load on this machine."""

    def compute_s(self, num_tokens: int, cached_tokens: int, new_tokens: int) -> float:
        """Seconds to compute `num_tokens` from text, as part of a prefill of `new_tokens` behind `cached_tokens`."""
        ...

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds to load `num_bytes` of KV from a tier."""
        ...


class Sized(Protocol):
    """A variant's id and size; records and metadata have them."""

    @property
    def variant_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class Pinned(Protocol):
    """Variants that eviction leaves alone."""

    def pinned_ids(self, tier: str | None) -> Collection[VariantId]:
        """Those that must not leave `tier`, or (None) the last tier that holds them."""
        ...


class Placement:
    """Decides which variants enter and leave each tier. Not thread-safe: needs exclusive access to the engine
    (`Exclusive`).

    Several tiers may hold a copy of a variant. The lower copy stays when the upper one is evicted, so nothing is
    written to a lower tier twice (RAGCache sec. 5.1: swap out only once). A use counts in every tier with a copy: the
    lower one serves the next use after a restart or an eviction above.

    Copies that queued requests wait for (`adopt_copy`) are evicted before all others, until one is used: only then does
    the policy know them.

    With a policy that arranges variants as a tree (RAGCache sec. 5.1), a tier accepts a variant only if it holds its
    parent, and evicts only leaves: a parent is never in a lower tier than its children.

    Args:
      policy: a name of `ccjax.policy.eviction.POLICIES`.
      on_gone: called with the id of a variant that no tier holds any more.
      parent_of: returns the parent of a variant in the knowledge tree; None if it has none or it is unknown.

    Attributes:
      pins: variants that eviction leaves alone whatever their use; None for none.
      awaited: variants that requests wait for: none is evicted for what others store, stored yet or not.
    """

    def __init__(
        self,
        store: TieredStore,
        costs: Costs,
        *,
        policy: str,
        on_gone: Callable[[VariantId], None],
        parent_of: Callable[[Sized], VariantId | None] = lambda variant: None,
    ) -> None:
        self._store = store
        self._parent_of = parent_of
        self._costs = costs
        self._on_gone = on_gone
        self._name = policy
        self._policies = {tier: make_policy(policy) for tier in store.usage()}
        self._unused: dict[str, dict[str, None]] = {tier: {} for tier in self._policies}
        self._num_requests = 0
        self._prefill = (0, 0)
        self.pins: Pinned | None = None
        self.awaited: collections.Counter[VariantId] = collections.Counter()

    def pinned_ids(self, tier: str | None) -> Collection[VariantId]:
        """The variants that `pins` keeps in `tier`, or (None) in any tier."""
        return () if self.pins is None else self.pins.pinned_ids(tier)

    def spared_ids(self, tier: str | None) -> set[str]:
        """`pinned_ids` and `awaited`."""
        return {*self.pinned_ids(tier), *self.awaited}

    def next_request(self) -> None:
        """The following uses belong to another request."""
        self._num_requests += 1

    def describe_prefill(self, cached_tokens: int, new_tokens: int) -> None:
        """The following uses and stores belong to a prefill that computed `new_tokens` behind `cached_tokens`."""
        self._prefill = (cached_tokens, new_tokens)

    def adopt(self, held: Collection[Sized], state: Any = None) -> None:
        """Adds variants that the tiers already hold, with their uses from `state`. A value of `state()` must be applied
        before anything else, one of `uses()` at any time."""
        is_ours = isinstance(state, dict) and state.get("policy") == self._name
        sized = {variant.variant_id: variant for variant in held}
        tiers = state.get("tiers") if is_ours else None
        uses = state.get("uses") if is_ours else None
        if isinstance(uses, dict):
            tiers = dict.fromkeys(self._policies, {"uses": {key: uses[key] for key in sized.keys() & uses.keys()}})
        if isinstance(tiers, dict):
            for tier, policy in self._policies.items():
                policy.restore(tiers.get(tier), sized.keys())
        for tier, policy in self._policies.items():

            @functools.cache  # many are of the same size
            def info(charge: int | None, num_tokens: int, num_bytes: int, tier: str = tier) -> EntryInfo:
                compute_s = self._costs.compute_s(num_tokens, 0, num_tokens)
                load_s = self._costs.load_s(tier, num_bytes)
                return EntryInfo(charge or num_bytes, num_tokens, compute_s, load_s=load_s)

            charges = self._store.charges(tier, [key for key in sized if key not in policy])
            new_entries = ((key, charge, sized[key]) for key, charge in charges.items())
            policy.on_adopt(
                {key: info(charge, variant.num_tokens, variant.num_bytes) for key, charge, variant in new_entries}
            )

    def use(self, meta: Sized, share: float) -> None:
        """Notes that this request reused the variant and recomputed `share` of it."""
        tiers = self._store.tiers_of(meta.variant_id)
        for number, tier in enumerate(tiers):
            policy, info = self._policies[tier], self._info(meta, tier, share, tiers[number + 1 :], is_reused=True)
            use = policy.on_hit if meta.variant_id in policy else policy.on_insert
            use(meta.variant_id, info, self._num_requests)
            self._unused[tier].pop(meta.variant_id, None)

    def store(
        self,
        record: ShardRecord,
        kv: KV,
        *,
        expected_share: float,
        pinned: Collection[VariantId],
        wait: bool = False,
    ) -> bool:
        """Stores a variant in every tier where it is worth more than what is evicted for it; False if no tier took it.

        Args:
          expected_share: the share that a later use is likely to recompute, behind a prefix not known yet.
          pinned: never evicted for it.
          wait: wait for room in the disk's queue instead of leaving the disk out.
        """
        ticket = self._store.prepare_store(record, is_paged=isinstance(kv, PagedKV))
        if ticket.exists:  # another process has written it again, which a failed read revealed
            self._store.complete_store(ticket, None)
            return True
        willing: tuple[str, ...] = ()
        for tier in reversed(ticket.tiers):  # bottom up: the value of a copy depends on whether there is one below

            def shortfall(tier: str = tier) -> int:
                return ticket.shortfall_bytes.get(tier, 0)

            info = self._info(record, tier, expected_share, willing, num_bytes=ticket.charge_bytes[tier])
            if self._make_room(tier, record, info, shortfall, pinned):
                willing = (tier, *willing)
        took = self._store.complete_store(ticket, kv, wait=wait, tiers=willing)
        self._drop(record.variant_id, set(willing).difference(took))
        return bool(took)

    def complete_load(self, ticket: LoadTicket, metas: Mapping[VariantId, Sized], *, ok: bool = True) -> None:
        """Unpins. With `ok`, a variant read whole from a lower tier is copied into each faster tier where it is worth
        more than what is evicted for it; one whose only copy is on the device is copied down by the same rule, so that
        variants in use survive the loss of the device (RAGCache sec. 6)."""
        tiers = self._store.memory_tiers
        promoted: dict[str, list[str]] = {tier: [] for tier in tiers}
        num_bytes = dict.fromkeys(promoted, 0)
        only_copies = [key for key in ticket.tiers if len(tiers) > 1 and self._store.tiers_of(key) == tiers[:1]]
        for variant_id in (*ticket.whole(), *only_copies) if ok else ():
            meta = metas.get(VariantId(variant_id))
            copies = self._store.tiers_of(variant_id)
            if meta is None or not copies:
                continue
            others = tiers[: tiers.index(copies[0])] if copies[0] in tiers else tiers
            if variant_id in only_copies:
                others, copies = tiers[1:], ()
            for tier in reversed(others):  # as in `store`
                charge = self._store.memory_charge(tier, meta.num_tokens)
                wanted = num_bytes[tier] + charge
                if self._store.shortfall_bytes(tier, wanted) is None:
                    continue

                def shortfall(tier: str = tier, wanted: int = wanted) -> int:
                    return self._store.shortfall_bytes(tier, wanted) or 0

                info = self._info(meta, tier, 0.0, copies, num_bytes=charge)
                if self._make_room(tier, meta, info, shortfall, ()):
                    promoted[tier].append(variant_id)
                    num_bytes[tier] = wanted
                    copies = (tier, *copies)
        took = self._store.complete_load(ticket, ok, promote=promoted)
        for tier, variant_ids in promoted.items():
            for variant_id in set(variant_ids).difference(took.get(tier, ())):
                self._drop(variant_id, {tier})

    def adopt_copy(self, tier: str, meta: Sized, kv: KV) -> bool:
        """Adds a copy that is in the memory of a tier already to this tier; until it is used, it is evicted before all
        others. False if the tier has one, or no tier does."""
        parent = self._parent_of(meta) if self._policies[tier].is_tree else None
        has_parent = parent is None or tier in self._store.tiers_of(parent)
        if not has_parent or not self._store.adopt(tier, meta.variant_id, kv):
            return False
        self._unused[tier][meta.variant_id] = None
        return True

    def make_room(self, tier: str, num_bytes: int) -> bool:
        """Evicts until a tier has room for `num_bytes`, what requests wait for last; False if too little can be
        evicted."""
        for kept in (self.spared_ids(tier), set[str](self.pinned_ids(tier))):
            self._evict_unused(tier, lambda: self._store.shortfall_bytes(tier, num_bytes), kept)
            while short := self._store.shortfall_bytes(tier, num_bytes):
                victims = self._policies[tier].victims(short, pinned=kept)
                if not victims:
                    break
                kept |= self._evict(tier, victims)
            else:
                return True
        return False

    def shrink(self, most_bytes: int) -> int:
        """Evicts about `most_bytes` of what a tier holds beyond its limit, because it was opened with more or other
        processes added it; returns the bytes evicted, 0 once no tier can evict more."""
        for tier, policy in self._policies.items():
            excess = self._store.shortfall_bytes(tier, 0)
            if excess:
                victims = policy.victims(min(excess, most_bytes), pinned=set(self.pinned_ids(tier)))
                self._evict(tier, victims or ())
                if freed := excess - (self._store.shortfall_bytes(tier, 0) or 0):
                    return freed
        return 0

    def lose(self, tier: str) -> None:
        """Removes all variants from a tier that lost its contents; those in use are removed by the next call. Ignores
        `pins`, and the policies do not count it as eviction."""
        for variant_id in self._store.ids(tier):
            if self._store.evict(tier, (variant_id,)):
                self._drop(variant_id, {tier})
                if self._store.tier_of(variant_id) is None:
                    self._on_gone(VariantId(variant_id))

    def evict(self, victims: Iterable[VariantId]) -> None:
        """Evicts variants from every tier, in a tree even those with children."""
        victims = tuple(victims)
        for tier, policy in self._policies.items():
            for group in [(key,) for key in victims] if policy.is_tree else [victims]:
                self._evict(tier, group)

    def forget(self, variant_id: str) -> None:
        """The variant left all tiers for another reason than lack of space."""
        self._drop(variant_id, self._policies)

    def apply_changes(self, variant_id: str) -> None:
        """Another process may have removed the variant's copy from a tier."""
        self._drop(variant_id, set(self._policies).difference(self._store.tiers_of(variant_id)))

    def inherit(self, variant_id: str, heir: str) -> None:
        """`heir`, which is not stored yet, is about to replace a variant and gets its uses."""
        for policy in self._policies.values():
            if heir not in policy:
                policy.inherit(variant_id, heir)

    def state(self, earlier: Any, held: Collection[str]) -> dict[str, Any]:
        """The state for `adopt`, as JSON values. `earlier` is the state saved before, possibly by another process on
        the store: for each variant still `held`, the longer history is kept."""
        tiers = {tier: policy.state(self._num_requests) for tier, policy in self._policies.items()}
        if isinstance(earlier, dict) and earlier.get("policy") == self._name and isinstance(earlier.get("tiers"), dict):
            tiers = {tier: _merged(state, earlier["tiers"].get(tier), held) for tier, state in tiers.items()}
        return {"policy": self._name, "tiers": tiers}

    def uses(self, held: Collection[str]) -> dict[str, Any]:
        """The uses of these variants for `adopt`, as JSON values: the longest history in any tier."""
        longest: dict[str, Any] = {}
        for policy in self._policies.values():
            for key, values in policy.state(self._num_requests)["uses"].items():
                if key in held and values[0] > longest.get(key, [0])[0]:
                    longest[key] = values
        return {"policy": self._name, "uses": longest}

    def _make_room(
        self,
        tier: str,
        new_entry: Sized,
        info: EntryInfo,
        shortfall: Callable[[], int],
        pinned: Collection[VariantId],
    ) -> bool:
        """Adds `new_entry` to the tier's policy and evicts until it fits; if that is impossible or not worthwhile,
        removes it from the policy and returns False."""
        policy, variant_id = self._policies[tier], new_entry.variant_id
        self._drop(variant_id, {tier})
        if policy.is_tree and info.parent is not None and info.parent not in policy:
            return False
        policy.on_insert(variant_id, info, self._num_requests)
        kept: set[str] = {*pinned, *self.spared_ids(tier)}  # later also those that turn out to be in use
        self._evict_unused(tier, shortfall, kept)
        while short := shortfall():
            victims = policy.victims(short, pinned=kept, new_key=variant_id, is_only_copy=info.below_load_s is None)
            if victims is None or variant_id in victims:
                policy.on_remove(variant_id, evicted=False)
                return False
            kept |= self._evict(tier, victims)
        return True

    def _evict_unused(self, tier: str, shortfall: Callable[[], int | None], kept: Collection[str]) -> None:
        """Evicts copies that were never used, the latest first (it is for the last request in the queue, and no parent
        of another), as long as the tier is short of bytes."""
        for variant_id in reversed(tuple(self._unused[tier])):
            if not shortfall():
                return
            if variant_id not in kept:
                self._evict(tier, (variant_id,))

    def _evict(self, tier: str, victims: Sequence[str]) -> set[str]:
        """Evicts variants from one tier; returns those that stay: in use, not deletable at the moment, or with children
        in the tree."""
        policy = self._policies[tier]
        if policy.is_tree and len(victims) > 1:
            return set().union(*(self._evict(tier, (key,)) if policy.is_leaf(key) else {key} for key in victims))
        gone = set(self._store.evict(tier, victims))
        stayed = {key for key in victims if key not in gone and tier in self._store.tiers_of(key)}
        for variant_id in victims:
            if variant_id not in stayed:
                self._unused[tier].pop(variant_id, None)
                if variant_id in policy:
                    policy.on_remove(variant_id, evicted=variant_id in gone)
            if variant_id in gone and self._store.tier_of(variant_id) is None:
                self._on_gone(VariantId(variant_id))
        return stayed

    def _drop(self, variant_id: str, tiers: Iterable[str]) -> None:
        for tier in tiers:
            self._unused[tier].pop(variant_id, None)
            if variant_id in self._policies[tier]:
                self._policies[tier].on_remove(variant_id, evicted=False)

    def _info(
        self,
        variant: Sized,
        tier: str,
        share: float,
        below: Sequence[str],
        *,
        num_bytes: int | None = None,
        is_reused: bool = False,
    ) -> EntryInfo:
        """What a policy decides by. `below` are the lower tiers with a copy, `num_bytes` the size in this one. With
        `is_reused`, its tokens count as new ones of the prefill instead of cached ones, as if it were not stored."""
        cached, new = self._prefill
        if is_reused:
            cached, new = cached - variant.num_tokens, new + variant.num_tokens
        return EntryInfo(
            num_bytes=num_bytes or self._store.charge_bytes(tier, variant.variant_id) or variant.num_bytes,
            num_tokens=variant.num_tokens,
            compute_s=self._costs.compute_s(variant.num_tokens, max(0, cached), max(variant.num_tokens, new)),
            recomputed_share=share,
            load_s=self._costs.load_s(tier, variant.num_bytes),
            below_load_s=self._costs.load_s(below[0], variant.num_bytes) if below else None,
            parent=self._parent_of(variant) if self._policies[tier].is_tree else None,
        )


def _merged(ours: dict[str, Any], earlier: Any, held: Collection[str]) -> dict[str, Any]:
    """Our state, with the longer of both histories of uses per key, and the parents from both."""
    earlier = earlier if isinstance(earlier, dict) else {}
    before = earlier.get("uses")
    uses = dict(ours["uses"])
    for key, values in before.items() if isinstance(before, dict) else ():
        is_sound = isinstance(values, list) and values and isinstance(values[0], int)
        if is_sound and key in held and values[0] > uses.get(key, [0])[0]:
            uses[key] = values
    merged = {**ours, "uses": uses}
    if "parents" in ours and isinstance(earlier.get("parents"), dict):
        known = {key: parent for key, parent in earlier["parents"].items() if key in held}
        merged["parents"] = known | ours["parents"]
    return merged

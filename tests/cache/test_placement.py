"""Placement of variants over a real store: what moves up, what leaves, and that policies know just what tiers hold."""

from __future__ import annotations

import collections
import json
import os
import tempfile
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ccjax.cache.placement import Placement
from ccjax.policy.eviction import POLICIES
from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.types import VariantId, VariantMeta
from tests.store.kv import SPEC, make_kv, make_record, open_store, record_file

ONE = SPEC.num_bytes(5)
PAGE = SPEC.num_bytes(PAGE_TOKENS)
RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # most of a trace on a shared disk is waiting for fsync


class Costs:
    """A token takes a second to compute; loading a byte takes a millionth of that from disk, far less from memory."""

    def compute_s(self, num_tokens, cached_tokens, new_tokens):
        return float(num_tokens)

    def load_s(self, tier, num_bytes):
        return {"device": 0.0, "host": 1e-9, "disk": 1e-6}[tier] * num_bytes


def meta_of(name, num_tokens=5):
    return VariantMeta(
        variant_id=VariantId(name),
        chunk_id=f"chunk-of-{name}",
        prefix_ids=(),
        inter_by_prefix=(),
        a_mean=0.0,
        b_mean=1.0,
        cci=0.5,
        token_ranking=tuple(range(num_tokens)),
        num_tokens=num_tokens,
        num_bytes=SPEC.num_bytes(num_tokens),
    )


class Placed:
    """A store, its placement and the ids that left it. At the end of its block, policies know just what tiers hold."""

    def __init__(self, where=None, *, policy="saved_seconds", state=None, pages=0, **budgets):
        device = DevicePool(SPEC, pages * PAGE) if pages else None
        self.store = open_store(where, device=device, **budgets)
        self.gone = []
        self.parents = {}
        self.placement = Placement(
            self.store,
            Costs(),
            policy=policy,
            on_gone=self.gone.append,
            parent_of=lambda one: self.parents.get(one.variant_id),
        )
        self.placement.adopt(self.store.records(), state)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        if failure is None:
            self.check()
        self.store.close()

    def put(self, *names, num_tokens=5, cfo=0.5, pinned=()):
        """Computes and stores variants, each in a request of its own; whether each was stored."""
        stored = []
        for name in names:
            self.placement.next_request()
            record, kv = make_record(name, num_tokens), make_kv(name, num_tokens)
            stored.append(self.placement.store(record, kv, expected_share=cfo, pinned=pinned))
            assert self.store.flush(120)
        return stored

    def use(self, *names, cfo=0.5, num_tokens=5, ok=True):
        """One request loads and uses variants."""
        self.placement.next_request()
        ticket = self.store.prepare_load(names)
        for name in ticket.tiers:
            ticket.read_layers(name, 0, SPEC.num_layers)
            self.placement.use(meta_of(name, num_tokens), cfo)
        self.placement.complete_load(ticket, {name: meta_of(name, num_tokens) for name in names}, ok=ok)

    def held(self, tier):
        return {record.variant_id for record in self.store.records() if tier in self.store.tiers_of(record.variant_id)}

    def check(self):
        for tier, policy in self.placement._policies.items():
            names = self.held(tier)
            assert all(name in policy for name in names), tier
            assert len(policy._entries) == len(names), tier  # type: ignore[attr-defined]


def test_more_valuable_new_variant_evicts_an_unused_one():
    with Placed(host_bytes=2 * ONE) as one:
        assert one.put("a", "b") == [True, True]
        one.use("b")
        assert one.put("c") == [True] and one.gone == ["a"]
        assert one.held("host") == {"b", "c"}


def test_less_valuable_new_variant_is_not_admitted():
    with Placed(host_bytes=2 * ONE) as one:
        one.put("a", "b")
        one.use("a", "b")
        assert one.put("c", cfo=1.0) == [False]  # each use would save nothing
        assert one.held("host") == {"a", "b"} and one.gone == []


def test_less_valuable_new_variant_is_stored_only_on_disk(tmp_path):
    with Placed(tmp_path, host_bytes=2 * ONE) as one:
        one.put("a", "b")
        one.use("a", "b")
        assert one.put("c", cfo=0.9) == [True]
        assert one.held("host") == {"a", "b"} and one.held("disk") == {"a", "b", "c"}


def test_variant_evicted_from_memory_stays_on_disk_without_a_rewrite(tmp_path):
    with Placed(tmp_path, host_bytes=ONE) as one:
        one.put("a", "b")
        written = one.store.usage()["disk"].writes
        for name in "abababbb":
            one.use(name)
        assert one.gone == [] and one.held("disk") == {"a", "b"} and one.held("host") == {"b"}
        assert one.store.usage()["disk"].writes == written == 2


def test_device_holds_the_most_used_variants_and_host_the_next(tmp_path):
    with Placed(tmp_path, pages=1, host_bytes=2 * ONE, policy="lfu") as one:
        one.put("a", "b", "c")
        for name, times in (("a", 5), ("b", 3), ("c", 1)):
            for _ in range(times):
                one.use(name)
        for name in "cba":
            one.use(name)
        assert one.held("device") == {"a"} and one.held("host") == {"a", "b"} and one.held("disk") == {"a", "b", "c"}
        one.check()
        usage = one.store.usage()
        assert usage["disk"].writes == 3 and usage["host"].hits > 0 and usage["device"].evicted > 0


def test_variant_evicted_from_device_stays_in_host_without_a_rewrite():
    with Placed(pages=1, host_bytes=2 * ONE, policy="lru") as one:
        one.put("a", "b")
        assert one.held("device") == {"b"} and one.held("host") == {"a", "b"}
        written = one.store.usage()["host"].writes
        for name in "abab":
            one.use(name)
            assert one.held("device") == {name} and one.gone == []
        assert one.store.usage()["host"].writes == written == 2


def test_device_alone_keeps_variants_if_host_memory_has_no_room():
    with Placed(pages=2, host_bytes=0) as one:
        assert one.put("a", "b") == [True, True] and one.held("device") == {"a", "b"}
        one.use("b")
        assert one.put("c") == [True] and one.gone == ["a"]


def test_disk_read_promotes_to_host_and_device_at_once(tmp_path):
    with Placed(tmp_path, host_bytes=0) as one:
        one.put("a")
    with Placed(tmp_path, pages=1, host_bytes=ONE) as one:
        one.use("a", ok=False)
        assert one.held("device") == one.held("host") == set()
        one.use("a")
        assert one.held("device") == one.held("host") == {"a"}
        one.check()
        one.use("a")
        assert one.store.usage()["device"].hits == 1


def test_room_is_made_for_all_variants_read_by_one_request(tmp_path):
    with Placed(tmp_path, host_bytes=2 * ONE, policy="lru") as one:
        one.put("a", "b", "x", "y")
        assert one.held("host") == {"x", "y"}
        one.use("a", "b")
        assert one.held("host") == {"a", "b"}


def test_tree_evicts_leaves_only_and_promotes_no_child_without_its_parent(tmp_path):
    with Placed(tmp_path, host_bytes=2 * ONE, policy="pgdsf") as one:
        one.parents = {"b": "a", "c": "b"}
        assert one.put("a", "b") == [True, True] and one.held("host") == {"a", "b"}
        for _ in range(5):
            one.use("b")  # worth more than its parent, which stays all the same
        one.put("c")
        assert one.held("host") == {"a", "b"} and one.held("disk") == {"a", "b", "c"}
        one.put("x")
        assert one.held("host") == {"a", "x"}
        one.use("c")
        assert one.held("host") == {"a", "x"}  # b is not there
        one.use("b")
        assert one.held("host") == {"a", "b"}


def test_leaf_in_use_protects_its_parents_from_eviction():
    with Placed(host_bytes=3 * ONE, policy="pgdsf") as one:
        one.parents = {"b": "a", "c": "b"}
        one.put("a", "b", "c")
        ticket = one.store.prepare_load(["c"])
        for num_tokens in (5, 10):  # c has to go; or c and b
            assert one.put("x", num_tokens=num_tokens) == [False] and one.held("host") == {"a", "b", "c"}
        one.placement.complete_load(ticket, {})
        assert one.put("x", num_tokens=10) == [True] and one.held("host") == {"a", "x"}
        one.placement.evict(["a"])  # not for want of room: wherever it stands
        assert one.held("host") == {"x"}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=20), st.integers(1, 5))
def test_every_tier_holds_the_parents_of_the_variants_it_holds(steps, room):
    parents = {"b": "a", "c": "b", "d": "b", "f": "e", "g": "f"}
    with Placed(host_bytes=room * ONE, policy="pgdsf") as one:
        one.parents = parents
        for name, is_use in steps:
            if is_use and name in one.held("host"):
                one.use(name)
            elif name not in one.held("host"):
                one.put(name)
            held = one.held("host")
            assert {parents[key] for key in held if key in parents} <= held
            one.check()


def test_promotion_to_host_memory_lowers_device_score(tmp_path):
    with Placed(tmp_path, host_bytes=0) as one:
        one.put("a", "b")
    with Placed(tmp_path, pages=1, host_bytes=2 * ONE) as one:
        for _ in range(3):
            one.use("b")
        one.use("a")
        assert one.held("host") == {"a", "b"} and one.held("device") == {"b"}


def test_device_copy_is_worth_only_the_load_time_of_its_host_copy(tmp_path):
    """Behind a copy in host memory, one on the device is worth a load; behind none, what computing takes."""
    with Placed(pages=1, host_bytes=ONE) as one:
        one.put("a")
        assert one.held("device") == one.held("host") == {"a"}
        for _ in range(8):
            one.use("a")
        assert one.put("b") == [True]  # worth more there, alone, than the copy of what the host holds as well
        assert one.held("device") == {"b"} and one.held("host") == {"a"} and one.gone == []


def test_disk_read_is_promoted_once_worth_more_than_a_held_variant(tmp_path):
    with Placed(tmp_path, host_bytes=ONE, policy="lfu") as one:
        one.put("a", "b")  # lfu takes every newcomer in
        for _ in range(3):
            one.use("b")
        assert one.held("host") == {"b"}
        one.use("a", ok=False)
        assert one.held("host") == {"b"}  # a failed prefill moves nothing
        one.use("a")
        assert one.held("host") == {"a"}


def test_room_counted_for_one_variant_is_not_given_to_another(tmp_path):
    with Placed(tmp_path, host_bytes=2 * ONE) as one:
        one.put("large", "there", num_tokens=10)
        one.put("small")
        for _ in range(3):
            one.use("there", num_tokens=10)
        assert one.held("host") == {"there"} and one.held("disk") == {"large", "small", "there"}
        for _ in range(2):
            one.use("small")
        assert one.held("host") == {"there"}  # not yet
        one.placement.next_request()
        ticket = one.store.prepare_load(["large", "small"])
        for name in ("large", "small"):
            ticket.read_layers(name, 0, SPEC.num_layers)
        one.placement.complete_load(ticket, {"large": meta_of("large", 10), "small": meta_of("small")})
        assert one.held("host") == {"small"}


def test_a_use_counts_in_the_lower_tier_too(tmp_path):
    with Placed(tmp_path, host_bytes=9 * ONE, disk_bytes=None) as one:
        one.put("a", "b", "c")
        room = one.store.usage()["disk"].used_bytes
    with Placed(tmp_path, host_bytes=9 * ONE, disk_bytes=room + 10) as one:
        one.use("a", "b", "c")
        for _ in range(3):
            one.use("a", "c")  # out of memory; the disk sees nothing of it
        one.put("d")
        assert one.held("disk") == {"a", "c", "d"} and one.held("host") == {"a", "b", "c", "d"}


def test_variants_held_by_a_load_are_not_evicted():
    with Placed(host_bytes=2 * ONE, policy="lru") as one:
        one.put("a", "b")
        ticket = one.store.prepare_load(["a"])
        one.put("c")
        assert one.held("host") == {"a", "c"}
        assert one.put("d", pinned=["c"]) == [False] and one.held("host") == {"a", "c"}
        one.placement.complete_load(ticket, {})
        one.put("d")
        assert one.held("host") == {"c", "d"}


def test_variants_that_requests_wait_for_are_stored_and_not_evicted_for_others():
    with Placed(host_bytes=2 * ONE) as one:
        one.put("a", "b")
        one.use("a", "b")
        one.placement.awaited.update("c")
        assert one.put("c", cfo=1.0) == [True], "however little it is worth"
        (kept,) = one.held("host") - {"c"}
        for name in "de":
            one.put(name)
            one.use(name)
        assert "c" in one.held("host") and kept in one.gone
        one.placement.awaited.subtract("c")
        one.placement.awaited += collections.Counter()  # drops what nobody waits for
        one.put("f")
        assert "c" in one.gone


def test_room_for_requests_that_run_is_made_from_variants_that_others_wait_for_last():
    with Placed(host_bytes=2 * ONE) as one:
        one.put("a", "b")
        one.use("b")
        one.placement.awaited.update("a")
        assert one.placement.make_room("host", ONE) and one.gone == ["b"]
        assert one.placement.make_room("host", 2 * ONE) and one.gone == ["b", "a"]


def test_failed_background_write_is_noticed_when_room_is_needed(tmp_path, monkeypatch):
    with Placed(tmp_path, host_bytes=9 * ONE) as one:
        one.put("a")
        room = one.store.usage()["disk"].used_bytes
    with Placed(tmp_path, host_bytes=9 * ONE, disk_bytes=2 * room + 20, policy="lru") as one:
        disk = one.store._disk
        with monkeypatch.context() as patch:
            patch.setattr(disk._root, "create", lambda *_: (_ for _ in ()).throw(OSError("full")))
            one.put("b")
        assert one.held("disk") == {"a"} and one.held("host") == {"b"}
        one.use("a")
        one.put("c", "d")  # the first to go would be b, which is not there
        assert one.held("disk") == {"c", "d"}


def test_writes_skipped_by_a_full_queue_are_not_counted(tmp_path, monkeypatch):
    go_on = threading.Event()
    with Placed(tmp_path, host_bytes=ONE, max_pending_bytes=1, policy="lru") as one:
        write = one.store._disk.write
        monkeypatch.setattr(one.store._disk, "write", lambda *args, **how: go_on.wait(120) and write(*args, **how))
        for name in "ab":
            assert one.placement.store(make_record(name), make_kv(name), expected_share=0.5, pinned=())
        go_on.set()
        assert one.store.flush(120)
        assert one.held("disk") == {"a"} and one.held("host") == {"b"}


def test_variants_removed_by_another_process_are_no_longer_counted(tmp_path):
    with Placed(tmp_path, host_bytes=9 * ONE) as one:
        one.put("a", "b")
        record_file(tmp_path, "a").unlink()
        assert one.store.refresh() == ((), ("a",))
        one.placement.apply_changes("a")
        one.check()
        assert one.held("host") == {"a", "b"} and one.held("disk") == {"b"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eviction_order_survives_a_restart(tmp_path, policy):
    with Placed(tmp_path, host_bytes=9 * ONE, policy=policy) as one:
        one.put("a", "b", "c", "d")
        room = one.store.usage()["disk"].used_bytes
        for names in ("bd", "bd", "c", "ba"):
            one.use(*names)
        state = json.loads(json.dumps(one.placement.state(None, one.held("disk"))))
        wanted = one.placement._policies["disk"].victims(4 * ONE)
    with Placed(tmp_path, host_bytes=9 * ONE, disk_bytes=room + 10, policy=policy, state=state) as one:
        assert one.placement._policies["disk"].victims(4 * ONE) == wanted and wanted is not None
        one.put("e", cfo=0.0)
        assert one.held("disk") == set("abcde") - {wanted[0]}


def test_state_of_another_policy_is_ignored(tmp_path):
    with Placed(tmp_path, host_bytes=9 * ONE, policy="lru") as one:
        one.put("a")
        state = one.placement.state(None, {"a"})
    for other in ({**state, "policy": "lfu"}, {**state, "tiers": {"disk": 3}}, {"policy": "lru"}, [state], None):
        with Placed(tmp_path, host_bytes=9 * ONE, policy="lru", state=other) as one:
            assert one.placement.state(None, {"a"})["tiers"]["disk"]["uses"] == {}


def test_merged_state_keeps_the_longer_history_of_each_variant(tmp_path):
    with Placed(tmp_path, host_bytes=9 * ONE) as one:
        one.put("a", "b")
        with Placed(tmp_path, host_bytes=9 * ONE) as two:
            for _ in range(3):
                two.use("b")
            one.use("a")
            theirs = json.loads(json.dumps(two.placement.state(None, {"a", "b"})))
        theirs["tiers"]["disk"]["uses"]["long gone"] = [99, 1, 0.0, 0.0, 0.0]
        merged = one.placement.state(theirs, {"a", "b"})["tiers"]["disk"]["uses"]
    assert {key: uses[0] for key, uses in merged.items()} == {"a": 2, "b": 3}


def test_replacement_variant_inherits_uses(tmp_path):
    with Placed(tmp_path, host_bytes=2 * ONE, policy="lfu") as one:
        one.put("approx", "other")
        for _ in range(3):
            one.use("approx")
        one.use("other")
        one.placement.inherit("approx", "exact")
        one.store.discard("approx")
        one.placement.forget("approx")
        one.put("exact", "new")
        assert one.held("host") == {"exact", "new"}


NAMES = st.sampled_from([f"v{number}" for number in range(6)])


class PlacementTrace(RuleBasedStateMachine):
    """Random stores, uses and losses; after each one, every policy knows just the variants of its tier."""

    @initialize(
        pages=st.integers(0, 3),
        host=st.integers(0, 2500),
        disk=st.none() | st.integers(0, 5000),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def open(self, pages, host, disk, policy):
        self.folder = tempfile.TemporaryDirectory(dir=RAM)
        self.where = Path(self.folder.name)
        self.options = {"pages": pages, "host_bytes": host, "disk_bytes": disk, "policy": policy}
        self.one = Placed(self.where, **self.options)
        self.tickets = []

    def tokens(self, name):
        return int(name[1:]) + 1

    @rule(name=NAMES, cfo=st.sampled_from([0.0, 0.5, 1.0]), pinned=st.lists(NAMES, max_size=2))
    def put(self, name, cfo, pinned):
        held = {record.variant_id for record in self.one.store.records()}
        (stored,) = self.one.put(name, num_tokens=self.tokens(name), cfo=cfo, pinned=pinned)
        after = {record.variant_id for record in self.one.store.records()}
        assert stored == (name in after)
        assert held & {*pinned, *(key for ticket in self.tickets for key in ticket.tiers)} <= after
        assert self.one.gone == sorted(held - after, key=self.one.gone.index)
        self.one.gone.clear()

    @rule(name=NAMES, cfo=st.sampled_from([0.0, 0.5, 1.0]), ok=st.booleans())
    def use(self, name, cfo, ok):
        before = {record.variant_id for record in self.one.store.records()}
        self.one.use(name, cfo=cfo, num_tokens=self.tokens(name), ok=ok)
        after = {record.variant_id for record in self.one.store.records()}
        assert before - after == set(self.one.gone)  # moving up may push out what has no copy below
        self.one.gone.clear()

    @rule(names=st.lists(NAMES, max_size=2))
    def hold(self, names):
        self.tickets.append(self.one.store.prepare_load(names))

    @rule()
    def let_go(self):
        if self.tickets:
            self.one.placement.complete_load(self.tickets.pop(0), {})

    @rule(name=NAMES)
    def damage(self, name):
        self.one.store.discard(name)
        self.one.placement.forget(name)

    @rule()
    def reopen(self):
        while self.tickets:
            self.let_go()
        state = json.loads(json.dumps(self.one.placement.state(None, self.one.held("disk")), allow_nan=False))
        self.one.store.close()
        self.one = Placed(self.where, state=state, **self.options)

    @invariant()
    def policies_know_what_tiers_hold(self):
        if hasattr(self, "one"):
            self.one.check()
            for tier, usage in self.one.store.usage().items():
                assert usage.budget_bytes is None or usage.used_bytes <= usage.budget_bytes, tier

    def teardown(self):
        if hasattr(self, "one"):
            while self.tickets:
                self.let_go()
            self.one.store.close()
            self.folder.cleanup()


TestPlacementTrace = PlacementTrace.TestCase
TestPlacementTrace.settings = settings(stateful_step_count=30)

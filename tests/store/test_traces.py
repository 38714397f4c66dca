"""Random traces of operations against a model of a few lines: contents, pins and budgets agree after every step."""

import os
import tempfile
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from tests.store.kv import SPEC, assert_same_bytes, bytes_on_disk, make_kv, make_record, open_store

IDS = st.sampled_from([f"v{number}" for number in range(6)])
TIERS = st.sampled_from(["device", "host", "disk"])
TOKENS = {f"v{number}": number + 1 for number in range(6)}  # different sizes: 192 bytes a token
PAGE = SPEC.num_bytes(PAGE_TOKENS)


class StoreTrace(RuleBasedStateMachine):
    """`held` is the model: tier -> variant id -> bytes charged there. Without a device tier, its budget is 0."""

    @initialize(
        device_pages=st.integers(0, 3), host_bytes=st.integers(0, 2500), disk_bytes=st.none() | st.integers(0, 6000)
    )
    def open(self, device_pages, host_bytes, disk_bytes):
        # In memory where there is such a place: most of a trace on a shared disk is waiting for fsync.
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.path = Path(self.folder.name)
        self.budgets = {"device": device_pages * PAGE, "host": host_bytes, "disk": disk_bytes}
        self.held: dict[str, dict[str, int]] = {"device": {}, "host": {}, "disk": {}}
        self.tickets = []
        self.reopen()

    def reopen(self):
        device = DevicePool(SPEC, self.budgets["device"]) if self.budgets["device"] else None
        budgets = {"host_bytes": self.budgets["host"], "disk_bytes": self.budgets["disk"]}
        self.store = open_store(self.path, device=device, **budgets)

    def room(self, tier):
        limit = self.budgets[tier]
        return float("inf") if limit is None else limit - sum(self.held[tier].values())

    def pinned(self):
        return {key for ticket in self.tickets for key in ticket.tiers}

    @rule(variant_id=IDS, make_room=st.booleans())
    def save(self, variant_id, make_room):
        ticket = self.store.prepare_store(make_record(variant_id, TOKENS[variant_id]))
        assert ticket.exists == any(variant_id in held for held in self.held.values())
        if not ticket.exists:
            charges = {
                "device": PAGE,
                "host": SPEC.num_bytes(TOKENS[variant_id]),
                "disk": ticket.charge_bytes.get("disk", 1 << 30),
            }
            fitting = [tier for tier in charges if self.budgets[tier] is None or charges[tier] <= self.budgets[tier]]
            assert list(ticket.tiers) == fitting
            assert ticket.shortfall_bytes == {
                tier: charges[tier] - self.room(tier) for tier in fitting if charges[tier] > self.room(tier)
            }
            for tier in list(ticket.shortfall_bytes) if make_room else []:
                self.evict(tier, list(self.held[tier]))
            took = [tier for tier in charges if charges[tier] <= self.room(tier)]
            assert list(self.store.complete_store(ticket, make_kv(variant_id, TOKENS[variant_id]))) == took
            for tier in took:
                self.held[tier][variant_id] = charges[tier]
        else:
            assert self.store.complete_store(ticket, None) == ()
        assert self.store.flush(120)

    @rule(ids=st.lists(IDS, max_size=4))
    def begin_load(self, ids):
        ticket = self.store.prepare_load(ids)
        for key in ids:
            tier = next((tier for tier, held in self.held.items() if key in held), None)
            assert ticket.tiers.get(key) == tier and (key in ticket.missing) == (tier is None)
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), ok=st.booleans(), first=st.integers(0, 2))
    def end_load(self, data, ok, first):
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        promotable = []
        for key, tier in ticket.tiers.items():
            assert_same_bytes(ticket.read_layers(key, first, 3), make_kv(key, TOKENS[key])[first:])
            if ok and (tier == "host" or (tier == "disk" and first == 0)):
                promotable.append(key)
        expected: dict[str, tuple[str, ...]] = {}
        for tier in ("device", "host"):
            for key in promotable:
                size = PAGE if tier == "device" else SPEC.num_bytes(TOKENS[key])
                if key not in self.held[tier] and size <= self.room(tier):
                    self.held[tier][key] = size
                    expected[tier] = (*expected.get(tier, ()), key)
        assert self.store.complete_load(ticket, ok) == expected

    @rule(tier=TIERS, ids=st.lists(IDS, max_size=3, unique=True))
    def evict(self, tier, ids):
        if tier == "device" and not self.budgets["device"]:
            return
        gone = [key for key in ids if key in self.held[tier] and key not in self.pinned()]
        assert list(self.store.evict(tier, ids)) == gone
        for key in gone:
            del self.held[tier][key]

    @rule(variant_id=IDS)
    def discard(self, variant_id):
        if variant_id not in self.pinned():  # what a reader of a discarded variant sees is another test's
            self.store.discard(variant_id)
            for held in self.held.values():
                held.pop(variant_id, None)

    @rule()
    def refresh(self):
        assert self.store.refresh() == ((), ())

    @rule()
    def restart(self):
        self.store.close()
        self.tickets.clear()
        self.held["device"].clear()
        self.held["host"].clear()
        self.reopen()

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "store"):
            return
        usage = self.store.usage()
        assert list(usage) == [tier for tier in self.held if tier != "device" or self.budgets["device"]]
        for tier in usage:
            held = self.held[tier]
            assert usage[tier].used_bytes == sum(held.values()) and usage[tier].num_variants == len(held)
            assert self.budgets[tier] is None or usage[tier].used_bytes <= self.budgets[tier]
        assert bytes_on_disk(self.path) == usage["disk"].used_bytes
        assert {record.variant_id for record in self.store.records()} == {*chain(*self.held.values())}

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()


TestStoreTrace = StoreTrace.TestCase
TestStoreTrace.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

"""One suite for every kind of shared index: leases, orders, changes; several processes; histories against a model."""

import contextlib
import json
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import ccjax.store.index.sqlite
from ccjax.store.index import open_index
from ccjax.store.index.api import CHANGES_AT_ONCE, CHANGES_KEPT, Order
from ccjax.store.index.sqlite import SqliteIndex

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def open_one(index_url, namespace):
    """`open_one()` opens the index as another process would."""
    opened = []

    def open_another(name: str = namespace):
        opened.append(open_index(index_url, name))
        return opened[-1]

    yield open_another
    for index in opened:
        index.close()


@pytest.fixture
def pair(open_one):
    return open_one(), open_one()


@pytest.fixture
def spawn(index_url, namespace):
    processes = []

    def start(command: str, *arguments: object) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tests.store.index_worker", command, index_url, namespace, *map(str, arguments)]
        processes.append(subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def let_pass(index_url: str, namespace: str, seconds: float) -> None:
    """Makes everything in the namespace expire this many seconds earlier."""
    if index_url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(index_url.removeprefix("sqlite://"), timeout=300)) as rows, rows:
            rows.execute("UPDATE leases SET expires_s = expires_s - ?", (seconds,))
            rows.execute("UPDATE orders SET expires_s = expires_s - ?1, free_s = free_s - ?1", (seconds,))
        return
    with contextlib.closing(redis.Redis.from_url(index_url)) as client:
        prefix, milliseconds = f"ccjax:{{{namespace}}}", round(1000 * seconds)
        for key in client.scan_iter(f"{prefix}:lease:*"):
            client.pexpire(key, client.pttl(key) - milliseconds)
        for name in (f"{prefix}:orders:expiry", f"{prefix}:orders:taken"):
            for key, _ in client.zscan_iter(name):
                client.zincrby(name, -milliseconds, key)


@pytest.fixture
def pass_time(index_url, namespace):
    """`pass_time(seconds)`, for the index that `open_one` opens."""
    return lambda seconds: let_pass(index_url, namespace, seconds)


def keys_of(leases) -> list[str]:
    return [lease.key for lease in leases]


# -- leases --------------------------------------------------------------------------------------------------------


def test_lease_has_one_holder_until_released(pair):
    ours, theirs = (index.leases for index in pair)
    assert ours.held(["a", "b"]) == frozenset() and ours.held([]) == frozenset() and ours.acquire([], 1000) == []
    (lease,) = ours.acquire(["a"], 1000)
    assert lease.key == "a" and lease.epoch == 0 and lease.holder
    assert theirs.acquire(["a"], 1000) == [] and ours.acquire(["a"], 1000) == []
    assert theirs.held(["a", "b"]) == {"a"}
    ours.release(lease)
    assert theirs.held(["a"]) == frozenset() and keys_of(theirs.acquire(["a"], 1000)) == ["a"]
    ours.release(lease)  # not ours any more
    assert ours.held(["a"]) == {"a"}


def test_leases_are_acquired_in_order_up_to_the_first_one_held(pair):
    ours, theirs = (index.leases for index in pair)
    assert keys_of(theirs.acquire(["c"], 1000)) == ["c"]
    assert keys_of(ours.acquire(["a", "b", "c", "d"], 1000)) == ["a", "b"]
    assert theirs.held(["a", "b", "c", "d"]) == {"a", "b", "c"}
    assert theirs.acquire(["a", "d"], 1000) == [] and theirs.held(["d"]) == frozenset()


def test_a_lease_expires_without_affecting_a_later_one(pair, pass_time):
    ours, theirs = (index.leases for index in pair)
    (lease,) = ours.acquire(["a"], 2000)
    pass_time(1000)
    assert theirs.acquire(["a"], 1000) == []
    pass_time(1001)
    assert theirs.held(["a"]) == frozenset()
    assert keys_of(theirs.acquire(["a"], 1000)) == ["a"]
    ours.release(lease)
    assert ours.held(["a"]) == {"a"}
    ours.sweep()
    assert ours.held(["a"]) == {"a"}


def test_namespaces_do_not_see_each_other(open_one):
    ours, theirs = open_one(), open_one("other-" + uuid.uuid4().hex)
    ours.leases.acquire(["a"], 1000)
    ours.orders.place("a", b"1", 1000)
    cursor = theirs.changes(None).cursor
    ours.notify({"v": b"record"}, {"w": None})
    assert theirs.leases.held(["a"]) == frozenset() and keys_of(theirs.leases.acquire(["a"], 1000)) == ["a"]
    assert len(theirs.orders) == 0 and theirs.orders.take(1) is None
    found = theirs.changes(cursor)
    assert (found.added, found.removed, found.is_complete) == ({}, {}, True)


def test_exactly_one_process_gets_each_of_200_leases(spawn, tmp_path):
    rivals = [spawn("race", tmp_path / "start", 200) for _ in range(2)]
    for rival in rivals:
        assert rival.stdout is not None and rival.stdout.readline() == "started\n"
    (tmp_path / "start").touch()
    won = [json.loads(rival.communicate(timeout=120)[0]) for rival in rivals]
    assert sorted(won[0] + won[1]) == sorted(f"k{number}" for number in range(200))
    assert won[0] and won[1]  # else it was no race


def test_lease_of_a_killed_holder_can_be_acquired_after_expiry(spawn, open_one, pass_time):
    index = open_one()
    index.orders.place("work", b"do it", 10_000)
    holder = spawn("hold", 1000)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    assert index.leases.acquire(["v"], 1000) == [] and index.orders.take(1000) is None
    pass_time(1001)
    assert index.leases.acquire(["v"], 1000) and index.orders.take(1000) == Order("work", b"do it", attempt=2)


# -- orders --------------------------------------------------------------------------------------------------------


def test_orders_are_taken_oldest_first_and_only_once(pair):
    ours, theirs = (index.orders for index in pair)
    assert ours.take(1000) is None and len(ours) == 0
    assert ours.place("b", b"\x00\xff", 1000) and theirs.place("a", b"2", 1000)
    assert not theirs.place("b", b"other", 1000)  # it stays as it was
    assert len(ours) == len(theirs) == 2
    assert theirs.take(1000) == Order("b", b"\x00\xff", 1)
    assert not ours.place("b", b"3", 1000) and len(ours) == 2
    assert ours.take(1000) == Order("a", b"2", 1) and ours.take(1000) is None
    ours.finish("b")
    ours.finish("b")
    ours.finish("never there")
    assert len(theirs) == 1
    assert ours.place("b", b"again", 1000) and theirs.take(1000) == Order("b", b"again", 1)


def test_unfinished_order_is_taken_again_in_its_original_position(pair, pass_time):
    ours, theirs = (index.orders for index in pair)
    for key in ("a", "b", "c"):
        ours.place(key, key.encode(), 10_000)
    assert ours.take(1000) == Order("a", b"a", 1)
    assert theirs.take(5000) == Order("b", b"b", 1)
    pass_time(1001)
    assert theirs.take(5000) == Order("a", b"a", 2)
    assert theirs.take(5000) == Order("c", b"c", 1) and theirs.take(5000) is None


def test_orders_expire_and_placing_again_does_not_extend_them(pair, pass_time):
    ours, theirs = (index.orders for index in pair)
    ours.place("taken", b"", 1000)
    ours.place("waiting", b"", 1000)
    assert theirs.take(5000) == Order("taken", b"", 1)
    assert not ours.place("waiting", b"", 5000)
    pass_time(1001)
    assert len(ours) == 0 and theirs.take(5000) is None
    assert ours.place("waiting", b"", 5000) and theirs.take(5000) == Order("waiting", b"", 1)


def test_too_many_orders_replace_the_oldest(pair, monkeypatch):
    ours, theirs = (index.orders for index in pair)
    monkeypatch.setattr(sys.modules[type(ours).__module__], "MOST_ORDERS", 3)
    for number in range(5):
        assert ours.place(f"k{number}", b"", 1000)
    assert len(theirs) == 3 and [theirs.take(1000).key for _ in range(3)] == ["k2", "k3", "k4"]


# -- changes -------------------------------------------------------------------------------------------------------


def everything(index, cursor):
    """All changes since a cursor, and the cursor after them."""
    added, removed = {}, {}
    while True:
        found = index.changes(cursor)
        assert found.is_complete
        if found.cursor == cursor:
            return added, removed, cursor
        cursor = found.cursor
        added.update(found.added)
        removed.update(found.removed)


def test_changes_are_received_once_by_others_and_not_by_the_sender(pair):
    ours, theirs = pair
    before, mine = theirs.changes(None), ours.changes(None)
    assert (before.added, before.removed, before.is_complete) == ({}, {}, True)
    ours.notify({"v": b"\x00 record \xff", "long": None}, {"w": "object", "x": None})
    found = theirs.changes(before.cursor)
    assert found.added == {"v": b"\x00 record \xff", "long": None} and found.is_complete
    assert found.removed == {"w": "object", "x": None}
    again = theirs.changes(found.cursor)
    assert (again.added, again.removed, again.is_complete, again.cursor) == ({}, {}, True, found.cursor)
    own = ours.changes(mine.cursor)
    assert (own.added, own.removed, own.is_complete) == ({}, {}, True)
    late = theirs.changes(None)
    assert (late.added, late.removed) == ({}, {})


def test_latest_change_of_a_variant_wins(pair):
    ours, theirs = pair
    cursor = theirs.changes(None).cursor
    ours.notify({"v": b"1", "w": b"1", "x": b"1"}, {})
    ours.notify({}, {"v": "one", "w": "one"})
    ours.notify({"w": b"2"}, {})
    found = theirs.changes(cursor)
    assert found.added == {"v": b"1", "x": b"1", "w": b"2"} and found.removed == {"v": "one", "w": "one"}


def test_removals_of_different_objects_of_a_variant_name_no_object(pair):
    ours, theirs = pair
    cursor = theirs.changes(None).cursor
    ours.notify({}, {"v": "one", "w": "one", "x": None})
    ours.notify({}, {"v": "two", "w": "one", "x": "two"})
    assert theirs.changes(cursor).removed == {"v": None, "w": "one", "x": None}


def test_large_and_numerous_changes_are_received_in_several_batches(pair):
    ours, theirs = pair
    cursor = theirs.changes(None).cursor
    wanted = {f"v{number}": number.to_bytes(4, "big") for number in range(2 * CHANGES_AT_ONCE + 50)}
    wanted["large"] = bytes(range(256)) * 400
    ours.notify(wanted, {})
    assert len(theirs.changes(cursor).added) == CHANGES_AT_ONCE
    assert everything(theirs, cursor)[:2] == (wanted, {})


def test_incomplete_notifications_are_passed_on(pair):
    ours, theirs = pair
    cursor = theirs.changes(None).cursor
    ours.notify({"v": b"1"}, {}, is_complete=False)
    found = theirs.changes(cursor)
    assert found.added == {"v": b"1"} and not found.is_complete
    assert theirs.changes(found.cursor).is_complete
    ours.notify({}, {}, is_complete=False)
    assert not theirs.changes(found.cursor).is_complete


def test_changes_are_incomplete_only_for_cursors_older_than_those_kept(pair):
    ours, theirs = pair
    cursor = theirs.changes(None).cursor
    for start in range(0, CHANGES_KEPT, 512):
        ours.notify({f"v{number}": b"1" for number in range(start, start + 512)}, {})
    added, _, end = everything(theirs, cursor)
    assert len(added) == CHANGES_KEPT
    ours.notify({f"w{number}": b"1" for number in range(200)}, {})  # Redis cuts off nodes of a hundred
    found = theirs.changes(cursor)
    assert not found.is_complete and found.cursor != cursor
    assert len(everything(theirs, end)[0]) == 200
    assert everything(theirs, found.cursor)[0] == {}
    ours.notify({"x": b"1"}, {})
    assert theirs.changes(found.cursor).added == {"x": b"1"}


@pytest.mark.parametrize("cursor", ["", "nonsense", "nonsense 5", "0123 0-0"])
def test_changes_since_a_cursor_of_another_index_are_incomplete(pair, cursor):
    ours, theirs = pair
    ours.notify({"v": b"1"}, {})
    found = theirs.changes(cursor)
    assert not found.is_complete and found.added == {}
    assert theirs.changes(found.cursor).is_complete


# -- histories against a model ---------------------------------------------------------------------------------------

WHO = st.integers(0, 1)
KEY = st.sampled_from(("a", "b", "c"))
SHORT_S, LONG_S = 1000.0, 1e6
SECONDS = st.sampled_from((SHORT_S, LONG_S))


class Histories(RuleBasedStateMachine):
    """Two processes on one index. Only `pass_time` advances time: short leases and orders expire by it, and other steps
    take almost none."""

    url = ""

    @initialize()
    def begin(self):
        self.now_s = 0.0
        self.namespace = uuid.uuid4().hex
        self.indexes = [open_index(self.url, self.namespace) for _ in range(2)]
        assert not self.indexes[0].leases.held(["a"])  # there is a file from now on
        self.leases = {}  # key -> (lease, end)
        self.old_leases = []
        self.orders = {}  # key -> [number, value, end, free at, attempt]
        self.number = 0

    def teardown(self):
        for index in getattr(self, "indexes", ()):
            index.close()

    @rule()
    def pass_time(self):
        self.now_s += 2 * SHORT_S
        let_pass(self.url, self.namespace, 2 * SHORT_S)
        self.leases = {key: lease for key, lease in self.leases.items() if lease[1] > self.now_s}
        self.orders = {key: order for key, order in self.orders.items() if order[2] > self.now_s}

    @rule(who=WHO, keys=st.lists(KEY, min_size=1, max_size=3, unique=True), seconds=SECONDS)
    def acquire(self, who, keys, seconds):
        won = self.indexes[who].leases.acquire(keys, seconds)
        taken = next((number for number, key in enumerate(keys) if key in self.leases), len(keys))
        assert keys_of(won) == keys[:taken]
        for lease in won:
            self.leases[lease.key] = lease, self.now_s + seconds
            self.old_leases.append(lease)

    @rule(who=WHO, which=st.integers(0, 100))
    def release(self, who, which):
        if self.old_leases:
            lease = self.old_leases[which % len(self.old_leases)]
            self.indexes[who].leases.release(lease)
            if self.leases.get(lease.key, (None,))[0] == lease:
                del self.leases[lease.key]

    @rule(who=WHO)
    def look(self, who):
        assert self.indexes[who].leases.held(["a", "b", "c"]) == self.leases.keys()
        assert len(self.indexes[who].orders) == len(self.orders)

    @rule(who=WHO, key=KEY, value=st.binary(max_size=3), seconds=SECONDS)
    def place(self, who, key, value, seconds):
        assert self.indexes[who].orders.place(key, value, seconds) == (key not in self.orders)
        if key not in self.orders:
            self.number += 1
            self.orders[key] = [self.number, value, self.now_s + seconds, self.now_s, 0]

    @rule(who=WHO, seconds=SECONDS)
    def take(self, who, seconds):
        free = [(order[0], key) for key, order in self.orders.items() if order[3] <= self.now_s]
        found = self.indexes[who].orders.take(seconds)
        if not free:
            assert found is None
            return
        key = min(free)[1]
        order = self.orders[key]
        order[3], order[4] = self.now_s + seconds, order[4] + 1
        assert found == Order(key, order[1], order[4])

    @rule(who=WHO, key=KEY)
    def finish(self, who, key):
        self.indexes[who].orders.finish(key)
        self.orders.pop(key, None)


def test_histories_of_two_processes_match_the_model(index_url):
    class OfThisKind(Histories):
        url = index_url

    OfThisKind.TestCase.settings = settings(
        max_examples=settings.default.max_examples,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
    )
    OfThisKind.TestCase("runTest").runTest()


def test_sqlite_index_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(ccjax.store.index.sqlite, "CHANGES_KEPT", 32)
    path = tmp_path / "index.db"
    index, other = SqliteIndex(path, "n"), SqliteIndex(path, "n")
    sizes = []
    for turn in range(60):
        cursor = other.changes(None).cursor
        for number in range(20):
            index.notify({f"v{turn}-{number}": bytes(10_000)}, {})
            index.leases.release(index.leases.acquire([f"v{number}"], 1000)[0])
        assert len(other.changes(cursor).added) == 20
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert max(sizes[30:]) <= max(sizes[:30]) < 8_000_000
    index.close()
    other.close()

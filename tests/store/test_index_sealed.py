"""A shared index of a store with keys, and an attacker without them who can write everything in it: they hold no lease
and order no work, and their entries are counted."""

import time
import uuid

import pytest

from ccjax.store import StoreCipher, StoreIdentity, StoreKeys
from ccjax.store.index import open_index
from ccjax.store.index.leases import LATE_S, IndexLeases
from tests.polling import wait_until
from tests.store.kv import open_store

KEYS = StoreKeys((b"k" * 32,))
SEALED = StoreIdentity("model-a", keys=KEYS)
HIDDEN = StoreIdentity("model-a", keys=KEYS, cipher=StoreCipher(KEYS))
STRANGER = StoreIdentity("model-a", keys=StoreKeys((b"t" * 32,)))


@pytest.fixture
def open_one(index_url):
    namespace, opened = uuid.uuid4().hex, []

    def open_another(identity=SEALED):
        opened.append(open_index(index_url, namespace, identity))
        return opened[-1]

    yield open_another
    for index in opened:
        index.close()


@pytest.fixture(params=[SEALED, HIDDEN], ids=["sealed", "encrypted"])
def ours(request, open_one):
    return open_one(request.param)


def test_leases_work_between_processes_with_keys(open_one):
    first, second = open_one(), open_one(StoreIdentity("model-a", keys=StoreKeys((b"n" * 32, b"k" * 32))))
    (lease, _) = first.leases.acquire(["a", "b"], 60)
    assert second.leases.acquire(["c", "b"], 60)[-1].key == "c" and second.leases.acquire(["a"], 60) == []
    assert second.leases.held(["a", "b", "x"]) == {"a", "b"}
    first.leases.release(lease)
    assert first.leases.held(["a"]) == frozenset() and len(second.leases.acquire(["a"], 60)) == 1
    assert first.num_forged == second.num_forged == 0


@pytest.mark.parametrize("identity", [None, STRANGER])
def test_lease_of_a_process_without_keys_is_ignored(open_one, ours, identity):
    theirs = open_one(identity)
    assert len(theirs.leases.acquire(["a", "b"], 60)) == 2
    assert ours.leases.held(["a", "b"]) == frozenset() and ours.num_forged == 2
    assert [lease.key for lease in ours.leases.acquire(["x", "a", "y", "b", "z"], 60)] == ["x", "a", "y", "b", "z"]
    assert ours.leases.held(["a", "b"]) == {"a", "b"} and ours.num_forged == 4


@pytest.mark.parametrize("value", ["", "zz", "00", "[1]", "\xff\x00", "0" * 200])
def test_arbitrary_lease_bytes_are_ignored(open_one, ours, value):
    theirs = open_one(None)
    theirs._leases._rows.take([("a", value)], 60)
    assert ours.leases.held(["a"]) == frozenset()
    assert len(ours.leases.acquire(["a"], 60)) == 1


def test_lease_under_another_key_or_replayed_is_ignored(open_one):
    ours, theirs = open_one(), open_one(None)
    (lease,) = ours.leases.acquire(["a"], 30)
    rows = theirs._leases._rows
    rows.take([("b", lease.holder)], 3600)
    assert ours.leases.held(["a", "b"]) == {"a"}
    rows.drop("a", lease.holder)
    rows.take([("a", lease.holder)], 3600)  # put back to stay
    now_s = time.time()
    soon, late = (IndexLeases(rows, SEALED, lambda at_s=at_s: at_s) for at_s in (now_s + 31, now_s + 31 + LATE_S))
    assert soon.held(["a"]) == {"a"} and late.held(["a"]) == frozenset()
    assert len(late.acquire(["a"], 30)) == 1


def test_orders_are_delivered_and_encrypted_ones_are_unreadable(open_one, ours):
    assert ours.orders.place("a", b"[17, 4711]", 60) and not ours.orders.place("a", b"[17, 4711]", 60)
    assert len(ours.orders) == 1
    raw = open_one(None).orders.take(0.001)
    assert (b"4711" in raw.value) == (ours._sealed._identity is SEALED)
    taken = []
    wait_until(lambda: taken.append(ours.orders.take(1000)) or taken[-1])
    order = taken[-1]
    assert (order.key, order.value, order.attempt) == ("a", b"[17, 4711]", 2)
    ours.orders.finish("a")
    assert len(ours.orders) == 0 and ours.orders.take(30) is None and ours.num_forged == 0


def test_orders_of_a_process_without_keys_are_removed(open_one, ours):
    plain = open_one(None)
    plain.orders.place("a", b"{}", 60)
    open_one(STRANGER).orders.place("b", b"{}", 60)
    sound = ours._sealed._identity.seal("order", "other", b"{}")  # one of ours under another name
    plain.orders.place("c", sound, 60)
    assert not ours.orders.place("a", b"ours", 60)  # the place is taken, until somebody looks
    ours.orders.place("d", b"ours", 60)
    assert ours.orders.take(30).key == "d" and ours.num_forged == 3
    assert len(ours.orders) == 1 and ours.orders.place("a", b"ours", 60)


def test_store_counts_forged_entries(tmp_path):
    index = f"sqlite://{tmp_path}/index.db"
    theirs = open_index(index, SEALED.namespace)
    with open_store(tmp_path / "store", identity=SEALED, index=index) as store:
        theirs.leases.acquire(["v"], 60)
        theirs.orders.place("v", b"{}", 60)
        assert store.claims.taken(["v"]) == frozenset() and store.change_feed.index.orders.take(1) is None
        usage = store.usage()["disk"]
        assert usage.forged == usage.corrupt == 2
        assert store.claims.claim(["v"], 60) == ("v",)
    theirs.close()

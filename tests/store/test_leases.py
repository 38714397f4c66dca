"""Leases: one winner among threads and processes, expiry, left-overs; and the claims that stores make."""

import json
import threading
from unittest.mock import Mock

import pytest

from ccjax.store import StoreUnavailableError
from ccjax.store.leases import LEFT_OVER_S, Leases
from ccjax.store.objects import open_root
from tests.store.kv import OURS, make_kv, make_record, open_store, put
from tests.store.test_processes import result_of, spawn

SPACE = OURS.namespace


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pair(place, clock) -> tuple[Leases, Leases]:
    """Two holders in one place, as if in two processes."""
    return tuple(Leases(open_root(place.url), OURS.namespace, clock) for _ in range(2))


def names(place) -> list[str]:
    return [key.rpartition("/")[2] for key in place.keys() if "/leases/" in key]


def test_lease_has_one_holder_until_released(pair):
    ours, theirs = pair
    assert ours.held(["a"]) == frozenset()
    (lease,) = ours.acquire(["a"], 10)
    assert (lease.key, lease.epoch, lease.expires_s) == ("a", 1, 1010.0)
    assert theirs.acquire(["a"], 10) == [] and ours.acquire(["a"], 10) == []
    assert theirs.held(["a", "b"]) == {"a"}
    ours.release(lease)
    assert theirs.held(["a"]) == frozenset() and len(theirs.acquire(["a"], 10)) == 1


def test_a_lease_expires_and_the_next_holder_has_the_next_epoch(pair, clock, place):
    ours, theirs = pair
    (lease,) = ours.acquire(["a"], 10)
    clock.now += 9.99
    assert theirs.acquire(["a"], 10) == []
    clock.now += 0.01
    assert theirs.held(["a"]) == frozenset()
    (stolen,) = theirs.acquire(["a"], 10)
    assert stolen.epoch == 2 and stolen.expires_s == 1020.0
    ours.release(lease)  # too late: it stays, or a process that read it before could take the next epoch again
    assert names(place) == ["a.00000001", "a.00000002"]
    assert ours.held(["a"]) == {"a"} and ours.acquire(["a"], 10) == []


def test_leases_are_acquired_in_order_up_to_the_first_one_held(pair):
    ours, theirs = pair
    assert [lease.key for lease in theirs.acquire(["c"], 10)] == ["c"]
    assert [lease.key for lease in ours.acquire(["a", "b", "c", "d"], 10)] == ["a", "b"]
    assert theirs.held(["a", "b", "c", "d"]) == {"a", "b", "c"}
    assert theirs.acquire(["a", "d"], 10) == [] and theirs.held(["d"]) == frozenset()


def test_leases_won_after_a_lost_race_are_released(pair, monkeypatch, place):
    """Another process takes "b" between the check and the creation."""
    ours, theirs = pair
    create = ours._create

    def late(key, latest, seconds):
        if key == "b":
            assert theirs.acquire(["b"], 10)
        return create(key, latest, seconds)

    monkeypatch.setattr(ours, "_create", late)
    assert [lease.key for lease in ours.acquire(["a", "b", "c"], 10)] == ["a"]
    assert names(place) == ["a.00000001", "b.00000001"]


def test_losing_the_race_for_the_first_key_leaves_the_other_keys_alone(pair, monkeypatch):
    ours, theirs = pair
    create, tried = ours._root.create, []

    def late(key, data, **options):
        tried.append(key.rpartition("/")[2])
        assert theirs.acquire(["a"], 10)
        return create(key, data, **options)

    monkeypatch.setattr(ours._root, "create", late)
    assert ours.acquire(["a", "b", "c"], 10) == [] and tried == ["a.00000001"]


def test_two_processes_never_hold_different_epochs_of_one_key(pair, clock, place, monkeypatch):
    """An old lease is swept between another process's check and creation, and a third begins at the first epoch."""
    ours, theirs = pair
    assert ours.acquire(["a"], 10)
    clock.now += LEFT_OVER_S + 11
    latest = theirs._latest
    monkeypatch.setattr(theirs, "_latest", lambda keys: _swept_after(latest(keys), ours))
    assert theirs.acquire(["a"], 10) == []
    assert names(place) == ["a.00000001"] and ours.held(["a"]) == {"a"}


def _swept_after(seen, other: Leases):
    other.sweep()
    assert len(other.acquire(["a"], 10)) == 1
    return seen


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"holder": "x"}', b'{"holder": "x", "expires_s": "soon"}', b"\xff", b"[" * 100_000],
    ids=len,
)
def test_a_damaged_lease_counts_as_expired(pair, place, content):
    ours, theirs = pair
    ours.acquire(["a"], 10)
    place.write(f"{SPACE}/leases/a.00000001", content)
    (lease,) = theirs.acquire(["a"], 10)
    assert lease.epoch == 2


def test_expired_leases_are_deleted_after_an_hour(pair, clock, place):
    ours, theirs = pair
    ours.acquire(["a", "b"], 10)
    clock.now += LEFT_OVER_S
    theirs.acquire(["b"], 10)
    theirs.sweep()
    assert names(place) == ["a.00000001", "b.00000001", "b.00000002"]
    clock.now += 10.5
    theirs.sweep()
    assert names(place) == ["b.00000002"]


@pytest.mark.parametrize("is_stolen", [False, True])
def test_concurrent_acquire_has_exactly_one_winner(place, is_stolen, clock):
    holders = [Leases(open_root(place.url), OURS.namespace, clock) for _ in range(8)]
    for round_number in range(6 if place.kind == "file" else 2):
        key = f"k{round_number}"
        if is_stolen:
            assert holders[0].acquire([key], 10)
            clock.now += 11
        barrier, won = threading.Barrier(len(holders)), []

        def race(leases, key=key, barrier=barrier, won=won):
            barrier.wait()
            won.extend(leases.acquire([key], 10))

        threads = [threading.Thread(target=race, args=(leases,)) for leases in holders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [lease.epoch for lease in won] == [1 + is_stolen]


def test_lease_of_a_killed_holder_is_acquired_by_exactly_one_other_process(process_place):
    place = process_place
    rivals = [spawn("await_lease", place.url, "v") for _ in range(2)]
    for rival in rivals:  # a process may take longer to start than the lease lasts
        assert rival.stdout is not None and rival.stdout.readline() == "started\n"
    holder = spawn("hold_lease", place.url, "v", 1)
    assert holder.stdout is not None
    expires_s = float(holder.stdout.readline())
    holder.kill()
    holder.communicate()
    outcomes = sorted((json.loads(result_of(rival)) for rival in rivals), key=lambda outcome: outcome["won"])
    assert [outcome["won"] for outcome in outcomes] == [False, True]
    assert outcomes[1]["at"] >= expires_s


# -- claims of a store ----------------------------------------------------------------------------------------------


def lease_names(place) -> list[str]:
    return [name.partition(".")[0] for name in names(place)]


def test_a_claim_lasts_until_the_variant_is_committed(place):
    with open_store(place.url) as ours, open_store(place.url) as theirs:
        assert ours.claims.claim(["v", "w"], 60) == ("v", "w")
        assert theirs.claims.taken(["v", "w", "x"]) == {"v", "w"} and ours.claims.taken(["v", "w"]) == frozenset()
        assert theirs.claims.claim(["v"], 60) == () and theirs.claims.committed(["v"]) == ()
        put(ours, "v")
        ours.claims.release(["w"])
        assert theirs.claims.committed(["v", "w"]) == ("v",) and theirs.tier_of("v") == "disk"
        assert theirs.claims.taken(["v", "w"]) == frozenset()
        assert lease_names(place) == []
        assert theirs.claims.claim(["w"], 60) == ("w",) and ours.claims.taken(["w"]) == {"w"}


def test_release_keeps_claims_on_queued_variants(place, monkeypatch):
    gate = threading.Event()
    with open_store(place.url) as store, open_store(place.url) as other:
        write = store._disk.write
        monkeypatch.setattr(store._disk, "write", lambda *a, **k: gate.wait(120) and write(*a, **k))
        store.claims.claim(["v"], 60)
        store.complete_store(store.prepare_store(make_record("v")), make_kv("v"))
        store.claims.release(["v"])
        assert other.claims.taken(["v"]) == {"v"}
        gate.set()
        assert store.flush(120)
    assert lease_names(place) == [] and not open_store(place.url).claims.taken(["v"])


def test_a_failed_write_releases_its_claim(place, monkeypatch):
    with open_store(place.url) as store:
        monkeypatch.setattr(store._disk, "write", Mock(side_effect=StoreUnavailableError("no space")))
        store.claims.claim(["v"], 60)
        put(store, "v")
    assert lease_names(place) == []


def test_closing_releases_the_remaining_claims(place):
    with open_store(place.url) as store:
        store.claims.claim(["v", "w"], 60)
    assert lease_names(place) == []


def test_failing_root_makes_no_claims_and_is_logged_once(place, monkeypatch, caplog):
    with open_store(place.url) as store:
        refuse = Mock(side_effect=StoreUnavailableError("no answer"))
        for number in (1, 2):
            with monkeypatch.context() as patch:
                for name in ("names", "create", "read"):
                    patch.setattr(store._disk._root, name, refuse)
                assert store.claims.claim(["v"], 60) == ()
                assert caplog.text.count("nothing is shared") == number
                assert store.claims.taken(["v"]) == frozenset() and store.claims.committed(["v"]) == ()
                assert caplog.text.count("nothing is shared") == number
            assert store.claims.claim(["v"], 60) == ("v",)
            store.claims.release(["v"])

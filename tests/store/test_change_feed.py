"""Stores on one root and one shared index: each knows commits and deletions of the others at once, and none depends on
the index."""

import contextlib
from unittest.mock import Mock

import pytest

import ccjax.store.change_feed
import ccjax.store.commits
from ccjax.store import ShardNotFoundError
from ccjax.store.change_feed import ChangeFeed
from ccjax.store.index import open_index
from tests.polling import wait_until
from tests.store.kv import OTHERS, assert_same_bytes, get, make_kv, make_record, open_store, put, record_file


@pytest.fixture
def open_at(tmp_path):
    """`open_at(index)` opens the store as another process would, with that index or without one."""
    with contextlib.ExitStack() as stores:
        yield lambda index, **options: stores.enter_context(open_store(tmp_path / "kv", index=index, **options))


@pytest.fixture
def open_one(open_at, index_url):
    """`open_one()` opens the store as another process would."""
    return lambda **options: open_at(index_url, **options)


def came(store, *variant_ids):
    """Waits until the store has changes of these variants, and takes them."""
    seen: set[str] = set()

    def all_came():
        seen.update(store.change_feed.take()[0])
        return set(variant_ids) <= seen

    wait_until(all_came)


def test_a_variant_of_another_process_can_be_loaded_without_listing_the_root(open_one, monkeypatch):
    ours, theirs = open_one(), open_one()
    refuse = Mock(side_effect=AssertionError("the record came along"))
    monkeypatch.setattr(theirs._disk._root, "names", refuse)
    monkeypatch.setattr(theirs._disk._root, "read", refuse)
    put(ours, "v")
    came(theirs, "v")
    assert theirs.tier_of("v") == "disk" and theirs.get_record("v") == make_record("v")
    assert_same_bytes(get(theirs, "v"), make_kv("v"))
    assert ours.usage()["disk"].used_bytes == theirs.usage()["disk"].used_bytes > 0
    assert ours.change_feed.take() == ((), ()) and not theirs.change_feed.needs_listing
    assert theirs.change_feed.counts.num_applied == 1


def test_a_long_record_is_read_from_the_root(open_one, monkeypatch):
    monkeypatch.setattr(ccjax.store.change_feed, "LARGEST_SENT_BYTES", 10)
    ours, theirs = open_one(), open_one()
    sent = []
    notify = ours.change_feed.index.notify
    monkeypatch.setattr(
        ours.change_feed.index, "notify", lambda added, *a, **k: sent.append(added) or notify(added, *a, **k)
    )
    put(ours, "v")
    came(theirs, "v")
    assert sent == [{"v": None}]
    assert_same_bytes(get(theirs, "v"), make_kv("v"))


def test_evictions_and_discards_are_applied_on_disk_and_not_in_memory(open_one):
    ours, theirs = open_one(), open_one()
    for key in ("v", "w", "x"):
        put(ours, key)
    came(theirs, "v", "w", "x")
    get(theirs, "w")  # in its memory from now on
    assert ours.evict("disk", ["v", "w"]) == ("v", "w")
    ours.discard("x")
    went: set[str] = set()
    wait_until(lambda: went.update(theirs.change_feed.take()[1]) or went == {"v", "w", "x"})
    assert [theirs.tiers_of(key) for key in ("v", "w", "x")] == [(), ("host",), ()]
    assert theirs.usage()["disk"].used_bytes == 0
    put(theirs, "v")
    came(ours, "v")
    assert_same_bytes(get(ours, "v"), make_kv("v"))


def test_variant_with_an_open_load_is_kept_until_the_load_completes(open_one):
    ours, theirs = open_one(), open_one()
    for key in ("v", "w"):
        put(ours, key)
    came(theirs, "v", "w")
    ticket = theirs.prepare_load(["v"])
    assert_same_bytes(ticket.read_layers("v", 0, 3), make_kv("v"))
    ours.evict("disk", ["v", "w"])
    wait_until(lambda: theirs.tier_of("w") is None)
    tell(ours, theirs, {"nowhere": None}, {})
    assert theirs.tier_of("v") == "disk" and theirs.get_record("v") == make_record("v")
    theirs.complete_load(ticket, ok=False)
    wait_until(lambda: theirs.tier_of("v") is None)


def test_rewritten_variant_replaces_the_old_one_in_other_processes(open_one):
    ours, theirs = open_one(), open_one()
    put(ours, "v")
    came(theirs, "v")
    object_id = theirs._disk._commits.get("v").object_id
    for _ in range(3):
        ours.evict("disk", ["v"])
        ours.discard("v")
        put(ours, "v")
    wait_until(lambda: (known := theirs._disk._commits.get("v")) and known.object_id != object_id)
    wait_until(lambda: theirs._disk._commits.get("v") == ours._disk._commits.get("v"))
    assert_same_bytes(get(theirs, "v"), make_kv("v"))


def test_a_stale_commit_does_not_replace_a_known_record(open_one):
    ours, theirs = open_one(), open_one()
    put(ours, "v")
    came(theirs, "v")
    old = theirs._disk._commits.get("v").raw
    ours.discard("v")
    put(ours, "v")
    wait_until(lambda: theirs._disk._commits.get("v") == ours._disk._commits.get("v"))
    tell(ours, theirs, {"v": old}, {})
    assert theirs._disk._commits.get("v") == ours._disk._commits.get("v")
    assert_same_bytes(get(theirs, "v"), make_kv("v"))


def test_a_late_deletion_does_not_affect_a_newer_object(open_one):
    """A deletion is announced late: after another process rewrote the variant and announced that."""
    ours, theirs, third = open_one(), open_one(), open_one()
    put(ours, "v")
    came(theirs, "v")
    old = theirs._disk._commits.get("v").object_id
    ours.change_feed.index.notify, notify = (lambda *_, **__: None), ours.change_feed.index.notify
    ours.discard("v")
    theirs.refresh()
    assert theirs.tier_of("v") is None
    put(theirs, "v")
    came(third, "v")
    notify({}, {"v": old})
    put(ours, "w")  # not announced
    notify({"w": None}, {})
    came(theirs, "w")
    came(third, "w")
    for store in (theirs, third):
        assert store._disk._commits.get("v") is not None and "v" not in store.change_feed.take()[1]
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_a_deletion_without_an_object_checks_the_root(open_one):
    ours, theirs = open_one(), open_one()
    for key in ("v", "w"):
        put(ours, key)
    came(theirs, "v", "w")
    ours._disk._root.delete(ours._disk._commits.record_key("w"))
    ours.change_feed.index.notify({}, {"v": None, "w": None})
    wait_until(lambda: theirs.tier_of("w") is None)
    assert theirs.tier_of("v") == "disk" and theirs.change_feed.take()[1] == ("w",)


def tell(ours, theirs, added, removed):
    """Sends changes and waits until they were applied, before others follow."""
    before = theirs.change_feed.counts.num_applied
    ours.change_feed.index.notify(added, removed)
    wait_until(lambda: theirs.change_feed.counts.num_applied >= before + len(added) + len(removed))


@pytest.mark.parametrize("way", ["news", "news of any object", "listing", "own", "unknown", "unknown, of any object"])
def test_late_commit_notification_does_not_restore_a_deleted_variant(open_one, way, monkeypatch):
    """Another process found it in a listing and deleted it before the writer announced it."""
    ours, theirs = open_one(), open_one()
    with monkeypatch.context() as patch:
        if way.startswith("unknown"):
            patch.setattr(ours.change_feed, "record_commit", lambda *_: None)
        put(ours, "v")
    if not way.startswith("unknown"):
        came(theirs, "v")
    known = ours._disk._commits.get("v")
    monkeypatch.setattr(ours.change_feed, "record_deletion", lambda *_: None)
    (theirs if way == "own" else ours).discard("v")
    wait_until(lambda: ours._disk._commits.read("v") is None)
    if way == "listing":
        assert theirs.refresh() == ((), ("v",))
    elif way != "own":
        tell(ours, theirs, {}, {"v": None if way.endswith("any object") else known.object_id})
    wait_until(lambda: theirs.tier_of("v") is None)
    tell(ours, theirs, {"v": known.raw}, {})
    tell(ours, theirs, {"nowhere": None}, {})
    assert theirs.tier_of("v") is None and theirs.usage()["disk"].used_bytes == 0
    ours.discard("v")  # it may still be in its memory
    put(ours, "v")
    wait_until(lambda: theirs.tier_of("v") == "disk")
    assert_same_bytes(get(theirs, "v"), make_kv("v"))


def test_the_most_recent_removals_are_remembered(open_one, monkeypatch):
    monkeypatch.setattr(ccjax.store.commits, "CHANGES_KEPT", 3)
    commits = open_one()._disk._commits
    for number in (0, 1, 2, 3, 4, 2, 5):
        commits.forget_removed(f"v{number}", f"object {number}")
    assert commits._removed == {f"v{number}": f"object {number}" for number in (4, 2, 5)}


@pytest.fixture
def told(index_url):
    """A process's feed, which does not send by itself, and another process's index with a cursor."""
    with contextlib.closing(open_index(index_url, "n")) as other:
        change_feed, cursor = ChangeFeed(open_index(index_url, "n")), other.changes(None).cursor
        yield change_feed, lambda: other.changes(cursor)
        change_feed.index.close()


def test_a_deletion_cancels_only_the_commit_of_its_own_object(told):
    change_feed, changes = told
    for key in ("same", "newer", "unknown"):
        change_feed.record_commit(key, "new", b"1")
    change_feed.record_deletion("same", "new")
    change_feed.record_deletion("newer", "old")
    change_feed.record_deletion("unknown", None)
    change_feed._send()
    found = changes()
    assert found.added == {"newer": b"1"} and found.removed == {"same": "new", "newer": "old", "unknown": None}


def test_unsent_changes_are_sent_with_later_ones(told, monkeypatch):
    change_feed, changes = told
    change_feed.record_commit("v", "one", b"1")
    change_feed.record_deletion("w", "one")
    change_feed.record_deletion("x", "one")

    def happens_meanwhile(*_, **__):
        change_feed.record_commit("v", "two", b"2")
        change_feed.record_deletion("x", "two")
        change_feed.record_deletion("y", "one")
        raise OSError("no answer")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(change_feed.index, "notify", happens_meanwhile)
        change_feed._send()
    change_feed._send()
    found = changes()
    assert found.added == {"v": b"2"} and found.removed == {"w": "one", "x": None, "y": "one"}


@pytest.mark.parametrize("record", [b"{}", b"\xff" * 100, None], ids=["empty", "no JSON", "none"])
def test_invalid_change_notifications_are_verified_and_adopt_nothing(open_one, caplog, record):
    ours, theirs = open_one(), open_one()
    put(ours, "sound")
    came(theirs, "sound")
    ours.change_feed.index.notify({"nowhere": record, "sound": record}, {"never there": "object", "nor this": None})
    put(ours, "w")
    came(theirs, "w")
    assert theirs.tier_of("nowhere") is None
    assert_same_bytes(get(theirs, "sound"), make_kv("sound"))
    assert theirs.usage()["disk"].corrupt == 0 and not theirs.change_feed.needs_listing


def test_quarantining_a_record_is_announced(open_one, tmp_path):
    ours = open_one()
    put(ours, "v")
    theirs, third = open_one(), open_one()
    record_file(tmp_path / "kv", "v").write_bytes(b"damaged")
    assert theirs._disk.find_committed(["v"]) == ("v",)  # known, so not read
    assert not theirs._disk._commits.load_record("v")
    wait_until(lambda: third.tier_of("v") is None)


def test_an_erasure_makes_others_list_the_store(open_one):
    ours, theirs = open_one(), open_one()
    put(ours, "v")
    came(theirs, "v")
    assert ours.erase(["v"], uncommitted=True) == ()
    wait_until(lambda: theirs.change_feed.needs_listing)
    wait_until(lambda: theirs.tier_of("v") is None)
    theirs.refresh()
    assert not theirs.change_feed.needs_listing and not ours.change_feed.needs_listing


def test_leases_are_shared_by_all_processes_with_the_index(open_one, open_at, tmp_path):
    ours, theirs, without = open_one(), open_one(), open_at(None)
    assert ours.claims.claim(["v", "w"], 60) == ("v", "w")
    assert theirs.claims.taken(["v", "w", "x"]) == {"v", "w"} and theirs.claims.claim(["v"], 60) == ()
    assert not list(tmp_path.glob("kv/*/leases/*"))
    assert without.claims.claim(["v"], 60) == ("v",)  # it knows no better, and works twice
    put(ours, "v")
    wait_until(lambda: theirs.claims.taken(["v", "w"]) == {"w"})
    assert not without._disk.write(make_record("v"), make_kv("v"))
    ours.claims.release(["w"])
    assert theirs.claims.taken(["v", "w"]) == frozenset()


def test_store_without_the_index_shares_variants_by_listing(open_one, open_at):
    with_it, without = open_one(), open_at(None)
    assert without.change_feed is None
    put(with_it, "v")
    put(without, "w")
    assert without.refresh() == (("v",), ()) and with_it.refresh() == (("w",), ())
    without.evict("disk", ["v"])
    with_it.evict("host", ["v"])
    with pytest.raises(ShardNotFoundError):
        get(with_it, "v")


def test_changes_of_another_models_variants_are_not_received(open_one, monkeypatch):
    ours, theirs = open_one(), open_one(identity=OTHERS)
    put(ours, "v")
    assert ours.change_feed.flush(120)
    looks, changes = [], theirs.change_feed.index.changes
    monkeypatch.setattr(theirs.change_feed.index, "changes", lambda cursor: looks.append(cursor) or changes(cursor))
    wait_until(lambda: len(looks) > 2)
    assert theirs.change_feed.counts.num_applied == 0 and theirs.tier_of("v") is None


# -- an index that is away -------------------------------------------------------------------------------------------


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "index" in record.getMessage()]


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_index_outage_logs_its_start_and_end_and_changes_arrive_afterwards(
    own_redis, open_at, caplog, way, tmp_path, request, num_waits
):
    if way == "stopped":
        request.getfixturevalue("impatient")
    ours, theirs = (open_at(own_redis.url) for _ in range(2))
    put(ours, "before")
    came(theirs, "before")
    stopped = own_redis.stopped()
    own_redis.kill() if way == "killed" else stopped.__enter__()
    wait_until(lambda: not ours.change_feed.counts.is_up and not theirs.change_feed.counts.is_up)
    before = num_waits()
    for number in range(5):
        put(ours, f"v{number}")
        assert ours.claims.claim([f"w{number}"], 60) == (f"w{number}",)
    ours.evict("disk", ["v0", "before"])
    assert num_waits() == before, "nobody waits for the index again"
    assert theirs.claims.taken(["w0", "w4", "w5"]) == {"w0", "w4"}  # by the root's leases
    assert theirs.tier_of("v1") is None
    own_redis.start() if way == "killed" else stopped.__exit__(None, None, None)
    if way == "stopped":
        came(theirs, "v1", "v2", "v3", "v4")
        wait_until(lambda: theirs.tier_of("before") is None)
        assert theirs.tier_of("v0") is None
    else:
        wait_until(lambda: theirs.change_feed.needs_listing)
        theirs.refresh()
        assert theirs.tier_of("v1") == "disk" and theirs.tier_of("before") is None
    wait_until(lambda: ours.change_feed.counts.is_up and theirs.change_feed.counts.is_up)
    put(ours, "after")
    came(theirs, "after")
    ours.claims.release([f"w{number}" for number in range(5)])
    assert not list(tmp_path.glob("kv/*/leases/*"))
    assert len([warning for warning in warnings(caplog) if "until it answers" in warning]) == 2  # one of each store
    assert len([warning for warning in warnings(caplog) if "answers again" in warning]) == 2
    assert len(warnings(caplog)) == 4


def test_index_lease_can_be_released_during_an_outage_without_error(own_redis, open_at, caplog):
    ours, theirs = (open_at(own_redis.url) for _ in range(2))
    assert ours.claims.claim(["v"], 60) == ("v",)
    own_redis.kill()
    ours.claims.release(["v"])
    assert theirs.claims.claim(["v"], 60) == ("v",)
    assert "nothing is shared" not in caplog.text


def test_a_store_opens_during_an_index_outage(own_redis, open_at, caplog):
    own_redis.kill()
    ours = open_at(own_redis.url)
    assert not ours.change_feed.counts.is_up and not ours.change_feed.needs_listing and len(warnings(caplog)) == 1
    put(ours, "v")
    own_redis.start()
    wait_until(lambda: ours.change_feed.counts.is_up and ours.change_feed.needs_listing)
    theirs = open_at(own_redis.url)
    assert theirs.tier_of("v") == "disk"


def test_unsent_changes_are_bounded_with_a_listing_as_fallback(own_redis, open_at, monkeypatch, impatient):
    monkeypatch.setattr(ccjax.store.change_feed, "CHANGES_KEPT", 3)
    ours, theirs = (open_at(own_redis.url) for _ in range(2))
    with own_redis.stopped():
        wait_until(lambda: not ours.change_feed.counts.is_up)
        for number in range(8):
            put(ours, f"v{number}")
        assert len(ours.change_feed._unsent) <= 3
    wait_until(lambda: theirs.change_feed.needs_listing)
    theirs.refresh()
    assert len(theirs.usage()) == 2 and theirs.usage()["disk"].num_variants == 8


def test_a_flush_waits_no_longer_than_a_second_for_the_index(own_redis, open_at):
    ours = open_at(own_redis.url)
    with own_redis.stopped():
        put(ours, "v")
        ours.flush()  # else for the 300 s that these tests give a server
    wait_until(lambda: ours.change_feed.counts.is_up)


def test_the_last_commits_are_announced_before_closing(open_one):
    theirs = open_one()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(contextlib.closing(open_one()))
        ours.complete_store(ours.prepare_store(make_record("v")), make_kv("v"))
    came(theirs, "v")

"""The contract of `store.objects.Root`, on directories and buckets alike: create, replace, list, move, delete, age."""

import threading
import time

import pytest

from ccjax.store.errors import StoreUnavailableError
from ccjax.store.objects import open_root

ON_MOTO = True


@pytest.fixture
def root(place):
    root = open_root(place.url)
    root.make_prefix("a")
    return root


def test_probes_of_a_root_leave_nothing_behind(place):
    open_root(place.url)
    assert place.keys() == []


def test_create_succeeds_only_for_the_first_writer(root, place):
    assert root.read("a/x.json") is None
    assert root.create("a/x.json", b"first") is True
    assert root.create("a/x.json", b"second") is False
    assert root.read("a/x.json") == b"first" == place.read("a/x.json")
    assert root.create("a/y.json", b"") is True and root.read("a/y.json") == b""
    root.delete("a/x.json")
    assert root.create("a/x.json", b"third") is True and root.read("a/x.json") == b"third"


def test_concurrent_create_succeeds_in_exactly_one_thread(root):
    won = []
    threads = [
        threading.Thread(target=lambda data=b"%d" % number: root.create("a/x", data) and won.append(data))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and root.read("a/x") == won[0]


def test_replace_overwrites_the_object(root):
    root.replace("a/x", b"first")
    root.replace("a/x", b"second, longer")
    assert root.read("a/x") == b"second, longer" and root.names("a") == ["x"]


def test_names_lists_only_direct_children(root, place):
    assert root.names("nothing") == [] and root.names("a") == []
    keys = ["a/b/c", "a/b/d", "a/x é%2F+.json", "ab/c", "top"]
    for key in keys:
        root.make_prefix(key.rpartition("/")[0])
        root.create(key, b"1")
    assert root.names("a") == ["b", "x é%2F+.json"] and root.names("a/b") == ["c", "d"]
    assert root.names("") == ["a", "ab", "top"] and place.keys() == sorted(keys)
    assert root.read("a/x é%2F+.json") == b"1"


def test_names_lists_more_than_one_page(root):
    names = [f"n{number:03}" for number in range(45)]
    for name in names:
        root.create(f"a/{name}", b"")
    assert root.names("a") == names


def test_move_renames_an_object_and_ignores_missing_ones(root):
    root.create("a/x", b"data")
    root.make_prefix("b")
    root.move("a/x", "b/y")
    root.move("a/gone", "b/z")
    assert root.names("a") == [] and root.names("b") == ["y"] and root.read("b/y") == b"data"


def test_delete_removes_only_an_object_or_everything_below_a_prefix(root):
    for key in ("a/b/c", "a/b/d/e", "a/b.json", "a/bc", "a/b0"):
        root.make_prefix(key.rpartition("/")[0])
        root.create(key, b"1")
    root.delete("a/b")
    assert root.names("a") == ["b.json", "b0", "bc"]
    root.delete("a/b.json")
    root.delete("a/b.json")
    assert root.names("a") == ["b0", "bc"]


def test_age_is_measured_since_creation(root, place, monkeypatch):
    first, second = root.new_id(), root.new_id()
    assert first != second and all(len(each) == 32 and int(each, 16) >= 0 for each in (first, second))
    key = f"a/{'f' * 64}.{first}"
    root.create(key, b"1")
    assert 0 <= root.age_s(key) < 3600
    place.let_pass(3600, monkeypatch)
    assert 3600 < root.age_s(key) < 7200
    assert root.age_s("a/nothing") == 0


def test_slow_clock_never_makes_objects_old(place, monkeypatch):
    root = open_root(place.url)
    name = root.new_id()
    root.replace(name, b"1")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200)
    assert root.age_s(name) <= 0


def test_read_only_root_reads_without_writing(root, place):
    root.create("a/x.json", b"first")
    before = place.keys()
    reading = open_root(place.url, read_only=True)
    assert reading.read("a/x.json") == b"first" and reading.read("a/y.json") is None
    assert reading.names("a") == ["x.json"] and place.keys() == before


def test_a_read_only_root_makes_no_directory(tmp_path):
    with pytest.raises(StoreUnavailableError, match="wanted a directory, got .*none"):
        open_root((tmp_path / "none").as_uri(), read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_read_only_bucket_rejects_writes(bucket):
    open_root(bucket.url).create("x.json", b"first")
    with pytest.raises(AssertionError, match="opened read_only"):
        open_root(bucket.url, read_only=True).create("x.json", b"second")
    assert bucket.read("x.json") == b"first"

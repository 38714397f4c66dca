"""The slow link: bytes and latencies on a test clock, parallel reads on one wire, results unchanged."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future

import pytest

from ccjax.store.throttle import ThrottledLink
from tests.store.kv import SPEC, assert_same_bytes, get, make_kv, open_store, put


class Clock:
    """A clock that only sleeping advances; no sleep begins before `go` is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.go = threading.Event()
        self.go.set()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.0 and self.go.wait(120)
        self.now += seconds


def done(value: object = None) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def arrivals(sizes: list[int], **settings: float) -> list[float]:
    """When each of several simultaneous reads completes, on a link of 100 bytes/s."""
    clock, there = Clock(), []
    link = ThrottledLink(100.0, clock=clock, sleep=clock.sleep, **settings)
    clock.go.clear()
    all_there = threading.Semaphore(0)
    for size in sizes:
        read = link(done(), size)
        read.add_done_callback(lambda _: (there.append(clock.now), all_there.release()))
    clock.go.set()
    for _ in sizes:
        assert all_there.acquire(timeout=120)
    return there


def test_concurrent_reads_share_the_bandwidth_in_order() -> None:
    assert arrivals([50, 100, 25]) == pytest.approx([0.5, 1.5, 1.75])


def test_latencies_overlap_but_transfers_do_not() -> None:
    assert arrivals([50, 50], latency_s=2.0) == pytest.approx([2.5, 3.0])


def test_idle_link_accumulates_no_bandwidth() -> None:
    clock = Clock()
    link = ThrottledLink(100.0, 1.0, clock=clock, sleep=clock.sleep)
    link(done(), 100).result(timeout=120)
    assert clock.now == pytest.approx(2.0)
    clock.now = 10.0
    link(done(), 100).result(timeout=120)
    assert clock.now == pytest.approx(12.0)


def test_read_result_or_error_is_passed_on_once_available() -> None:
    clock = Clock()
    link = ThrottledLink(1e9, clock=clock, sleep=clock.sleep)
    read: Future = Future()
    late = link(read, 1)
    with pytest.raises(TimeoutError):
        late.result(timeout=0.05)
    read.set_result("kv")
    assert late.result(timeout=120) == "kv"
    broken: Future = Future()
    broken.set_exception(ValueError("DATA_LOSS"))
    with pytest.raises(ValueError, match="DATA_LOSS"):
        link(broken, 1).result(timeout=120)


def test_reads_starting_concurrently_are_charged_separately() -> None:
    """The second one starts while the first one looks at the clock."""
    clock = Clock()

    def interrupted() -> float:
        if second.ident is None:
            second.start()
            second.join(0.2)  # it has to wait for the first one
        return clock.now

    link = ThrottledLink(100.0, clock=interrupted, sleep=clock.sleep)
    reads = []
    second = threading.Thread(target=lambda: reads.append(link(done(), 100)))
    reads.append(link(done(), 100))
    second.join(120)
    for read in reads:
        read.result(timeout=120)
    assert clock.now == pytest.approx(2.0)


def test_bytes_that_arrived_during_a_late_read_are_available_at_once() -> None:
    clock = Clock()
    link = ThrottledLink(100.0, clock=clock, sleep=clock.sleep)
    late: Future = Future()
    reads = [link(late, 100), link(done("kv"), 100)]
    clock.now = 5.0
    late.set_result(None)
    assert reads[1].result(timeout=120) == "kv" and clock.now == 5.0


def test_every_disk_tier_layer_is_throttled(tmp_path) -> None:
    clock = Clock()
    with open_store(tmp_path, host_bytes=0) as store:
        put(store, "a", 5)
    link = ThrottledLink(SPEC.num_bytes(5) / 3.0, clock=clock, sleep=clock.sleep)
    with open_store(tmp_path, host_bytes=0, on_read=link) as store:
        assert_same_bytes(get(store, "a"), make_kv("a", 5))
        assert clock.now == pytest.approx(3.0)
        get(store, "a")
        assert clock.now == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0,), "bytes_per_s"),
        ((math.inf,), "bytes_per_s"),
        ((math.nan,), "bytes_per_s"),
        ((1.0, -1.0), "latency_s"),
        ((1.0, math.inf), "latency_s"),
        ((1.0, math.nan), "latency_s"),
    ],
)
def test_bad_arguments_are_named(arguments, name) -> None:
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        ThrottledLink(*arguments)

"""When a generator works: it must not take time from the replicas whose CPUs it shares."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ccjax.cluster import generator
from ccjax.cluster.idle import idle_cpus
from tests.polling import wait_until


class Orders:
    """Counts requests for orders; there are none."""

    def __init__(self) -> None:
        self.times_asked = 0

    def compute(self, *, is_cancelled):
        self.times_asked += 1
        assert not is_cancelled()


@contextlib.contextmanager
def working(monkeypatch, idle, *, needs_idle_cpus):
    """Orders that a generator requests while the block runs; `idle` gives the number of idle CPUs."""
    monkeypatch.setattr(generator, "idle_cpus", lambda seconds, wait: wait(0.001) or idle())
    orders, stopping = Orders(), threading.Event()
    thread = threading.Thread(
        target=generator.work,
        args=(SimpleNamespace(orders=orders), stopping),
        kwargs={"needs_idle_cpus": needs_idle_cpus},
    )
    thread.start()
    try:
        yield orders
    finally:
        stopping.set()
        thread.join()


@pytest.mark.parametrize("error", [OSError("no index"), RuntimeError("a broken order")])
def test_generator_continues_after_a_failed_order(monkeypatch, error):
    def fail(orders, *, is_cancelled):
        orders.times_asked += 1
        raise error

    monkeypatch.setattr(generator, "_RETRY_S", 0.001)
    monkeypatch.setattr(Orders, "compute", fail)
    with working(monkeypatch, lambda: 1.0, needs_idle_cpus=False) as orders:
        wait_until(lambda: orders.times_asked > 2)


@pytest.fixture
def busy_cpus():
    """Keeps every CPU of this machine busy."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def test_idle_cpus_are_counted(busy_cpus):
    passed = []
    how = {"wait": lambda seconds: passed.append(seconds) or time.sleep(seconds)}
    wait_until(lambda: idle_cpus(0.3, **how) < 0.3, timeout_s=120)
    assert set(passed) == {0.3}


def test_low_priority_generator_works_only_while_a_cpu_is_idle(monkeypatch):
    room, looks = [0.0], []

    def idle():
        looks.append(room[0])
        return room[0]

    def looked_again():
        before = len(looks)
        wait_until(lambda: len(looks) > before + 20, timeout_s=120)

    with working(monkeypatch, idle, needs_idle_cpus=True) as orders:
        looked_again()
        assert orders.times_asked == 0
        room[0] = 0.6
        wait_until(lambda: orders.times_asked > 1, timeout_s=120)
        room[0] = 0.4
        looked_again()
        assert orders.times_asked == sum(room == 0.6 for room in looks)


def test_generator_with_its_own_device_does_not_wait_for_idle_cpus(monkeypatch):
    with working(monkeypatch, lambda: 0.0, needs_idle_cpus=False) as orders:
        wait_until(lambda: orders.times_asked > 1)

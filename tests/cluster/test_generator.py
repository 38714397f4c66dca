"""When a generator works: it is to take nothing from the replicas whose CPUs it shares."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time

import pytest

from ccjax.cluster import generator
from ccjax.cluster.idle import idle_cpus
from tests.polling import wait_until


class Engine:
    """Counts how often it was asked for work; there is none."""

    def __init__(self) -> None:
        self.times_asked = 0

    def compute_ahead(self, *, is_cancelled):
        self.times_asked += 1
        assert not is_cancelled()


@contextlib.contextmanager
def working(monkeypatch, idle, *, needs_idle_cpus):
    """An engine that a generator asks for work, while the block runs; `idle` gives the CPUs that are idle."""
    monkeypatch.setattr(generator, "idle_cpus", lambda seconds, wait: wait(0.01) or idle())
    engine, stopping = Engine(), threading.Event()
    thread = threading.Thread(
        target=generator.work, args=(engine, stopping), kwargs={"needs_idle_cpus": needs_idle_cpus}
    )
    thread.start()
    try:
        yield engine
    finally:
        stopping.set()
        thread.join()


def spin(until: float) -> None:
    while time.monotonic() < until:
        pass


@pytest.fixture
def busy_cpus():
    """Every CPU of this machine has something to do."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=spin, args=(time.monotonic() + 60,), daemon=True)
        for _ in range(os.cpu_count() or 1)
    ]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


def test_idle_cpus_are_counted(busy_cpus):
    passed = []
    wait_until(lambda: idle_cpus(0.3, lambda seconds: passed.append(seconds) or time.sleep(seconds)) < 0.3)
    assert set(passed) == {0.3}


def test_of_low_priority_it_works_only_while_a_cpu_is_idle(monkeypatch):
    room = [0.0]
    asked = threading.Event()

    def idle():
        asked.set()
        return room[0]

    with working(monkeypatch, idle, needs_idle_cpus=True) as engine:
        assert asked.wait(10.0)
        time.sleep(0.2)
        assert engine.times_asked == 0
        room[0] = 0.6
        wait_until(lambda: engine.times_asked > 1)
        room[0] = 0.4
        time.sleep(0.1)
        before = engine.times_asked
        time.sleep(0.3)
        assert engine.times_asked == before


def test_with_a_device_of_its_own_it_asks_for_no_room(monkeypatch):
    with working(monkeypatch, lambda: 0.0, needs_idle_cpus=False) as engine:
        wait_until(lambda: engine.times_asked > 1)

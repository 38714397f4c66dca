"""Real processes on one directory and one Redis, whose clocks differ by ten minutes: leases, pins and erasures hold.

libfaketime shifts the wall clock of a process, but not the times of files. It is preloaded, because the command
`faketime` leaves a process behind when it is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.skewed_worker import TEXTS
from tests.redis_server import RedisServer
from tests.server.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SKEW_S = 600.0
SKEWED = ["ahead", "behind"]
WORKER = "tests.engine.skewed_worker"

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime: apt-get install faketime"),
]


class Process:
    """A worker whose clock is `offset_s` seconds ahead."""

    def __init__(self, offset_s: float, *arguments: str) -> None:
        self.offset_s = offset_s
        command = [sys.executable, "-m", WORKER, *arguments]
        environment = dict(os.environ)
        if offset_s:
            environment |= {"LD_PRELOAD": str(LIBRARY), "FAKETIME": f"{offset_s:+.0f}s"}
            environment |= dict.fromkeys(("FAKETIME_DONT_FAKE_MONOTONIC", "DONT_FAKE_MONOTONIC", "NO_FAKE_STAT"), "1")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker ended with {self._process.poll()}"
        return json.loads(line)

    def begin(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def tell(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.begin(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, common_redis: RedisServer) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("skew")
    write_tiny_model(folder / "model", ["Anna and Bob live by the river, and someone keeps bees there."])
    return str(folder / "model"), f"file://{folder}/store", common_redis.url


@pytest.fixture(scope="module")
def processes(arguments: tuple[str, ...]) -> Iterator[dict[str, Process]]:
    """Three workers: one with the right clock, one ahead, one behind."""
    offsets = {"right": 0.0, "ahead": SKEW_S, "behind": -SKEW_S}
    found = {name: Process(offset_s, *arguments) for name, offset_s in offsets.items()}
    try:
        for process in found.values():
            process.answer()
        yield found
    finally:
        for process in found.values():
            process.kill()


def passages(name: str) -> list[dict[str, str]]:
    """Two documents; the id of the first one is `name`."""
    ids = (name, f"{name}-2")
    return [{"id": one, "text": text.format(name)} for one, text in zip(ids, TEXTS, strict=True)]


@pytest.fixture(params=SKEWED)
def pair(request: pytest.FixtureRequest, processes: dict[str, Process]) -> tuple[str, Process, Process]:
    """A unique name, the process with the wrong clock, and the one with the right clock."""
    return f"{request.node.originalname} {request.param}", processes[request.param], processes["right"]


@pytest.fixture(params=["wrong first", "right first"])
def ordered(request: pytest.FixtureRequest, pair: tuple[str, Process, Process]) -> tuple[str, Process, Process]:
    name, wrong, right = pair
    return (f"{name} 1", wrong, right) if request.param == "wrong first" else (f"{name} 2", right, wrong)


def test_wall_clocks_of_the_processes_are_skewed(processes: dict[str, Process]) -> None:
    for process in processes.values():
        found = process.tell("clock")
        assert abs(found["time"] - time.time() - process.offset_s) < SKEW_S / 2
        assert abs(found["monotonic"] - time.monotonic()) < SKEW_S / 2


def test_chunks_needed_by_both_processes_at_once_are_computed_once(pair: tuple[str, Process, Process]) -> None:
    name, *both = pair
    for process in both:
        process.begin("ask", documents=passages(name))
    first, second = sorted((process.answer() for process in both), key=lambda found: found["computed"], reverse=True)
    assert first["tokens"] == second["tokens"]
    assert sum(first["passages"]) == 0 and min(second["passages"]) > 0
    assert second["recomputed"] == 0 and first["computed"] == second["computed"] + sum(second["passages"])


def test_lease_is_not_taken_from_its_holder(ordered: tuple[str, Process, Process]) -> None:
    name, holder, other = ordered
    holder.begin("ask", documents=passages(name), is_held=True)
    assert holder.answer() == {"computing": True}
    other.begin("ask", documents=passages(name), tells=True)
    assert other.answer() == {"waiting": True}
    holder.begin("go on")
    found = other.answer()
    assert found["waited_s"] > 0.0 and min(found["passages"]) > 0 and found["recomputed"] == 0
    assert holder.answer()["tokens"] == found["tokens"]


def test_one_process_reads_what_the_other_stored(ordered: tuple[str, Process, Process]) -> None:
    name, first, second = ordered
    stored = first.tell("ask", documents=passages(name))
    found = second.tell("ask", documents=passages(name))
    assert sum(stored["passages"]) == 0 and min(found["passages"]) > 0 and found["recomputed"] == 0
    assert found["tokens"] == stored["tokens"]
    assert first.tell("corrupt") == second.tell("corrupt") == {"number": 0}


def test_pins_are_visible_to_both_processes_and_their_notes_are_kept(ordered: tuple[str, Process, Process]) -> None:
    name, first, second = ordered
    first.tell("ask", documents=passages(name))
    until = first.tell("pin", name=name, ttl_s=3600.0)["until"]
    assert second.tell("look")[name] == until
    short = first.tell("pin", name=f"{name}-2", ttl_s=120.0)["until"]
    notes = first.tell("pin_notes")["names"]
    second.tell("look")  # by its clock the pin may have expired long ago, or last long
    assert set(notes) <= set(second.tell("pin_notes")["names"])
    found = first.tell("look")
    assert found[name] == until and found[f"{name}-2"] == short  # they apply the clock of the pinning process


def test_erasure_holds_and_spares_kv_computed_after_it(ordered: tuple[str, Process, Process]) -> None:
    name, first, second = ordered
    first.tell("ask", documents=passages(name))
    assert min(second.tell("ask", documents=passages(name))["passages"]) > 0  # in memory of both processes
    assert first.tell("erase", name=name)["variants"] > 0
    assert name not in second.tell("look")
    anew = second.tell("ask", documents=passages(name))
    assert anew["passages"][0] == 0
    for process in (first, second):
        process.tell("look")
        found = process.tell("ask", documents=passages(name))
        assert min(found["passages"]) > 0 and found["tokens"] == anew["tokens"]


@pytest.mark.parametrize("skewed", SKEWED)
def test_lease_of_a_dead_process_expires_on_time(
    processes: dict[str, Process], arguments: tuple[str, ...], skewed: str
) -> None:
    """Waits end at the real end of a lease, not at its end by another clock."""
    holder, other = processes[skewed], processes["right"]
    name = f"dead {skewed}"
    holder.begin("ask", documents=passages(name), is_held=True, claim_s=5.0)
    assert holder.answer() == {"computing": True}
    holder.kill()
    found = other.tell("ask", documents=passages(name))
    processes[skewed] = Process(holder.offset_s, *arguments)  # for later tests
    processes[skewed].answer()
    assert found["waited_s"] < SKEW_S / 2 and sum(found["passages"]) == 0

"""Processes that share a bucket share its limit, and go on storing new variants below it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.engine.budget_worker import LENGTHS
from tests.engine.helpers import TinyModel
from tests.store import servers
from tests.store.places import KEYS, s3_bucket


def test_two_processes_end_below_the_limit_of_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    limit = 4 * sum(LENGTHS) * TinyModel().token_bytes
    with servers.double("s3_double") as port:
        place = s3_bucket("s3", port, "kv")
        command = [sys.executable, "-m", "tests.engine.budget_worker", place.url, str(limit)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        with contextlib.ExitStack() as running:
            workers: list[Any] = [
                running.enter_context(subprocess.Popen([*command, str(seed)], **pipes))  # type: ignore[call-overload]
                for seed in range(2)
            ]
            for worker in workers:
                word, evicted = worker.stdout.readline().split()
                assert word == "done" and int(evicted) > 0
            known = []
            for worker in [*workers, *workers]:
                worker.stdin.write("refresh\n")
                worker.stdin.flush()
                known.append(int(worker.stdout.readline()))
        stored = sum(len(place.read(key)) for key in place.keys() if "/data/" in key or "/records/" in key)
    assert known[2] == known[3], "both know all of it"
    assert limit / 2 < known[3] <= limit and stored <= limit, (known, stored, limit)

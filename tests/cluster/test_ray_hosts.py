"""Replicas on Ray whose model is split over two processes with a device each: answers are those of a single process,
also after one of them was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import READY_S, REPLICA, Serving, end, is_alive, serving
from tests.polling import wait_until

pytestmark = pytest.mark.cluster
FOLLOWER = "ray::_follow"
ONE_DEVICE = ("env", "XLA_FLAGS=--xla_force_host_platform_device_count=1")
QUESTIONS = ["Which tool does Yara Ames own?", "What colour is the boat of Dora Vance?", "Who owns a lemon boat?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Serving]:
    split = ("--num-processes", "2", "--tensor-parallel-size", "2")
    store = ("--store", f"file://{folder}/store", "--generators", "0")
    with serving(folder, "--cluster", "ray", "--replicas", "1", *split, *store, under=ONE_DEVICE) as server:
        yield server


def test_answers_match_those_of_one_process(cluster: Serving, folder: Path) -> None:
    with serving(folder, under=ONE_DEVICE) as single:
        for reuse in ("off", "exact", "exact", "bounded"):
            for question in QUESTIONS:
                wanted = single.text(question, retrieval=True, reuse=reuse)
                assert cluster.text(question, retrieval=True, reuse=reuse) == wanted
    assert len(cluster.pids(REPLICA)) == len(cluster.pids(FOLLOWER)) == 1


def test_a_killed_follower_ends_its_replica_and_both_are_replaced(cluster: Serving) -> None:
    wanted = cluster.text(QUESTIONS[0], retrieval=True)
    (leader,), (follower,) = cluster.pids(REPLICA), cluster.pids(FOLLOWER)
    os.kill(follower, signal.SIGKILL)
    wait_until(lambda: not is_alive(leader), timeout_s=60)
    wait_until(lambda: cluster.chat(QUESTIONS[0], retrieval=True).status_code == 200, timeout_s=READY_S)
    assert cluster.text(QUESTIONS[0], retrieval=True) == wanted
    assert len(cluster.pids(REPLICA)) == len(cluster.pids(FOLLOWER)) == 1


def test_shutdown_leaves_no_process(cluster: Serving) -> None:
    running = [*cluster.pids(REPLICA), *cluster.pids(FOLLOWER)]
    assert len(running) == 2 and end(cluster) == 0
    wait_until(lambda: not any(map(is_alive, running)))

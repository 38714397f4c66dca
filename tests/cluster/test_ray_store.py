"""A real cluster whose store is a bucket and whose index is in Redis, with outages of both."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import REPLICA, Serving, documents, loading, serving
from tests.polling import wait_until
from tests.redis_server import RedisServer, redis_server
from tests.store.gate import Gate
from tests.store.places import KEYS
from tests.store.servers import moto

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def keys(redis: RedisServer) -> str:
    return redis.run("--scan", "--pattern", "ccjax:*").strip()


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    with moto() as port:
        gate = Gate(port)
        yield gate
        gate.shut()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, gate: Gate, redis: RedisServer) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    store = f"s3://chunks/kv?endpoint=http://127.0.0.1:{gate.port}&region=us-east-1"
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        options = ["--store", store, "--store-index", redis.url]
        yield stack.enter_context(serving(folder, "--cluster", "ray", "--replicas", "2", *options))


@pytest.fixture
def cluster(running: Serving) -> Serving:
    running.wait_for(2)
    return running


def tiers(cluster: Serving, name: str) -> set[str | None]:
    """The tiers of these documents' passages."""
    report = cluster.chat("What is it?", documents=documents(name), reuse="exact").json()["reuse"]
    return {document["tier"] for document in report["per_document"] if document["role"] == "passage"}


def stored(cluster: Serving) -> float:
    """Variants in the bucket as far as the replicas know."""
    found = cluster.metrics().items()
    return sum(value for (name, *labels), value in found if name == "ccjax_store_num_variants" and "disk" in labels)


def wait_until_written(cluster: Serving) -> None:
    """Waits until nothing new was stored for two seconds."""
    counts = [-1.0, stored(cluster)]
    while counts[-1] != counts[-2]:
        time.sleep(2.0)
        counts.append(stored(cluster))


def test_answers_continue_during_bucket_outage_and_sharing_resumes_after(cluster: Serving, gate: Gate) -> None:
    wanted = cluster.text("What is it?", documents=documents("before"), reuse="exact")
    with loading(cluster) as load:
        time.sleep(1.0)
        gate.shut()
        started = time.monotonic()
        assert cluster.text("What is it?", documents=documents("before"), reuse="exact") == wanted
        assert tiers(cluster, "meanwhile") == {None} and tiers(cluster, "meanwhile") <= {None, "host"}
        print(f"three answers without the bucket took {time.monotonic() - started:.1f} s")
        time.sleep(2.0)
        gate.open()
        opened, number = time.monotonic(), 0
        before = stored(cluster)
        while stored(cluster) <= before:
            number += 1
            tiers(cluster, f"after {number}")
            assert time.monotonic() - opened < 600, "nothing is stored again"
        print(f"stored again {time.monotonic() - opened:.1f} s after the bucket was back")
        tiers(cluster, "afterwards")
    wait_until_written(cluster)
    assert set(load.statuses) == {200}
    for victim in cluster.pids(REPLICA):  # one after the other: none remembers
        os.kill(victim, signal.SIGKILL)
        time.sleep(1.0)
        cluster.wait_for(2)
    # Host: what was read at the start, which is the most used.
    assert tiers(cluster, "afterwards") | tiers(cluster, "before") <= {"disk", "host"}


def test_answers_continue_during_redis_outage_and_leases_resume_after(cluster: Serving, redis: RedisServer) -> None:
    tiers(cluster, "told")
    assert keys(redis), "nothing is told by Redis at all"
    with loading(cluster) as load:
        redis.kill()
        started = time.monotonic()
        assert tiers(cluster, "untold") == {None} and tiers(cluster, "untold") <= {None, "host", "disk"}
        print(f"two answers without Redis took {time.monotonic() - started:.1f} s")
        time.sleep(1.0)
        redis.start()
        started = time.monotonic()
        wait_until(lambda: keys(redis), timeout_s=120)
        print(f"told again {time.monotonic() - started:.1f} s after Redis was back")
    assert set(load.statuses) == {200}

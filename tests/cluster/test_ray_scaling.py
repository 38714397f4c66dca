"""A real cluster whose number of replicas follows the requests in progress."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.processes import REPLICA, Serving, loading, serving
from tests.polling import wait_until

pytestmark = pytest.mark.cluster
NUM_CLIENTS = 28
"""More requests than the 16 in progress for one replica, fewer than for two."""


def answering(cluster: Serving) -> set[str]:
    """Number of replicas that have answered a request."""
    name = "ccjax_e2e_request_latency_seconds_count"
    return {labels[-1] for (found, *labels), value in cluster.metrics().items() if found == name and value}


def test_a_second_replica_starts_under_load_and_stops_without_losing_requests(tmp_path: Path) -> None:
    options = ["--cluster", "ray", "--replicas", "1:2", "--scale-down-after-s", "4"]
    options += ["--store", f"file://{tmp_path}/store", "--generators", "0"]
    with serving(tmp_path, *options) as cluster:
        cluster.wait_for(1)
        (first,) = cluster.pids(REPLICA)
        with loading(cluster, NUM_CLIENTS, max_tokens=60) as load:
            started = time.monotonic()
            cluster.wait_for(2)
            print(f"a second replica after {time.monotonic() - started:.1f} s, {len(load.statuses)} requests meanwhile")
            wait_until(lambda: len(answering(cluster)) == 2, timeout_s=60)
        assert set(load.statuses) == {200}
        second = set(cluster.pids(REPLICA)) - {first}
        assert len(second) == 1
        # Two continuous clients need one replica, and use both when one is stopped.
        with loading(cluster, 2, max_tokens=250) as few:
            started = time.monotonic()
            cluster.wait_for(1)
            print(f"one replica again after {time.monotonic() - started:.1f} s, {len(few.statuses)} requests meanwhile")
            time.sleep(2.0)
        assert set(few.statuses) == {200}
        assert cluster.total("ccjax_cluster_lost_replicas_total") == 0  # nor was any tried again
        assert len(cluster.pids(REPLICA)) == 1

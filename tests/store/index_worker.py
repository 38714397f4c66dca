"""A second process for the tests of shared indexes: `python -m tests.store.index_worker COMMAND URL NAMESPACE ...`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from ccjax.store.index import open_index


def race(url: str, namespace: str, start_file: str, num_keys: str) -> None:
    """Tries to acquire leases at the same time as another process, one by one in any order; prints the acquired ones.
    Both get one before either continues."""
    index = open_index(url, namespace)
    index.leases.held(["x"])
    print("started", flush=True)
    while not Path(start_file).exists():
        time.sleep(0.001)
    won = []
    for number in random.sample(range(int(num_keys)), int(num_keys)):  # in one order who is behind never overtakes
        is_first = not won
        won += [lease.key for lease in index.leases.acquire([f"k{number}"], 3600)]
        if won and is_first:
            Path(f"{start_file}.{os.getpid()}").touch()
            while len(list(Path(start_file).parent.glob("start.*"))) < 2:
                time.sleep(0.001)
    print(json.dumps(won))


def hold(url: str, namespace: str, seconds: str) -> None:
    """Takes a lease and an order, and reports it; releases neither."""
    index = open_index(url, namespace)
    assert index.leases.acquire(["v"], float(seconds)) and index.orders.take(float(seconds)) is not None
    print("held", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    {"race": race, "hold": hold}[sys.argv[1]](*sys.argv[2:])

"""The follower processes of a replica whose model spans several hosts: Ray tasks beside the replica's actor."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ccjax.cluster.replica import ReplicaOptions
from ccjax.engine.hosts import follow, join
from ccjax.server.loading import use_compile_cache, with_dtype
from ccjax.server.logs import configure_logging

logger = logging.getLogger(__name__)


def lead_followers(options: ReplicaOptions, resources: dict[str, float]) -> None:
    """Starts the followers, each in a bundle of the replica's placement group, and joins them into one group.

    If one of them fails, this process exits and Ray replaces the replica: calls waiting for the devices might never
    return.

    Args:
      resources: as `ray_replicas.deploy`.
    """
    own = ray.util.get_node_ip_address()
    with socket.create_server((own, 0)) as probe:
        address = f"{own}:{probe.getsockname()[1]}"
    placed = get_current_placement_group()
    assert placed is not None, "lead_followers: wanted an actor in a placement group"
    running = []
    for number in range(1, options.num_processes):
        where = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=number)
        # In a process of its own, because JAX joins a group once.
        task = ray.remote(max_calls=1, max_retries=0, scheduling_strategy=where, **actor_options(resources))(_follow)
        running.append(task.remote(options, address, number))
    threading.Thread(target=_watch, args=(running,), name="ccjax-followers", daemon=True).start()
    join(address, options.num_processes, 0).when_lost(lambda reason: os._exit(1))


def actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """Ray's options for the resources of one process."""
    wanted = dict(resources)
    return {"num_cpus": wanted.pop("CPU", 0.01), "num_gpus": wanted.pop("GPU", 0), "resources": wanted}


def bundle(resources: dict[str, float]) -> dict[str, float]:
    """The same as a bundle of the placement group."""
    return {"CPU": 0.01, **resources}


def _follow(options: ReplicaOptions, address: str, number: int) -> None:
    configure_logging(options.log_level, options.log_format)
    use_compile_cache(Path(options.compile_cache_dir))
    join(address, options.num_processes, number)
    follow(options.model, **with_dtype(options.engine))


def _watch(running: list[ray.ObjectRef]) -> None:
    """Exits this process with the reason of the first failed follower."""
    try:
        while running:
            done, running = ray.wait(running)
            ray.get(done)
    except Exception as error:
        logger.critical("a process of this replica failed: %s", error)
        os._exit(1)

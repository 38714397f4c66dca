"""Runs a cluster node with the front on it: the implementation of `ccjax serve --cluster ray`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ccjax.cluster.front import Front
from ccjax.cluster.nodes import RayNode
from ccjax.cluster.prompts import PromptReader
from ccjax.cluster.ray_replicas import RayReplicas, deploy, deploy_generators, replica_counts, running
from ccjax.cluster.replica import ReplicaOptions, ReplicaScale
from ccjax.engine import EngineConfig
from ccjax.loading.model import Progress, load_prompt_builder, model_tokenizer
from ccjax.retrieval import Retriever
from ccjax.server.draining import DrainingServer
from ccjax.server.loading import open_documents, use_compile_cache

logger = logging.getLogger(__name__)

_ORDER_AFTER_S = 0.5


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Location and contents of the cluster.

    Attributes:
      host, port, address: of `RayNode`.
      scale: replicas in the whole cluster; None keeps those that run, or starts one.
      generators: engines that compute for waiting requests; needs the replicas' `store_index`. None for the default
        (`with_generators`).
      generators_on_cpu: on the hosts' CPUs instead of accelerators of their own.
      resources: Ray resources of a replica; None for the GPUs or TPUs that its model is split over, if the cluster has
        some.
    """

    replica: ReplicaOptions
    host: str | None = None
    port: int = 0
    address: str | None = None
    scale: ReplicaScale | None = None
    generators: int | None = None
    generators_on_cpu: bool = True
    resources: dict[str, float] | None = None


def serve_cluster(
    options: ClusterOptions, listener: socket.socket, on_ready: Callable[[dict[str, int]], None], progress: Progress
) -> None:
    """Serves on `listener` until SIGTERM or SIGINT; requests received before are answered first.

    Args:
      on_ready: called with the counts of replicas once they answer.
      progress: called as (stage, done, total) during long operations.

    Raises:
      ValueError, OSError: model, documents or settings cannot be used.
      NodeError: no Ray node can be started, or there is no cluster.
      RuntimeError: the replicas cannot be started.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a node that is being started must be stopped, too
        signal.signal(number, _leave)
    _check(options.replica.engine)
    engine = options.replica.engine
    builder = load_prompt_builder(options.replica.model, engine.get("system_prompt"), tokenizer=engine.get("tokenizer"))
    with contextlib.ExitStack() as stack:
        retriever = _documents(options.replica, progress)
        if retriever is not None:
            stack.callback(retriever.close)
        progress("ray", 0, 1)
        node = stack.enter_context(RayNode(options.host, options.port, options.address))
        progress("ray", 1, 1)
        progress("replicas", 0, 1)
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray installed its own there
            signal.signal(number, _leave)
        replicas = _replicas(with_generators(options, node.resources()), node)
        progress("replicas", 1, 1)
        reader = PromptReader(builder, retriever, options.replica.server, tenant_salt=engine.get("tenant_salt", ""))
        front = Front(replicas, reader, options.replica.server)
        server = DrainingServer(front, front, keep_alive_s=options.replica.server.keep_alive_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        on_ready(replica_counts() or {})
        server.run(sockets=[listener])


def with_generators(options: ClusterOptions, resources: Mapping[str, float]) -> ClusterOptions:
    """The options with the number of generators, and what replicas need for them.

    By default there is one if the replicas have an index, through which it receives orders, and accelerators. On a CPU
    that also serves, a generator takes time from the answers: in the paper's experiment answers per second grew by less
    with one (docs/results.md).

    Args:
      resources: Ray's, of the cluster.
    """
    number, replica = options.generators, options.replica
    if number is None:
        number = int("store_index" in replica.engine and any(resources.get(name, 0) >= 1 for name in ("GPU", "TPU")))
    if number:
        replica = dataclasses.replace(replica, engine={"order_after_s": _ORDER_AFTER_S, **replica.engine})
    return dataclasses.replace(options, replica=replica, generators=number)


def _leave(number: int, _: object) -> None:
    raise SystemExit(0)


def _check(engine: Mapping[str, Any]) -> None:
    """Checks settings before any replica is started; raises ConfigError."""
    EngineConfig(**{name: value for name, value in engine.items() if (name, value) != ("dtype", "auto")})


def _documents(options: ReplicaOptions, progress: Progress) -> Retriever | None:
    """The index in which the front searches passages, for the replicas as well. Opened before any replica is started,
    so that these find everything embedded, at least on this host."""
    tokenizer = model_tokenizer(options.model, options.engine.get("tokenizer"))
    return open_documents(options.model, options.documents, tokenizer, progress)


def _replicas(options: ClusterOptions, node: RayNode) -> RayReplicas:
    """The running replicas if they match the options; otherwise new ones that replace them."""
    found = running()
    scale = options.scale
    if found is not None:
        made_of = found.made_of()
        if scale is None or (made_of and all(settings == (options.replica, scale) for settings in made_of)):
            return found
        logger.warning("the running replicas are replaced one by one, since their options differ")
    resources = options.resources
    if resources is None:
        each = options.replica.engine.get("tensor_parallel_size", 1)
        resources = {name: each for name in ("GPU", "TPU") if node.resources().get(name, 0) >= 1}
    for name, number in resources.items():
        if (there := node.resources().get(name, 0)) < number:
            logger.warning(
                "a replica takes %g of %s, the cluster has %g: waiting for hosts to join", number, name, there
            )
    use_compile_cache(Path(options.replica.compile_cache_dir))
    replicas = deploy(options.replica, scale or ReplicaScale(1, 1), resources)
    if options.generators:
        deploy_generators(
            options.replica, replicas.dtype(), options.generators, resources, on_cpu=options.generators_on_cpu
        )
    return replicas

"""`ccjax serve --cluster ray`: from options to replicas."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import threading
from typing import TYPE_CHECKING

from ccjax.cli.options import StartupError, flag, part
from ccjax.cli.serving.messages import Display, added_line, naming, ready_line, stages, url_of
from ccjax.cli.serving.options import ServeOptions, engine_settings
from ccjax.config import DocumentOptions, EngineConfig

if TYPE_CHECKING:
    from ccjax.cluster.serving import ClusterOptions
    from ccjax.server import ServerSettings


def serve_cluster_of(args: ServeOptions, settings: ServerSettings, listener: socket.socket) -> int:
    """Runs replicas on Ray, and the front that forwards requests to them."""
    try:
        from ccjax.cluster.nodes import NodeError
        from ccjax.cluster.serving import serve_cluster
    except ImportError as error:
        raise StartupError(f"--cluster: needs the extra: pip install 'ccjax[cluster]' ({error})") from error

    def on_ready(counts: dict[str, int]) -> None:
        display.close()
        print(added_line(args), file=sys.stderr)
        replicas = f"{counts.get('running', 0)} replicas of {args.model}"
        print(ready_line(args, settings, replicas, url_of(args, listener)), file=stdout, flush=True)

    # Ray prints what its processes log. A parent that reads only the ready line from stdout must not block the shutdown
    # once the pipe is full.
    stdout = sys.stdout
    display = Display(stages(), lambda *_: None, threading.Event())
    with naming(args, "--model"):
        options = cluster_options(args, settings)
        try:
            with contextlib.closing(display), contextlib.redirect_stdout(sys.stderr):
                serve_cluster(options, listener, on_ready, display)
        except NodeError as error:
            raise StartupError(
                f"--cluster-address: {error}" if args.cluster_address else f"--cluster: {error}"
            ) from error
        except RuntimeError as error:
            raise StartupError(f"--replicas: they do not start: {error}") from error
    return 0


def cluster_options(args: ServeOptions, settings: ServerSettings) -> ClusterOptions:
    from ccjax.cluster.replica import ReplicaOptions, ReplicaScale
    from ccjax.cluster.serving import ClusterOptions
    from ccjax.runner.budgets import host_cache_bytes
    from ccjax.server.loading import user_cache

    engine = engine_settings(args)
    if engine.get("store") is not None:  # several processes on one store coordinate
        engine.setdefault("share_computation", True)
        if args.gets_index:
            name = hashlib.sha256(engine["store"].encode()).hexdigest()[:16]
            engine["store_index"] = f"sqlite://{user_cache()}/store-index/{name}.db"
    if args.replicas is not None and "host_cache_bytes" not in engine:  # they may all be on one machine
        engine["host_cache_bytes"] = host_cache_bytes(EngineConfig()) // max(args.replicas)
    if args.generators and "store_index" not in engine:
        raise StartupError("--generators: wanted a --store-index, through which they receive orders")
    scale = None
    if args.replicas is not None:
        least, most = args.replicas
        scale = ReplicaScale(least, most, down_after_s=args.scale_down_after_s)
    replica = ReplicaOptions(
        model=args.model,
        engine=engine,
        documents=part(args, DocumentOptions),
        server=settings,
        compile_cache_dir=str(args.compile_cache_dir or user_cache() / "compile"),
        warmup=args.warmup,
        log_level=args.log_level.upper(),
        log_format=args.log_format,
    )
    return ClusterOptions(
        replica,
        host=args.cluster_host,
        port=args.cluster_port,
        address=args.cluster_address,
        generators=args.generators,
        generators_on_cpu=args.generator_device == "cpu",
        scale=scale,
        resources=args.replica_resources,
    )


def check_no_cluster_flags(args: ServeOptions) -> None:
    for name in ("replicas", "generators", "cluster_host", "cluster_address", "replica_resources"):
        if getattr(args, name) is not None:
            raise StartupError(f"{flag(name)}: wanted only together with --cluster ray")

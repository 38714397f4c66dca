"""Deploys, calls, counts and stops replicas as a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RaySystemError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from ccjax.cluster.calls import Call, Head, ReplicaResponse
from ccjax.cluster.front import NoReplicaError, ReplicaLostError
from ccjax.cluster.generator import Generator
from ccjax.cluster.replica import Replica, ReplicaOptions, ReplicaScale
from ccjax.cluster.router import CacheAwareRouter
from ccjax.policy.routing import PromptSummary

logger = logging.getLogger(__name__)
logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it logs every step of a deployment

APP, NAME = "ccjax", "Replica"
GENERATOR_APP, GENERATOR_NAME = "ccjax-generator", "Generator"
_LOW_PRIORITY = 10
_GENERATOR_ENDS_S = 10.0
_OF_REPLICAS_ONLY = (
    *("attention", "device_cache_bytes", "gpu_memory_utilization", "device_memory_bytes"),
    *("order_after_s", "max_num_seqs", "max_queue"),
)
_LOST = (RayActorError, ReplicaUnavailableError, RaySystemError)
_QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
_COUNTS_FOR_S = 0.5
_NO_LIMIT = 1 << 20
"""Ray's limit on concurrent requests. Each engine limits its own queue and answers 429 with Retry-After."""
_DRAIN_S = 60.0
"""How long a stopping replica may take to finish answers it has begun."""
_ABOUT_S = 30.0
_GENERATORS_S = 2.0


class RayReplicas:
    """The replicas of one application, callable from any process of the Ray cluster."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle.options(stream=True)
        self._all = handle
        self._generators: DeploymentHandle[Any] | None = None
        self._counts: dict[str, int] = {}
        self._counted_s = -math.inf
        self._counting: asyncio.Future[dict[str, int] | None] | None = None

    async def answer(self, call: Call, prompt: PromptSummary) -> AsyncGenerator[Head | bytes, None]:
        """Streams the answer of one replica, chosen by the router from the prompt.

        Raises:
          ReplicaLostError: the replica died or cannot be reached.
          NoReplicaError: there is none.
        """
        try:
            pieces: Any = self._handle.answer.remote(call, prompt=prompt)  # a generator, by the handle's options
            try:
                async for piece in pieces:
                    yield piece
            except (asyncio.CancelledError, GeneratorExit):
                pieces.cancel()
                raise
        except DeploymentUnavailableError as error:
            raise NoReplicaError(str(error)) from error
        except _LOST as error:
            raise ReplicaLostError(str(error)) from error

    async def answers(self, call: Call, timeout_s: float) -> Sequence[ReplicaResponse | Exception]:
        """The answers of all running replicas; empty if there are none."""
        response = self._all.broadcast("answer_whole", call)
        try:
            return await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        except TimeoutError as error:
            return [error]

    def made_of(self) -> list[tuple[ReplicaOptions, ReplicaScale]]:
        """The options of each replica that answers."""
        try:
            found = self._all.broadcast("made_of").results(timeout_s=_ABOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [result for result in found if not isinstance(result, Exception)]

    def dtype(self) -> str:
        """The dtype of the KV that they read and write."""
        return self._all.broadcast("dtype").results(timeout_s=_ABOUT_S)[0]

    async def counts(self) -> dict[str, int]:
        """Ray's state in lower case -> number of replicas; refreshed at most twice a second. While Ray's controller
        does not answer, the last known counts: replicas do not need it for requests."""
        if time.monotonic() - self._counted_s > _COUNTS_FOR_S:
            if self._counting is None:
                self._counting = asyncio.ensure_future(asyncio.to_thread(replica_counts))
            looking = self._counting
            is_first = self._counted_s == -math.inf
            await asyncio.wait({looking}, timeout=None if is_first else _COUNTS_FOR_S)
            if looking.done() and looking is self._counting:
                found, self._counting = looking.result(), None
                self._counts = self._counts if found is None else found
                self._counted_s = time.monotonic()
        return self._counts

    async def generator_metrics(self) -> Sequence[str]:
        """The metrics of each generator that answers; empty if there are none."""
        try:
            if self._generators is None:
                looking = asyncio.to_thread(serve.get_app_handle, GENERATOR_APP)
                self._generators = await asyncio.wait_for(looking, _GENERATORS_S)
            response = self._generators.broadcast("metrics")
            found = await response.results_async(timeout_s=_GENERATORS_S, return_exceptions=True)
        except (RayServeException, DeploymentUnavailableError, TimeoutError):
            return []
        return [result for result in found if isinstance(result, str)]


def deploy(options: ReplicaOptions, scale: ReplicaScale, resources: dict[str, float]) -> RayReplicas:
    """Starts the replicas or, if some run, replaces them one after the other, so that some answer at all times. Returns
    once all answer.

    Args:
      resources: Ray resources of one replica, such as {"GPU": 1}; none for a share of the CPU.

    Raises:
      RuntimeError: the replicas cannot be started; has the message of the last one.
    """
    is_fixed = scale.least == scale.most
    router: dict[str, Any] = {"request_router_class": CacheAwareRouter, "request_routing_stats_period_s": 0.5}
    deployment = serve.deployment(
        name=NAME,
        num_replicas=scale.least if is_fixed else "auto",
        autoscaling_config=None
        if is_fixed
        else AutoscalingConfig(
            min_replicas=scale.least,
            max_replicas=scale.most,
            initial_replicas=scale.least,
            target_ongoing_requests=scale.requests_each,
            upscale_delay_s=scale.up_after_s,
            downscale_delay_s=scale.down_after_s,
        ),
        ray_actor_options=_actor_options(resources),
        max_ongoing_requests=_NO_LIMIT,
        max_queued_requests=-1,  # a limit would count all that arrive at the same moment
        graceful_shutdown_timeout_s=_DRAIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        health_check_timeout_s=60.0,
        logging_config=_QUIET,
        request_router_config=RequestRouterConfig(**router),
    )(Replica)
    # Clients talk to the front; Ray's own proxy, which does not know chunks, would only take a port.
    serve.start(proxy_location="Disabled", logging_config=_QUIET)
    return RayReplicas(_run(deployment.bind(options, scale), APP, NAME))


def deploy_generators(
    options: ReplicaOptions, dtype: str, number: int, resources: dict[str, float], *, on_cpu: bool
) -> None:
    """Starts engines that compute for waiting requests, or replaces the running ones.

    Args:
      dtype: of the replicas' KV.
      resources: as `deploy`; `on_cpu` needs none.
      on_cpu: the paper's configuration B: on the hosts' CPUs, which replicas on accelerators leave idle; at a low
        priority in case they do not. Otherwise configuration A: on accelerators of their own.

    Raises:
      RuntimeError: they cannot be started.
    """
    actor, niceness = _actor_options({} if on_cpu else resources), 0
    if on_cpu:
        actor["runtime_env"] = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
        niceness = _LOW_PRIORITY
    # An engine without clients needs no memory for requests, and no kernels of another platform.
    engine = {name: value for name, value in options.engine.items() if name not in _OF_REPLICAS_ONLY}
    engine |= {"dtype": dtype, "max_num_seqs": 1}
    if on_cpu:
        engine.pop("tensor_parallel_size", None)
    deployment = serve.deployment(
        name=GENERATOR_NAME,
        num_replicas=number,
        ray_actor_options=actor,
        graceful_shutdown_timeout_s=_GENERATOR_ENDS_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        health_check_timeout_s=120.0,
        logging_config=_QUIET,
    )(Generator)
    bound = deployment.bind(dataclasses.replace(options, engine=engine), niceness)
    _run(bound, GENERATOR_APP, GENERATOR_NAME)


def _actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """Ray's options for the resources of one process."""
    wanted = dict(resources)
    return {"num_cpus": wanted.pop("CPU", 0.01), "num_gpus": wanted.pop("GPU", 0), "resources": wanted}


def _run(bound: Application, app: str, deployment: str) -> DeploymentHandle[Any]:
    """Raises RuntimeError with the reason of the last replica that failed to start, if Ray knows it."""
    try:
        return serve.run(bound, name=app, route_prefix=None)
    except RuntimeError as error:
        found = serve.status().applications.get(app)
        message = found.deployments[deployment].message if found and deployment in found.deployments else ""
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else str(error)) from error


def running() -> RayReplicas | None:
    """The replicas that already run in the cluster, if any."""
    if APP not in serve.status().applications:
        return None
    return RayReplicas(serve.get_app_handle(APP))


def replica_counts() -> dict[str, int] | None:
    """State in lower case -> number of replicas; None if Ray's controller does not answer."""
    try:
        app = serve.status().applications.get(APP)
    except Exception as error:
        logger.debug("no status of the replicas: %s", error)
        return None
    if app is None or NAME not in app.deployments:
        return {}
    return {str(state).lower(): number for state, number in app.deployments[NAME].replica_states.items()}

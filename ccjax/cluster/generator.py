"""The KV Cache Generator (Shared RAG-DCache sec. III-B): an engine in a Ray actor that answers no requests but computes
what waiting requests elsewhere will need."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from pathlib import Path

import ccjax
from ccjax.cluster.idle import idle_cpus
from ccjax.cluster.replica import ReplicaOptions
from ccjax.engine import Engine
from ccjax.server.loading import load_engine, use_compile_cache
from ccjax.server.logs import configure_logging
from ccjax.server.metrics import ServerMetrics

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 1.0

_IDLE_S, _IDLE_CPUS = 0.2, 0.5
"""Required share of idle CPUs, and over what time."""


class Generator:
    """Works on a thread until it is stopped.

    Args:
      niceness: of the whole process, so that it uses only what other processes leave of shared CPUs. If not 0, orders
        are taken only while a CPU is idle.
    """

    async def __init__(self, options: ReplicaOptions, niceness: int = 0) -> None:
        configure_logging(options.log_level, options.log_format)
        if niceness:
            os.nice(niceness)
        self._stopping = threading.Event()
        self._engine = await asyncio.to_thread(_load, options)
        self._metrics = ServerMetrics()
        name = options.server.served_model_name or self._engine.model_name
        self._metrics.attach(version=ccjax.__version__, model=name, engine=self._engine, retriever=None)
        how = {"needs_idle_cpus": niceness > 0}
        self._thread = threading.Thread(
            target=work, args=(self._engine, self._stopping), kwargs=how, name="ccjax-generator", daemon=True
        )
        self._thread.start()

    def metrics(self) -> str:
        """Its metrics in the Prometheus text format."""
        return self._metrics.render().decode()

    async def check_health(self) -> None:
        """Raises if this generator should be replaced."""
        if not self._thread.is_alive():
            raise RuntimeError("the generator ended")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it failed to load
            self._stopping.set()
            await asyncio.to_thread(self._thread.join)
            await asyncio.to_thread(self._engine.close)


def work(engine: Engine, stopping: threading.Event, *, needs_idle_cpus: bool) -> None:
    """Carries out orders of other processes, until `stopping`.

    Args:
      needs_idle_cpus: take orders only while a CPU of this machine is idle: one started on busy CPUs finishes late, and
        takes time from replicas that would have done the work themselves.
    """
    while not stopping.is_set():
        if needs_idle_cpus and idle_cpus(_IDLE_S, stopping.wait) < _IDLE_CPUS:
            continue
        pause_s = _POLL_S
        try:
            if engine.orders.compute(is_cancelled=stopping.is_set) is not None:
                pause_s = 0.0
        except OSError as error:
            logger.debug("no orders: %s", error)
            pause_s = _RETRY_S
        except Exception:
            logger.exception("an order failed")
            pause_s = _RETRY_S
        stopping.wait(pause_s)


def _load(options: ReplicaOptions) -> Engine:
    use_compile_cache(Path(options.compile_cache_dir))
    return load_engine(options.model, options.engine)

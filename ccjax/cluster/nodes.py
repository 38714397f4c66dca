"""Runs this machine as a node of a Ray cluster for the life of the process."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType

import ray
from ray import serve

NAMESPACE = "ccjax"
OBJECT_STORE_BYTES = 200 << 20
"""Requests and answers pass through it, KV does not."""

_REACH_S = 10.0
"""Timeout of the check that a cluster is listening: Ray itself would retry for minutes."""

_HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings by which the head drops an unresponsive node after some 20 s instead of 70 s; requests sent there wait that
long."""

_END_WITH_PARENT = (
    "import ctypes, os, signal, sys; PR_SET_PDEATHSIG = 1; "
    "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Runs a command that does not outlive a killed server: its replicas would keep the accelerators."""

_START_S = 60.0
_STOP_S = 20.0


class NodeError(RuntimeError):
    """The node cannot be started, or the cluster cannot be reached."""


class RayNode:
    """A node of a new or an existing cluster; a context manager that stops it.

    Args:
      host: address by which other nodes reach this one; None for the one that routes to `address`, or 127.0.0.1.
      port: of the new cluster; 0 for any free one.
      address: HOST:PORT of the cluster to join; None for a new one.

    Raises:
      NodeError: Ray does not start, or does not answer.
    """

    def __init__(self, host: str | None, port: int, address: str | None) -> None:
        self.is_new = address is None
        if address:
            _wait_for(address)
        own = host or (_leads_to(address) if address else "127.0.0.1")
        self.address = address or f"{own}:{port or _free_port(own)}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={own}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        if self.is_new:
            command += ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        else:
            command += [f"--address={self.address}"]
        if sys.platform == "linux":
            command = [sys.executable, "-c", _END_WITH_PARENT, *command]
        # Replicas without accelerators should use what JAX_PLATFORMS says, as a single server would.
        environment = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0", **_HEALTH, **os.environ}
        self._log = tempfile.TemporaryFile()
        # In a session of its own, so that Ctrl-C reaches only the server, which stops the node after its last answer.
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            self._connect(own)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def resources(self) -> Mapping[str, float]:
        """Resources of the whole cluster, by Ray's names."""
        return ray.cluster_resources()

    def close(self) -> None:
        """Stops the node, and the cluster if it started it."""
        if ray.is_initialized():
            if self.is_new:
                serve.shutdown()
            ray.shutdown()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _connect(self, own: str) -> None:
        deadline_s = time.monotonic() + _START_S
        while True:
            if self._process.poll() is not None:
                self._log.seek(0)
                lines = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
                raise NodeError(f"Ray did not start: {lines[-1]}")
            try:
                ray.init(
                    address=self.address,
                    namespace=NAMESPACE,
                    logging_level=logging.ERROR,
                    log_to_driver=True,
                    configure_logging=False,
                    _node_ip_address=own,
                )
                return
            except (ConnectionError, RuntimeError) as error:
                if time.monotonic() > deadline_s:
                    raise NodeError(f"no answer from a Ray cluster at {self.address}: {error}") from error
                time.sleep(0.3)


def _wait_for(address: str) -> None:
    """Waits until the address accepts connections."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _REACH_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_REACH_S).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                raise NodeError(f"no answer from a Ray cluster at {address}: {error.strerror or error}") from error
        time.sleep(0.2)


def _leads_to(address: str) -> str:
    """This machine's address towards another one; sends nothing."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise NodeError(f"no way to {address}: {error}") from error
        return str(ipaddress.ip_address(probe.getsockname()[0]))


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise NodeError(f"cannot listen on {host}: {error}") from error
        return probe.getsockname()[1]

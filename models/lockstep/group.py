"""Forms a group of processes: first JAX's own runtime, then a connection from each follower to the leader."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ccjax.models.lockstep.errors import LostHostError
from ccjax.models.lockstep.follower import follow
from ccjax.models.lockstep.leader import Leader
from ccjax.models.lockstep.steps import record_with

logger = logging.getLogger(__name__)

_INVITATION_BYTES = 512
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f">{_TOKEN_BYTES}sI")


class Group:
    """The processes that hold one model together; process 0 leads. Created by `join`.

    Attributes:
      process: index of this process, from 0.
      num_processes: number of processes in the group.
    """

    def __init__(self, process: int, num_processes: int, listener: socket.socket | None, invitation: Mapping[str, Any]):
        self.process = process
        self.num_processes = num_processes
        self._listener = listener
        self._host, self._port = str(invitation["host"]), int(invitation["port"])
        self._token = bytes.fromhex(invitation["token"])
        self._leader: Leader | None = None
        self._when_lost: list[Callable[[str], None]] = []

    @property
    def is_leader(self) -> bool:
        """True for the process that serves requests; the others `follow`."""
        return self.process == 0

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Registers a callback for the loss of a follower, called from another thread with the reason. Calls that wait
        for the devices may then never return, so a server should exit."""
        self._when_lost.append(callback)

    def lead(self, shared: Mapping[str, Any], *, timeout_s: float = 1800.0) -> None:
        """Waits for all followers; from then until `end`, all operations on the mesh go through this group.

        Args:
          shared: objects that operations refer to by name, the same in all processes: weights, static arguments of
            steps, and "mesh".
          timeout_s: how long to wait for followers, which may still be loading.

        Raises:
          LostHostError: not all followers connected.
        """
        assert self._listener is not None, "lead: this process follows"
        if self._leader is not None:
            raise RuntimeError("lead: wanted one engine for the group, it has one")
        connections: dict[int, socket.socket] = {}
        try:
            self._gather(connections, time.monotonic() + timeout_s)
        except TimeoutError:
            for connection in connections.values():
                connection.close()
            missing = sorted(set(range(1, self.num_processes)) - connections.keys())
            raise LostHostError(f"processes {missing} did not come within {timeout_s:g} s") from None
        self._leader = Leader(connections, shared, self._lost)
        record_with(self._leader)

    def follow(self, shared: Mapping[str, Any]) -> None:
        """Runs the leader's operations until it ends the group.

        Raises:
          LostHostError: the leader disappeared, or could not be reached.
        """
        assert not self.is_leader, "follow: this process leads"
        try:
            connection = socket.create_connection((self._host, self._port), timeout=60.0)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO.pack(self._token, self.process))
        except OSError as error:
            raise LostHostError(f"the leader cannot be reached at {self._host}:{self._port}: {error}") from error
        follow(connection, shared)

    def end(self) -> None:
        """Ends the group in all processes; arrays on the mesh become unusable. May be called twice."""
        if self._leader is not None:
            record_with(None)
            self._leader.end()
        if self._listener is not None:
            self._listener.close()

    def _gather(self, connections: dict[int, socket.socket], deadline_s: float) -> None:
        """Adds a connection for each follower; raises TimeoutError."""
        assert self._listener is not None
        while len(connections) < self.num_processes - 1:
            self._listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            connection, _ = self._listener.accept()
            try:
                process = self._accept(connection)
            except OSError:  # it disconnected, or sent nothing
                process = None
            if process is None or process in connections:
                connection.close()
            else:
                connections[process] = connection

    def _lost(self, reason: str) -> None:
        logger.critical("the model's hosts: %s", reason)
        for callback in self._when_lost:
            callback(reason)

    def _accept(self, connection: socket.socket) -> int | None:
        """The index of the connecting process; None if it does not belong to the group."""
        connection.settimeout(10.0)
        said = b""
        while len(said) < _HELLO.size and (part := connection.recv(_HELLO.size - len(said))):
            said += part
        if len(said) < _HELLO.size:
            return None
        token, process = _HELLO.unpack(said)
        if not hmac.compare_digest(token, self._token) or not 0 < process < self.num_processes:
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return process


_group: Group | None = None


def group() -> Group | None:
    """The group of this process; None if it has none."""
    return _group


def join(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None, timeout_s: int = 300
) -> Group:
    """Makes this process part of a group; call it once, before anything else uses JAX.

    Args:
      coordinator_address: host:port of process 0 for JAX's runtime; this and the next two are None if JAX determines
        them itself (Cloud TPU, SLURM, Kubernetes, Open MPI).
      timeout_s: how long to wait for the other processes.

    Raises:
      RuntimeError: the others did not connect, JAX has already been used, or this process already has a group.
      ValueError: JAX cannot determine the arguments itself.
    """
    global _group
    if _group is not None:
        raise RuntimeError("join: this process is in a group already")
    jax.config.update("jax_enable_preemption_service", False)  # it would intercept the server's SIGTERM
    jax.distributed.initialize(
        coordinator_address, num_processes=num_processes, process_id=process_id, initialization_timeout=timeout_s
    )
    listener, invitation = None, b""
    if jax.process_index() == 0:
        host = (
            socket.gethostname() if coordinator_address is None else coordinator_address.rpartition(":")[0].strip("[]")
        )
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
        token = secrets.token_hex(_TOKEN_BYTES)
        invitation = json.dumps({"host": host, "port": listener.getsockname()[1], "token": token}).encode()
    padded = np.zeros(_INVITATION_BYTES, np.uint8)
    padded[: len(invitation)] = np.frombuffer(invitation, np.uint8)
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes().rstrip(b"\0")
    _group = Group(jax.process_index(), jax.process_count(), listener, json.loads(agreed))
    return _group

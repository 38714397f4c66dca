"""The leader: sends every operation to the followers, then launches it itself."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ccjax.models.lockstep import wire
from ccjax.models.lockstep.errors import LostHostError
from ccjax.models.lockstep.steps import Step, run_in_turn

Result = TypeVar("Result")


class Leader:
    """Runs operations in the same order on all processes; a `steps.Recorder`. Thread-safe.

    Arrays on the mesh are identified by number. Once a process of the group has failed, every operation raises.

    Args:
      connections: connection to each follower, by its process index.
      shared: see `wire.Names`; the same in all processes. "mesh" is the group's mesh.
      on_lost: called once with the reason, from another thread, when a follower is lost.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        shared: Mapping[str, Any],
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._connections = dict(connections)
        self._names = wire.Names(shared)
        self._weights = {id(value) for value in shared.values() if isinstance(jax.tree.leaves(value)[0], jax.Array)}
        self._on_lost = on_lost
        self._turn = threading.RLock()
        self._numbers: dict[int, int] = {}
        self._freed: collections.deque[int] = collections.deque()
        self._next = 0
        self._lost: str | None = None
        self._has_ended = False
        for process, connection in self._connections.items():
            arguments = (process, connection)
            threading.Thread(target=self._watch, args=arguments, name="ccjax-follower", daemon=True).start()

    def run(self, step: Step[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """Runs the step in all processes; only in this one if none of its arguments is on the mesh."""
        if not any(self._is_on_mesh(value) for value in (*args, *kwargs.values())):
            return step.jitted(*args, **kwargs)
        message = wire.Message({"do": "step", "step": step.name})
        with self._operation(message):
            header = message.header
            header["args"] = [self._encoded(value, message) for value in args]
            header["kwargs"] = {name: self._encoded(value, message) for name, value in kwargs.items()}
            self._send(lambda process: message)
            return self._number(run_in_turn(step.jitted, *args, **kwargs))

    def put(self, values: Any, placement: NamedSharding) -> Any:
        """Puts host arrays on the mesh. Each follower receives the part for its devices."""
        leaves, tree = jax.tree.flatten(values)
        hosts = [np.asarray(leaf) for leaf in leaves]

        def message_for(process: int) -> wire.Message:
            message = wire.Message(dict(header))
            for host in hosts:
                part = wire.part_of(host.shape, placement, process)
                begins = [axis.start for axis in part]
                message.header["parts"] = [*message.header["parts"], [host.shape, begins, message.add(host[part])]]
            return message

        header = {"do": "put", "spec": wire.spec_of(placement), "parts": []}
        with self._operation(wire.Message(header)):
            self._send(message_for)
            # Copies: the caller may reuse its buffers, and arrays on the mesh may be donated.
            made = [wire.place(host.copy(), [0] * host.ndim, host.shape, placement) for host in hosts]
            return self._number(jax.tree.unflatten(tree, made))

    def zeros(self, shape: tuple[int, ...], dtype: Any, placement: NamedSharding) -> jax.Array:
        """An array of zeros on the mesh."""
        kind, spec = np.dtype(dtype).name, wire.spec_of(placement)
        message = wire.Message({"do": "zeros", "shape": shape, "dtype": kind, "spec": spec})
        with self._operation(message):
            self._send(lambda process: message)
            return self._number(jnp.zeros(shape, dtype, device=placement))

    def end(self) -> None:
        """Ends the group in all processes. May be called twice."""
        with self._turn:
            is_first, self._has_ended = not self._has_ended, True  # the first follower may exit at once
            if is_first and self._lost is None:
                with contextlib.suppress(OSError):
                    self._send(lambda process: wire.Message({"do": "end"}))
        self._hang_up()

    # -- internals ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _operation(self, message: wire.Message) -> Iterator[None]:
        """Runs one operation at a time. A failure ends the group, because followers may wait for the operation."""
        with self._turn:
            if self._has_ended or self._lost is not None:
                raise LostHostError(self._lost or "the group has ended")
            message.header["free"] = [self._freed.popleft() for _ in range(len(self._freed))]
            message.header["first"] = self._next
            try:
                yield
            except BaseException as error:
                self._lose(f"an operation failed here: {error}")
                raise

    def _send(self, message_for: Callable[[int], wire.Message]) -> None:
        for process, connection in self._connections.items():
            message_for(process).send(connection)

    def _is_on_mesh(self, value: Any) -> bool:
        if isinstance(value, tuple | list):
            return any(map(self._is_on_mesh, value))
        return id(value) in self._numbers or id(value) in self._weights

    def _encoded(self, value: Any, message: wire.Message) -> Any:
        return wire.encode(value, message, self._number_of, self._names)

    def _number_of(self, array: jax.Array) -> int:
        number = self._numbers.get(id(array))
        if number is None:
            raise TypeError(f"array of {array.shape}: wanted one that was made by a step, `put` or `zeros`")
        return number

    def _number(self, made: Result) -> Result:
        """Numbers the arrays of a result, in order; followers free an array after it is deleted here."""
        for array in jax.tree.leaves(made):
            key, number = id(array), self._next
            self._next += 1
            self._numbers[key] = number
            weakref.finalize(array, self._forget, key, number).atexit = False
        return made

    def _forget(self, key: int, number: int) -> None:
        # A new array may already have the same id.
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._freed.append(number)

    def _watch(self, process: int, connection: socket.socket) -> None:
        """Reads until the connection closes; followers send only the reason for a failure."""
        reason = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(4096):
                reason += part
        if not self._has_ended:
            self._lose(f"process {process} has gone: {reason.decode(errors='replace') or 'no word of why'}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._hang_up()
            self._on_lost(reason)

    def _hang_up(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # closing alone would not wake readers
            connection.close()

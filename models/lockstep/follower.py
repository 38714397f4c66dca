"""A follower: runs the leader's operations, in order, on its part of the arrays."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.models.lockstep import wire
from ccjax.models.lockstep.errors import LostHostError
from ccjax.models.lockstep.steps import STEPS, run_in_turn


def follow(connection: socket.socket, shared: Mapping[str, Any]) -> None:
    """Runs until the leader ends the group. Reports failures to the leader.

    Args:
      shared: see `wire.Names`.

    Raises:
      LostHostError: the leader disappeared.
    """
    names, mesh = wire.Names(shared), shared["mesh"]
    arrays: dict[int, jax.Array] = {}
    with connection, connection.makefile("rb", buffering=1 << 20) as stream:
        try:
            while (message := wire.receive(stream)) is not None:
                header = message.header
                if header["do"] == "end":
                    return
                for number in header["free"]:
                    del arrays[number]
                made = _carried_out(message, arrays, names, mesh)
                arrays |= enumerate(jax.tree.leaves(made), header["first"])
        except ConnectionError as error:
            raise LostHostError(f"the leader has gone: {error}") from error
        except Exception as error:
            _send_error(connection, error)
            raise
    raise LostHostError("the leader has gone")


def _carried_out(message: wire.Message, arrays: Mapping[int, jax.Array], names: wire.Names, mesh: Any) -> Any:
    header = message.header
    if header["do"] == "step":
        args = [wire.decode(value, message, arrays, names) for value in header["args"]]
        kwargs = {name: wire.decode(value, message, arrays, names) for name, value in header["kwargs"].items()}
        return run_in_turn(STEPS[header["step"]].jitted, *args, **kwargs)
    placement = wire.placed(header["spec"], mesh)
    if header["do"] == "zeros":
        return jnp.zeros(tuple(header["shape"]), np.dtype(header["dtype"]), device=placement)
    return [
        wire.place(message.buffers[number], begins, tuple(shape), placement)
        for shape, begins, number in header["parts"]
    ]


def _send_error(connection: socket.socket, error: Exception) -> None:
    try:
        connection.sendall(f"{type(error).__name__}: {error}".encode()[:4096])
    except OSError:
        pass  # the leader will see the connection close

"""Serialises operations: a JSON header, then the raw bytes of host arrays. Received data is never executed."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_LENGTH = struct.Struct(">I")
_MAX_HEADER_BYTES = 64 << 20


@dataclasses.dataclass
class Message:
    """One operation.

    Attributes:
      header: the operation, as JSON.
      buffers: host arrays, referenced by index in the header.
    """

    header: dict[str, Any]
    buffers: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, array: np.ndarray) -> int:
        """Adds a buffer and returns its index."""
        self.buffers.append(np.ascontiguousarray(array).reshape(array.shape))
        return len(self.buffers) - 1

    def send(self, connection: socket.socket) -> None:
        """Sends the whole operation."""
        shapes = [[array.dtype.name, array.shape] for array in self.buffers]
        header = json.dumps({**self.header, "buffers": shapes}, separators=(",", ":")).encode()
        connection.sendall(_LENGTH.pack(len(header)) + header)
        for array in self.buffers:
            if array.nbytes:
                connection.sendall(memoryview(array.reshape(-1).view(np.uint8)))  # pyright: ignore[reportArgumentType]


def receive(stream: Any) -> Message | None:
    """The next operation; None if the other side has closed the connection.

    Raises:
      ConnectionError: the connection broke within an operation.
      ValueError: it is malformed.
    """
    begin = stream.read(_LENGTH.size)
    if not begin:
        return None
    if len(begin) < _LENGTH.size:
        raise ConnectionError("operation: the other side ended amid one")
    (length,) = _LENGTH.unpack(begin)
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"operation: wanted a header of at most {_MAX_HEADER_BYTES} bytes, got {length}")
    header = json.loads(_filled(stream, bytearray(length)))
    buffers = []
    for name, shape in header.pop("buffers"):
        array = np.empty(tuple(shape), np.dtype(name))
        _filled(stream, array.reshape(-1).view(np.uint8))
        buffers.append(array)
    return Message(header, buffers)


def _filled(stream: Any, buffer: Any) -> Any:
    view = memoryview(buffer)
    while view.nbytes:
        count = stream.readinto(view)
        if not count:
            raise ConnectionError("operation: the other side ended amid one")
        view = view[count:]
    return buffer


class Names:
    """Objects that all processes have under the same name: weights by layer, static arguments of steps, the mesh."""

    def __init__(self, shared: Mapping[str, Any]) -> None:
        self._shared = dict(shared)
        self._by_id = {id(value): name for name, value in self._shared.items()}

    def __getitem__(self, name: str) -> Any:
        return self._shared[name]

    def of(self, value: Any) -> str:
        """The name of a value, or of a shared object that is equal to it.

        Raises:
          TypeError: there is none.
        """
        name = self._by_id.get(id(value))
        if name is None:
            for name, ours in self._shared.items():
                if type(ours) is type(value) and ours == value:
                    return name
            raise TypeError(f"argument of a step: wanted an array, a number or what the group shares, got {value!r}")
        return name


def encode(value: Any, message: Message, handle_of: Callable[[jax.Array], int], names: Names) -> Any:
    """A step's argument as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array):
        return {"array": handle_of(value)}
    if isinstance(value, np.ndarray | np.generic):
        return {"buffer": message.add(np.asarray(value))}
    if type(value) in (tuple, list):
        return {"tuple": [encode(part, message, handle_of, names) for part in value]}
    return {"name": names.of(value)}


def decode(value: Any, message: Message, arrays: Mapping[int, jax.Array], names: Names) -> Any:
    """Inverse of `encode`, with the arrays of this process."""
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == "array":
        return arrays[what]
    if kind == "buffer":
        return message.buffers[what]
    if kind == "tuple":
        return tuple(decode(part, message, arrays, names) for part in what)
    return names[what]


def spec_of(placement: NamedSharding) -> list[Any]:
    """A layout as JSON; `placed` is the inverse."""
    return [list(axis) if isinstance(axis, tuple) else axis for axis in placement.spec]


def placed(spec: Sequence[Any], mesh: Mesh) -> NamedSharding:
    """Inverse of `spec_of`."""
    return NamedSharding(mesh, PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in spec)))


def part_of(shape: tuple[int, ...], placement: NamedSharding, process: int) -> tuple[slice, ...]:
    """The smallest block of an array that contains all parts on the devices of one process."""
    own: Iterator[tuple[slice, ...]] = (
        index for device, index in placement.devices_indices_map(shape).items() if device.process_index == process
    )
    bounds = [[axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True)] for index in own]
    return tuple(
        slice(min(begin for begin, _ in axis), max(end for _, end in axis)) for axis in zip(*bounds, strict=True)
    )


def place(part: np.ndarray, begins: Sequence[int], shape: tuple[int, ...], placement: NamedSharding) -> jax.Array:
    """An array on the mesh; `part`, which starts at index `begins`, contains what this process's devices hold of it."""

    def inside(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = (axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        return part[tuple(slice(low - begin, high - begin) for (low, high), begin in zip(bounds, begins, strict=True))]

    return jax.make_array_from_callback(shape, placement, inside)

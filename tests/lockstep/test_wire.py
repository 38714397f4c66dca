"""Operations as bytes: what is sent is what is carried out, and nothing else is."""

from __future__ import annotations

import io
import socket
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ccjax.models.lockstep import wire

ARRAYS = [
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.asarray(7, np.uint32),
    np.zeros((0, 5), np.float32),
    np.linspace(-2, 2, 6).astype(jnp.bfloat16),
    np.linspace(-2, 2, 6).astype(jnp.float8_e4m3fn),
    np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(20, dtype=np.int8)[::3],
    np.asarray([True, False]),
]


def sent(message: wire.Message) -> bytes:
    """What goes over the wire."""
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as stream:
        message.send(ours)
        ours.shutdown(socket.SHUT_WR)
        return stream.read()


def test_messages_survive_a_round_trip():
    message = wire.Message({"do": "put", "free": [3, 4]})
    assert [message.add(array) for array in ARRAYS] == list(range(len(ARRAYS)))
    stream = io.BytesIO(sent(message) + sent(wire.Message({"do": "end"})))
    found = wire.receive(stream)
    assert found is not None and found.header == {"do": "put", "free": [3, 4]}
    for got, wanted in zip(found.buffers, ARRAYS, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64))
    end = wire.receive(stream)
    assert end is not None and end.header == {"do": "end"} and wire.receive(stream) is None


def test_truncated_or_oversized_message_is_an_error():
    message = wire.Message({"do": "put"})
    message.add(ARRAYS[0])
    whole = sent(message)
    for length in range(1, len(whole)):
        with pytest.raises((ConnectionError, ValueError)):
            wire.receive(io.BytesIO(whole[:length]))
    with pytest.raises(ValueError, match="67108864"):
        wire.receive(io.BytesIO(struct.pack(">I", 1 << 31)))


def test_arrays_are_sent_by_number_and_shared_objects_by_name():
    on_mesh = {7: jnp.ones(3), 9: jnp.zeros(2)}
    shared = {"config": frozenset({1}), "top": object()}
    names = wire.Names(shared)
    message = wire.Message({})
    args = [on_mesh[9], None, (on_mesh[7], ARRAYS[0]), np.int32(5), "xla", 3, True, shared["top"], frozenset({1})]

    def number_of(array: jax.Array) -> int:
        return next(number for number, ours in on_mesh.items() if ours is array)

    encoded = [wire.encode(value, message, number_of, names) for value in args]
    assert encoded[0] == {"array": 9} and encoded[1] is None and encoded[4:7] == ["xla", 3, True]
    decoded = [wire.decode(value, message, on_mesh, names) for value in encoded]
    assert decoded[0] is on_mesh[9] and decoded[7] is shared["top"] and decoded[8] is shared["config"]
    assert decoded[2][0] is on_mesh[7] and int(decoded[3]) == 5
    np.testing.assert_array_equal(decoded[2][1], ARRAYS[0])
    with pytest.raises(TypeError, match="what the group shares"):
        wire.encode(object(), message, number_of, names)


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("kv"), PartitionSpec(None, ("kv", "group")), PartitionSpec(None, "kv")]
)
def test_sharding_survives_encoding_and_splits_the_array(spec):
    mesh = Mesh(np.asarray(jax.devices()[:4], object).reshape(2, 2), ("kv", "group"))
    placement = wire.placed(wire.spec_of(NamedSharding(mesh, spec)), mesh)
    assert placement == NamedSharding(mesh, spec)
    host = np.arange(8 * 12).reshape(8, 12)
    whole = wire.part_of(host.shape, placement, 0)
    assert whole == (slice(0, 8), slice(0, 12))
    made = wire.place(host, [0, 0], host.shape, placement)
    np.testing.assert_array_equal(np.asarray(made), host)
    assert made.sharding == placement


class Elsewhere:
    """A device of another process, as far as `part_of` looks."""

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


class Split:
    """A placement of [8, 12] whose columns lie on two processes, two devices each."""

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Elsewhere, tuple[slice, ...]]:
        return {Elsewhere(number // 2): (slice(None), slice(3 * number, 3 * number + 3)) for number in range(4)}


def test_process_is_sent_only_the_part_its_devices_hold():
    assert wire.part_of((8, 12), Split(), 0) == (slice(0, 8), slice(0, 6))  # pyright: ignore[reportArgumentType]
    assert wire.part_of((8, 12), Split(), 1) == (slice(0, 8), slice(6, 12))  # pyright: ignore[reportArgumentType]

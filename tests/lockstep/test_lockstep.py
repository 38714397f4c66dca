"""A leader and a follower, here threads of one process: both run the same, in the same order, with the same values."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ccjax.models import lockstep
from ccjax.models.lockstep import wire
from ccjax.models.lockstep.follower import follow
from ccjax.models.lockstep.group import _HELLO, Group
from ccjax.models.lockstep.leader import Leader
from ccjax.models.lockstep.steps import record_with
from tests.polling import wait_until

MESH = Mesh(np.asarray(jax.devices()[:1], object), ("kv",))
PLACE = NamedSharding(MESH, PartitionSpec())
WEIGHTS = {"weight": jax.device_put(np.arange(4.0, dtype=np.float32), PLACE)}
SHARED = {"mesh": MESH, "config": "a config", "top": WEIGHTS}


@lockstep.step(static_argnames=("config",), donate_argnames=("x",))
def mixed_step(x: Any, y: Any, *, config: str) -> tuple[Any, Any]:
    """Two arrays of two."""
    return x + 1.0, x + 2.0 * y + float(len(config))


class Probe:
    """Stands for a step: what it is given, by side."""

    name = "probe"

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {"leader": [], "follower": []}
        self.arrays: list[weakref.ref[Any]] = []
        self.fails = ""
        lockstep.steps.STEPS[self.name] = self  # pyright: ignore[reportArgumentType]

    def jitted(self, *args: Any) -> jax.Array:
        side = "follower" if threading.current_thread().name == "follower" else "leader"
        if self.fails == side:
            raise ArithmeticError(f"no luck on the {side}")
        if side == "follower":
            self.arrays += [weakref.ref(value) for value in args if isinstance(value, jax.Array)]
        self.seen[side].append([np.asarray(jax.tree.leaves(value)[0]).tolist() for value in args])
        return jax.device_put(np.float32(len(self.seen[side])), PLACE)


class Pair:
    """Both sides."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.ended: list[BaseException | None] = []
        self.lost: list[str] = []
        self.probe = Probe()
        self.leader = Leader({0: ours}, SHARED, self.lost.append)
        self.thread = threading.Thread(target=self._follow, args=(theirs,), name="follower")
        self.thread.start()
        record_with(self.leader)

    def run_probe(self, *args: Any) -> jax.Array:
        return self.leader.run(self.probe, args, {})  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        record_with(None)
        self.leader.end()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _follow(self, connection: socket.socket) -> None:
        try:
            follow(connection, SHARED)
            self.ended.append(None)
        except BaseException as error:
            self.ended.append(error)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as pair:
        yield pair


def test_leader_and_follower_run_the_same_operations_in_the_same_order(pair):
    """Random programs of four threads, whose arrays come and go."""

    def program(seed: int) -> None:
        random = np.random.default_rng(seed)
        arrays = [lockstep.put(random.normal(size=3).astype(np.float32), PLACE)]
        for number in range(60):
            kind, chosen = random.integers(5), arrays[random.integers(len(arrays))]
            if kind == 0:
                arrays += lockstep.put([random.normal(size=3).astype(np.float32) for _ in range(2)], PLACE)
            elif kind == 1:
                arrays.append(lockstep.zeros((3,), np.float32, PLACE))
            elif kind == 2:
                arrays.pop(random.integers(len(arrays)))
                arrays = arrays or [lockstep.zeros((3,), np.float32, PLACE)]
            elif kind == 3:
                x = arrays.pop(next(i for i, array in enumerate(arrays) if array is chosen))
                arrays += mixed_step(x, np.float32(number), config="a config")
            pair.run_probe(arrays[-1], np.int32(number), (arrays[0], None), SHARED["top"])

    list(ThreadPoolExecutor(4).map(program, range(4)))
    pair.close()
    assert pair.ended == [None] and pair.lost == []
    assert len(pair.probe.seen["leader"]) == 240 and pair.probe.seen["follower"] == pair.probe.seen["leader"]


def test_later_changes_to_the_callers_buffer_have_no_effect(pair):
    buffer = np.ones((64, 64), np.float32)
    on_mesh = lockstep.put(buffer, PLACE)
    buffer[:] = 7.0
    pair.run_probe(on_mesh)
    pair.close()
    for side in ("leader", "follower"):
        assert pair.probe.seen[side] == [[np.ones((64, 64)).tolist()]]


def test_arrays_freed_on_the_leader_are_freed_on_the_follower(pair):
    kept = lockstep.zeros((3,), np.float32, PLACE)
    for _ in range(5):
        pair.run_probe(lockstep.zeros((3,), np.float32, PLACE), kept)
    gc.collect()
    pair.run_probe(kept)
    wait_until(lambda: len(pair.probe.seen["follower"]) == 6)
    gc.collect()
    alive = [array() is not None for array in pair.probe.arrays]
    assert alive == [False, True] * 5 + [True]


def test_step_without_mesh_arrays_runs_only_on_the_leader(pair):
    first, second = mixed_step(jnp.ones(2), np.ones(2, np.float32), config="another")
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [10.0, 10.0])
    pair.close()
    assert pair.ended == [None]  # it never heard of that config


def test_failing_follower_reports_its_error_to_the_leader(pair):
    pair.probe.fails = "follower"
    array = lockstep.zeros((3,), np.float32, PLACE)
    pair.run_probe(array)
    wait_until(lambda: bool(pair.lost))
    assert pair.lost == ["process 0 has gone: ArithmeticError: no luck on the follower"]
    with pytest.raises(lockstep.LostHostError, match="no luck on the follower"):
        pair.run_probe(array)
    pair.thread.join(30)
    assert isinstance(pair.ended[0], ArithmeticError)


def test_nothing_runs_after_a_step_failed_on_the_leader(pair):
    array = lockstep.zeros((3,), np.float32, PLACE)
    pair.probe.fails = "leader"
    with pytest.raises(ArithmeticError):
        pair.run_probe(array)
    with pytest.raises(lockstep.LostHostError, match="failed here: no luck on the leader"):
        lockstep.put(np.ones(3), PLACE)
    assert len(pair.lost) == 1
    pair.thread.join(30)
    assert isinstance(pair.ended[0], lockstep.LostHostError), "the follower is not left waiting"


@pytest.mark.parametrize("last_words", [b"", b"\0", b"\0\0\0\x09{"])
def test_follower_notices_a_leader_that_disconnects(pair, last_words):
    lockstep.zeros((3,), np.float32, PLACE)
    for connection in pair.leader._connections.values():
        connection.sendall(last_words)
    for connection in pair.leader._connections.values():
        connection.shutdown(socket.SHUT_RDWR)
    pair.thread.join(60)
    assert isinstance(pair.ended[0], lockstep.LostHostError)


def test_array_that_was_not_put_by_the_group_is_rejected(pair):
    with pytest.raises(TypeError, match="`put`"):
        pair.run_probe(lockstep.zeros((3,), np.float32, PLACE), jnp.ones(3))


def test_nothing_runs_after_close(pair):
    pair.close()
    with pytest.raises(lockstep.LostHostError, match="ended"):
        pair.leader.zeros((3,), np.float32, PLACE)


# -- coming together -------------------------------------------------------------------------------------------------

TOKEN = bytes(range(32))


@pytest.fixture
def leading() -> Iterator[Group]:
    listener = socket.create_server(("127.0.0.1", 0))
    invitation = {"host": "127.0.0.1", "port": listener.getsockname()[1], "token": TOKEN.hex()}
    group = Group(0, 3, listener, invitation)
    yield group
    group.end()


def follower_of(group: Group, process: int) -> Group:
    return Group(process, 3, None, {"host": "127.0.0.1", "port": group._port, "token": group._token.hex()})


@contextlib.contextmanager
def followers_of(group: Group, *processes: int) -> Iterator[list[Future[None]]]:
    """These processes of the group, each following on a thread."""
    with ThreadPoolExecutor(len(processes)) as threads:
        yield [threads.submit(follower_of(group, process).follow, SHARED) for process in processes]


def test_unknown_connections_are_rejected_and_a_group_leads_only_once(leading):
    address = ("127.0.0.1", leading._port)
    said = [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, _HELLO.pack(bytes(32), 1), _HELLO.pack(TOKEN, 0), _HELLO.pack(TOKEN, 3)]
    strangers = []
    for words in said:
        strangers.append(socket.create_connection(address))
        strangers[-1].sendall(words)
        strangers[-1].shutdown(socket.SHUT_WR)
    with followers_of(leading, 1, 2) as following:
        leading.lead(SHARED, timeout_s=60)
        for stranger in strangers:
            stranger.settimeout(60)
            with stranger, contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        with pytest.raises(RuntimeError, match="one engine"):
            leading.lead(SHARED)
        leading.end()
        assert [one.result(60) for one in following] == [None, None]


def test_idle_connections_have_no_timeout(leading, monkeypatch):
    """Nobody asks an idle server for anything: both ends wait for each other without a limit."""
    held = []
    module = sys.modules[Group.__module__]  # `lockstep.group` is a function
    monkeypatch.setattr(module, "follow", lambda connection, shared: held.append(connection))
    with followers_of(leading, 1, 2) as following:
        leading.lead(SHARED, timeout_s=60)
        for one in following:
            one.result(60)
    leader = leading._leader
    assert leader is not None
    assert [one.gettimeout() for one in (*held, *leader._connections.values())] == [None] * 4
    leading.end()
    for connection in held:
        connection.close()


def test_second_connection_of_a_process_is_rejected(leading):
    with contextlib.ExitStack() as stack:
        came = []
        for process in (1, 1, 2):
            came.append(stack.enter_context(socket.create_connection(("127.0.0.1", leading._port))))
            came[-1].sendall(_HELLO.pack(TOKEN, process))
            came[-1].settimeout(60)
        leading.lead(SHARED, timeout_s=60)
        assert came[1].recv(1) == b""
        leading.end()
        for connection in (came[0], came[2]):
            with connection.makefile("rb") as stream:
                message = wire.receive(stream)
            assert message is not None and message.header["do"] == "end"


def test_error_names_the_processes_that_did_not_connect(leading):
    with followers_of(leading, 1) as (following,):
        with pytest.raises(lockstep.LostHostError, match=r"\[2\]"):
            leading.lead(SHARED, timeout_s=1.0)
        leading.end()
        with pytest.raises((lockstep.LostHostError, OSError)):
            following.result(60)


def test_follower_error_names_the_unreachable_leader(leading):
    follower = follower_of(leading, 1)
    leading.end()
    with pytest.raises(lockstep.LostHostError, match=str(leading._port)):
        follower.follow(SHARED)

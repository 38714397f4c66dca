"""Device operations: plain JAX in a single process; in a group, recorded and repeated by the other processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Result = TypeVar("Result")

STEPS: dict[str, Step[Any]] = {}
"""All steps by name, the same in every process."""


class Recorder(Protocol):
    """The leader of a group, as used by steps."""

    def run(self, step: Step[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result: ...
    def put(self, values: Any, placement: NamedSharding) -> Any: ...
    def zeros(self, shape: tuple[int, ...], dtype: Any, placement: NamedSharding) -> jax.Array: ...


_recorder: Recorder | None = None


def record_with(recorder: Recorder | None) -> None:
    """Routes all operations through `recorder` from now on; None for plain JAX."""
    global _recorder
    _recorder = recorder


class Step(Generic[Result]):
    """A jitted function; its other attributes (`lower`, `trace`) are those of `jax.jit`.

    In a group, every process repeats a call, unless none of its arguments is on the mesh. Arguments are arrays on the
    mesh, host arrays and numbers, None, tuples of these, and shared objects by name.
    """

    def __init__(self, function: Callable[..., Result], **options: Any) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.jitted = jax.jit(function, **options)
        functools.update_wrapper(self, function)
        STEPS[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if _recorder is None:
            return self.jitted(*args, **kwargs)
        return _recorder.run(self, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles a call with arguments like these, only in this process; nothing runs or is donated."""
        self.jitted.lower(*args, **kwargs).compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["jitted"], name)


def run_in_turn(jitted: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Runs a step in one process of a group. On CPUs it waits for the result: they run independent programs
    concurrently, and gloo would mix up the all-reduces of two programs. Other devices process launches in order."""
    made = jitted(*args, **kwargs)
    return jax.block_until_ready(made) if jax.default_backend() == "cpu" else made


def step(**options: Any) -> Callable[[Callable[..., Result]], Step[Result]]:
    """A decorator that makes a function a `Step`, with options of `jax.jit`."""
    return lambda function: Step(function, **options)


def put(values: Any, placement: jax.sharding.Sharding | None) -> Any:
    """Puts a tree of host arrays on the devices; None for the default one. A CPU device may keep using the memory of
    the host arrays, so they must not be changed afterwards."""
    if _recorder is None or not isinstance(placement, NamedSharding):
        return jax.device_put(values, placement)
    return _recorder.put(values, placement)


def zeros(shape: tuple[int, ...], dtype: Any, placement: jax.sharding.Sharding | None) -> jax.Array:
    """An array of zeros on the devices."""
    if _recorder is None or not isinstance(placement, NamedSharding):
        return jnp.zeros(shape, dtype, device=placement)
    return _recorder.zeros(shape, dtype, placement)


def fetch(values: Any) -> Any:
    """Fetches a tree of arrays to the host, complete even if their parts are on several hosts."""
    return jax.device_get(jax.tree.map(_at_hand, values))


def _at_hand(value: Any) -> Any:
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return value
    assert isinstance(value.sharding, NamedSharding) and isinstance(value.sharding.mesh, Mesh)
    return _replicated(value, mesh=value.sharding.mesh)


def _on_all(value: jax.Array, *, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))


_replicated = Step(_on_all, static_argnames=("mesh",))

"""What runs on the devices: plain JAX in a single process, written down and repeated elsewhere in a group of them."""

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
    """The leader of a group, as steps see it."""

    def run(self, step: Step[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result: ...
    def put(self, values: Any, placement: NamedSharding) -> Any: ...
    def zeros(self, shape: tuple[int, ...], dtype: Any, placement: NamedSharding) -> jax.Array: ...


_recorder: Recorder | None = None


def record_with(recorder: Recorder | None) -> None:
    """From now on all operations go through `recorder`; None for plain JAX."""
    global _recorder
    _recorder = recorder


class Step(Generic[Result]):
    """A jitted function; what it has beside its call (`lower`, `trace`) is that of `jax.jit`.

    In a group of processes a call is repeated by all of them, unless it is given nothing that lies on the mesh.
    Arguments are arrays on the mesh, arrays and numbers of the host, None, tuples of these, and what the group shares
    by name.
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
        """Compiles what a call with arguments like these runs, in this process alone; nothing runs or is donated."""
        self.jitted.lower(*args, **kwargs).compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["jitted"], name)


def run_in_turn(jitted: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """What every process of a group runs of a step. Devices other than CPUs take what they are sent one after the
    other; a CPU begins what does not wait for anything else at once, and gloo would mix up the sums of two programs."""
    made = jitted(*args, **kwargs)
    return jax.block_until_ready(made) if jax.default_backend() == "cpu" else made


def step(**options: Any) -> Callable[[Callable[..., Result]], Step[Result]]:
    """A decorator: the function as a `Step`, with options of `jax.jit`."""
    return lambda function: Step(function, **options)


def put(values: Any, placement: jax.sharding.Sharding | None) -> Any:
    """Arrays of the host, as a tree, on the devices; None for the default one. A CPU device may go on using the memory
    of the host's arrays, which must not change any more."""
    if _recorder is None or not isinstance(placement, NamedSharding):
        return jax.device_put(values, placement)
    return _recorder.put(values, placement)


def zeros(shape: tuple[int, ...], dtype: Any, placement: jax.sharding.Sharding | None) -> jax.Array:
    """An array of zeros on the devices."""
    if _recorder is None or not isinstance(placement, NamedSharding):
        return jnp.zeros(shape, dtype, device=placement)
    return _recorder.zeros(shape, dtype, placement)


def fetch(values: Any) -> Any:
    """Arrays on the host, as a tree, each whole wherever its parts lie."""
    return jax.device_get(jax.tree.map(_at_hand, values))


def _at_hand(value: Any) -> Any:
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return value
    assert isinstance(value.sharding, NamedSharding) and isinstance(value.sharding.mesh, Mesh)
    return _replicated(value, mesh=value.sharding.mesh)


def _on_all(value: jax.Array, *, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))


_replicated = Step(_on_all, static_argnames=("mesh",))

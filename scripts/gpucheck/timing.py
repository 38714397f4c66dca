"""Times device code: many calls per sample, alternating between candidates.

JAX functions run in a compiled loop. A barrier makes each turn's inputs depend on the last turn's result, so that XLA
neither hoists work out of the loop nor merges turns. It costs nothing itself: in the loop compiled for an H100, each
turn has every kernel of the call and no copy. PyTorch functions are captured as one CUDA graph of many calls. So no
time of Python is included; JAX's loop still launches its kernels one by one, which is visible in calls of some ten
microseconds (`turn_us` is the time of an empty turn).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

SAMPLE_S = 0.02
"""Wanted length of one sample."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A function to be timed.

    Attributes:
      sample: runs it often enough and returns the seconds of one call.
      result: of its first run.
      method: how a sample repeats its calls.
    """

    sample: Callable[[], float]
    result: Any
    method: str


def calls_per_sample(floor_s: float, most: int = 1000) -> int:
    """Calls that fill a sample if one takes `floor_s` seconds; at least 2."""
    return max(2, min(most, round(SAMPLE_S / floor_s)))


def looped(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A function of the same arrays that computes the result of `function` `calls` times, one after the other."""

    def run(*arrays: Any) -> Any:
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *arrays))

        def turn(_: Any, last: Any) -> Any:
            held, _ = lax.optimization_barrier((arrays, last))
            return function(*held)

        return lax.fori_loop(0, calls, turn, nothing)

    return run


def lowered_jax(function: Callable[..., Any], arrays: Sequence[Any], calls: int) -> Callable[[], Timed]:
    """Traces `function(*arrays)`; returns a function that compiles and warms it up, which may run in a thread."""
    lowered = jax.jit(looped(function, calls)).lower(*arrays)

    def build() -> Timed:
        compiled = lowered.compile()

        def sample() -> float:
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arrays))
            return (time.perf_counter() - start) / calls

        return Timed(sample, jax.block_until_ready(compiled(*arrays)), "compiled loop")

    return build


def timed_jax(function: Callable[..., Any], arrays: Sequence[Any], calls: int) -> Timed:
    """`function(*arrays)`, compiled and warmed up."""
    return lowered_jax(function, arrays, calls)()


def interleaved(timed: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds per call, one sample a round after an uncounted one: all in turn, every other round backwards."""
    for function in timed.values():
        function.sample()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds):
        for name in list(timed)[:: -1 if number % 2 else 1]:
            seconds[name].append(timed[name].sample())
    return seconds


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Median over rounds of one time over the other of the same round."""
    return statistics.median(own / other for own, other in zip(seconds, others, strict=True))


def random_bfloat16(seed: int, *shape: int) -> jax.Array:
    """Signed normal numbers; zeros would run faster than real data."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def matmul_tflops(size: int, rounds: int) -> float:
    """TFLOP/s of XLA's own bfloat16 product of two `size` x `size` matrices."""
    flops = 2 * size**3
    matrices = random_bfloat16(0, size, size), random_bfloat16(1, size, size)
    timed = timed_jax(jnp.matmul, matrices, calls_per_sample(flops / 700e12, 50))
    return flops / statistics.median(interleaved({"matmul": timed}, rounds)["matmul"]) / 1e12


def copy_gbps(num_bytes: int, rounds: int) -> float:
    """GB/s, read plus written, of one pass over an array larger than any cache; each byte changes, so XLA keeps it."""
    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    timed = timed_jax(lambda x: x ^ np.uint32(1), (words,), calls_per_sample(2 * num_bytes / 3e12, 100))
    return 2 * num_bytes / statistics.median(interleaved({"copy": timed}, rounds)["copy"]) / 1e9


def transfer_gbps(num_bytes: int, rounds: int, memory_kind: str) -> float:
    """GB/s from host memory to the device, one array at a time.

    Args:
      memory_kind: "pinned_host" for memory that the device reads directly, the maximum of the link; "unpinned_host" for
        an ordinary NumPy array.

    Raises:
      NotImplementedError: the device has no such memory.
    """
    device = jax.devices()[0]
    there = {memory.kind for memory in device.addressable_memories()}
    source: Any = np.arange(num_bytes // 4, dtype=np.uint32)
    if memory_kind == "pinned_host":
        if memory_kind not in there:
            raise NotImplementedError(f"memory_kind: wanted one of {sorted(there)}, got {memory_kind!r}")
        source = jax.device_put(source, SingleDeviceSharding(device, memory_kind=memory_kind))
    target = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)

    def sample() -> float:
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(source, target, may_alias=False))
        return time.perf_counter() - start

    seconds = interleaved({memory_kind: Timed(sample, None, "one copy")}, rounds)[memory_kind]
    return num_bytes / statistics.median(seconds) / 1e9


def turn_us(rounds: int) -> float:
    """Microseconds of a turn of the loop with a minimal kernel."""
    timed = timed_jax(lambda x: x + 1, (jnp.zeros(1, jnp.int32),), 1000)
    return 1e6 * statistics.median(interleaved({"turn": timed}, rounds)["turn"])

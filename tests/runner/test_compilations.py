"""The counter of compiled steps: JAX may rename its events, and then it would stay 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ccjax.runner.compilations import compilations


def test_each_new_size_counts_as_one_compilation() -> None:
    counter = compilations()
    assert compilations() is counter
    step = jax.jit(lambda x: x * 3.0 + 1.0)
    sizes = [jnp.ones(size) for size in (11, 12)]
    before, seconds = counter.count, counter.seconds
    for x in sizes * 3:
        step(x).block_until_ready()
    assert counter.count == before + 2
    assert seconds < counter.seconds < seconds + 60.0


def test_background_compilations_are_counted_separately() -> None:
    counter = compilations()
    step = jax.jit(lambda x: x * 5.0 - 1.0)
    sizes = [jnp.ones(size) for size in (13, 14)]
    before, in_background = counter.count, counter.background_count
    with counter.in_background():
        step(sizes[0]).block_until_ready()
    assert (counter.count, counter.background_count) == (before, in_background + 1)
    step(sizes[1]).block_until_ready()
    assert (counter.count, counter.background_count) == (before + 1, in_background + 1)

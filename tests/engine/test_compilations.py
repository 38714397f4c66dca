"""The counter of compiled steps: JAX may rename its events, and then it would stay 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ccjax.engine.compilations import compilations


def test_every_new_size_counts_once() -> None:
    counter = compilations()
    assert compilations() is counter
    step = jax.jit(lambda x: x * 3.0 + 1.0)
    sizes = [jnp.ones(size) for size in (11, 12)]
    before, seconds = counter.count, counter.seconds
    for x in sizes * 3:
        step(x).block_until_ready()
    assert counter.count == before + 2
    assert seconds < counter.seconds < seconds + 60.0

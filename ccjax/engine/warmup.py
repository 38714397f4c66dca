"""Compiles the model's steps for every listed size before the first request. Knows no request and no store."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.engine.buckets import segment_bucket, slot_bucket, token_bucket
from ccjax.engine.loading import Progress
from ccjax.engine.prefill import Prefiller
from models.llama3.steps import embed_step, layer_step, logits_step, rotate_step, select_step

_ALL_SIZES_UP_TO = 1024


def shapes(max_model_len: int) -> list[tuple[int, int]]:
    """(computed tokens, context slots) of every size up to `max_model_len`, decode included, small ones first.

    Beyond 1,024 slots only decode, short questions and full prefills: all of them would take minutes, and what is left
    out compiles once, when a request first needs it.
    """
    slots = sorted({slot_bucket(length) for length in range(1, max_model_len + 1)})
    rows = sorted({token_bucket(length) for length in range(1, max_model_len + 1)})
    return [
        (count, size)
        for size in slots
        for count in rows
        if count <= size and (size <= _ALL_SIZES_UP_TO or count in (1, 16, 32, 64, size))
    ]


def warm_up(prefiller: Prefiller, sizes: Sequence[tuple[int, int]], progress: Progress | None = None) -> None:
    """Runs each step once at every (computed tokens, context slots); all layers share one compiled step.

    XLA compiles on all cores.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(_run_steps, prefiller, count, size) for count, size in sizes]
        try:
            for done, run in enumerate(concurrent.futures.as_completed(runs)):
                run.result()
                if progress is not None:
                    progress("compile", done + 1, len(sizes))
        finally:
            pool.shutdown(cancel_futures=True)


def _run_steps(prefiller: Prefiller, count: int, size: int) -> None:
    config = prefiller.config
    x = embed_step(prefiller.top, np.zeros(count, np.int32))
    shape = (size, config.num_kv_heads, config.head_dim)
    positions = jnp.arange(size, dtype=jnp.int32)
    rows = np.zeros(count, np.int32)
    rotated = rotate_step(jnp.zeros(shape, prefiller.dtype), positions, config=config)
    is_decode = count == 1
    out = layer_step(
        prefiller.params.layers[0],
        x,
        rotated,
        jnp.zeros(shape, prefiller.dtype),
        rows,
        rows,
        positions,
        None if is_decode else positions,
        config=config,
        num_segments=0 if is_decode else segment_bucket(1),
        implementation=prefiller.implementation,
    )
    last = select_step(out.x, np.zeros(1, np.int32))
    jax.block_until_ready(logits_step(prefiller.top, last, config=config))

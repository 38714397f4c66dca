"""Compiles the model's steps for every listed size before the first request. Knows no request and no store."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.engine.buckets import segment_bucket, slot_bucket, token_bucket
from ccjax.engine.loading import Progress
from ccjax.engine.prefill import Prefiller
from models.llama3.steps import embed_step, layer_step, logits_step, rotate_step, select_step


def shapes(max_model_len: int) -> list[tuple[int, int]]:
    """(computed tokens, context slots) of every size up to `max_model_len`, decode included, small ones first."""
    slots = sorted({slot_bucket(length) for length in range(1, max_model_len + 1)})
    rows = sorted({token_bucket(length) for length in range(1, max_model_len + 1)})
    return [(count, size) for size in slots for count in rows if count <= size]


def warm_up(prefiller: Prefiller, max_model_len: int, progress: Progress | None) -> None:
    """Runs each step once at every size; all layers share one compiled step."""
    config, params = prefiller.config, prefiller.params
    todo = shapes(max_model_len)
    num_segments = segment_bucket(1)
    for done, (count, size) in enumerate(todo):
        if progress is not None:
            progress("compile", done, len(todo))
        x = embed_step(params, np.zeros(count, np.int32))
        shape = (size, config.num_kv_heads, config.head_dim)
        positions = jnp.arange(size, dtype=jnp.int32)
        rows = np.zeros(count, np.int32)
        rotated = rotate_step(jnp.zeros(shape, prefiller.dtype), positions, config=config)
        out = layer_step(
            params.layers[0],
            x,
            rotated,
            jnp.zeros(shape, prefiller.dtype),
            rows,
            rows,
            positions,
            None if count == 1 else positions,
            config=config,
            num_segments=0 if count == 1 else num_segments,
            implementation=prefiller.implementation,
        )
        last = select_step(out.x, np.zeros(1, np.int32))
        jax.block_until_ready(logits_step(params, last, config=config))
    if progress is not None:
        progress("compile", len(todo), len(todo))

"""Compiles the model's steps: every listed size before the first request, single ones beside it. Knows no request and
no store."""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.engine.buckets import batch_bucket, entry_bucket, segment_bucket, slot_bucket, token_bucket
from ccjax.engine.loading import Progress
from ccjax.engine.pool import DevicePool, num_pages
from ccjax.engine.prefill import IsCancelled, PrefillCancelledError, Prefiller, Size
from ccjax.engine.sampling import draw
from models.llama3.paged_steps import paged_decode_step, paged_layer_step, write_rows_step
from models.llama3.steps import embed_step, layer_step, logits_step, rotate_step, select_step

_ALL_SIZES_UP_TO = 1024
_BATCHES_UP_TO = 8
_PARTS = 16
"""Parts of a prompt, each with a last page that is not full."""

_POLL_S = 0.05


def shapes(max_model_len: int) -> list[tuple[int, int]]:
    """(computed tokens, context slots) of every size of a prefill up to `max_model_len`, small ones first.

    Beyond 1,024 slots only short questions and full prefills: all of them would take minutes, and what is left out
    compiles once, when a request first needs it. So do packs of several prompts that are longer together.
    """
    slots = sorted({slot_bucket(length) for length in range(1, max_model_len + 1)})
    rows = sorted({token_bucket(length) for length in range(1, max_model_len + 1)})
    return [
        (count, size)
        for size in slots
        for count in rows
        if count <= size and (size <= _ALL_SIZES_UP_TO or count in (1, 16, 32, 64, size))
    ]


def decode_shapes(max_model_len: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """(requests, entries of the page tables) of every decode step up to `max_model_len`, small ones first; of batches,
    up to 8 requests: larger ones compile when they first come."""
    most = num_pages(max_model_len) + _PARTS
    entries = sorted({entry_bucket(count) for count in range(1, most + 1)})
    batches = sorted({batch_bucket(count) for count in range(1, min(max_num_seqs, _BATCHES_UP_TO) + 1)})
    return [(batch, count) for count in entries for batch in batches]


def warm_up(
    prefiller: Prefiller,
    pool: DevicePool,
    sizes: Sequence[tuple[int, int]],
    decode_sizes: Sequence[tuple[int, int]],
    progress: Progress | None = None,
) -> None:
    """Runs each step once at every size: of prefills (computed tokens, context slots), with what brings cached chunks
    in, and of decode (requests, entries). All layers share one compiled step.

    XLA compiles on all cores.
    """
    jobs: list[Callable[[], None]] = [
        functools.partial(_run_pack, prefiller, pool, (count, slots, segment_bucket(1))) for count, slots in sizes
    ]
    jobs += [functools.partial(_run_decode, prefiller, pool, size) for size in decode_sizes]
    counts = {count for count, _ in sizes if count <= _ALL_SIZES_UP_TO}
    jobs += [functools.partial(pool.compile_write, count) for count in sorted(counts)]
    jobs += [functools.partial(pool.compile_gather, slots) for slots in sorted({slots for _, slots in sizes})]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = [threads.submit(job) for job in jobs]
        try:
            for done, run in enumerate(concurrent.futures.as_completed(runs)):
                run.result()
                if progress is not None:
                    progress("compile", done + 1, len(jobs))
        finally:
            threads.shutdown(cancel_futures=True)


def _run_pack(prefiller: Prefiller, pool: DevicePool, size: Size) -> None:
    """A layer of a pack that writes nowhere and sees nothing."""
    num_rows, num_slots, num_segments = size
    x = embed_step(prefiller.top, np.zeros(num_rows, np.int32))
    rows, nowhere = jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, pool.num_slots, jnp.int32)
    slots, context = jnp.full(num_slots, pool.num_slots, jnp.int32), jnp.zeros(num_slots, jnp.int32)
    out = pool.update(
        0,
        lambda k_pages, v_pages: paged_layer_step(
            prefiller.params.layers[0],
            x,
            k_pages,
            v_pages,
            rows,
            nowhere,
            rows,
            slots,
            context,
            context,
            context,
            config=prefiller.config,
            num_segments=num_segments,
            implementation=prefiller.implementation,
        ),
    )
    shape = (num_slots, prefiller.config.num_kv_heads, prefiller.config.head_dim)
    none = jnp.asarray(np.zeros(shape, prefiller.dtype))  # as `LayerLoader` does it
    pool.update(0, lambda k_pages, v_pages: write_rows_step(k_pages, v_pages, slots, none, none))
    last = select_step(out.x, np.zeros(1, np.int32))
    jax.block_until_ready(logits_step(prefiller.top, last, config=prefiller.config))


def _run_decode(prefiller: Prefiller, pool: DevicePool, size: tuple[int, int]) -> None:
    """A layer of a decode step that writes nowhere and sees nothing, and what follows the last layer."""
    batch, num_entries = size
    x = embed_step(prefiller.top, np.zeros(batch, np.int32))
    rows, nowhere = jnp.zeros(batch, jnp.int32), jnp.full(batch, pool.num_slots, jnp.int32)
    table = jnp.zeros((batch, num_entries), jnp.int32)
    out = pool.update(
        0,
        lambda k_pages, v_pages: paged_decode_step(
            prefiller.params.layers[0],
            x,
            k_pages,
            v_pages,
            rows,
            nowhere,
            table,
            table,
            table,
            config=prefiller.config,
            implementation=None,
        ),
    )
    logits = logits_step(prefiller.top, out.x, config=prefiller.config)
    draw(logits, [])


class BackgroundCompiler:
    """Compiles on a thread of its own: a compilation cannot be stopped, but need not be waited for."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ccjax-compile")
        self._runs: dict[Size, concurrent.futures.Future[None]] = {}

    def wait_for(self, size: Size, is_cancelled: IsCancelled | None) -> None:
        """Returns once the steps of a size are compiled.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True first; the compilation goes on.
        """
        if self._prefiller.has_run(size):
            return
        if size not in self._runs:
            self._runs[size] = self._pool.submit(_run_steps, self._prefiller, size)
        while not concurrent.futures.wait([self._runs[size]], timeout=_POLL_S).done:
            if is_cancelled is not None and is_cancelled():
                raise PrefillCancelledError
        self._runs[size].result()


def _run_steps(prefiller: Prefiller, size: Size) -> None:
    num_rows, num_slots, num_segments = size
    config = prefiller.config
    x = embed_step(prefiller.top, np.zeros(num_rows, np.int32))
    shape = (num_slots, config.num_kv_heads, config.head_dim)
    positions = jnp.arange(num_slots, dtype=jnp.int32)
    rows = np.zeros(num_rows, np.int32)
    rotated = rotate_step(jnp.zeros(shape, prefiller.dtype), positions, config=config)
    out = layer_step(
        prefiller.params.layers[0],
        x,
        rotated,
        jnp.zeros(shape, prefiller.dtype),
        rows,
        rows,
        positions,
        positions if num_segments else None,
        config=config,
        num_segments=num_segments,
        implementation=prefiller.implementation,
    )
    last = select_step(out.x, np.zeros(1, np.int32))
    jax.block_until_ready(logits_step(prefiller.top, last, config=config))

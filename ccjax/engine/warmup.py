"""Compiles the model's steps: every listed size before the first request, single ones beside it. Knows no request and
no store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import numpy as np

from ccjax.engine.buckets import batch_bucket, entry_bucket, segment_bucket, slot_bucket, token_bucket
from ccjax.engine.loading import Progress
from ccjax.engine.pool import DevicePool, num_pages
from ccjax.engine.prefill import IsCancelled, PrefillCancelledError, Prefiller, Size
from ccjax.engine.sampling import draw
from models.llama3.paged_steps import (
    deviation_step,
    page_rotation_step,
    paged_decode_step,
    paged_layer_step,
    rotation_step,
    write_rows_step,
)
from models.llama3.steps import embed_step, layer_step, logits_step, rotate_step, select_step
from models.lockstep import put, zeros

_ALL_ROWS_UP_TO = 4096
_PARTS = 16
"""Parts of a prompt, each with a last page that is not full."""

_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """What an engine's steps are compiled for.

    Attributes:
      max_model_len, max_num_batched_tokens, max_num_seqs: as in `EngineConfig`.
      with_mass: of `Pack`.
    """

    max_model_len: int
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 32
    with_mass: bool = True

    @property
    def context_tokens(self) -> int:
        """Most tokens of the contexts of a pack: any one prompt, or as many as a full pack with half of all reused."""
        usual = min(2 * self.max_num_batched_tokens, 4 * self.max_model_len)
        return slot_bucket(max(self.max_model_len, usual))

    @property
    def num_segments(self) -> int:
        """Columns of the mass output, for prompts of up to 15 chunks."""
        return segment_bucket(1) if self.with_mass else 0

    def packs(self) -> list[tuple[int, int]]:
        """(computed tokens, context slots) of every pack, small ones first.

        Beyond 4,096 slots only short questions and full packs: all of them would take minutes, and what is left out
        compiles once, when a request first needs it.
        """
        slots = sorted({slot_bucket(length) for length in range(1, self.context_tokens + 1)})
        rows = self._rows()
        full = rows[-1]
        return [
            (count, size)
            for size in slots
            for count in rows
            if count <= size and (size <= _ALL_ROWS_UP_TO or count in (1, 16, 32, 64, full))
        ]

    def selections(self) -> list[tuple[int, int]]:
        """(computed tokens, requests that those hold the last token of) of every pack, up to 8 requests."""
        return [(rows, count) for rows in self._rows() for count in self._batches() if count <= min(rows, 8)]

    def decodes(self) -> list[tuple[int, int]]:
        """(requests, entries of the page tables) of every decode step up to `max_model_len`, small ones first."""
        most = num_pages(self.max_model_len) + _PARTS
        entries = sorted({entry_bucket(count) for count in range(1, most + 1)})
        return [(batch, count) for count in entries for batch in self._batches()]

    def _rows(self) -> list[int]:
        most = min(self.max_num_batched_tokens, self.context_tokens)
        return sorted({token_bucket(length) for length in range(1, most + 1)})

    def _batches(self) -> list[int]:
        return sorted({batch_bucket(count) for count in range(1, self.max_num_seqs + 1)})


def warm_up(
    prefiller: Prefiller,
    pool: DevicePool,
    sizes: BatchSizes,
    progress: Progress | None = None,
    *,
    with_deviation: bool = False,
) -> None:
    """Runs each step once at every size: of packs, with what brings cached chunks in, and of decode. All layers share
    one compiled step. XLA compiles on all cores.

    Args:
      with_deviation: the step that chooses tokens by deviation, too.
    """
    packs = sizes.packs()
    rows, slots = sorted({count for count, _ in packs}), sorted({size for _, size in packs})
    jobs: list[Callable[[], None]] = [
        functools.partial(compile_pack, prefiller, pool, (*size, sizes.num_segments)) for size in packs
    ]
    jobs += [functools.partial(_run_decode, prefiller, pool, size) for size in sizes.decodes()]
    jobs += [functools.partial(_run_selection, prefiller, size) for size in sizes.selections()]
    jobs += [functools.partial(pool.compile_write, count) for count in rows]
    jobs += [functools.partial(pool.compile_gather, count) for count in slots]
    if with_deviation:
        jobs += [functools.partial(_run_deviation, prefiller, pool, count) for count in rows]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = [threads.submit(job) for job in jobs]
        try:
            for done, run in enumerate(concurrent.futures.as_completed(runs)):
                run.result()
                if progress is not None:
                    progress("compile", done + 1, len(jobs))
        finally:
            threads.shutdown(cancel_futures=True)


def compile_pack(prefiller: Prefiller, pool: DevicePool, size: Size) -> None:
    """Runs a layer of a pack that writes nowhere and sees nothing."""
    num_rows, num_slots, num_segments = size
    x = embed_step(prefiller.top, prefiller.put(np.zeros(num_rows, np.int32)))
    rows, nowhere = prefiller.put((np.zeros(num_rows, np.int32), np.full(num_rows, pool.num_slots, np.int32)))
    slots, context = prefiller.put((np.full(num_slots, pool.num_slots, np.int32), np.zeros(num_slots, np.int32)))
    settings = {"config": prefiller.config, "mesh": prefiller.mesh}
    rotations = rotation_step(rows, **settings), rotation_step(context, **settings)
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
            context if num_segments else None,
            *rotations,
            config=prefiller.config,
            num_segments=num_segments,
            implementation=prefiller.implementation,
            mesh=prefiller.mesh,
        ),
    )
    shape = (num_slots, prefiller.config.num_kv_heads, prefiller.config.head_dim)
    none = put(np.zeros(shape, prefiller.dtype), prefiller.context_placement)  # as `LayerLoader` does it
    mesh = prefiller.mesh
    pool.update(0, lambda k_pages, v_pages: write_rows_step(k_pages, v_pages, slots, none, none, mesh=mesh))
    jax.block_until_ready(out.x)


def _run_selection(prefiller: Prefiller, size: tuple[int, int]) -> None:
    num_rows, num_requests = size
    x = embed_step(prefiller.top, prefiller.put(np.zeros(num_rows, np.int32)))
    jax.block_until_ready(select_step(x, prefiller.put(np.zeros(num_requests, np.int32))))


def _run_deviation(prefiller: Prefiller, pool: DevicePool, num_rows: int) -> None:
    x = embed_step(prefiller.top, prefiller.put(np.zeros(num_rows, np.int32)))
    nowhere = prefiller.put(np.full(num_rows, pool.num_slots, np.int32))
    layer, config = prefiller.params.layers[0], prefiller.config
    out = pool.read(0, lambda k_pages, v_pages: deviation_step(layer, x, k_pages, v_pages, nowhere, config=config))
    jax.block_until_ready(out)


def _run_decode(prefiller: Prefiller, pool: DevicePool, size: tuple[int, int]) -> None:
    """A layer of a decode step that writes nowhere and sees nothing, and what follows the last layer."""
    batch, num_entries = size
    x = embed_step(prefiller.top, prefiller.put(np.zeros(batch, np.int32)))
    rows, nowhere = prefiller.put((np.zeros(batch, np.int32), np.full(batch, pool.num_slots, np.int32)))
    table = prefiller.put(np.zeros((batch, num_entries), np.int32))
    rotation = page_rotation_step(table, config=prefiller.config, mesh=prefiller.mesh)
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
            rotation,
            config=prefiller.config,
            implementation=prefiller.decode_implementation,
            mesh=prefiller.mesh,
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
    x = embed_step(prefiller.top, prefiller.put(np.zeros(num_rows, np.int32)))
    shape = (num_slots, config.num_kv_heads, config.head_dim)
    positions = prefiller.put(np.arange(num_slots, dtype=np.int32))
    rows = prefiller.put(np.zeros(num_rows, np.int32))
    empty = functools.partial(zeros, shape, prefiller.dtype, prefiller.context_placement)
    rotated = rotate_step(empty(), positions, config=config)
    out = layer_step(
        prefiller.params.layers[0],
        x,
        rotated,
        empty(),
        rows,
        rows,
        positions,
        positions if num_segments else None,
        config=config,
        num_segments=num_segments,
        implementation=prefiller.implementation,
        mesh=prefiller.mesh,
    )
    last = select_step(out.x, prefiller.put(np.zeros(1, np.int32)))
    jax.block_until_ready(logits_step(prefiller.top, last, config=config))

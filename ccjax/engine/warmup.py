"""Compiles the model's steps: sizes before the first request, others beside requests. Knows no request and no store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ccjax.engine.buckets import batch_bucket, entry_bucket, segment_bucket, slot_bucket, token_bucket
from ccjax.engine.compilations import compilations
from ccjax.engine.compiled_sizes import Key
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
from models.lockstep import Step, put, zeros

logger = logging.getLogger(__name__)

_ALL_ROWS_UP_TO = 4096
_PARTS = 16
"""Parts of a prompt, each with a last page that is not full."""

_FEWEST_ROWS = 32
_MOST_PADDING = 1.5
"""Before the first request packs are compiled for no fewer rows than the first number, and so that each finds a size at
most so many times its own: a layer of SmolLM2 takes 6 ms with 32 rows, 58 ms with 640 (processor time, AVX-512)."""

_MOST_ENDS = 8
"""Prompts that usually end in one pack, at most."""

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
        return slot_bucket(max(self.max_model_len, self._usual_tokens))

    @property
    def num_segments(self) -> int:
        """Columns of the mass output, for prompts of up to 15 chunks."""
        return segment_bucket(1) if self.with_mass else 0

    def packs(self) -> list[tuple[int, int]]:
        """(computed tokens, context slots) of every pack, small ones first.

        Beyond 4,096 slots only short questions and full packs: all of them would take minutes, and what is left out
        compiles once, when a request first needs it.
        """
        rows = self.rows()
        full = rows[-1]
        return [
            (count, size)
            for size in self.slots()
            for count in rows
            if count <= size and (size <= _ALL_ROWS_UP_TO or count in (1, 16, 32, 64, full))
        ]

    def first_packs(self) -> list[tuple[int, int]]:
        """Few packs that every other one fits into: most with little padding of rows. Slots cost little, since those
        that are not used are not looked at: 640 rows over 600 tokens take 58 ms with 1,024 slots, 70 with 8,192."""
        rows = self.rows()
        spread = _spread([count for count in rows if count >= _FEWEST_ROWS] or rows[-1:])
        usual, most = slot_bucket(min(self._usual_tokens, self.context_tokens)), self.context_tokens
        packs = [(count, usual) for count in spread if count <= usual]
        return packs + [(count, most) for count in dict.fromkeys((spread[0], spread[-1])) if most > usual]

    def decodes(self) -> list[tuple[int, int]]:
        """(requests, entries of the page tables) of every decode step up to `max_model_len`, small ones first."""
        most = num_pages(self.max_model_len) + _PARTS
        entries = sorted({entry_bucket(count) for count in range(1, most + 1)})
        return [(batch, count) for count in entries for batch in self._batches()]

    def first_decodes(self) -> list[tuple[int, int]]:
        """Few decode steps that every other one fits into: one request alone, a few, all. Entries that are not used
        cost next to nothing."""
        batches, entries = self._batches(), self.decodes()[-1][1]
        few = [batch for batch in batches if batch <= _MOST_ENDS]
        return [(batch, entries) for batch in dict.fromkeys([*few[:1], *few[-1:], batches[-1]])]

    def ends(self) -> list[int]:
        """Requests whose last token is in a pack: up to 8, or all."""
        batches = self._batches()
        return [count for count in batches if count <= _MOST_ENDS or count == batches[-1]]

    def rows(self) -> list[int]:
        """Computed tokens of every pack, ascending."""
        most = min(self.max_num_batched_tokens, self.context_tokens)
        return sorted({token_bucket(length) for length in range(1, most + 1)})

    def slots(self) -> list[int]:
        """Context slots of every pack, ascending."""
        return sorted({slot_bucket(length) for length in range(1, self.context_tokens + 1)})

    @property
    def _usual_tokens(self) -> int:
        return min(2 * self.max_num_batched_tokens, 4 * self.max_model_len)

    def _batches(self) -> list[int]:
        return sorted({batch_bucket(count) for count in range(1, self.max_num_seqs + 1)})


def _spread(sizes: Sequence[int]) -> list[int]:
    """Few of some ascending sizes, the largest among them: each of the others finds one that is at most `_MOST_PADDING`
    times as large."""
    kept, smallest = [], sizes[0]
    for size, larger in itertools.pairwise(sizes):
        if larger > _MOST_PADDING * smallest:
            kept.append(size)
            smallest = larger
    return [*kept, sizes[-1]]


class StepCompiler:
    """Compiles the steps of one engine, size by size; from any thread.

    On a single device nothing runs but steps that need no pages, so that a compilation keeps no pages from requests.
    Over several devices all of them run, as the processes of a group want it, once none does for requests.

    Args:
      with_deviation: the step that chooses tokens by deviation, too.
      with_tier: what chunks of the device tier are written and read with, too.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        pool: DevicePool,
        sizes: BatchSizes,
        *,
        with_deviation: bool = False,
        with_tier: bool = True,
    ) -> None:
        self._prefiller, self._pool, self._sizes = prefiller, pool, sizes
        self._with_deviation, self._with_tier = with_deviation, with_tier

    @property
    def is_apart(self) -> bool:
        """True where it may compile while requests run."""
        return self._prefiller.mesh is None

    def all(self) -> list[Key]:
        """Every size that is listed, those of `first` in front."""
        packs: list[Key] = [("pack", (*size, self._sizes.num_segments)) for size in self._sizes.packs()]
        decodes: list[Key] = [("decode", size) for size in self._sizes.decodes()]
        writes: list[Key] = [("write", (count,)) for count in self._sizes.rows()] if self._with_tier else []
        return list(dict.fromkeys([*self.first(), *packs, *decodes, *writes]))

    def first(self) -> list[Key]:
        """Few sizes that all others fit into, and those that have no substitute."""
        packs: list[Key] = [("pack", (*size, self._sizes.num_segments)) for size in self._sizes.first_packs()]
        decodes: list[Key] = [("decode", size) for size in self._sizes.first_decodes()]
        contexts: list[Key] = [("context", (count,)) for count in self._sizes.slots()]
        writes: list[Key] = [("write", (count,)) for count in _spread(self._sizes.rows())] if self._with_tier else []
        return [*decodes, *packs, *contexts, *writes]

    def compile(self, key: Key) -> None:
        """Compiles what runs at a size."""
        kind, size = key
        if kind == "pack":
            num_rows, num_slots, num_segments = size
            compile_pack(self._prefiller, self._pool, (num_rows, num_slots, num_segments))
            self._compile_ends(num_rows)
            if self._with_deviation:
                _compile_deviation(self._prefiller, self._pool, num_rows)
        elif kind == "decode":
            batch, num_entries = size
            _compile_decode(self._prefiller, self._pool, (batch, num_entries))
            self._compile_logits(batch)
        elif kind == "batch":
            self._compile_logits(*size)
        elif kind == "context":
            _compile_context(self._prefiller, self._pool, *size)
            if self._with_tier:
                self._pool.compile_gather(*size)
        else:
            self._pool.compile_write(*size)
        self._prefiller.sizes.note(kind, size)

    def warm_up(self, keys: Sequence[Key], progress: Progress | None = None) -> None:
        """Compiles all of these, on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            runs = [threads.submit(self.compile, key) for key in keys]
            try:
                for done, run in enumerate(concurrent.futures.as_completed(runs)):
                    run.result()
                    if progress is not None:
                        progress("compile", done + 1, len(keys))
            finally:
                threads.shutdown(cancel_futures=True)

    def _compile_ends(self, num_rows: int) -> None:
        x = embed_step(self._prefiller.top, self._prefiller.put(np.zeros(num_rows, np.int32)))
        for count in self._sizes.ends():
            jax.block_until_ready(select_step(x, self._prefiller.put(np.zeros(count, np.int32))))

    def _compile_logits(self, batch: int) -> None:
        """What follows the last layer."""
        x = embed_step(self._prefiller.top, self._prefiller.put(np.zeros(batch, np.int32)))
        draw(logits_step(self._prefiller.top, x, config=self._prefiller.config), [])
        self._prefiller.sizes.note("batch", (batch,))


def compile_pack(prefiller: Prefiller, pool: DevicePool, size: Size) -> None:
    """Compiles a layer of a pack, with what comes before it."""
    num_rows, num_slots, num_segments = size
    x = embed_step(prefiller.top, prefiller.put(np.zeros(num_rows, np.int32)))
    rows, nowhere = prefiller.put((np.zeros(num_rows, np.int32), np.full(num_rows, pool.num_slots, np.int32)))
    slots, context = prefiller.put((np.full(num_slots, pool.num_slots, np.int32), np.zeros(num_slots, np.int32)))
    settings = {"config": prefiller.config, "mesh": prefiller.mesh}
    rotations = rotation_step(rows, **settings), rotation_step(context, **settings)
    _compile_update(
        prefiller,
        pool,
        lambda step, k_pages, v_pages: step(
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
        paged_layer_step,
    )


def _compile_context(prefiller: Prefiller, pool: DevicePool, num_slots: int) -> None:
    shape = (num_slots, prefiller.config.num_kv_heads, prefiller.config.head_dim)
    none = put(np.zeros(shape, prefiller.dtype), prefiller.context_placement)  # as `LayerLoader` does it
    slots = prefiller.put(np.full(num_slots, pool.num_slots, np.int32))
    _compile_update(
        prefiller,
        pool,
        lambda step, k_pages, v_pages: step(k_pages, v_pages, slots, none, none, mesh=prefiller.mesh),
        write_rows_step,
    )


def _compile_deviation(prefiller: Prefiller, pool: DevicePool, num_rows: int) -> None:
    x = embed_step(prefiller.top, prefiller.put(np.zeros(num_rows, np.int32)))
    nowhere = prefiller.put(np.full(num_rows, pool.num_slots, np.int32))
    layer, config = prefiller.params.layers[0], prefiller.config
    if prefiller.mesh is None:
        deviation_step.compile(layer, x, *pool.pages(0), nowhere, config=config)
        return
    out = pool.read(0, lambda k_pages, v_pages: deviation_step(layer, x, k_pages, v_pages, nowhere, config=config))
    jax.block_until_ready(out)


def _compile_decode(prefiller: Prefiller, pool: DevicePool, size: tuple[int, int]) -> None:
    """Compiles a layer of a decode step, with what comes before it."""
    batch, num_entries = size
    x = embed_step(prefiller.top, prefiller.put(np.zeros(batch, np.int32)))
    rows, nowhere = prefiller.put((np.zeros(batch, np.int32), np.full(batch, pool.num_slots, np.int32)))
    table = prefiller.put(np.zeros((batch, num_entries), np.int32))
    rotation = page_rotation_step(table, config=prefiller.config, mesh=prefiller.mesh)
    _compile_update(
        prefiller,
        pool,
        lambda step, k_pages, v_pages: step(
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
        paged_decode_step,
    )


def _compile_update(
    prefiller: Prefiller,
    pool: DevicePool,
    call: Callable[[Callable[..., Any], jax.Array, jax.Array], Any],
    step: Step[Any],
) -> None:
    """Compiles a step that takes pages, as `call` calls it: with rows that are written nowhere and see nothing."""
    if prefiller.mesh is None:
        call(step.compile, *pool.pages(0))
    else:
        jax.block_until_ready(pool.update(0, functools.partial(call, step))[0])


class BackgroundCompiler:
    """Compiles on a thread of its own: a compilation cannot be stopped, but need not be waited for."""

    def __init__(self, prefiller: Prefiller, steps: StepCompiler) -> None:
        self._prefiller, self._steps = prefiller, steps
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ccjax-compile")
        self._runs: dict[Size, concurrent.futures.Future[None]] = {}
        self._next: concurrent.futures.Future[None] | None = None
        self._is_closed = False

    def wait_for(self, size: Size, is_cancelled: IsCancelled | None) -> None:
        """Returns once the steps of a size are compiled.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True first; the compilation goes on.
        """
        if self._prefiller.has_run(size):
            return
        if size not in self._runs:
            self._runs[size] = self._pool.submit(_run_steps, self._prefiller, size)
        if not _is_done(self._runs[size], is_cancelled):
            raise PrefillCancelledError
        self._runs[size].result()

    def compile_next(self, is_cancelled: IsCancelled | None) -> bool:
        """Compiles one size of those that are wanted or left. False where there was none; True also where
        `is_cancelled` returned True first, and the compilation goes on."""
        if self._next is None:
            key = self._prefiller.sizes.next()
            if key is None:
                return False
            self._next = self._pool.submit(self._compile, key)
        if _is_done(self._next, is_cancelled):
            self._next = None
        return True

    def close(self) -> None:
        """Compiles nothing more, but does not wait for what it has begun."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: Key) -> None:
        try:
            with compilations().in_background():
                self._steps.compile(key)
        except Exception:
            if not self._is_closed:  # the pool is gone then
                logger.exception("%s: could not be compiled ahead", key)
            self._prefiller.sizes.give_up(key)


def _is_done(run: concurrent.futures.Future[None], is_cancelled: IsCancelled | None) -> bool:
    """Waits for the end; False where `is_cancelled` returned True first."""
    while not concurrent.futures.wait([run], timeout=_POLL_S).done:
        if is_cancelled is not None and is_cancelled():
            return False
    return True


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

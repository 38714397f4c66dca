"""Compiles the model's steps: some sizes before the first request, others while requests run."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ccjax.loading.model import Progress
from ccjax.models.llama3.inputs import DecodeInputs, StepInputs
from ccjax.models.llama3.paged_steps import deviation_step, paged_decode_step, paged_layer_step, question_step
from ccjax.models.llama3.steps import embed_step, logits_step, select_step, write_rows_step
from ccjax.runner.adjustments import Adjustments
from ccjax.runner.batch_sizes import BatchSizes, spread
from ccjax.runner.cancellation import IsCancelled
from ccjax.runner.compilations import compilations
from ccjax.runner.compiled_sizes import Key, Kind
from ccjax.runner.compiler_threads import lower_compilers
from ccjax.runner.decode import decode_parts, run_layers
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.pool import DevicePool
from ccjax.runner.sampling import SampleSpec, sample_tokens
from ccjax.sampling import SamplingParams

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class StepCompiler:
    """Compiles the steps of one engine, size by size; may be called from any thread.

    On a single device, steps that use pages are compiled without running, so that compilations never hold the pages
    that requests need. Over several devices, all steps are run, as the processes of a group require, while no request
    runs.

    Args:
      with_deviation: also compile the step that chooses tokens by deviation.
      with_question: also compile the pass of questions whose attention chooses tokens.
      with_tier: also compile the steps that write and read chunks of the device tier.
      with_live_mass: the packs of requests compute masses, not only those that prepare passages.
    """

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        sizes: BatchSizes,
        *,
        with_deviation: bool = False,
        with_question: bool = False,
        with_tier: bool = True,
        with_live_mass: bool = True,
    ) -> None:
        self._model, self._pool, self._sizes = model, pool, sizes
        self._with_deviation, self._with_question, self._with_tier = with_deviation, with_question, with_tier
        self._with_live_mass = with_live_mass
        self._rows: set[int] = set()

    @property
    def is_apart(self) -> bool:
        """True if compiling is possible while requests run: on a single device."""
        return self._model.mesh is None

    def all(self) -> list[Key]:
        """All listed sizes, those of `first` first, then a few packs with another number of masses, and the sampling of
        constrained answers and of those with penalties."""
        sizes = self._sizes
        changed: tuple[Kind, ...] = ("masks", "adjustments")
        masks: list[Key] = [(kind, (rows,)) for kind in changed for rows in sizes.batches()]
        columns, others = (sizes.num_segments, sizes.more_segments) if self._with_live_mass else (0, 0)
        other: list[Key] = [("pack", (*size, others)) for size in sizes.first_packs()]
        keys = self._keys(sizes.packs(), sizes.questions(), sizes.decodes(), sizes.rows(), columns)
        return list(dict.fromkeys([*self.first(), *other, *masks, *keys]))

    def first(self) -> list[Key]:
        """A few sizes that cover all others, and those that cannot be substituted."""
        sizes = self._sizes
        contexts: list[Key] = [("context", (count,)) for count in sizes.slots()]
        packs, questions, decodes = sizes.first_packs(), sizes.first_questions(), sizes.first_decodes()
        return [*self._keys(packs, questions, decodes, spread(sizes.rows()), sizes.num_segments), *contexts]

    def _keys(
        self,
        packs: Sequence[tuple[int, int]],
        questions: Sequence[tuple[int, int]],
        decodes: Sequence[tuple[int, int]],
        writes: Sequence[int],
        columns: int,
    ) -> list[Key]:
        keys: list[Key] = [("decode", size) for size in decodes]
        keys.extend(("pack", (*size, columns)) for size in packs)
        if self._with_question:
            keys.extend(("question", size) for size in questions)
        if self._with_tier:
            keys.extend(("write", (count,)) for count in writes)
        return keys

    def compile(self, key: Key) -> None:
        """Compiles the steps that run at a size."""
        kind, size = key
        if kind == "pack":
            num_rows, num_slots, num_segments = size
            compile_pack(self._model, self._pool, (num_rows, num_slots, num_segments))
            self._compile_ends(num_rows)
            if self._with_deviation:
                _compile_deviation(self._model, self._pool, num_rows)
                self._compile_choices(num_rows)
        elif kind == "question":
            num_rows, num_slots = size
            _compile_question(self._model, self._pool, num_rows, num_slots)
        elif kind == "decode":
            batch, num_entries = size
            _compile_decode(self._model, self._pool, batch, num_entries)
            self._compile_logits(batch)
        elif kind == "batch":
            self._compile_logits(size[0])
        elif kind == "masks":
            mask = b"\xff\xff\xff\xff" * -(-self._model.config.vocab_size // 32)
            self._compile_logits(size[0], [SampleSpec(SamplingParams(), 0, 0, lambda: mask)])
        elif kind == "adjustments":
            sampling = SamplingParams(presence_penalty=1.0)
            adjustments = Adjustments(sampling, np.zeros(1, np.int32), ends=())
            adjustments.push(0)
            self._compile_logits(size[0], [SampleSpec(sampling, 0, 0, adjustments=adjustments)])
        elif kind == "context":
            _compile_context(self._model, self._pool, *size)
            self._pool.compile_gather(*size)
        else:
            self._pool.compile_write(*size)
        self._model.sizes.note(kind, size)

    def warm_up(self, keys: Sequence[Key], progress: Progress | None = None) -> None:
        """Compiles all of the given sizes, on all cores; for a GPU one after the other, since XLA times its products on
        the card itself while it compiles."""
        with concurrent.futures.ThreadPoolExecutor(1 if jax.default_backend() == "gpu" else os.cpu_count()) as threads:
            runs = [threads.submit(self.compile, key) for key in keys]
            try:
                for done, run in enumerate(concurrent.futures.as_completed(runs)):
                    run.result()
                    if progress is not None:
                        progress("compile", done + 1, len(keys))
            finally:
                threads.shutdown(cancel_futures=True)

    def _compile_ends(self, num_rows: int) -> None:
        x = embed_step(self._model.top, self._model.put(np.zeros(num_rows, np.int32)))
        for count in self._sizes.ends():
            jax.block_until_ready(select_step(x, self._model.put(np.zeros(count, np.int32))))

    def _compile_choices(self, num_rows: int) -> None:
        """Compiles the steps that drop rows, between packs of this size and of those compiled so far."""
        self._rows.add(num_rows)  # before it is read, so that none of two sizes compiled at once misses the other
        for other in self._rows.copy():
            more, fewer = max(other, num_rows), min(other, num_rows)
            x = embed_step(self._model.top, self._model.put(np.zeros(more, np.int32)))
            jax.block_until_ready(select_step(x, self._model.put(np.zeros(fewer, np.int32))))

    def _compile_logits(self, batch: int, specs: Sequence[SampleSpec] = ()) -> None:
        """Compiles the steps after the last layer: logits, and sampling as in `specs`."""
        x = embed_step(self._model.top, self._model.put(np.zeros(batch, np.int32)))
        sample_tokens(logits_step(self._model.top, x, config=self._model.config), specs)
        self._model.sizes.note("batch", (batch,))


def compile_pack(model: DeviceModel, pool: DevicePool, size: tuple[int, int, int]) -> None:
    """Compiles a layer of a pack and the steps before it."""
    _compile_layer(model, pool, paged_layer_step, _step_inputs(model, pool, *size))


def _compile_question(model: DeviceModel, pool: DevicePool, num_rows: int, num_slots: int) -> None:
    _compile_layer(model, pool, question_step, _step_inputs(model, pool, num_rows, num_slots, 0))


def _compile_decode(model: DeviceModel, pool: DevicePool, batch: int, num_entries: int) -> None:
    """Compiles a decode step."""
    inputs = model.put(_zeros(DecodeInputs.abstract(batch, num_entries, model.config.head_dim)))
    rotation = model.rotation(inputs.page_table)
    inputs = dataclasses.replace(inputs, q_slot=_nowhere(model, pool, batch), page_rotation=rotation)
    token_ids, parts = model.put(np.zeros(batch, np.int32)), decode_parts(model)
    if model.mesh is not None:
        jax.block_until_ready(run_layers(model, pool, token_ids, inputs))
        return
    x, top = (token_ids, model.top) if len(parts) == 1 else (embed_step(model.top, token_ids), None)
    layers = model.params.layers[parts[0]]
    pages = [pool.pages(number) for number in range(len(layers))]
    paged_decode_step.lower(layers, top, x, pages, inputs, settings=model.settings).compile()


def _step_inputs(model: DeviceModel, pool: DevicePool, num_rows: int, num_slots: int, num_segments: int) -> StepInputs:
    """Rows that are not written and attend to nothing that is stored."""
    inputs = model.put(_zeros(StepInputs.abstract(num_rows, num_slots, num_segments, model.config.head_dim)))
    return dataclasses.replace(
        inputs,
        q_slot=_nowhere(model, pool, num_rows),
        k_slot=_nowhere(model, pool, num_slots),
        q_rotation=model.rotation(inputs.q_pos),
        k_rotation=model.rotation(inputs.k_pos),
    )


def _zeros(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)


def _nowhere(model: DeviceModel, pool: DevicePool, count: int) -> jax.Array:
    """Slots past the end."""
    return model.put(np.full(count, pool.num_slots, np.int32))


def _compile_layer(model: DeviceModel, pool: DevicePool, step: Any, inputs: StepInputs) -> None:
    """Compiles the step of a layer, which updates its pages, and the embedding of its rows."""
    x = embed_step(model.top, model.put(np.zeros(inputs.q_slot.shape, np.int32)))
    layer, settings = model.params.layers[0], model.settings
    if model.mesh is None:
        step.lower(layer, x, pool.pages(0), inputs, settings=settings).compile()
        return
    out = pool.update(0, lambda pages: step(layer, x, pages, inputs, settings=settings))
    jax.block_until_ready(out.x)  # not the pages: they are donated to the next step


def _compile_context(model: DeviceModel, pool: DevicePool, num_slots: int) -> None:
    shape = (num_slots, model.config.num_kv_heads, model.config.head_dim)
    none = jax.device_put(np.zeros(shape, model.dtype), model.rows_placement)  # as in `LayerLoader`
    slots = _nowhere(model, pool, num_slots)
    if model.mesh is None:
        write_rows_step.lower(pool.pages(0), slots, none, none, mesh=None).compile()
    else:
        pool.write_rows(0, slots, none, none)


def _compile_deviation(model: DeviceModel, pool: DevicePool, num_rows: int) -> None:
    x = embed_step(model.top, model.put(np.zeros(num_rows, np.int32)))
    nowhere, layer, config = _nowhere(model, pool, num_rows), model.params.layers[0], model.config
    if model.mesh is None:
        deviation_step.lower(layer, x, pool.pages(0), nowhere, config=config).compile()
        return
    jax.block_until_ready(pool.read(0, lambda pages: deviation_step(layer, x, pages, nowhere, config=config)))


class BackgroundCompiler:
    """Compiles on a separate thread, because a compilation cannot be stopped, but a call can stop waiting for it."""

    def __init__(self, model: DeviceModel, steps: StepCompiler) -> None:
        self._model, self._steps = model, steps
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="ccjax-compile", initializer=lower_compilers
        )
        self._next: concurrent.futures.Future[None] | None = None
        self._is_closed = False

    def compile_next(self, is_cancelled: IsCancelled | None) -> bool:
        """Compiles the next wanted or remaining size. Returns False if there was none, else True, even if
        `is_cancelled` returned True first and the compilation is still running."""
        run = self._next
        if run is None:
            key = self._model.sizes.next()
            if key is None:
                return False
            run = self._next = self._pool.submit(self._compile, key)
        if _is_done(run, is_cancelled):
            self._next = None
        return True

    def close(self) -> None:
        """Starts no more compilations; does not wait for the running one."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: Key) -> None:
        try:
            with compilations().in_background():
                self._steps.compile(key)
        except Exception:
            if not self._is_closed:  # after `close`, failures are expected: the page pool is closed
                logger.exception("%s: could not be compiled ahead", key)
            self._model.sizes.give_up(key)


def _is_done(run: concurrent.futures.Future[None], is_cancelled: IsCancelled | None) -> bool:
    """Waits until `run` is done; returns False if `is_cancelled` returned True first."""
    while not concurrent.futures.wait([run], timeout=_POLL_S).done:
        if is_cancelled is not None and is_cancelled():
            return False
    return True

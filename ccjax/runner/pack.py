"""Pieces of several prompts, run together through all layers, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ccjax.models.llama3.paged_steps import deviation_step, paged_layer_step, rotation_step, write_rows_step
from ccjax.models.llama3.steps import embed_step, logits_step, select_step
from ccjax.models.lockstep import fetch
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import Contexts, PrefillJob
from ccjax.runner.plan_rows import LayerRows, padded_to, without_sink
from ccjax.runner.pool import DevicePool

_NO_POSITION = np.iinfo(np.int32).max


@dataclasses.dataclass(eq=False)
class Piece:
    """Computed tokens `[first, last)` of a job, as indices into its computed tokens (`PrefillJob.offsets`)."""

    job: PrefillJob
    first: int
    last: int
    number: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= len(self.job.offsets):
            raise ValueError(
                f"first, last: wanted 0 <= first < last <= {len(self.job.offsets)}, got {self.first}, {self.last}"
            )
        self.offsets = self.job.offsets[self.first : self.last]

    @property
    def is_last(self) -> bool:
        """True if it completes the prompt."""
        return self.last == len(self.job.offsets)


class JobFailedError(Exception):
    """A job of a pack cannot continue; `__cause__` is the reason."""

    def __init__(self, job: PrefillJob) -> None:
        super().__init__()
        self.job = job


class Pack:
    """Pieces that run together: call `run_layer` for each layer, then `logits`.

    The KV that pieces compute or load is written to the pages of their requests, where later pieces and decode steps
    read it. The result of a piece does not depend on the other pieces.

    Attributes:
      layer: the next layer to run.
      has_new_sizes: whether a step ran at a size for the first time, so that its time may include a compilation.
    """

    def __init__(
        self, model: DeviceModel, pool: DevicePool, pieces: Sequence[Piece], *, with_mass: bool = True
    ) -> None:
        """
        Args:
          with_mass: compute the masses that capture and CacheCraft alg. 1 need, even if no job of the pack needs them:
            making this depend on the jobs would double the number of compiled sizes.
        """
        self._model = model
        self._pool = pool
        self._pieces = list(pieces)
        for number, piece in enumerate(pieces):
            piece.number = number
        self.layer = 0
        self.has_new_sizes = False
        self._num_rows_run = 0
        self._filled: set[PrefillJob] = set()
        self._loaded_slots: dict[PrefillJob, jax.Array] = {}
        # A piece attends to no slot after its last token, so the context ends there.
        lengths = [int(piece.offsets[-1]) + 1 for piece in pieces]
        parts = list(zip(pieces, lengths, strict=True))
        most_segments = max(len(piece.job.plan.segments) for piece in pieces) if with_mass else 0
        self._num_rows, self._num_slots, self._num_segments = model.sizes.pack(
            self._expected_rows(), sum(lengths), most_segments
        )

        def context(values: Sequence[np.ndarray], fill: int) -> np.ndarray:
            return padded_to(np.concatenate(values), self._num_slots, fill)

        slots = context([piece.job.pages.slots[:length] for piece, length in parts], pool.num_slots)
        k_pos = context([np.arange(length) for length in lengths], _NO_POSITION)
        k_request = context([np.full(length, piece.number) for piece, length in parts], len(pieces) - 1)
        # Segment numbers of different requests overlap; a token's masses refer to the segments of its own request.
        k_segment = context([without_sink(piece.job.segment_of)[:length] for piece, length in parts], -1)
        self._slots, self._k_pos, self._k_request, self._k_segment = model.put((slots, k_pos, k_request, k_segment))
        self._k_rotation = self._rotation(self._k_pos)
        self._set_rows()
        token_ids = np.concatenate([piece.job.token_ids[piece.offsets] for piece in pieces])
        self._x = embed_step(model.top, model.put(padded_to(token_ids, self._num_rows, 0)))

    @property
    def num_computed(self) -> int:
        """Number of computed tokens, averaged over the layers of the model."""
        return round(self._num_rows_run / self._model.config.num_layers)

    @property
    def hidden(self) -> jax.Array:
        """[N, D], the hidden states after the layers that ran so far."""
        return self._x

    @property
    def is_done(self) -> bool:
        """True once all layers have run, or no piece is left."""
        return self.layer == self._model.config.num_layers or not self._pieces

    def is_ready(self) -> bool:
        """True if the next layer would not wait for a load."""
        return all(contexts.is_ready(self.layer) for _, contexts in self._loading())

    def wait(self) -> None:
        """Waits until the device has run the launched layers."""
        self._x.block_until_ready()

    def drop(self, job: PrefillJob) -> None:
        """Removes a job; none of its pages is written from now on."""
        if any(piece.job is job for piece in self._pieces):
            others = [piece for piece in self._pieces if piece.job is not job]
            self._keep({piece: np.arange(len(piece.offsets)) for piece in others})

    def run_layer(self) -> None:
        """Launches the next layer; returns before the device is done.

        Raises:
          JobFailedError: the reused KV of a job could not be loaded; after `drop` of that job, the layer can be run.
        """
        for job, contexts in self._loading():
            if job not in self._filled:  # already filled if another job failed in this layer
                self._fill(job, contexts)
                self._filled.add(job)
        self._filled.clear()
        self._filter()
        out = self._pool.update(
            self.layer,
            lambda k_pages, v_pages: paged_layer_step(
                self._model.params.layers[self.layer],
                self._x,
                k_pages,
                v_pages,
                self._q_pos,
                self._q_slot,
                self._q_request,
                self._slots,
                self._k_pos,
                self._k_request,
                self._k_segment if self._num_segments else None,
                self._q_rotation,
                self._k_rotation,
                config=self._model.config,
                num_segments=self._num_segments,
                implementation=self._model.implementation,
                mesh=self._model.mesh,
            ),
        )
        self._x = out.x
        size = (self._num_rows, self._num_slots, self._num_segments)
        self.has_new_sizes |= self._model.sizes.note("pack", size)
        self._num_rows_run += sum(len(piece.offsets) for piece in self._pieces)
        kept, first = {}, 0
        for piece in self._pieces:
            rows = LayerRows(self.layer, piece.offsets, first, out.k, out.v, out.mass, out.self_mass)
            first += len(piece.offsets)
            stays = piece.job.add_layer(rows, is_last_piece=piece.is_last, num_layers=self._model.config.num_layers)
            kept[piece] = np.arange(len(piece.offsets)) if stays is None else stays
        self.layer += 1
        if any(len(kept[piece]) < len(piece.offsets) for piece in self._pieces):
            self._keep(kept)

    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        """Returns the jobs whose prompt is complete, and the logits `[B, V]`, float32, of their last tokens, B padded;
        None instead of logits if there is no such job."""
        self._keep_logits()
        ends = np.cumsum([len(piece.offsets) for piece in self._pieces]) - 1
        done = [(piece.job, int(end)) for piece, end in zip(self._pieces, ends, strict=True) if piece.is_last]
        if not done:
            return [], None
        return [job for job, _ in done], self._logits(np.asarray([end for _, end in done], np.int32))

    # -- inside ------------------------------------------------------------------------------------------------

    def _expected_rows(self) -> list[int]:
        """Rows of each layer; the focus cut and failures may drop more."""
        layers = range(self._model.config.num_layers)
        return [sum(piece.job.num_rows(layer, piece.offsets) for piece in self._pieces) for layer in layers]

    def _keep_logits(self) -> None:
        """Adds the logits of the tokens of this pack to the outcomes of the jobs that want them (`num_logits`)."""
        first = 0
        for piece in self._pieces:
            job = piece.job
            wanted = first + np.flatnonzero(piece.offsets >= len(job.token_ids) - job.num_logits)
            first += len(piece.offsets)
            if len(wanted):
                logits, before = fetch(self._logits(wanted))[: len(wanted)], job.result.last_logits
                job.result.last_logits = logits if before is None else np.concatenate([before, logits])

    def _logits(self, rows: np.ndarray) -> jax.Array:
        """Logits [B, V], float32, of some rows, B padded."""
        sizes = self._model.sizes
        size = sizes.batch(len(rows))
        x = select_step(self._x, self._model.put(padded_to(rows, size, int(rows[-1]))))
        logits = logits_step(self._model.top, x, config=self._model.config)
        sizes.note("batch", (size,))
        return logits

    def _loading(self) -> list[tuple[PrefillJob, Contexts]]:
        """The jobs whose first piece is in this pack and that load reused KV, with the source of that KV."""
        first = [piece.job for piece in self._pieces if piece.first == 0]
        return [(job, job.contexts) for job in first if job.contexts is not None]

    def _fill(self, job: PrefillJob, contexts: Contexts) -> None:
        """Writes the loaded KV of the next layer to the pages of the request."""
        try:
            k, v = contexts.take(self.layer)
        except Exception as error:
            raise JobFailedError(job) from error
        if job not in self._loaded_slots:
            self._loaded_slots[job] = self._model.put(self._slots_to_load(job, len(k)))
        slots, mesh = self._loaded_slots[job], self._model.mesh
        self._pool.update(
            self.layer, lambda k_pages, v_pages: write_rows_step(k_pages, v_pages, slots, k, v, mesh=mesh)
        )

    def _slots_to_load(self, job: PrefillJob, num_slots: int) -> np.ndarray:
        """For each slot of a job's context, the pool slot that its loaded row is written to, or `pool.num_slots`."""
        from_pages, slots = job.pages.slots, np.full(num_slots, self._pool.num_slots, np.int32)
        for index, segment in enumerate(job.plan.segments):
            if segment.action == "reuse" and index not in job.pages.shared:
                where = slice(segment.start, segment.start + segment.num_tokens)
                slots[where] = from_pages[where]
        return slots

    def _filter(self) -> None:
        """Drops candidate rows whose stored KV deviates little from the computed one; waits for the device if there are
        candidates."""
        choosing = [piece for piece in self._pieces if piece.job.filters(self.layer)]
        if not choosing:
            return
        deviations = fetch(
            self._pool.read(
                self.layer,
                lambda k_pages, v_pages: deviation_step(
                    self._model.params.layers[self.layer],
                    self._x,
                    k_pages,
                    v_pages,
                    self._q_slot,
                    config=self._model.config,
                ),
            )
        )
        kept, first = {}, 0
        for piece in self._pieces:
            rows = slice(first, first + len(piece.offsets))
            first = rows.stop
            kept[piece] = np.arange(len(piece.offsets))
            if piece in choosing:
                begun = piece.job.offsets[piece.first : piece.last]
                kept[piece] = piece.job.most_deviating(self.layer, begun, piece.offsets, deviations[rows])
        self._keep(kept)

    def _set_rows(self) -> None:
        """Sets the inputs that describe the rows; padding rows repeat the last row and are not written."""
        offsets = [piece.offsets for piece in self._pieces]
        slots = [piece.job.pages.slots[piece.offsets] for piece in self._pieces]
        requests = [np.full(len(piece.offsets), piece.number) for piece in self._pieces]

        def padded(parts: list[np.ndarray], fill: int | None) -> jax.Array:
            values = np.concatenate(parts)
            return self._model.put(padded_to(values, self._num_rows, int(values[-1]) if fill is None else fill))

        self._q_pos, self._q_request = padded(offsets, None), padded(requests, None)
        self._q_slot = padded(slots, self._pool.num_slots)
        self._q_rotation = self._rotation(self._q_pos)

    def _rotation(self, positions: jax.Array) -> jax.Array:
        return rotation_step(positions, config=self._model.config, mesh=self._model.mesh)

    def _keep(self, kept: Mapping[Piece, np.ndarray]) -> None:
        """Continues with the pieces in `kept` only, and with the given rows of each."""
        rows, first = [], 0
        for piece in self._pieces:
            if piece in kept:
                rows.append(first + kept[piece])
            first += len(piece.offsets)
        for piece, stays in kept.items():
            piece.offsets = piece.offsets[stays]
        self._pieces = [piece for piece in self._pieces if piece in kept]
        if self._pieces:
            num_rows = sum(len(piece.offsets) for piece in self._pieces)
            self._num_rows = self._model.sizes.rows(num_rows, self._num_slots, self._num_segments)
            self._set_rows()
            values = np.concatenate(rows)
            self._x = select_step(self._x, self._model.put(padded_to(values, self._num_rows, int(values[-1]))))

"""Pieces of several prompts, run together through all layers, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from ccjax.models.llama3.paged_steps import deviation_step, paged_layer_step, rotation_step
from ccjax.models.llama3.steps import embed_step, logits_step, select_step
from ccjax.runner.context_loader import ContextLoader
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.plan_rows import LayerRows, padded_to, without_sink
from ccjax.runner.pool import DevicePool

NO_POSITION = np.iinfo(np.int32).max


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

    @property
    def is_whole(self) -> bool:
        """True if it has all computed tokens of the prompt."""
        return self.first == 0 and self.is_last


class Pack:
    """Pieces that run together: call `run_layer` for each layer, then `logits`.

    The KV that pieces compute or load is written to the pages of their requests, where later pieces and decode steps
    read it. The result of a piece does not depend on the other pieces.

    Attributes:
      layer: the next layer to run.
      has_new_sizes: whether a step ran at a size for the first time, so that its time may include a compilation.
      num_rows_run: sum over the layers that ran of their computed tokens.
    """

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        pieces: Sequence[Piece],
        *,
        with_mass: bool = True,
        loaded: Collection[PrefillJob] = (),
        layer: int = 0,
        hidden: np.ndarray | None = None,
    ) -> None:
        """
        Args:
          with_mass: compute the masses that capture and CacheCraft alg. 1 need, even if no job of the pack needs them:
            making this depend on the jobs would double the number of compiled sizes.
          loaded: jobs whose reused KV is in their pages, or is written there by the caller; for the others, the pack
            does that with the first piece.
          layer: the first layer to run.
          hidden: [N, D], the hidden states of the pieces' tokens before it; None before layer 0.
        """
        self._model = model
        self._pool = pool
        self._pieces = list(pieces)
        for number, piece in enumerate(pieces):
            piece.number = number
        self.layer = layer
        self.has_new_sizes = False
        self.num_rows_run = 0
        self._loader_of = {
            piece: ContextLoader(model, pool, piece.job, piece.job.contexts)
            for piece in pieces
            if piece.first == 0 and piece.job.contexts is not None and piece.job not in loaded
        }
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
        k_pos = context([np.arange(length) for length in lengths], NO_POSITION)
        k_request = context([np.full(length, piece.number) for piece, length in parts], len(pieces) - 1)
        # Segment numbers of different requests overlap; a token's masses refer to the segments of its own request.
        k_segment = context([without_sink(piece.job.segment_of)[:length] for piece, length in parts], -1)
        self._slots, self._k_pos, self._k_request, self._k_segment = model.put((slots, k_pos, k_request, k_segment))
        self._k_rotation = self._rotation(self._k_pos)
        self._set_rows()
        if hidden is None:
            token_ids = np.concatenate([piece.job.token_ids[piece.offsets] for piece in pieces])
            self._x = embed_step(model.top, model.put(padded_to(token_ids, self._num_rows, 0)))
        else:
            self._x = model.put(np.pad(hidden, ((0, self._num_rows - len(hidden)), (0, 0))))

    @property
    def num_computed(self) -> int:
        """Number of computed tokens, averaged over the layers of the model."""
        return round(self.num_rows_run / self._model.config.num_layers)

    @property
    def hidden(self) -> jax.Array:
        """[N, D], the hidden states after the layers that ran so far."""
        return self._x

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces that still run."""
        return self._pieces

    @property
    def is_done(self) -> bool:
        """True once all layers have run, or no piece is left."""
        return self.layer == self._model.config.num_layers or not self._pieces

    def is_ready(self) -> bool:
        """True if the next layer would not wait for a load."""
        return all(loader.is_ready(self.layer) for loader in self._loaders())

    def wait(self) -> None:
        """Waits until the device has run the launched layers."""
        self._x.block_until_ready()

    def drop(self, job: PrefillJob) -> None:
        """Removes a job; none of its pages is written from now on."""
        self.keep({piece: np.arange(len(piece.offsets)) for piece in self._pieces if piece.job is not job})

    def run_layer(self) -> None:
        """Launches the next layer; returns before the device is done, unless tokens are chosen by deviation.

        Raises:
          JobFailedError: the reused KV of a job could not be loaded; after `drop` of that job, the layer can be run.
        """
        for loader in self._loaders():
            loader.write(self.layer)
        self._choose()
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
        self.num_rows_run += sum(len(piece.offsets) for piece in self._pieces)
        kept, first = {}, 0
        for piece in self._pieces:
            rows = LayerRows(self.layer, piece.offsets, first, out.k, out.v, out.mass, out.self_mass)
            first += len(piece.offsets)
            decides = piece.job.add_layer(rows, is_last_piece=piece.is_last, num_layers=self._model.config.num_layers)
            kept[piece] = (
                piece.job.focused_rows(self.layer, piece.offsets) if decides else np.arange(len(piece.offsets))
            )
        self.layer += 1
        self.keep(kept)

    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        """Returns the jobs whose prompt is complete, and the logits `[B, V]`, float32, of their last tokens, B padded;
        None instead of logits if there is no such job."""
        self._keep_logits()
        ends = np.cumsum([len(piece.offsets) for piece in self._pieces]) - 1
        done = [(piece.job, int(end)) for piece, end in zip(self._pieces, ends, strict=True) if piece.is_last]
        if not done:
            return [], None
        return [job for job, _ in done], self._logits(np.asarray([end for _, end in done], np.int32))

    def deviations(self) -> np.ndarray:
        """[rows] float32, for each row the distance between the KV that the next layer computes for it and the one in
        its slot; waits for the device."""
        deviations = self._pool.read(
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
        return jax.device_get(deviations)[: sum(len(piece.offsets) for piece in self._pieces)]

    def keep(self, kept: Mapping[Piece, np.ndarray]) -> None:
        """Continues with the pieces in `kept` only, and with the given rows of each."""
        if all(piece in kept and len(kept[piece]) == len(piece.offsets) for piece in self._pieces):
            return
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

    # -- inside ------------------------------------------------------------------------------------------------

    def _expected_rows(self) -> list[int]:
        """Rows of each layer from the next one on; the focus cut and failures may drop more."""
        rows = np.zeros(self._model.config.num_layers - self.layer, np.int64)
        for piece in self._pieces:
            rows += piece.job.expected_rows(self.layer, piece.offsets)
        return rows.tolist()

    def _keep_logits(self) -> None:
        """Adds the logits of the tokens of this pack to the outcomes of the jobs that want them (`num_logits`)."""
        first = 0
        for piece in self._pieces:
            job = piece.job
            wanted = first + np.flatnonzero(piece.offsets >= len(job.token_ids) - job.num_logits)
            first += len(piece.offsets)
            if len(wanted):
                logits, before = jax.device_get(self._logits(wanted))[: len(wanted)], job.result.last_logits
                job.result.last_logits = logits if before is None else np.concatenate([before, logits])

    def _logits(self, rows: np.ndarray) -> jax.Array:
        """Logits [B, V], float32, of some rows, B padded."""
        sizes = self._model.sizes
        size = sizes.batch(len(rows))
        x = select_step(self._x, self._model.put(padded_to(rows, size, int(rows[-1]))))
        logits = logits_step(self._model.top, x, config=self._model.config)
        sizes.note("batch", (size,))
        return logits

    def _loaders(self) -> list[ContextLoader]:
        return [loader for piece, loader in self._loader_of.items() if piece in self._pieces]

    def _choose(self) -> None:
        """Drops candidate rows of whole prompts whose stored KV deviates little from the computed one; waits for the
        device if there are candidates."""
        choosing = [piece for piece in self._pieces if piece.is_whole and piece.job.filters(self.layer)]
        if not choosing:
            return
        deviations = self.deviations()
        kept, first = {}, 0
        for piece in self._pieces:
            rows = slice(first, first + len(piece.offsets))
            first = rows.stop
            kept[piece] = np.arange(len(piece.offsets))
            if piece in choosing:
                kept[piece] = piece.job.most_deviating(self.layer, piece.offsets, deviations[rows])
        self.keep(kept)

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

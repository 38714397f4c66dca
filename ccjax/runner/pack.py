"""Pieces of several prompts, run together through all layers, one layer at a time."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ccjax.models.llama3.inputs import StepInputs
from ccjax.models.llama3.paged_steps import PagedLayerOutput, deviation_step, paged_layer_step
from ccjax.models.llama3.steps import embed_step, logits_step, select_step
from ccjax.runner.compiled_sizes import Kind
from ccjax.runner.context_loader import ContextLoader
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.plan_rows import LayerRows, padded_to, without_sink
from ccjax.runner.pool import DevicePool
from ccjax.runner.sampling import score_tokens

_SCORED_ROWS = 32
"""Rows whose logits, of the whole vocabulary, are held at once."""
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


class Prefilling(abc.ABC):
    """Pieces on their way through the layers: call `run_layer` until `is_done`, then `logits`.

    Attributes:
      layer: number of layers that ran, so the next one to run.
      hidden: the hidden states that were launched last.
      has_new_sizes: whether a step ran at a size for the first time, so that its time may include a compilation.
      num_rows_run: sum over the layers that ran of their computed tokens.
    """

    hidden: jax.Array

    def __init__(self, model: DeviceModel, pool: DevicePool) -> None:
        self._model, self._pool = model, pool
        self.layer = self.num_rows_run = 0
        self.has_new_sizes = False

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """True once all layers have run, or no piece is left."""

    @property
    def num_computed(self) -> int:
        """Number of computed tokens, averaged over the layers of the model."""
        return round(self.num_rows_run / self._model.config.num_layers)

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """True if the next call of `run_layer` would not wait for a load."""

    def wait(self) -> None:
        """Waits until the device has run what was launched."""
        jax.block_until_ready(self.hidden)

    @abc.abstractmethod
    def drop(self, job: PrefillJob) -> None:
        """Removes a job; none of its pages is written from now on."""

    @abc.abstractmethod
    def run_layer(self) -> None:
        """Launches the next layer; returns before the device is done, unless tokens are to be chosen.

        Raises:
          JobFailedError: the reused KV of a job could not be loaded; after `drop` of that job, the layer can be run.
        """

    @abc.abstractmethod
    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        """Returns the jobs whose prompt is complete, and the logits `[B, V]`, float32, of their last tokens, B padded;
        None instead of logits if there is no such job."""

    def _run_layer_of(self, part: Prefilling) -> None:
        """Runs the next layer of a part of these pieces."""
        before = part.num_rows_run
        part.run_layer()
        self.hidden = part.hidden
        self.has_new_sizes |= part.has_new_sizes
        self.num_rows_run += part.num_rows_run - before


class Pack(Prefilling):
    """Pieces that run together, in one step for each layer.

    The KV that pieces compute or load is written to the pages of their requests, where later pieces and decode steps
    read it. The result of a piece does not depend on the other pieces.
    """

    kind: ClassVar[Kind] = "pack"

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        pieces: Sequence[Piece],
        *,
        loaded: Collection[PrefillJob] = (),
        layer: int = 0,
        hidden: np.ndarray | None = None,
    ) -> None:
        """
        Args:
          loaded: jobs whose reused KV is in their pages, or is written there by the caller; for the others, the pack
            does that with the first piece.
          layer: the first layer to run.
          hidden: [N, D], the hidden states of the pieces' tokens before it; None before layer 0.
        """
        super().__init__(model, pool)
        self._pieces = list(pieces)
        for number, piece in enumerate(pieces):
            piece.number = number
        self.layer = layer
        self._loader_of = {
            piece: ContextLoader(model, pool, piece.job, piece.job.contexts)
            for piece in pieces
            if self._loads(piece) and piece.job.contexts is not None and piece.job not in loaded
        }
        positions = [self._context(piece) for piece in pieces]
        self._size = self._first_size(sum(map(len, positions)))
        num_slots, num_segments = (*self._size[1:], 0)[:2]

        def context(values: Sequence[np.ndarray], fill: int) -> np.ndarray:
            return padded_to(np.concatenate(values), num_slots, fill)

        parts = [(piece.job, len(own)) for piece, own in zip(pieces, positions, strict=True)]
        # Columns of different requests overlap; a token's masses refer to the segments of its own request.
        segments = [without_sink(job.column_of)[:length] for job, length in parts]
        named = {
            "k_slot": context([job.pages.slots[:length] for job, length in parts], pool.num_slots),
            "k_pos": context(positions, NO_POSITION),
            "k_request": context([np.full(length, number) for number, (_, length) in enumerate(parts)], len(parts) - 1),
            "k_segment": context(segments, -1) if num_segments else None,
        }
        named = model.put(named)
        rotation = model.rotation(named["k_pos"])
        self._inputs = StepInputs(**named, **self._rows(), k_rotation=rotation, num_segments=num_segments)
        if hidden is None:
            token_ids = np.concatenate([piece.job.token_ids[piece.offsets] for piece in pieces])
            self.hidden = embed_step(model.top, model.put(padded_to(token_ids, self._size[0], 0)))
        else:
            self.hidden = model.put(np.pad(hidden, ((0, self._size[0] - len(hidden)), (0, 0))))

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces that still run."""
        return self._pieces

    @property
    def is_done(self) -> bool:
        return self.layer == self._model.config.num_layers or not self._pieces

    def is_ready(self) -> bool:
        return all(loader.is_ready(self.layer) for loader in self._loaders())

    def drop(self, job: PrefillJob) -> None:
        self.keep({piece: np.arange(len(piece.offsets)) for piece in self._pieces if piece.job is not job})

    def run_layer(self) -> None:
        for loader in self._loaders():
            loader.write(self.layer)
        self._choose()
        weights, x, inputs = self._model.params.layers[self.layer], self.hidden, self._inputs
        out = self._pool.update(
            self.layer, lambda pages: self._step(weights, x, pages, inputs, settings=self._model.settings)
        )
        self.hidden = out.x
        self.has_new_sizes |= self._model.sizes.note(self.kind, self._size)
        self.num_rows_run += sum(len(piece.offsets) for piece in self._pieces)
        kept = self._noted(out)
        self.layer += 1
        self.keep(kept)

    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        self._keep_logits()
        ends = np.cumsum([len(piece.offsets) for piece in self._pieces]) - 1
        done = [(piece.job, int(end)) for piece, end in zip(self._pieces, ends, strict=True) if piece.is_last]
        if not done:
            return [], None
        return [job for job, _ in done], self._logits(np.asarray([end for _, end in done], np.int32))

    def deviations(self) -> np.ndarray:
        """[rows] float32, for each row the distance between the KV that the next layer computes for it and the one in
        its slot; waits for the device."""
        weights, x, slots = self._model.params.layers[self.layer], self.hidden, self._inputs.q_slot
        deviations = self._pool.read(
            self.layer, lambda pages: deviation_step(weights, x, pages, slots, config=self._model.config)
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
            self._size = self._model.sizes.fewer(self.kind, self._size, num_rows)
            self._inputs = dataclasses.replace(self._inputs, **self._rows())
            values = np.concatenate(rows)
            chosen = self._model.put(padded_to(values, self._size[0], int(values[-1])))
            self.hidden = select_step(self.hidden, chosen)

    # -- what a pass of questions does differently ---------------------------------------------------------------------

    def _step(self, *arguments: Any, **settings: Any) -> Any:
        return paged_layer_step(*arguments, **settings)

    def _loads(self, piece: Piece) -> bool:
        """Whether the reused KV of the piece's job is written to its pages."""
        return piece.first == 0

    def _context(self, piece: Piece) -> np.ndarray:
        """Position of each token of the piece's context, which begins with the prompt. A piece attends to no slot after
        its last token, so the context ends there."""
        return np.arange(int(piece.offsets[-1]) + 1)

    def _positions(self, piece: Piece) -> np.ndarray:
        """Position of each row of the piece."""
        return piece.offsets

    def _first_size(self, num_slots: int) -> tuple[int, ...]:
        """The size of the first layer, with columns for masses only if a job needs them: they take up to half of the
        time of the attention."""
        needs_mass = any(piece.job.collect or piece.job.watches_focus for piece in self._pieces)
        most_segments = 1 + max(int(piece.job.column_of.max()) for piece in self._pieces) if needs_mass else 0
        return self._model.sizes.pack(self._expected_rows(), num_slots, most_segments)

    def _noted(self, out: PagedLayerOutput) -> dict[Piece, np.ndarray]:
        """Adds the output of a layer to the results of the jobs; returns the rows of each piece that go on."""
        kept, first = {}, 0
        for piece in self._pieces:
            rows = LayerRows(self.layer, piece.offsets, first, out.mass, out.self_mass)
            first += len(piece.offsets)
            decides = piece.job.add_layer(rows, is_last_piece=piece.is_last, num_layers=self._model.config.num_layers)
            kept[piece] = (
                piece.job.focused_rows(self.layer, piece.offsets) if decides else np.arange(len(piece.offsets))
            )
        return kept

    # -- inside ------------------------------------------------------------------------------------------------

    def _expected_rows(self) -> list[int]:
        """Rows of each layer from the next one on; the focus cut and failures may drop more."""
        rows = np.zeros(self._model.config.num_layers - self.layer, np.int64)
        for piece in self._pieces:
            rows += piece.job.expected_rows(self.layer, piece.offsets)
        return rows.tolist()

    def _keep_logits(self) -> None:
        """Adds the logits of the tokens of this pack, and the scores of those that follow, to the outcomes of the jobs
        that want them (`num_logits`, `num_top`)."""
        first = 0
        for piece in self._pieces:
            job = piece.job
            wanted = first + np.flatnonzero(piece.offsets >= len(job.token_ids) - job.num_logits)
            if job.num_top is not None:
                before_others = np.flatnonzero(piece.offsets < job.plan.num_tokens - 1)
                for start in range(0, len(before_others), _SCORED_ROWS):
                    rows = before_others[start : start + _SCORED_ROWS]
                    following = job.token_ids[piece.offsets[rows] + 1].tolist()
                    job.result.scores += score_tokens(self._logits(first + rows), following, job.num_top)
            first += len(piece.offsets)
            if len(wanted):
                logits, before = jax.device_get(self._logits(wanted))[: len(wanted)], job.result.last_logits
                job.result.last_logits = logits if before is None else np.concatenate([before, logits])

    def _logits(self, rows: np.ndarray) -> jax.Array:
        """Logits [B, V], float32, of some rows, B padded."""
        sizes = self._model.sizes
        size = sizes.batch(len(rows))
        x = select_step(self.hidden, self._model.put(padded_to(rows, size, int(rows[-1]))))
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

    def _rows(self) -> dict[str, jax.Array]:
        """The inputs that describe the rows; padding rows repeat the last row and are not written."""

        def padded(parts: list[np.ndarray], fill: int | None = None) -> np.ndarray:
            values = np.concatenate(parts)
            return padded_to(values, self._size[0], int(values[-1]) if fill is None else fill)

        slots = [piece.job.pages.slots[piece.offsets] for piece in self._pieces]
        rows = {
            "q_pos": padded([self._positions(piece) for piece in self._pieces]),
            "q_request": padded([np.full(len(piece.offsets), piece.number) for piece in self._pieces]),
            "q_slot": padded(slots, self._pool.num_slots),
        }
        rows = self._model.put(rows)
        return {**rows, "q_rotation": self._model.rotation(rows["q_pos"])}

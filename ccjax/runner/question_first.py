"""A pack that begins with the questions of some of its prompts, whose attention chooses the tokens to recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from ccjax.models.llama3.paged_steps import question_step, rotation_step
from ccjax.models.llama3.steps import embed_step
from ccjax.runner.context_loader import ContextLoader
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import NO_POSITION, Pack, Piece
from ccjax.runner.plan_rows import padded_to
from ccjax.runner.pool import DevicePool
from ccjax.runner.split_prompt import SplitPrompt


class QuestionPass:
    """Runs the questions of some prompts through all layers, over the stored KV of their chunks, and adds up their
    attention to each token. Tokens without stored KV are left out.

    Attributes:
      layer: the next layer to run.
      hidden: the hidden states after the layers that ran so far.
      has_new_sizes: as for `Pack`.
      num_rows_run: as for `Pack`.
    """

    def __init__(self, model: DeviceModel, pool: DevicePool, jobs: Sequence[PrefillJob]) -> None:
        self._model, self._pool = model, pool
        self._all = list(jobs)
        self.jobs = list(jobs)
        self._loaders = {job: ContextLoader(model, pool, job, job.contexts) for job in jobs if job.contexts is not None}
        self.layer = self.num_rows_run = 0
        self.has_new_sizes = False
        self._rows = [job.question_offsets for job in jobs]
        self._ends = np.cumsum([job.plan.num_tokens for job in jobs])
        self._size = model.sizes.question(sum(map(len, self._rows)), int(self._ends[-1]))
        self._received: list[jax.Array] = []
        self._set_inputs()
        token_ids = np.concatenate([job.token_ids[rows] for job, rows in zip(jobs, self._rows, strict=True)])
        self.hidden = embed_step(model.top, model.put(padded_to(token_ids, self._size[0], 0)))

    @property
    def is_done(self) -> bool:
        """True once all layers have run, or no job is left."""
        return self.layer == self._model.config.num_layers or not self.jobs

    def is_ready(self) -> bool:
        """True if the next layer would not wait for a load."""
        return all(self._loaders[job].is_ready(self.layer) for job in self.jobs if job in self._loaders)

    def drop(self, job: PrefillJob) -> None:
        """Removes a job; none of its pages is written from now on."""
        if job in self.jobs:
            self.jobs.remove(job)
            self._set_slots()

    def run_layer(self) -> None:
        """Launches the next layer; returns before the device is done.

        Raises:
          JobFailedError: the reused KV of a job could not be loaded.
        """
        for job in self.jobs:
            if job in self._loaders:
                self._loaders[job].write(self.layer)
        out = self._pool.update(
            self.layer,
            lambda k_pages, v_pages: question_step(
                self._model.params.layers[self.layer],
                self.hidden,
                k_pages,
                v_pages,
                self._q_pos,
                self._q_slot,
                self._q_request,
                self._slots,
                self._k_pos,
                self._k_request,
                self._q_rotation,
                self._k_rotation,
                config=self._model.config,
                mesh=self._model.mesh,
            ),
        )
        self.hidden = out.x
        out.received.copy_to_host_async()
        self._received.append(out.received)
        self.has_new_sizes |= self._model.sizes.note("question", self._size)
        self.layer += 1
        for job in self.jobs:
            self.num_rows_run += len(job.question_offsets)
            job.result.computed_token_layers += len(job.question_offsets)

    def revise(self) -> None:
        """Lets the jobs choose their tokens by what the layers measured; waits for the device."""
        if not self.jobs:
            return
        total = np.stack(jax.device_get(self._received)).sum(0, dtype=np.float64)
        for job, received in zip(self._all, np.split(total[: self._ends[-1]], self._ends[:-1]), strict=True):
            if job in self.jobs:
                job.revise(received)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _set_inputs(self) -> None:
        def rows(parts: Sequence[np.ndarray]) -> np.ndarray:  # padding rows repeat the last one
            values = np.concatenate(parts)
            return padded_to(values, self._size[0], int(values[-1]))

        def context(parts: Sequence[np.ndarray], fill: int) -> np.ndarray:
            return padded_to(np.concatenate(parts), self._size[1], fill)

        jobs, numbers = self.jobs, range(len(self.jobs))
        positions = []
        for job in jobs:
            is_there = job.is_stored[: job.plan.num_tokens]
            is_there[job.question_offsets] = True
            positions.append(np.where(is_there, np.arange(len(is_there)), NO_POSITION))
        self._q_pos, self._q_request, self._k_pos, self._k_request, self._slots = self._model.put(
            (
                rows(self._rows),
                rows([np.full(len(own), number) for number, own in zip(numbers, self._rows, strict=True)]),
                context(positions, NO_POSITION),
                context([np.full(len(own), number) for number, own in zip(numbers, positions, strict=True)], -1),
                context([job.pages.slots[: job.plan.num_tokens] for job in jobs], self._pool.num_slots),
            )
        )
        settings = {"config": self._model.config, "mesh": self._model.mesh}
        self._q_rotation = rotation_step(self._q_pos, **settings)
        self._k_rotation = rotation_step(self._k_pos, **settings)
        self._set_slots()

    def _set_slots(self) -> None:
        """Sets the slots that rows are written to: none for padding rows and dropped jobs."""
        nowhere = self._pool.num_slots
        slots = [
            job.pages.slots[rows] if job in self.jobs else np.full(len(rows), nowhere)
            for job, rows in zip(self._all, self._rows, strict=True)
        ]
        self._q_slot = self._model.put(padded_to(np.concatenate(slots), self._size[0], nowhere))


class QuestionFirst:
    """Two passes over some pieces: the questions of those prompts whose plans ask for it, then all pieces, by the
    revised plans. Takes the place of a `Pack`."""

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        pieces: Sequence[Piece],
        then: Callable[[Sequence[Piece], Sequence[PrefillJob]], Pack | SplitPrompt],
    ) -> None:
        """
        Args:
          then: makes the second pass of some pieces; the reused KV of the given jobs is in their pages by then.
        """
        self._pieces = list(pieces)
        self._first = QuestionPass(model, pool, [piece.job for piece in pieces if asks_first(piece)])
        self._then = then
        self._second: Pack | SplitPrompt | None = None
        self._num_layers = model.config.num_layers

    @property
    def layer(self) -> int:
        """Number of layers that ran, in both passes together."""
        return self._first.layer + (0 if self._second is None else self._second.layer)

    @property
    def hidden(self) -> jax.Array:
        """The hidden states that were launched last."""
        return (self._second or self._first).hidden

    @property
    def is_done(self) -> bool:
        """True once all layers have run, or no piece is left."""
        return not self._pieces if self._second is None else self._second.is_done

    @property
    def has_new_sizes(self) -> bool:
        """As for `Pack`."""
        return self._first.has_new_sizes or (self._second is not None and self._second.has_new_sizes)

    @property
    def num_computed(self) -> int:
        """As for `Pack`."""
        second = 0 if self._second is None else self._second.num_computed
        return self._first.num_rows_run // self._num_layers + second

    def is_ready(self) -> bool:
        """True if the next call of `run_layer` would not wait for a load."""
        return (self._second or self._first).is_ready()

    def wait(self) -> None:
        """Waits until the device has run what was launched."""
        self.hidden.block_until_ready()

    def drop(self, job: PrefillJob) -> None:
        """Removes a job; none of its pages is written from now on."""
        self._pieces = [piece for piece in self._pieces if piece.job is not job]
        (self._second or self._first).drop(job)
        self._begin_second()

    def run_layer(self) -> None:
        """Launches the next layer of a pass; returns before the device is done, except between the two passes.

        Raises:
          JobFailedError: the reused KV of a job could not be loaded.
        """
        (self._second or self._first).run_layer()
        self._begin_second()

    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        """As for `Pack`."""
        return ([], None) if self._second is None else self._second.logits()

    def _begin_second(self) -> None:
        """Begins the second pass once the first is done, unless no piece is left."""
        if self._second is None and self._first.is_done and self._pieces:
            self._first.revise()
            pieces = [Piece(piece.job, piece.first, piece.last) for piece in self._pieces]
            self._second = self._then(pieces, self._first.jobs)


def asks_first(piece: Piece) -> bool:
    """True if the question of the piece's prompt has to choose tokens before the piece runs."""
    return piece.first == 0 and bool(piece.job.plan.chosen_by_question)

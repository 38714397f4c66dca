"""A pack that begins with the questions of some of its prompts, whose attention chooses the tokens to recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ccjax.models.llama3.paged_steps import QuestionOutput, question_step
from ccjax.runner.compiled_sizes import Kind
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import NO_POSITION, Pack, Piece, Prefilling
from ccjax.runner.pool import DevicePool


class QuestionPass(Pack):
    """The questions of some prompts, over the stored KV of their chunks; adds up their attention to each token. Tokens
    without stored KV are left out. A part of the question that stands before passages is moved behind them for this
    pass; what it leaves in its slots is replaced when all tokens are computed."""

    kind: ClassVar[Kind] = "question"

    def __init__(self, model: DeviceModel, pool: DevicePool, jobs: Sequence[PrefillJob]) -> None:
        self._received: list[jax.Array] = []
        self._ends = np.cumsum([job.plan.num_tokens for job in jobs])
        super().__init__(model, pool, [_question_of(job) for job in jobs])

    def revise(self) -> None:
        """Lets the jobs choose their tokens by what the layers measured; waits for the device."""
        if not self._pieces:
            return
        total = np.stack(jax.device_get(self._received)).sum(0, dtype=np.float64)
        of_job = np.split(total[: self._ends[-1]], self._ends[:-1])
        for piece in self._pieces:
            piece.job.revise(of_job[piece.number])

    # -- what a pack does differently ----------------------------------------------------------------------------------

    def _step(self, *arguments: Any, **settings: Any) -> Any:
        return question_step(*arguments, **settings)

    def _loads(self, piece: Piece) -> bool:
        return True

    def _context(self, piece: Piece) -> np.ndarray:
        is_there = piece.job.is_stored[: piece.job.plan.num_tokens]
        positions = np.where(is_there, np.arange(len(is_there)), NO_POSITION)
        positions[piece.offsets] = self._positions(piece)
        return positions

    def _positions(self, piece: Piece) -> np.ndarray:
        return piece.job.plan.segments[-1].start + np.arange(len(piece.offsets))

    def _first_size(self, num_slots: int) -> tuple[int, ...]:
        return self._model.sizes.question(sum(len(piece.offsets) for piece in self._pieces), num_slots)

    def _noted(self, out: QuestionOutput) -> dict[Piece, np.ndarray]:
        out.received.copy_to_host_async()
        self._received.append(out.received)
        for piece in self._pieces:
            piece.job.result.computed_token_layers += len(piece.offsets)
        return {piece: np.arange(len(piece.offsets)) for piece in self._pieces}


def _question_of(job: PrefillJob) -> Piece:
    """The piece of a prompt's question."""
    offsets = job.question_offsets
    first, last = np.searchsorted(job.offsets, offsets[[0, -1]]).tolist()
    piece = Piece(job, first, last + 1)
    piece.offsets = offsets
    return piece


class QuestionFirst(Prefilling):
    """Two passes over some pieces: the questions of those prompts whose plans ask for it, then all pieces, by the
    revised plans; `layer` counts the layers of both."""

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        pieces: Sequence[Piece],
        then: Callable[[Sequence[Piece], Sequence[PrefillJob]], Prefilling],
    ) -> None:
        """
        Args:
          then: makes the second pass of some pieces; the reused KV of the given jobs is in their pages by then.
        """
        super().__init__(model, pool)
        self._pieces = list(pieces)
        self._first = QuestionPass(model, pool, [piece.job for piece in pieces if asks_first(piece)])
        self._then = then
        self._second: Prefilling | None = None
        self.hidden = self._first.hidden

    @property
    def is_done(self) -> bool:
        return not self._pieces if self._second is None else self._second.is_done

    def is_ready(self) -> bool:
        return (self._second or self._first).is_ready()

    def drop(self, job: PrefillJob) -> None:
        self._pieces = [piece for piece in self._pieces if piece.job is not job]
        (self._second or self._first).drop(job)
        self._begin_second()

    def run_layer(self) -> None:
        self._run_layer_of(self._second or self._first)
        self.layer = self._first.layer + (0 if self._second is None else self._second.layer)
        self._begin_second()

    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        return ([], None) if self._second is None else self._second.logits()

    def _begin_second(self) -> None:
        """Begins the second pass once the first is done, unless no piece is left."""
        if self._second is None and self._first.is_done and self._pieces:
            self._first.revise()
            pieces = [Piece(piece.job, piece.first, piece.last) for piece in self._pieces]
            self._second = self._then(pieces, [piece.job for piece in self._first.pieces])
            self.hidden = self._second.hidden


def asks_first(piece: Piece) -> bool:
    """True if the question of the piece's prompt has to choose tokens before the piece runs."""
    return piece.first == 0 and bool(piece.job.plan.chosen_by_question)

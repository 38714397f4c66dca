"""The thread that runs all requests of an engine: carries out what `ccjax.policy.scheduling` decides, step by step."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence

import jax

from ccjax.engine.batch.decode import DecodeBatch
from ccjax.engine.batch.pack import JobFailedError, Pack, Piece
from ccjax.engine.batch.seating import Seating
from ccjax.engine.batch.serving import Serving
from ccjax.engine.device_model import DeviceModel
from ccjax.engine.pool import DevicePool
from ccjax.engine.rates import Rates
from ccjax.engine.sampling import Drawn, draw
from ccjax.engine.variants import VariantIndex
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.store.tiered import TieredStore

logger = logging.getLogger(__name__)

_LOOK_S = 0.002


class BatchLoop(Seating):
    """Runs requests until `close`; what is public may be called from any thread.

    The thread that is let in by `paused` may use everything that the loop uses: between two steps of the loop, when no
    prefill is under way; answers may be.
    """

    def __init__(
        self,
        model: DeviceModel,
        variants: VariantIndex,
        store: TieredStore,
        pool: DevicePool,
        rates: Rates,
        settings: SchedulerSettings,
        *,
        max_retries: int,
        with_mass: bool = True,
        take_in_news: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
          max_retries: how often an answer is tried again whose step failed.
          with_mass: of `Pack`.
          take_in_news: see `Seating`.
        """
        super().__init__(variants, store, pool, rates, settings, max_retries=max_retries, take_in_news=take_in_news)
        self._model = model
        self._with_mass = with_mass
        self._decoder = DecodeBatch(model, pool)

    def _work(self) -> None:
        """One pack with the decode steps between its layers, or one decode step; and one for each who decodes alone."""
        self._attend()
        alone = self._scheduler.decoding_alone
        for request_id in alone:
            self._decode(alone=request_id)
        if not self._has_pages():
            self._look_later()
            return
        pieces = self._next_pieces()
        if pieces:
            self._run_pack(pieces)
        elif self._scheduler.num_decoding:
            self._decode()
        elif self._servings and not self._num_guests and not alone:
            # All that are left wait for another process, or for pages that nobody who is scheduled holds: those of
            # what is read just now for a snapshot, say, or the cached chunks of a prompt whose answers all wait.
            parked = [one for one in self._room.shared if one.is_parked]
            for siblings in parked:
                self._dropped(siblings, self._room.drop(siblings))
            self._end()
            if not parked:
                self._look_later()

    def _look_later(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._new), _LOOK_S)

    def _start_over(self) -> None:
        self._pack = None
        self._end()
        if self._lost_s is not None or self._pool.is_lost():
            self._lose_pages()

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _next_pieces(self) -> list[tuple[Serving, Piece]]:
        self._plan_first()
        now_s = time.perf_counter()
        free_pages = 0 if self._num_guests else self._room.num_pages  # guests wait for the prefills that were begun
        with self._changed:
            self._welcome()
            pack = self._scheduler.next_pack(now_s, free_pages, self._costs(), shared_pages=self._shared_pages)
        for preempted in pack.preempted:
            self._preempt(self._servings[preempted])
        admitted = [self._servings[request_id] for request_id in pack.admitted]
        for serving in admitted:
            serving.take_prompt()
        for serving in admitted:
            if serving.request_id in self._servings:
                self._admit(serving)
        pieces = []
        for piece in pack.pieces:
            serving = self._servings.get(piece.request_id)
            if serving is not None and serving.job is not None:
                pieces.append((serving, Piece(serving.job, piece.start, piece.start + piece.num_tokens)))
        if pack.pieces and not pieces:
            self._scheduler.pack_done(now_s)
        return pieces

    def _run_pack(self, pieces: list[tuple[Serving, Piece]]) -> None:
        done: Sequence[tuple[Serving, Drawn]] = ()
        try:
            done = self._run_layers(pieces)
        except Exception as error:
            logger.exception("a pack failed")
            self._pack = None
            self._try_again([serving for serving, _ in pieces], error)
        self._pack = None
        self._scheduler.pack_done(time.perf_counter())
        kept = []
        for serving, one in done:
            try:
                kept.append((serving.siblings.keep, serving.admission, serving.note_prefill()))
                self._share(serving)
            except Exception as error:
                logger.exception("a request failed behind its prefill")
                self._fail(serving, error)
            else:
                self._take_in(serving, one)
        for keep, admission, prefilled in kept:  # once the first tokens are out
            if prefilled is not None:
                keep(prefilled)
            admission.release()
        self._end()

    def _run_layers(self, pieces: list[tuple[Serving, Piece]]) -> list[tuple[Serving, Drawn]]:
        """The requests whose prompt is through, each with its next token."""
        started_s, decoded_s = time.perf_counter(), 0.0
        parts = [piece for _, piece in pieces]
        pack = self._pack = Pack(self._model, self._pool, parts, with_mass=self._with_mass)
        by_job = {piece.job: serving for serving, piece in pieces}
        tracers = [serving.siblings.tracer for serving, _ in pieces if serving.siblings.tracer is not None]
        ends_s = [started_s]
        under_way: collections.deque[jax.Array] = collections.deque()
        while not pack.is_done and self._pack is pack:
            if not pack.is_ready():
                if self._scheduler.num_decoding:
                    decoded_s += self._decode()
                    if self._pack is not pack:
                        break
                pack.wait()  # what is waited for while the device works is not waited for
            under_way.append(pack.hidden)
            if len(under_way) > 1:  # the host must not run ahead of the device
                under_way.popleft().block_until_ready()
                if tracers and len(ends_s) < pack.layer:  # the layer before the one that was begun last is through
                    ends_s.append(time.perf_counter())
            try:
                pack.run_layer()
            except JobFailedError as error:
                self._refuse(by_job[error.job], error.__cause__)
                continue
            self._attend()
            if self._scheduler.after_layer(time.perf_counter()):
                decoded_s += self._decode()
        if self._pack is not pack:  # its pages are lost
            return []
        if tracers:
            for hidden in (*under_way, pack.hidden)[len(ends_s) - pack.layer - 1 :]:
                hidden.block_until_ready()
                ends_s.append(time.perf_counter())
            for tracer in tracers:
                tracer.layers(ends_s, has_new_sizes=pack.has_new_sizes)
        jobs, logits = pack.logits()
        drawn = [] if logits is None else draw(logits, [by_job[job].draw for job in jobs])
        if not pack.has_new_sizes and pack.num_computed:
            waited_s = sum(job.contexts.waited_s for job in by_job if job.contexts is not None)
            self._rates.compute.add(pack.num_computed, time.perf_counter() - started_s - decoded_s - waited_s)
        return [(by_job[job], one) for job, one in zip(jobs, drawn, strict=True)]

    # -- decode --------------------------------------------------------------------------------------------------------

    def _decode(self, *, alone: str | None = None) -> float:
        """A token for each request that decodes, those left out that share no step; or for such a one, `alone`. The
        seconds that it took."""
        started_s = time.perf_counter()
        step = self._scheduler.next_decode(self._room.num_pages, self._costs(), alone=alone)
        for preempted in step.preempted:
            self._preempt(self._servings[preempted])
        self._make_room(len(step.draws))
        servings = [self._servings[request_id] for request_id in step.request_ids]
        drawn, on_device_s = [], started_s
        try:
            if servings:
                logits = self._decoder.step([one.pages for one in servings], [one.last_token for one in servings])
                if self._pack is not None:
                    self._pack.wait()  # the step runs behind its layers, whose time is not the step's
                    on_device_s = time.perf_counter()
                drawn = draw(logits, [one.draw for one in servings])
        except Exception as error:
            logger.exception("a decode step failed")
            self._try_again(servings, error)
            servings = []
        if drawn and alone is None:
            seconds = time.perf_counter() - on_device_s
            self._decode_step_s = seconds if not self._decode_step_s else 0.9 * self._decode_step_s + 0.1 * seconds
        self._scheduler.decode_done(time.perf_counter())
        for serving, token in zip(servings, drawn, strict=True):
            self._take_in(serving, token)
            if alone is not None:
                self._rejoin(serving)
        self._end()
        return time.perf_counter() - started_s

    def _take_in(self, serving: Serving, drawn: Drawn) -> None:
        """Gives a request its next token, and lets go of it if that is the last."""
        try:
            is_last = serving.take_in(drawn)
        except Exception as error:
            logger.exception("a request failed over a token of its answer")
            self._fail(serving, error)
            return
        if is_last:
            tokens, mean = float(serving.num_drawn), self._answer_tokens
            self._answer_tokens = tokens if mean is None else 0.9 * mean + 0.1 * tokens
            self._let_go(serving)
            self._closing.append(serving.admission)
            self._ended.append(serving)

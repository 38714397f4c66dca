"""The thread that runs all requests of an engine: carries out what `ccjax.policy.scheduling` decides, step by step.
Knows no HTTP and no text."""

from __future__ import annotations

import collections
import logging
import time

import jax

from ccjax.engine.admission import Admission
from ccjax.engine.batch.decode import DecodeBatch
from ccjax.engine.batch.doors import Doors
from ccjax.engine.batch.failures import CancelledError, as_request_error, too_late
from ccjax.engine.batch.line import likely_order
from ccjax.engine.batch.pack import JobFailedError, Pack, Piece
from ccjax.engine.batch.room import Room
from ccjax.engine.batch.serving import Serving
from ccjax.engine.batch.siblings import SharedPrompt, Siblings
from ccjax.engine.cached_prefill import CachedPrefill
from ccjax.engine.pool import DevicePool
from ccjax.engine.prefill import Prefiller
from ccjax.engine.rates import Rates
from ccjax.engine.reads import LoadFailedError
from ccjax.engine.sampling import Drawn, draw
from ccjax.engine.variants import VariantIndex
from ccjax.policy.scheduling import Costs, NeverFitsError, SchedulerSettings
from store.errors import TierFullError
from store.tiered import TieredStore

logger = logging.getLogger(__name__)

_UNMEASURED_S_PER_TOKEN = 1e-3
_LOOK_S = 0.002
_PLANNED_AHEAD = 8
"""Requests in line that are planned before each pack: what those before them stored is there for them then."""


class BatchLoop(Doors):
    """Runs requests until `close`; what is public may be called from any thread.

    The thread that is let in by `paused` may use everything that the loop uses: between two steps of the loop, when no
    prefill is under way; answers may be.
    """

    def __init__(
        self,
        model: Prefiller,
        prefill: CachedPrefill,
        variants: VariantIndex,
        store: TieredStore,
        pool: DevicePool,
        rates: Rates,
        settings: SchedulerSettings,
        *,
        with_mass: bool = True,
        decode_implementation: str | None = None,
    ) -> None:
        """
        Args:
          with_mass: of `Pack`.
        """
        super().__init__(pool, settings)
        self._model = model
        self._prefill = prefill
        self._variants = variants
        self._store = store
        self._rates = rates
        self._with_mass = with_mass
        self._room = Room(pool, store, variants)
        self._decoder = DecodeBatch(model, pool, implementation=decode_implementation)
        self._pack: Pack | None = None
        self._held: list[Serving] = []
        self._closing: list[Admission] = []
        self._ended: list[Serving] = []
        self._decode_step_s = 0.0
        self._answer_tokens: float | None = None

    def _work(self) -> None:
        """One pack with the decode steps between its layers, or one decode step."""
        self._attend()
        pieces = self._next_pieces()
        if pieces:
            self._run_pack(pieces)
        elif self._scheduler.num_decoding:
            self._decode()
        elif self._servings and not self._num_guests:
            # All that are left wait for another process, or for pages that nobody who is scheduled holds: those of
            # what is read just now for a snapshot, say, or the cached chunks of a prompt whose answers all wait.
            parked = [one for one in self._room.shared if one.is_parked]
            for siblings in parked:
                self._dropped(siblings, self._room.drop(siblings))
            self._end()
            if not parked:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._new), _LOOK_S)

    def _attend(self) -> None:
        """Takes in new requests, lets go of cancelled and late ones, and puts back in line who has waited enough."""
        with self._changed:
            self._welcome()
            late = self._scheduler.expire(time.perf_counter())
        for request_id in late:
            if request_id in self._servings:  # else a sibling was late, too
                self._fail(self._servings[request_id], too_late())
        for serving in tuple(self._servings.values()):
            if serving.request_id in self._servings and serving.siblings.is_cancelled():
                self._fail(serving, CancelledError())
        for serving in tuple(self._held):
            if serving.admission.look():
                self._held.remove(serving)
                self._plan(serving)

    def _fail(self, serving: Serving, error: Exception) -> None:
        """Ends all answers of a request with an error."""
        siblings = serving.siblings
        for one in tuple(siblings.open):
            self._let_go(one)
            one.admission.close(ok=False)
        siblings.emit(as_request_error(error))

    def _start_over(self) -> None:
        self._pack = None
        self._end()
        if self._pool.is_lost():
            self._make_room(self._pool.num_pages)
            try:
                self._pool.renew()
            except RuntimeError:  # whoever reads a chunk just now is through before long; the next request fails, too
                logger.exception("the pages that a failed step took along cannot be replaced yet")

    def _let_go(self, serving: Serving) -> None:
        """Forgets an answer; its pages are free, with the last one those of the prompt."""
        self._servings.pop(serving.request_id, None)
        if serving in self._held:
            self._held.remove(serving)
        if serving.request_id in self._scheduler:  # else it expired
            self._scheduler.remove(serving.request_id)
        self._drop(serving)
        serving.admission.release()
        siblings = serving.siblings
        siblings.open.remove(serving)
        if siblings.prompt is not None and not siblings.open:
            self._closing.append(self._room.drop(siblings).admission)

    def _drop(self, serving: Serving) -> None:
        """Takes a request out of the pack, and its pages from it."""
        if self._pack is not None and serving.job is not None:
            self._pack.drop(serving.job)
        serving.drop()

    # -- prefill -----------------------------------------------------------------------------------------------

    def _next_pieces(self) -> list[tuple[Serving, Piece]]:
        self._plan_first()
        now_s = time.perf_counter()
        free_pages = 0 if self._num_guests else self._room.num_pages  # guests wait for the prefills that were begun
        with self._changed:
            self._welcome()
            pack = self._scheduler.next_pack(now_s, free_pages, self._costs(), shared_pages=self._shared_pages)
        for preempted in pack.preempted:
            self._preempt(self._servings[preempted.request_id])
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

    def _plan_first(self) -> None:
        """Plans the first in line, anew where the cached chunks are others than when it was planned last."""
        servings = [one for one in self._servings.values() if one.siblings.prompt is None]
        waiting = [one for one in servings if one.job is None and one not in self._held]
        num_seats = self._scheduler.settings.max_num_seqs - self._scheduler.num_running
        # Those of several flows, also for one seat: who is first depends on what each computes. And one at least, for
        # who has priority finds a seat where there is none.
        num_planned = _PLANNED_AHEAD if num_seats else 1
        if 0 < num_seats < len(waiting):  # who goes first is also for what is cached to say
            num_planned = max(num_planned, self._scheduler.settings.reorder_window)
        for serving in likely_order(waiting)[:num_planned]:
            if serving.planned_at != self._variants.num_changes:
                self._plan(serving)

    def _admit(self, serving: Serving) -> None:
        """Draws pages and starts to load; a request whose plan had to change goes back in line."""
        try:
            if serving.planned_at is None:
                serving.plan(self._variants.num_changes)
            serving.start()
            if not serving.agree():
                self._scheduler.hold(serving.request_id)
                self._held.append(serving)
                return
            serving.open()
            self._make_room(serving.num_own_pages)
            serving.begin(self._pool)
            is_as_scheduled = serving.is_as_scheduled
        except TierFullError:  # fewer pages are free than was thought
            is_as_scheduled = False
        except Exception as error:
            self._fail(serving, error)
            return
        if not is_as_scheduled:
            self._drop(serving)
            serving.admission.close(ok=False)
            self._replan(serving)

    def _preempt(self, serving: Serving) -> None:
        """Takes the pages of a request, which goes back in line."""
        self._num_preemptions += 1
        self._drop(serving)
        serving.planned_at = None
        self._closing.append(serving.admission)
        if serving.siblings.prompt is not None:  # to compute less than before
            self._replan(serving)

    def _plan(self, serving: Serving) -> None:
        """Plans a request anew that has no pages."""
        try:
            serving.plan(self._variants.num_changes)
        except Exception as error:
            self._fail(serving, error)
        else:
            self._replan(serving)

    def _replan(self, serving: Serving) -> None:
        try:
            self._scheduler.replan(serving.work(self._store.tier_of))
        except NeverFitsError as error:
            self._fail(serving, error)

    def _run_pack(self, pieces: list[tuple[Serving, Piece]]) -> None:
        try:
            self._run_layers(pieces)
        except Exception as error:
            logger.exception("a pack failed, and its requests with it")
            self._pack = None
            self._fail_all([serving for serving, _ in pieces], error)
            self._scheduler.pack_done(time.perf_counter())

    def _fail_all(self, servings: list[Serving], error: Exception) -> None:
        """Fails those of a step that have pages still; raises `error` if the step took everybody's."""
        for serving in servings:
            if self._servings.get(serving.request_id) is serving and serving.job is not None:
                self._fail(serving, error)
        self._end()
        if self._pool.is_lost():
            raise error

    def _run_layers(self, pieces: list[tuple[Serving, Piece]]) -> None:
        started_s, decoded_s = time.perf_counter(), 0.0
        parts = [piece for _, piece in pieces]
        pack = self._pack = Pack(self._model, self._pool, parts, with_mass=self._with_mass)
        by_job = {piece.job: serving for serving, piece in pieces}
        under_way: collections.deque[jax.Array] = collections.deque()
        while not pack.is_done:
            if not pack.is_ready():
                if self._scheduler.num_decoding:
                    decoded_s += self._decode()
                pack.wait()  # what is waited for while the device works is not waited for
            under_way.append(pack.hidden)
            if len(under_way) > 1:  # the host must not run ahead of the device
                under_way.popleft().block_until_ready()
            try:
                pack.run_layer()
            except JobFailedError as error:
                self._refuse(by_job[error.job], error.__cause__)
                continue
            self._attend()
            if self._scheduler.after_layer(time.perf_counter()):
                decoded_s += self._decode()
        jobs, logits = pack.logits()
        self._pack = None
        drawn = [] if logits is None else draw(logits, [by_job[job].draw for job in jobs])
        if not pack.has_new_sizes and pack.num_computed:
            waited_s = sum(job.contexts.waited_s for job in by_job if job.contexts is not None)
            self._rates.compute.add(pack.num_computed, time.perf_counter() - started_s - decoded_s - waited_s)
        self._scheduler.pack_done(time.perf_counter())
        kept = []
        for job, one in zip(jobs, drawn, strict=True):
            kept.append((by_job[job].admission, by_job[job].note_prefill()))
            self._share(by_job[job])
            self._take_in(by_job[job], one)
        for admission, prefilled in kept:  # once the first tokens are out
            if prefilled is not None:
                self._prefill.keep(prefilled)
            admission.release()
        self._end()

    def _share(self, serving: Serving) -> None:
        """Lets the other answers to a prompt that is through begin, or those that wait go on, with its pages."""
        siblings = serving.siblings
        waiting, new = self._waiting(siblings), serving.fork()
        if siblings.prompt is not None or not (waiting or new):
            return
        self._scheduler.share(serving.share())
        self._room.shared.append(siblings)
        for one in new:
            self._scheduler.add(one.work(self._store.tier_of), after=serving.request_id)
            self._servings[one.request_id] = one
        for one in waiting:
            self._replan(one)

    def _refuse(self, serving: Serving, cause: BaseException | None) -> None:
        """A request of the pack cannot have the KV that it reuses."""
        if isinstance(cause, LoadFailedError):
            self._drop(serving)
            serving.admission.fail(cause)
            self._replan(serving)
        else:
            assert isinstance(cause, Exception)
            self._fail(serving, cause)

    # -- decode ------------------------------------------------------------------------------------------------

    def _decode(self) -> float:
        """A token for each request that decodes; the seconds that it took."""
        started_s = time.perf_counter()
        step = self._scheduler.next_decode(self._room.num_pages, self._costs())
        for preempted in step.preempted:
            self._preempt(self._servings[preempted.request_id])
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
            logger.exception("a decode step failed, and its requests with it")
            self._fail_all(servings, error)
            servings = []
        seconds = time.perf_counter() - on_device_s
        self._decode_step_s = seconds if not self._decode_step_s else 0.9 * self._decode_step_s + 0.1 * seconds
        self._scheduler.decode_done(time.perf_counter())
        for serving, token in zip(servings, drawn, strict=True):
            self._take_in(serving, token)
        self._end()
        return time.perf_counter() - started_s

    def _take_in(self, serving: Serving, drawn: Drawn) -> None:
        """Gives a request its next token, and lets go of it if that is the last."""
        if serving.take_in(drawn):
            tokens, mean = float(serving.num_drawn), self._answer_tokens
            self._answer_tokens = tokens if mean is None else 0.9 * mean + 0.1 * tokens
            self._let_go(serving)
            self._closing.append(serving.admission)
            self._ended.append(serving)

    def _end(self) -> None:
        """Ends answers, and unpins what requests that are gone had reused: before that, so that whoever has an answer
        finds all in place, but not between two layers, for what moves up then takes time."""
        if self._pack is None:
            closing, self._closing = self._closing, []
            for admission in closing:
                admission.close()
        ended, self._ended = self._ended, []
        for serving in ended:
            serving.finish()

    # -- what things take --------------------------------------------------------------------------------------

    def _make_room(self, num_pages: int) -> None:
        for siblings, prompt in self._room.make(num_pages):
            self._dropped(siblings, prompt)

    def _dropped(self, siblings: Siblings, prompt: SharedPrompt) -> None:
        """The answers that wait have to compute their prompt again."""
        self._closing.append(prompt.admission)
        for serving in self._waiting(siblings):
            serving.planned_at = None
            self._replan(serving)

    def _waiting(self, siblings: Siblings) -> list[Serving]:
        """The answers of a request that are in line."""
        return [one for one in siblings.open if one.job is None and one not in self._held]

    def _shared_pages(self, request_id: str) -> int:
        return self._servings[request_id].num_shared_pages(self._store.is_pinned)

    def _costs(self) -> Costs:
        token_s = self._rates.seconds_per_token or _UNMEASURED_S_PER_TOKEN
        return Costs(
            token_s=token_s,
            page_copy_s=0.0,
            decode_step_s=self._decode_step_s,
            answer_tokens=self._answer_tokens,
        )

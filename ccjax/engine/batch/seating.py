"""Who has a seat in the batch: plans, pages, and who gives them back, for others or because a step failed. Runs no step
of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ccjax.engine.admission import Admission
from ccjax.engine.batch.doors import Doors
from ccjax.engine.batch.failures import CancelledError, as_request_error, too_late
from ccjax.engine.batch.line import likely_order
from ccjax.engine.batch.pack import Pack
from ccjax.engine.batch.room import Room
from ccjax.engine.batch.serving import Serving
from ccjax.engine.batch.siblings import SharedPrompt, Siblings
from ccjax.engine.pool import DevicePool
from ccjax.engine.prefill import PrefillCancelledError
from ccjax.engine.rates import Rates
from ccjax.engine.reads import LoadFailedError
from ccjax.engine.variants import VariantIndex
from ccjax.policy.scheduling import NeverFitsError, SchedulerSettings, StepCosts
from ccjax.store.errors import TierFullError
from ccjax.store.tiered import TieredStore

logger = logging.getLogger(__name__)

_UNMEASURED_S_PER_TOKEN = 1e-3
_PLANNED_AHEAD = 8
"""Requests in line that are planned before each pack: what those before them stored is there for them then."""
_RENEW_S = 30.0
"""How long requests wait for pages in place of lost ones."""


class Seating(Doors):
    """The requests of a loop between arrival and end; all of it is the loop's thread's."""

    def __init__(
        self,
        variants: VariantIndex,
        store: TieredStore,
        pool: DevicePool,
        rates: Rates,
        settings: SchedulerSettings,
        *,
        max_retries: int,
        take_in_news: Callable[[], None],
    ) -> None:
        """
        Args:
          max_retries: how often an answer is tried again whose step failed.
          take_in_news: called before requests are planned; may change the variants, and does no I/O.
        """
        super().__init__(pool, settings)
        self._variants = variants
        self._store = store
        self._rates = rates
        self._max_retries = max_retries
        self._take_in_news = take_in_news
        self._room = Room(pool, store, variants)
        self._pack: Pack | None = None
        self._held: list[Serving] = []
        self._closing: list[Admission] = []
        self._ended: list[Serving] = []
        self._lost_s: float | None = None
        self._decode_step_s = 0.0
        self._answer_tokens: float | None = None

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
        try:
            siblings.emit(as_request_error(error))
        except Exception:
            logger.exception("a request failed, and who asked could not be told")

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

    def _end(self) -> None:
        """Ends answers, and unpins what requests that are gone had reused: before that, so that whoever has an answer
        finds all in place, but not between two layers, for what moves up then takes time."""
        if self._pack is None:
            closing, self._closing = self._closing, []
            for admission in closing:
                admission.close()
        ended, self._ended = self._ended, []
        for serving in ended:
            try:
                serving.finish()
            except Exception:
                logger.exception("an answer is complete, and who asked could not be told")

    # -- plans and pages -----------------------------------------------------------------------------------------------

    def _plan_first(self) -> None:
        """Plans the first in line, anew where variants of their chunks came or went since they were planned last."""
        self._take_in_news()
        servings = [one for one in self._servings.values() if one.siblings.prompt is None]
        waiting = [one for one in servings if one.job is None and one not in self._held]
        num_seats = self._scheduler.settings.max_num_seqs - self._scheduler.num_running
        # Those of several flows, also for one seat: who is first depends on what each computes. And one at least, for
        # who has priority finds a seat where there is none.
        num_planned = _PLANNED_AHEAD if num_seats else 1
        if 0 < num_seats < len(waiting):  # who goes first is also for what is cached to say
            num_planned = max(num_planned, self._scheduler.settings.reorder_window)
        for serving in likely_order(waiting)[:num_planned]:
            changed_at = self._variants.changes.last(serving.chunk_ids)
            if serving.planned_at is None or serving.planned_at < changed_at:
                self._plan(serving)

    def _admit(self, serving: Serving) -> None:
        """Draws pages and starts to load; a request whose plan had to change goes back in line."""
        try:
            if serving.planned_at is None:
                serving.plan(self._variants.changes.count)
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
        self._take_pages(serving)
        if serving.siblings.prompt is not None:  # to compute less than before
            self._replan(serving)

    def _take_pages(self, serving: Serving) -> None:
        self._drop(serving)
        serving.planned_at = None
        self._closing.append(serving.admission)

    def _plan(self, serving: Serving) -> None:
        """Plans a request anew that has no pages."""
        try:
            serving.plan(self._variants.changes.count)
        except Exception as error:
            self._fail(serving, error)
        else:
            self._replan(serving)

    def _replan(self, serving: Serving) -> None:
        try:
            self._scheduler.replan(serving.work(self._store.tier_of))
        except NeverFitsError as error:
            self._fail(serving, error)

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
        elif isinstance(cause, PrefillCancelledError):
            self._fail(serving, cause)
        else:
            assert isinstance(cause, Exception)
            logger.error("what a request reuses cannot be had", exc_info=cause)
            self._try_again([serving], cause)

    # -- what failed ---------------------------------------------------------------------------------------------------

    def _try_again(self, servings: Sequence[Serving], error: Exception) -> None:
        """Those of a failed step that have pages still go back in line, and share no step with others from now on; who
        was tried again as often as may be fails with `error`.

        If the step took the pool's pages along, everybody else goes back in line as well, which counts against nobody.
        """
        is_lost = self._pool.is_lost()
        if is_lost:
            self._pack = None  # to take requests out of it would run steps over what is lost
        for serving in servings:
            if self._servings.get(serving.request_id) is not serving or serving.job is None:
                continue
            if serving.num_retries >= self._max_retries:
                self._fail(serving, error)
                continue
            serving.num_retries += 1
            self._num_retries += 1
            self._scheduler.set_alone(serving.request_id, True)
            self._go_back(serving)
        if is_lost:
            self._lose_pages()
        self._end()

    def _go_back(self, serving: Serving) -> None:
        """Puts a request that holds pages at the head of its flow; its tokens stay, as with a preemption."""
        self._take_pages(serving)
        self._replan(serving)

    def _rejoin(self, serving: Serving) -> None:
        """A request had a decode step to itself: whatever failed is behind it. But with its last retry it stays alone,
        so that nobody else's failure is its end."""
        if serving.request_id in self._servings and serving.num_retries < self._max_retries:
            self._scheduler.set_alone(serving.request_id, False)

    def _lose_pages(self) -> None:
        """What the pool held is lost: everybody starts over, with empty pages as soon as there are some."""
        logger.warning("the pages of the pool are lost; what runs is computed, or loaded, again")
        self._pack, self._lost_s = None, time.perf_counter()
        for serving in tuple(self._servings.values()):
            if serving.job is not None:
                self._go_back(serving)
            serving.planned_at = None
        for siblings in tuple(self._room.shared):
            self._dropped(siblings, self._room.drop(siblings))
        closing, self._closing = self._closing, []
        for admission in closing:
            admission.close(ok=False)  # nothing moves up into pages that are lost
        self._has_pages()

    def _has_pages(self) -> bool:
        """False while what the pool lost is not replaced yet.

        Raises:
          RuntimeError: it could not be for so long that requests had better be told.
        """
        if self._lost_s is None:
            return True
        self._room.lose()
        try:
            self._pool.renew()
        except RuntimeError:  # somebody reads a chunk just now, for a snapshot say, or the device has no memory
            if time.perf_counter() - self._lost_s > _RENEW_S:
                raise
            return False
        self._lost_s = None
        return True

    # -- what things take ----------------------------------------------------------------------------------------------

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

    def _costs(self) -> StepCosts:
        token_s = self._rates.seconds_per_token or _UNMEASURED_S_PER_TOKEN
        return StepCosts(
            token_s=token_s,
            decode_step_s=self._decode_step_s,
            answer_tokens=self._answer_tokens,
        )

"""The life of the batch loop's sequences: planned, admitted, preempted, tried again, ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ccjax.cache.reads import LoadFailedError
from ccjax.cache.variants import VariantIndex
from ccjax.engine.admission import Admission
from ccjax.engine.batch.available_pages import AvailablePages
from ccjax.engine.batch.failures import CancelledError, as_request_error, too_late
from ccjax.engine.batch.locked_scheduler import LockedScheduler, planning_order
from ccjax.engine.batch.sequence import SequenceGroup, TokenSequence
from ccjax.engine.batch.shared_prompt import SharedPrompt
from ccjax.policy.scheduling import NeverFitsError
from ccjax.runner.cancellation import PrefillCancelledError
from ccjax.runner.pack import Pack
from ccjax.runner.pool import DevicePool
from ccjax.runner.sampling import Drawn
from ccjax.store.errors import TierFullError
from ccjax.store.tiered import TieredStore

logger = logging.getLogger(__name__)

_NUM_PREPLANNED = 8
"""Waiting sequences that are planned before each pack: what earlier ones stored is there for them then."""
_RENEW_S = 30.0
"""How long sequences wait for pages in place of lost ones."""


class Sequences:
    """All sequences that the loop's thread knows, which alone uses this.

    Attributes:
      pack: the pack that runs; None between two.
      pages: what can be drawn for prompts and answers.
      num_preemptions, num_retries: so far.
      answer_tokens: of a usual answer lately; None before the first has ended.
    """

    def __init__(
        self,
        scheduler: LockedScheduler,
        variants: VariantIndex,
        store: TieredStore,
        pool: DevicePool,
        *,
        max_retries: int,
        apply_changes: Callable[[], None],
    ) -> None:
        """
        Args:
          max_retries: how often a sequence is tried again whose step failed.
          apply_changes: called before sequences are planned; may change the variants, and does no I/O.
        """
        self.pack: Pack | None = None
        self.pages = AvailablePages(pool, store, variants)
        self.num_preemptions = 0
        self.num_retries = 0
        self.answer_tokens: float | None = None
        self._by_id: dict[str, TokenSequence] = {}
        self._scheduler = scheduler
        self._variants = variants
        self._store = store
        self._pool = pool
        self._max_retries = max_retries
        self._apply_changes = apply_changes
        self._held: list[TokenSequence] = []
        self._closing: list[Admission] = []
        self._ended: list[TokenSequence] = []
        self._lost_s: float | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: str) -> TokenSequence:
        return self._by_id[request_id]

    def get(self, request_id: str) -> TokenSequence | None:
        """The sequence of that id, or None once it has ended."""
        return self._by_id.get(request_id)

    def all(self) -> tuple[TokenSequence, ...]:
        """A copy; the only method that other threads may call."""
        return tuple(self._by_id.values())

    @property
    def is_prefilling(self) -> bool:
        """True while some prompt is only computed in part."""
        return any(one.job is not None and not one.is_decoding for one in self._by_id.values())

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Adds sequences that the scheduler knows already."""
        self._by_id.update({one.request_id: one for one in sequences})

    # -- from the queue to the first step ------------------------------------------------------------------------------

    def refresh(self, late: Iterable[str]) -> None:
        """Ends sequences that are late, as the scheduler says, or cancelled, and plans those again that have waited for
        another process."""
        for request_id in late:
            if request_id in self._by_id:  # else another one of its group was late, too
                self.fail(self._by_id[request_id], too_late())
        for sequence in self.all():
            if sequence.request_id in self._by_id and sequence.group.is_cancelled():
                self.fail(sequence, CancelledError())
        for sequence in tuple(self._held):
            if sequence.admission.look():
                self._held.remove(sequence)
                self._plan(sequence)

    def refresh_unstarted(self) -> None:
        """Ends cancelled and late sequences that never left the queue: they hold nothing that another thread may be
        using."""
        now_s = time.perf_counter()
        for sequence in self.all():
            group = sequence.group
            if group.started_s is not None:
                continue
            if group.is_cancelled():
                self.fail(sequence, CancelledError())
            elif group.deadline_s is not None and group.deadline_s <= now_s:
                self.fail(sequence, too_late())

    def plan_waiting(self) -> None:
        """Plans the first in the queue, again where variants of their chunks came or went since."""
        self._apply_changes()
        unshared = [one for one in self._by_id.values() if one.group.prompt is None]
        waiting = [one for one in unshared if one.job is None and one not in self._held]
        num_free = self._scheduler.settings.max_num_seqs - self._scheduler.num_running
        # Those of several flows, even when only one can be admitted: who is first depends on what each computes. And
        # always one, for it may have the priority to preempt another.
        num_planned = _NUM_PREPLANNED if num_free else 1
        if 0 < num_free < len(waiting):  # what is cached has a say in who goes first
            num_planned = max(num_planned, self._scheduler.settings.reorder_window)
        for sequence in planning_order(waiting)[:num_planned]:
            changed_at = self._variants.changes.last(sequence.chunk_ids)
            if sequence.planned_at is None or sequence.planned_at < changed_at:
                self._plan(sequence)

    def admit(self, request_ids: Sequence[str]) -> None:
        """Draws the pages of sequences and starts to load; one whose plan had to change waits again."""
        admitted = [self._by_id[request_id] for request_id in request_ids]
        for sequence in admitted:
            sequence.claim_prompt()
        for sequence in admitted:
            if sequence.request_id in self._by_id:
                self._admit(sequence)

    def _admit(self, sequence: TokenSequence) -> None:
        try:
            if sequence.planned_at is None:
                sequence.plan(self._variants.changes.count)
            sequence.mark_started()
            if not sequence.agree():
                self._scheduler.hold(sequence.request_id)
                self._held.append(sequence)
                return
            sequence.open()
            self.reclaim(sequence.num_own_pages)
            sequence.start_prefill(self._pool)
            is_as_scheduled = sequence.is_as_scheduled
        except TierFullError:  # fewer pages are free than was thought
            is_as_scheduled = False
        except Exception as error:
            self.fail(sequence, error)
            return
        if not is_as_scheduled:
            self._release_pages(sequence)
            sequence.admission.close(ok=False)
            self._replan(sequence)

    def _plan(self, sequence: TokenSequence) -> None:
        """Plans a sequence that has no pages."""
        try:
            sequence.plan(self._variants.changes.count)
        except Exception as error:
            self.fail(sequence, error)
        else:
            self._replan(sequence)

    def _replan(self, sequence: TokenSequence) -> None:
        """Tells the scheduler the work of a sequence by its plan now."""
        try:
            self._scheduler.replan(sequence.work(self._store.tier_of))
        except NeverFitsError as error:
            self.fail(sequence, error)

    def shared_pages(self, request_id: str) -> int:
        """Pages that only this sequence would keep from being taken."""
        return self._by_id[request_id].num_shared_pages(self._store.is_pinned)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def reclaim(self, num_pages: int) -> None:
        """Frees so many pages where possible."""
        for group, prompt in self.pages.reclaim(num_pages):
            self._dropped(group, prompt)

    def drop_unread_prompts(self) -> bool:
        """Drops the shared prompts that no admitted sequence reads; False where there was none."""
        unread = [one for one in self.pages.shared if one.is_unread]
        for group in unread:
            self._dropped(group, self.pages.drop(group))
        return bool(unread)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Takes the pages of sequences, which wait again."""
        for request_id in request_ids:
            self._preempt(self._by_id[request_id])

    def _preempt(self, sequence: TokenSequence) -> None:
        self.num_preemptions += 1
        self._take_pages(sequence)
        if sequence.group.prompt is not None:  # to compute less than before
            self._replan(sequence)

    def share_prompt(self, sequence: TokenSequence) -> None:
        """Lets the others of a group read the prompt that is computed now: they begin, or go on."""
        group = sequence.group
        waiting, new = self._waiting(group), sequence.fork()
        if group.prompt is not None or not (waiting or new):
            return
        self._scheduler.share(sequence.share())
        self.pages.shared.append(group)
        for one in new:
            self._scheduler.add(one.work(self._store.tier_of), after=sequence.request_id)
        self.add(new)
        for one in waiting:
            self._replan(one)

    def _dropped(self, group: SequenceGroup, prompt: SharedPrompt) -> None:
        """Lets those that wait compute their prompt again."""
        self._closing.append(prompt.admission)
        for sequence in self._waiting(group):
            sequence.planned_at = None
            self._replan(sequence)

    def _waiting(self, group: SequenceGroup) -> list[TokenSequence]:
        return [one for one in group.open if one.job is None and one not in self._held]

    def _take_pages(self, sequence: TokenSequence) -> None:
        self._release_pages(sequence)
        sequence.planned_at = None
        self._closing.append(sequence.admission)

    def _release_pages(self, sequence: TokenSequence) -> None:
        if self.pack is not None and sequence.job is not None:
            self.pack.drop(sequence.job)
        sequence.release_pages()

    # -- tokens and ends -----------------------------------------------------------------------------------------------

    def append_token(self, sequence: TokenSequence, drawn: Drawn) -> None:
        """Gives a sequence its next token; with the last one it ends."""
        try:
            is_last = sequence.append_token(drawn)
        except Exception as error:
            logger.exception("a request failed over a token of its answer")
            self.fail(sequence, error)
            return
        if is_last:
            tokens, mean = float(sequence.num_drawn), self.answer_tokens
            self.answer_tokens = tokens if mean is None else 0.9 * mean + 0.1 * tokens
            self._forget(sequence)
            self._closing.append(sequence.admission)
            self._ended.append(sequence)

    def settle(self) -> None:
        """Unpins what sequences that are gone had reused, and then emits the ends of answers, so that all is in place
        once a caller has its answer. Nothing is unpinned between two layers: what moves to a faster tier takes time."""
        if self.pack is None:
            closing, self._closing = self._closing, []
            for admission in closing:
                admission.close()
        ended, self._ended = self._ended, []
        for sequence in ended:
            try:
                sequence.finish()
            except Exception:
                logger.exception("an answer is complete, and who asked could not be told")

    def fail(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends all sequences of a group with an error."""
        group = sequence.group
        for one in tuple(group.open):
            self._forget(one)
            one.admission.close(ok=False)
        try:
            group.emit(as_request_error(error))
        except Exception:
            logger.exception("a request failed, and who asked could not be told")

    def fail_all(self, error: Exception) -> None:
        """Ends everything with an error."""
        while self._by_id:
            self.fail(next(iter(self._by_id.values())), error)

    def _forget(self, sequence: TokenSequence) -> None:
        """Removes a sequence and frees its pages; with the last of a group those of the prompt."""
        self._by_id.pop(sequence.request_id, None)
        if sequence in self._held:
            self._held.remove(sequence)
        if sequence.request_id in self._scheduler:  # else it expired
            self._scheduler.remove(sequence.request_id)
        self._release_pages(sequence)
        sequence.admission.release()
        group = sequence.group
        group.open.remove(sequence)
        if group.prompt is not None and not group.open:
            self._closing.append(self.pages.drop(group).admission)

    # -- what failed ---------------------------------------------------------------------------------------------------

    def refuse(self, sequence: TokenSequence, cause: BaseException | None) -> None:
        """Takes a sequence out of the pack whose reused KV cannot be had."""
        if isinstance(cause, LoadFailedError):
            self._release_pages(sequence)
            sequence.admission.fail(cause)
            self._replan(sequence)
        elif isinstance(cause, PrefillCancelledError):
            self.fail(sequence, cause)
        else:
            assert isinstance(cause, Exception)
            logger.error("what a request reuses cannot be had", exc_info=cause)
            self.retry([sequence], cause)

    def retry(self, sequences: Sequence[TokenSequence], error: Exception) -> None:
        """Puts those of a failed step that still have pages back in the queue; they share no step with others from now
        on. One that was tried `max_retries` times fails with `error`.

        If the step took the pool's pages with it, all others wait again as well, which counts against none of them.
        """
        is_lost = self._pool.is_lost()
        if is_lost:
            self.pack = None  # to take sequences out of it would run steps over what is lost
        for sequence in sequences:
            if self._by_id.get(sequence.request_id) is not sequence or sequence.job is None:
                continue
            if sequence.num_retries >= self._max_retries:
                self.fail(sequence, error)
                continue
            sequence.num_retries += 1
            self.num_retries += 1
            self._scheduler.set_alone(sequence.request_id, True)
            self._requeue(sequence)
        if is_lost:
            self.lose_pages()
        self.settle()

    def rejoin(self, sequence: TokenSequence) -> None:
        """Lets a sequence share steps again, once it had a decode step of its own. With its last retry it stays alone,
        so that no other one's failure is its end."""
        if sequence.request_id in self._by_id and sequence.num_retries < self._max_retries:
            self._scheduler.set_alone(sequence.request_id, False)

    def lose_pages(self) -> None:
        """Starts all over, for what the pool held is lost."""
        logger.warning("the pages of the pool are lost; what runs is computed, or loaded, again")
        self.pack, self._lost_s = None, time.perf_counter()
        for sequence in self.all():
            if sequence.job is not None:
                self._requeue(sequence)
            sequence.planned_at = None
        for group in tuple(self.pages.shared):
            self._dropped(group, self.pages.drop(group))
        closing, self._closing = self._closing, []
        for admission in closing:
            admission.close(ok=False)  # nothing moves into pages that are lost
        self.has_pages()

    def start_over(self) -> None:
        """Forgets the pack, once all sequences have failed."""
        self.pack = None
        self.settle()
        if self._lost_s is not None or self._pool.is_lost():
            self.lose_pages()

    def has_pages(self) -> bool:
        """False while lost pages are not replaced yet.

        Raises:
          RuntimeError: they could not be for so long that requests had better be told.
        """
        if self._lost_s is None:
            return True
        self.pages.forget_cached()
        try:
            self._pool.renew()
        except RuntimeError:  # a chunk is being read, for a snapshot say, or the device has no memory
            if time.perf_counter() - self._lost_s > _RENEW_S:
                raise
            return False
        self._lost_s = None
        return True

    def _requeue(self, sequence: TokenSequence) -> None:
        """Puts a sequence that holds pages at the head of its flow; its tokens stay, as with a preemption."""
        self._take_pages(sequence)
        self._replan(sequence)

"""The life cycle of the batch loop's sequences: planning, admission, preemption, retries, completion."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.planned_prefill import PlannedPrefill
from ccjax.cache.reads import LoadFailedError
from ccjax.engine.batch.available_pages import AvailablePages
from ccjax.engine.batch.failures import CancelledError, as_request_error, too_late
from ccjax.engine.batch.group import SequenceGroup
from ccjax.engine.batch.locked_scheduler import LockedScheduler, planning_order
from ccjax.engine.batch.sequence import TokenSequence
from ccjax.engine.batch.shared_prompt import SharedPrompt
from ccjax.policy.scheduling import NeverFitsError
from ccjax.runner.cancellation import PrefillCancelledError
from ccjax.runner.pack import Prefilling
from ccjax.runner.pool import DevicePool
from ccjax.runner.sampling import SampledToken
from ccjax.store.errors import TierFullError
from ccjax.store.usage import DEVICE
from ccjax.types import ChunkId

logger = logging.getLogger(__name__)

_NUM_PREPLANNED = 8
"""Waiting sequences that are planned before each pack; planned this late, they can reuse what earlier ones stored."""
_RENEW_S = 30.0
"""How long sequences wait until lost pages are replaced."""


class Sequences:
    """All sequences of the loop. Used only by the loop's thread, except for `all`.

    Attributes:
      packs: the running pack and one that interrupts it; none between packs.
      pages: the pages available to prompts and answers.
      num_preemptions, num_retries: counts so far.
      answer_tokens: moving average of the tokens per answer; None before the first answer has ended.
    """

    def __init__(
        self,
        scheduler: LockedScheduler,
        chunks: ChunkCache,
        pool: DevicePool,
        *,
        max_retries: int,
    ) -> None:
        """
        Args:
          max_retries: how often a sequence whose step failed is retried.
        """
        self.packs: list[Prefilling] = []
        self.pages = AvailablePages(pool, chunks.store, chunks.variants, chunks.device_preloader)
        self.num_preemptions = 0
        self.num_retries = 0
        self.answer_tokens: float | None = None
        self._by_id: dict[str, TokenSequence] = {}
        self._scheduler = scheduler
        self._variants = chunks.variants
        self._store = chunks.store
        self._pool = pool
        self._max_retries = max_retries
        self._apply_changes = chunks.updater.apply
        self._preloader = chunks.device_preloader
        self._held: list[TokenSequence] = []
        self._preparing: dict[ChunkId, SequenceGroup] = {}
        self._closing: list[PlannedPrefill] = []
        self._ended: list[TokenSequence] = []
        self._lost_s: float | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence_id: str) -> TokenSequence:
        return self._by_id[sequence_id]

    def get(self, sequence_id: str) -> TokenSequence | None:
        """The sequence with this id, or None if it has ended."""
        return self._by_id.get(sequence_id)

    def all(self) -> tuple[TokenSequence, ...]:
        """A copy of all sequences; the only method that other threads may call."""
        return tuple(self._by_id.values())

    @property
    def preloaded_bytes(self) -> int:
        """Bytes of KV copied to the device for queued requests so far."""
        return 0 if self._preloader is None else self._preloader.num_bytes

    @property
    def is_prefilling(self) -> bool:
        """True if a sequence is in prefill."""
        return any(sequence.job is not None and not sequence.is_decoding for sequence in self._by_id.values())

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Adds sequences that the scheduler already knows."""
        self._by_id.update({sequence.sequence_id: sequence for sequence in sequences})

    # -- from the queue to the first step ------------------------------------------------------------------------------

    def refresh(self, late: Iterable[str]) -> None:
        """Ends late sequences (those that the scheduler expired) and cancelled ones, and plans sequences again whose
        wait for another process is over."""
        for sequence_id in late:
            if sequence_id in self._by_id:  # else it ended with another late sequence of its group
                self.fail(self._by_id[sequence_id], too_late())
        for sequence in self.all():
            is_there = sequence.sequence_id in self._by_id
            if is_there and sequence.group.is_cancelled() and not self._is_wanted(sequence.group):
                self.fail(sequence, CancelledError())
        for sequence in tuple(self._held):
            if sequence.is_wait_over():
                self._held.remove(sequence)
                self._plan(sequence)

    def _is_wanted(self, group: SequenceGroup) -> bool:
        """True for a preparation of a passage of another request: of a search's next answer, where this one's first
        passages have changed."""
        keys = {key for key, preparing in self._preparing.items() if preparing is group}
        others = (other for other in self._by_id.values() if other.group is not group) if keys else ()
        return any(not keys.isdisjoint(other.chunk_ids) and not other.group.is_cancelled() for other in others)

    def refresh_unstarted(self) -> None:
        """Ends cancelled and late sequences that never left the queue. This is safe while another thread has paused the
        loop, since they hold nothing."""
        now_s = time.perf_counter()
        for sequence in self.all():
            group = sequence.group
            if group.started_s is not None:
                continue
            if group.is_cancelled():
                self.fail(sequence, CancelledError())
            elif group.deadline_s is not None and group.deadline_s <= now_s:
                self.fail(sequence, too_late())

    def plan_waiting(self, *, most: int | None = None) -> None:
        """Plans the first sequences in the queue; again if variants of their chunks have changed since.

        Args:
          most: how many to plan at most; None for no limit.
        """
        self._apply_changes()
        if self._preloader is not None and (copied := self._preloader.collect()) is not None:
            for sequence in self._queued():
                if copied in sequence.pinned_ids:
                    self._replan(sequence)
        unshared = [sequence for sequence in self._by_id.values() if sequence.group.shared_prompt is None]
        waiting = [sequence for sequence in unshared if sequence.job is None and sequence not in self._held]
        num_free = self._scheduler.settings.max_num_seqs - self._scheduler.num_running
        # Several, even if only one can be admitted: the order of the flows depends on how much each one computes. At
        # least one even without a free slot, since it may preempt a less important sequence.
        num_planned = _NUM_PREPLANNED if num_free else 1
        if 0 < num_free < len(waiting):  # the order also depends on what is cached
            num_planned = max(num_planned, self._scheduler.settings.reorder_window)
        unplanned = (one for one in planning_order(waiting)[:num_planned] if self._is_outdated(one))
        for sequence in itertools.islice(unplanned, most):
            self._plan(sequence)

    def _is_outdated(self, sequence: TokenSequence) -> bool:
        changed_at = self._variants.changes.last(sequence.chunk_ids)
        return sequence.planned_at_change is None or sequence.planned_at_change < changed_at

    def look_ahead(self) -> None:
        """Between two layers: begins to load for sequences in the queue, and plans one more for that."""
        if self._preloader is not None and self._scheduler.num_waiting:
            self.plan_waiting(most=1)
            self.preload()

    def preload(self) -> None:
        """Starts to copy what planned sequences in the queue will reuse to free pages of the device."""
        if self._preloader is not None:
            queued = planning_order(self._queued())
            wanted = (variant_id for sequence in queued for variant_id in sequence.pinned_ids)
            # So many are left for the answers, which would have to wait for the copy.
            self._preloader.want(wanted, num_spare=self._scheduler.settings.max_num_seqs)

    def forget_copy(self) -> None:
        """Drops a copy for a queued request that is under way."""
        if self._preloader is not None:
            self._preloader.forget()

    def _queued(self) -> list[TokenSequence]:
        return [sequence for sequence in self._by_id.values() if sequence.job is None]

    def admit(self, sequence_ids: Sequence[str]) -> None:
        """Allocates the pages of sequences and starts loading; a sequence whose plan had to change is queued again."""
        admitted = [self._by_id[sequence_id] for sequence_id in sequence_ids]
        for sequence in admitted:
            sequence.read_shared_prompt()
        for sequence in admitted:
            if sequence.sequence_id in self._by_id:
                self._admit(sequence)

    def _admit(self, sequence: TokenSequence) -> None:
        try:
            if sequence.planned_at_change is None:
                sequence.plan(self._variants.changes.count)
            sequence.mark_started()
            if self._prepare(sequence) or not sequence.claim():
                self._scheduler.hold(sequence.sequence_id)
                self._held.append(sequence)
                return
            sequence.pin()
            self.reclaim(sequence.num_own_pages)
            sequence.start_prefill(self._pool)
            is_as_scheduled = sequence.is_as_scheduled
        except TierFullError:  # fewer pages are free than assumed
            is_as_scheduled = False
        except Exception as error:
            self.fail(sequence, error)
            return
        if not is_as_scheduled:
            self._release_pages(sequence)
            sequence.prefill.close(ok=False)
            self._replan(sequence)

    def _prepare(self, sequence: TokenSequence) -> bool:
        """Queues prefills that prepare the sequence's passages right before it; True if it has to wait for some."""
        added = []
        for preparation in sequence.preparations(self._preparing):
            try:
                self._scheduler.add(preparation.work(self._pool.is_in_place), after=sequence.sequence_id)
            except NeverFitsError:
                preparation.group.open.remove(preparation)
            else:
                added.append(preparation)
        self.add(added)
        self._preparing = {key: group for key, group in self._preparing.items() if group.open}
        return sequence.is_waiting

    def _plan(self, sequence: TokenSequence) -> None:
        """Plans a sequence that holds no pages."""
        try:
            sequence.plan(self._variants.changes.count)
        except Exception as error:
            self.fail(sequence, error)
        else:
            self._replan(sequence)

    def _replan(self, sequence: TokenSequence) -> None:
        """Updates the scheduler with the work of a sequence under its current plan."""
        try:
            self._scheduler.replan(sequence.work(self._pool.is_in_place))
        except NeverFitsError as error:
            self.fail(sequence, error)

    def shared_pages(self, sequence_id: str) -> int:
        """Shared pages of a sequence that are reclaimable now and would not be if it ran."""
        return self._by_id[sequence_id].num_shared_pages(self._pages_to_pin)

    def _pages_to_pin(self, variant_id: str) -> int:
        """Pages of a variant that are reclaimable now: all that it has on the device, or none."""
        is_there = self._store.tier_of(variant_id) == DEVICE and not self._store.is_pinned(variant_id)
        return (self._store.charge_bytes(DEVICE, variant_id) or 0) // self._pool.page_bytes if is_there else 0

    # -- pages ---------------------------------------------------------------------------------------------------------

    def reclaim(self, num_pages: int) -> None:
        """Frees pages until `num_pages` are free, if possible."""
        for group, prompt in self.pages.reclaim(num_pages):
            self._dropped(group, prompt)

    def drop_unread_prompts(self) -> bool:
        """Drops the shared prompts that no admitted sequence reads; False if there was none."""
        unread = [group for group in self.pages.shared if group.is_unread]
        for group in unread:
            self._dropped(group, self.pages.drop(group))
        return bool(unread)

    def preempt(self, sequence_ids: Iterable[str]) -> None:
        """Takes the pages of sequences that the scheduler has preempted and queued again."""
        for sequence_id in sequence_ids:
            self._preempt(self._by_id[sequence_id])

    def _preempt(self, sequence: TokenSequence) -> None:
        self.num_preemptions += 1
        self._take_pages(sequence)
        if sequence.group.shared_prompt is not None:  # it reads the shared prompt and computes less than before
            self._replan(sequence)

    def share_prompt(self, sequence: TokenSequence) -> None:
        """Shares a prompt that was just computed with the other sequences of the group: creates them, or replans those
        that wait."""
        group = sequence.group
        waiting, new = self._waiting(group), sequence.fork()
        if group.shared_prompt is not None or not (waiting or new):
            return
        self._scheduler.share(sequence.share())
        self.pages.shared.append(group)
        for fork in new:
            self._scheduler.add(fork.work(self._pool.is_in_place), after=sequence.sequence_id)
        self.add(new)
        for member in waiting:
            self._replan(member)

    def _dropped(self, group: SequenceGroup, prompt: SharedPrompt) -> None:
        """Makes the waiting sequences of a group compute their dropped prompt again."""
        self._closing.append(prompt.prefill)
        for sequence in self._waiting(group):
            sequence.planned_at_change = None
            self._replan(sequence)

    def _waiting(self, group: SequenceGroup) -> list[TokenSequence]:
        return [sequence for sequence in group.open if sequence.job is None and sequence not in self._held]

    def _take_pages(self, sequence: TokenSequence) -> None:
        self._release_pages(sequence)
        sequence.planned_at_change = None
        self._closing.append(sequence.prefill)

    def _release_pages(self, sequence: TokenSequence) -> None:
        if sequence.job is not None:
            for pack in self.packs:
                pack.drop(sequence.job)
        sequence.release_pages()

    # -- tokens and ends -----------------------------------------------------------------------------------------------

    def append_token(self, sequence: TokenSequence, token: SampledToken) -> bool:
        """Adds a token to a sequence and ends the sequence if it was the last one; False if the request failed over
        it."""
        try:
            is_last = sequence.append_token(token)
        except Exception as error:
            logger.exception("a request failed over a token of its answer")
            self.fail(sequence, error)
            return False
        if is_last:
            tokens, mean = float(sequence.num_sampled), self.answer_tokens
            self.answer_tokens = tokens if mean is None else 0.9 * mean + 0.1 * tokens
            self._forget(sequence, keeps_pages=sequence.group.keeps_run)
            self._closing.append(sequence.prefill)
            self._ended.append(sequence)
        return True

    def settle(self) -> None:
        """Emits the last deltas of ended sequences, first unpinning what they reused, so that a caller with a complete
        answer finds it evictable. Between the layers of a pack it is unpinned later, since promotion takes time."""
        if not self.packs:
            closing, self._closing = self._closing, []
            for prefill in closing:
                prefill.close()
        ended, self._ended = self._ended, []
        for sequence in ended:
            try:
                sequence.finish()
            except Exception:
                logger.exception("an answer is complete, but its caller could not be told")
        kept = [sequence for sequence in ended if sequence.group.keeps_run]
        for sequence in kept:
            sequence.keep_run()
        for sequence in kept:  # after all, since sequences of one prompt share its pages
            self._free_pages(sequence)

    def fail(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends all sequences of the group of `sequence` with an error."""
        group = sequence.group
        for member in tuple(group.open):
            self._forget(member)
            member.prefill.close(ok=False)
        try:
            group.emit(as_request_error(error))
        except Exception:
            logger.exception("a request failed, but its caller could not be told")

    def fail_all(self, error: Exception) -> None:
        """Ends all sequences with an error."""
        while self._by_id:
            self.fail(next(iter(self._by_id.values())), error)

    def _forget(self, sequence: TokenSequence, *, keeps_pages: bool = False) -> None:
        """Removes a sequence and frees its pages; with the last one of a group, also those of the shared prompt.

        Args:
          keeps_pages: it has ended, and `settle` frees its pages.
        """
        self._by_id.pop(sequence.sequence_id, None)
        if sequence in self._held:
            self._held.remove(sequence)
        if sequence.sequence_id in self._scheduler:  # else the scheduler expired it
            self._scheduler.remove(sequence.sequence_id)
        sequence.prefill.release_claims()
        sequence.group.open.remove(sequence)
        if not keeps_pages:
            self._free_pages(sequence)

    def _free_pages(self, sequence: TokenSequence) -> None:
        self._release_pages(sequence)
        group = sequence.group
        if group.shared_prompt is not None and not group.open:
            self._closing.append(self.pages.drop(group).prefill)

    # -- what failed ---------------------------------------------------------------------------------------------------

    def refuse(self, sequence: TokenSequence, cause: BaseException | None) -> None:
        """Removes a sequence from the pack because loading its reused KV failed; plans it again, ends or retries it."""
        if isinstance(cause, LoadFailedError):
            self._release_pages(sequence)
            sequence.prefill.replan_without(cause)
            self._replan(sequence)
        elif isinstance(cause, PrefillCancelledError):
            self.fail(sequence, cause)
        else:
            assert isinstance(cause, Exception)
            logger.error("what a request reuses cannot be had", exc_info=cause)
            self.retry([sequence], cause)

    def retry(self, sequences: Sequence[TokenSequence], error: Exception) -> None:
        """Queues the sequences of a failed step again, except those without pages; from now on they run alone. A
        sequence that was already retried `max_retries` times fails with `error`.

        If the failed step destroyed the pool's pages, all other running sequences are queued again, too; this does not
        count as a retry of theirs.
        """
        is_lost = self._pool.is_lost()
        if is_lost:
            self.packs.clear()  # removing sequences from them would run steps over the lost pages
        for sequence in sequences:
            if self._by_id.get(sequence.sequence_id) is not sequence or sequence.job is None:
                continue
            if sequence.num_retries >= self._max_retries:
                self.fail(sequence, error)
                continue
            sequence.num_retries += 1
            self.num_retries += 1
            self._scheduler.set_alone(sequence.sequence_id, True)
            self._requeue(sequence)
        if is_lost:
            self.lose_pages()
        self.settle()

    def rejoin(self, sequence: TokenSequence) -> None:
        """Lets a sequence share steps again after a decode step of its own. In its last retry it stays alone, so that
        another sequence's failure cannot end it."""
        if sequence.sequence_id in self._by_id and sequence.num_retries < self._max_retries:
            self._scheduler.set_alone(sequence.sequence_id, False)

    def lose_pages(self) -> None:
        """Queues all running sequences again and drops shared prompts, because the contents of the pool are lost."""
        logger.warning("the pages of the pool are lost; what runs is computed, or loaded, again")
        self._lost_s = time.perf_counter()
        self.packs.clear()
        for sequence in self.all():
            if sequence.job is not None:
                self._requeue(sequence)
            sequence.planned_at_change = None
        for group in tuple(self.pages.shared):
            self._dropped(group, self.pages.drop(group))
        closing, self._closing = self._closing, []
        for prefill in closing:
            prefill.close(ok=False)  # nothing may be promoted into lost pages
        self.has_pages()

    def start_over(self) -> None:
        """Resets the state after all sequences have failed."""
        self.packs.clear()
        self.settle()
        if self._lost_s is not None or self._pool.is_lost():
            self.lose_pages()

    def has_pages(self) -> bool:
        """Returns False while lost pages could not be replaced yet; tries to replace them.

        Raises:
          RuntimeError: replacing them has failed for `_RENEW_S`, so that requests should fail.
        """
        if self._lost_s is None:
            return True
        self.pages.forget_cached()
        self.forget_copy()
        try:
            self._pool.renew()
        except RuntimeError:  # a chunk is being read, e.g. for a snapshot, or the device has no memory
            if time.perf_counter() - self._lost_s > _RENEW_S:
                raise
            return False
        self._lost_s = None
        return True

    def _requeue(self, sequence: TokenSequence) -> None:
        """Queues a sequence that holds pages at the front of its flow; its tokens are kept, as in a preemption."""
        self._take_pages(sequence)
        self._replan(sequence)

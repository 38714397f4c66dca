"""The thread that runs all requests of an engine, step by step.

Data flow: a request's `TokenSequence` is queued. When it comes near the head of the queue, its prompt is planned
(`PlannedPrefill`: which chunks are reused, which tokens are computed), and again if what is stored of its chunks
changes. Once the scheduler (`ccjax.policy.scheduling`) admits it, it allocates pages of the pool and starts to load. A
`Pack` of pieces of several prompts runs through the layers, with decode steps between them; the last piece of a prompt
yields the logits from which the first token is sampled. A decode step adds a token to each sequence that has its first.
Tokens go to the caller, computed chunks into the store: after the first token, or before an answer of a single token.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping

import jax

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.costs import UNMEASURED_S_PER_TOKEN
from ccjax.config.engine import BatchSettings
from ccjax.engine.batch.failures import as_request_error
from ccjax.engine.batch.locked_scheduler import LockedScheduler
from ccjax.engine.batch.pauses import Pauses
from ccjax.engine.batch.sequence import TokenSequence
from ccjax.engine.batch.sequences import Sequences
from ccjax.errors import OverloadError
from ccjax.policy.scheduling import AdmissionQueueFullError, NeverFitsError, StepCosts
from ccjax.runner.context_loader import JobFailedError
from ccjax.runner.decode import DecodeBatch
from ccjax.runner.device import Device
from ccjax.runner.pack import Piece
from ccjax.runner.packing import pack_pieces
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.runner.sampling import SampledToken, sample_tokens

logger = logging.getLogger(__name__)

_SLOW_LAYER_S = 0.05
"""Layers that take longer are not queued on the device behind each other: what interrupts them would wait for all."""
_LOOK_S = 0.002
_PAUSED_LOOK_S = 0.05
"""Interval of checks for cancelled requests while another thread has paused the loop."""


@dataclasses.dataclass(frozen=True)
class BatchCounts:
    """The state of a loop: running and waiting requests, prompt tokens still to be computed for them, preemptions and
    retries of failed steps so far, pages of the pool, the bytes of KV copied to host memory by each thread, the pages
    of reused segments (`DevicePool.reused_pages`), and the bytes copied to the device for queued requests."""

    running: int
    waiting: int
    waiting_tokens: int
    preemptions: int
    retries: int
    free_pages: int
    num_pages: int
    bytes_to_host: Mapping[str, int]
    reused_pages: Mapping[str, int]
    preloaded_bytes: int


class BatchLoop:
    """Runs requests until `close`. Public methods may be called from any thread.

    `_changed` guards the state shared between threads: the scheduler, `_new` and the pauses. `_sequences` belongs to
    the loop's thread, which collects submitted sequences from `_new`.
    """

    def __init__(
        self,
        device: Device,
        chunks: ChunkCache,
        config: BatchSettings,
    ) -> None:
        self._model = device.model
        self._pool = device.pool
        self._rates = chunks.rates
        self._apply_changes = chunks.updater.apply
        self._changed = threading.Condition()
        sizes = device.sizes
        limits = {"batched_tokens": sizes.max_num_batched_tokens, "context_tokens": sizes.context_tokens}
        settings = config.scheduler_settings(device.pool.num_pages, PAGE_TOKENS, **limits)
        self._scheduler = LockedScheduler(settings, self._changed)
        self._sequences = Sequences(self._scheduler, chunks, device.pool, max_retries=config.max_retries)
        self._decoder = DecodeBatch(device.model, device.pool)
        self._decode_step_s = 0.0
        self._new: collections.deque[TokenSequence] = collections.deque()
        self._pauses = Pauses(self._changed, self._scheduler)
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- from any thread -----------------------------------------------------------------------------------------------

    @property
    def counts(self) -> BatchCounts:
        """The current counts: running means in prefill or decoding; waiting includes preempted sequences."""
        scheduler, sequences, pool = self._scheduler, self._sequences, self._pool
        return BatchCounts(
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.waiting_tokens(),
            sequences.num_preemptions,
            sequences.num_retries,
            pool.num_free,
            pool.num_pages,
            pool.bytes_to_host,
            dict(pool.reused_pages),
            sequences.preloaded_bytes,
        )

    def waiting(self) -> list[TokenSequence]:
        """The sequences that never left the queue, unordered; one may leave it at the moment of the call."""
        with self._changed:
            known = [*self._sequences.all(), *self._new]
        return [sequence for sequence in known if sequence.group.started_s is None]

    def check_queue_limit(self, flow: str) -> None:
        """Raises OverloadError if `add` would for a request of this flow."""
        with self._changed, self._refusing(flow):
            self._scheduler.check_queue_limit(flow)

    def add(self, sequence: TokenSequence) -> None:
        """Puts a sequence in the queue.

        Raises:
          OverloadError: the queue is full.
          ContextLengthError: the pool is too small for it.
          RuntimeError: the loop is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("engine: closed already")
            with self._refusing(sequence.group.flow):
                self._scheduler.settings.check_fits(sequence.most_work)
                self._scheduler.add(sequence.work(lambda _: False))
            self._new.append(sequence)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ccjax-batch", daemon=True)
                self._thread.start()

    @contextlib.contextmanager
    def _refusing(self, flow: str) -> Iterator[None]:
        try:
            yield
        except AdmissionQueueFullError as error:
            raise OverloadError(str(error), self._scheduler.retry_after_s(flow, self._costs())) from None
        except NeverFitsError as error:
            raise as_request_error(error) from None

    def wake(self) -> None:
        """Wakes the loop to check for cancelled requests."""
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self, *, wait: bool = True) -> Iterator[bool]:
        """Pauses the loop between two steps, once no prefill is in progress: those that are now, and at most as many
        tokens of others, run before. Meanwhile the calling thread may use everything that the loop uses. Sequences may
        be in the middle of decoding. Without `wait`, yields False instead of waiting for a request or another thread.
        What other processes changed in the store is applied first.

        Raises:
          RuntimeError: the loop is closed.
        """
        with contextlib.ExitStack() as turn:
            with self._changed:
                may_enter = wait or not (len(self._sequences) or self._new or self._pauses.num_pausing)
                if may_enter:
                    turn.enter_context(self._pauses.turn())
            if may_enter and self._closed:
                raise RuntimeError("engine: closed already")
            if may_enter:
                self._apply_changes()
            yield may_enter

    def close(self) -> None:
        """Ends the thread once all requests are answered. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._step()
            except Exception as error:
                logger.exception("the batch failed; everything that was under way or waiting fails with it")
                with self._changed:
                    self._accept_new()
                    self._sequences.fail_all(error)
                    self._scheduler.clear()
                self._sequences.start_over()

    def _wait_for_work(self) -> bool:
        """Lets other threads pause the loop and waits for requests; False once the loop is closed and none is left."""
        sequences = self._sequences
        is_prefilling = sequences.is_prefilling
        if not len(sequences):
            sequences.forget_copy()
        with self._changed:
            while not is_prefilling and (self._pauses.num_pausing or not (self._new or len(sequences) or self._closed)):
                self._pauses.is_possible = True
                self._changed.notify_all()
                self._changed.wait(_PAUSED_LOOK_S if self._new or len(sequences) else None)
                self._accept_new()
                sequences.refresh_unstarted()
            self._pauses.is_possible = not (self._new or len(sequences))
            return not self._pauses.is_possible

    def _accept_new(self) -> None:
        """Adds new sequences to `_sequences`; under the lock, so that the scheduler cannot name an unknown one."""
        with self._changed:
            self._sequences.add(self._new)
            self._new.clear()

    def _refresh(self) -> None:
        """Adds new sequences and ends cancelled and late ones."""
        with self._changed:  # both under one lock, so that an expired sequence is always known
            self._accept_new()
            late = self._scheduler.expire(time.perf_counter())
        self._sequences.refresh(late)

    def _step(self) -> None:
        """Runs a decode step for each sequence that decodes alone, then a pack with the decode steps between its layers
        or, if there is nothing to prefill, one decode step."""
        sequences, scheduler = self._sequences, self._scheduler
        self._refresh()
        alone = scheduler.decoding_alone
        for sequence_id in alone:
            self._decode(alone=sequence_id)
        if not sequences.has_pages():
            self._wait_briefly()
            return
        sequences.plan_waiting()
        pieces = self._next_pieces()
        sequences.preload()
        if pieces:
            self._run_pack(pieces)
        elif scheduler.num_decoding:
            self._decode()
        elif len(sequences) and not self._pauses.num_pausing and not alone:
            # All remaining sequences wait for another process, or for pages that no scheduled sequence holds: pages
            # being read for a snapshot, for example, or cached chunks of a shared prompt whose sequences all wait.
            has_dropped = sequences.drop_unread_prompts()
            sequences.settle()
            if not has_dropped:
                self._wait_briefly()

    def _wait_briefly(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._new), _LOOK_S)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _next_pieces(self, *, interrupts: bool = False) -> list[tuple[TokenSequence, Piece]]:
        """The pieces that the scheduler wants to run next, after carrying out its admissions and preemptions.

        Args:
          interrupts: before the next layer of the running pack.
        """
        sequences, now_s = self._sequences, time.perf_counter()
        with self._changed:
            self._accept_new()
            how = {"shared_pages": sequences.shared_pages, "interrupts": interrupts}
            pack = self._scheduler.next_pack(now_s, sequences.pages.num_pages, self._costs(), **how)
        sequences.preempt(pack.preempted)
        sequences.admit(pack.admitted)
        pieces = []
        for piece in pack.pieces:
            sequence = sequences.get(piece.sequence_id)
            if sequence is not None and sequence.job is not None:
                pieces.append((sequence, Piece(sequence.job, piece.start, piece.start + piece.num_tokens)))
        if pack.pieces and not pieces:
            self._scheduler.pack_done(now_s)
        return pieces

    def _run_pack(self, pieces: list[tuple[TokenSequence, Piece]]) -> None:
        sequences = self._sequences
        num_packs = len(sequences.packs)
        done: list[tuple[TokenSequence, SampledToken]] = []
        try:
            done = self._run_layers(pieces)
        except Exception as error:
            logger.exception("a pack failed")
            del sequences.packs[num_packs:]
            sequences.retry([sequence for sequence, _ in pieces], error)
        del sequences.packs[num_packs:]
        self._scheduler.pack_done(time.perf_counter())
        finished = []
        for sequence, token in done:
            planned, kept = sequence.prefill, None
            try:
                prefilled = sequence.finish_prefill()
                sequences.share_prompt(sequence)
            except Exception as error:
                logger.exception("a request failed after its prefill")
                sequences.fail(sequence, error)
            else:
                kept = prefilled if sequences.append_token(sequence, token) else None
            finished.append((sequence.group.keep, planned, kept))
        for keep, planned, prefilled in finished:  # after the first tokens are emitted, except in answers of one token
            if prefilled is not None:
                keep(prefilled)
            planned.release_claims()
        sequences.settle()

    def _run_layers(self, pieces: list[tuple[TokenSequence, Piece]]) -> list[tuple[TokenSequence, SampledToken]]:
        """Runs a pack through all layers; returns the sequences whose prompt is complete, with their next tokens."""
        sequences, started_s, decoded_s = self._sequences, time.perf_counter(), 0.0
        pack = pack_pieces(
            self._model,
            self._pool,
            [piece for _, piece in pieces],
            max_rows=self._scheduler.settings.max_num_batched_tokens,
        )
        sequences.packs.append(pack)
        by_job = {piece.job: sequence for sequence, piece in pieces}
        tracers = [sequence.group.tracer for sequence, _ in pieces if sequence.group.tracer is not None]
        ends_s = [started_s]  # of the layers, for the traces
        under_way: collections.deque[tuple[int, jax.Array]] = collections.deque()
        ended_s, layer_s = started_s, 0.0

        def wait_for_oldest() -> None:
            nonlocal ended_s, layer_s
            num_layers, hidden = under_way.popleft()
            jax.block_until_ready(hidden)
            now_s = time.perf_counter()
            ended_s, layer_s = now_s, now_s - ended_s
            if tracers and num_layers == len(ends_s):
                ends_s.append(now_s)

        while not pack.is_done and pack in sequences.packs:
            if not pack.is_ready():
                if self._scheduler.num_decoding:
                    decoded_s += self._decode()
                    if pack not in sequences.packs or pack.is_done:  # lost pages; or the step took them from the pack
                        break
                pack.wait()  # time that a load takes while the device is busy does not count as waiting
            while len(under_way) > (layer_s < _SLOW_LAYER_S):  # the host must not run ahead of the device
                wait_for_oldest()
            try:
                pack.run_layer()
            except JobFailedError as error:
                sequences.refuse(by_job[error.job], error.__cause__)
                continue
            under_way.append((pack.layer, pack.hidden))
            self._refresh()
            if self._scheduler.after_layer(time.perf_counter()):
                decoded_s += self._decode()
            sequences.look_ahead()
            decoded_s += self._interrupt()
        if pack not in sequences.packs:  # the pool's pages are lost
            return []
        if tracers:
            while under_way:
                wait_for_oldest()
            for tracer in tracers:
                tracer.layers(ends_s, has_new_sizes=pack.has_new_sizes)
        jobs, logits = pack.logits()
        sampled = [] if logits is None else sample_tokens(logits, [by_job[job].sample_spec for job in jobs])
        if not pack.has_new_sizes and pack.num_computed:
            waited_s = sum(job.contexts.waited_s for job in by_job if job.contexts is not None)
            self._rates.compute.add(pack.num_computed, time.perf_counter() - started_s - decoded_s - waited_s)
        return [(by_job[job], token) for job, token in zip(jobs, sampled, strict=True)]

    def _interrupt(self) -> float:
        """Runs short prompts before the next layer of the running pack, if some came meanwhile; returns the seconds it
        took."""
        started_s = time.perf_counter()
        if not self._scheduler.num_waiting or not self._scheduler.may_interrupt(started_s):
            return 0.0
        self._sequences.plan_waiting()
        pieces = self._next_pieces(interrupts=True)
        if pieces:
            self._sequences.packs[-1].wait()  # what is queued on the device runs first, and is not counted
            self._run_pack(pieces)
        return time.perf_counter() - started_s

    # -- decode --------------------------------------------------------------------------------------------------------

    def _decode(self, *, alone: str | None = None) -> float:
        """Runs a decode step for all decoding sequences that share steps or, with `alone`, for that one only. Returns
        the seconds it took."""
        sequences, started_s = self._sequences, time.perf_counter()
        step = self._scheduler.next_decode(sequences.pages.num_pages, self._costs(), alone=alone)
        sequences.preempt(step.preempted)
        sequences.reclaim(len(step.allocating))
        decoding = [sequences[sequence_id] for sequence_id in step.sequence_ids]
        sampled, on_device_s = [], started_s
        try:
            if decoding:
                logits = self._decoder.step(
                    [sequence.pages for sequence in decoding], [sequence.last_token for sequence in decoding]
                )
                if sequences.packs:
                    sequences.packs[-1].wait()  # the step is queued after the pack's layers, whose time is not counted
                    on_device_s = time.perf_counter()
                sampled = sample_tokens(logits, [sequence.sample_spec for sequence in decoding])
        except Exception as error:
            logger.exception("a decode step failed")
            sequences.retry(decoding, error)
            decoding = []
        if sampled and alone is None:
            seconds = time.perf_counter() - on_device_s
            self._decode_step_s = seconds if not self._decode_step_s else 0.9 * self._decode_step_s + 0.1 * seconds
        self._scheduler.decode_done(time.perf_counter())
        for sequence, token in zip(decoding, sampled, strict=True):
            sequences.append_token(sequence, token)
            if alone is not None:
                sequences.rejoin(sequence)
        sequences.settle()
        return time.perf_counter() - started_s

    def _costs(self) -> StepCosts:
        """The recently measured costs of steps."""
        token_s = self._rates.seconds_per_token or UNMEASURED_S_PER_TOKEN
        return StepCosts(token_s, self._decode_step_s, self._sequences.answer_tokens)

"""Coordinates a compilation: reads, estimates, hands out work in small batches until everything is stored, and
reports."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ccjax.precompute.estimate import Estimate, file_system_of, make_estimate, sample
from ccjax.precompute.messages import Failure, Settings, WarmingWork
from ccjax.precompute.plan import Unit, batches
from ccjax.precompute.report import Report
from ccjax.precompute.workers import StoppedError, WorkerError, WorkerProcess, Workers

BATCH_S = 4.0
"""Target time of a batch. Its leases last some seconds longer: that is how long a killed process delays others."""

MOST_IN_BATCH = 16
SAMPLE = 8
_NOTED_AT_ONCE = 10_000
_AGAIN_S = 1.0
"""Pause before checking again what another process is computing."""

_ATTEMPTS = 2
"""Number of workers that a batch may crash before it is abandoned."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options besides computing what is missing.

    Attributes:
      is_dry_run: only estimate.
      is_forced: start even if the result does not fit.
      prunes: first drop variants of passages that no longer exist.
      questions: file of questions to ask at the end; None for none. top_k: passages for a question that names none.
        limit: number of questions to ask; None for all. max_new_tokens: of an answer.
    """

    is_dry_run: bool = False
    is_forced: bool = False
    prunes: bool = False
    questions: Path | None = None
    top_k: int = 5
    limit: int | None = None
    max_new_tokens: int = 32


class Show(Protocol):
    """Receives progress reports."""

    def stage(self, worker: int, stage: str, done: int, total: int) -> None:
        """A worker is loading, reading or asking."""
        ...

    def estimated(self, report: Report) -> None:
        """The estimate is known."""
        ...

    def computed(self, report: Report) -> None:
        """Some more variants were processed."""
        ...


class DoesNotFitError(ValueError):
    """The missing variants do not fit."""


@dataclasses.dataclass
class _UnitBatch:
    units: tuple[Unit, ...]
    attempt: int = 1
    not_before: float = 0.0


class Compilation:
    """One run; call `run` once.

    Args:
      settings: one for each worker; they may differ only in `environment`.
      is_stopped: the name of the signal that requested the end, or None.
    """

    def __init__(
        self, settings: Sequence[Settings], options: Options, show: Show, is_stopped: Callable[[], str | None]
    ) -> None:
        self._settings = tuple(settings)
        self._options = options
        self._show = show
        self._is_stopped = is_stopped
        own = settings[0]
        self.report = Report(
            {
                "model": own.model,
                "store": own.engine["store"],
                "documents": own.documents.docs,
                "workers": len(settings),
                "neighbours": own.num_neighbours,
                "disk_kv_dtype": own.engine.get("disk_kv_dtype", "auto"),
            },
            is_dry_run=options.is_dry_run,
        )
        self._queue: collections.deque[_UnitBatch] = collections.deque()
        self._running: dict[int, _UnitBatch] = {}
        self._started = 0.0
        self._why = "every worker died"

    def run(self) -> Report:
        """Runs everything; the report is partial if a signal, or the last worker's death, ended it early.

        Raises:
          ValueError: an argument, a file, the store or the model cannot be used; the message says which.
            DoesNotFitError if the result would not fit. Nothing was computed then.
        """
        workers = Workers(self._settings, self._show.stage, lambda: self._is_stopped() is not None)
        try:
            self._run(workers)
            workers.end()
        except StoppedError:
            self.report.interrupted = self._is_stopped()
            for worker, value in workers.end() if self._running else ():
                self._handle_reply(worker, value)
        except WorkerError as error:
            self.report.error = str(error)
        finally:
            workers.kill()
        return self.report

    def _run(self, workers: Workers) -> None:
        report, options = self.report, self._options
        workers.answers()  # all are loaded
        if options.questions is not None:
            workers.ask("check_questions", options.questions, options.limit)
        report.collection = collection = workers.ask("read")
        missing = collection.plan.missing
        units = sample(missing, SAMPLE)
        sample_s = workers.ask_all("calibrate", self._work(units)) if units else []
        sample_tokens = sum(unit.computed_tokens for unit in units)
        report.estimate = estimate = self._estimate(missing, 0, sample_tokens, sample_s)
        report.stored = set(workers.ask("stored"))
        self._show.estimated(report)
        if options.is_dry_run:
            return
        if not options.prunes:
            self._check(estimate)
        used_bytes = max(workers.ask_all("open"))
        if options.prunes:
            report.pruned = pruned = workers.ask("prune")
            used_bytes -= pruned.num_bytes
        report.estimate = estimate = self._estimate(missing, used_bytes, sample_tokens, sample_s)
        self._check(estimate)
        there = [unit.passage for unit in collection.plan.alone if not unit.is_missing]
        for start in range(0, len(there), _NOTED_AT_ONCE):
            workers.ask("note", tuple(there[start : start + _NOTED_AT_ONCE]))
        mean_s = sum(sample_s) / len(sample_s) if sample_s else 1.0
        batch_tokens = int(BATCH_S * sample_tokens / mean_s)
        self._started = time.monotonic()
        for is_conditioned in (False, True):  # these reuse the others
            some = [unit for unit in missing if bool(unit.behind) == is_conditioned]
            self._compute(workers, batches(some, batch_tokens, MOST_IN_BATCH))
        report.stored = set(workers.ask("stored"))  # what is stored, not what was counted
        if options.questions is not None:
            asked = (options.questions, options.top_k, options.limit, options.max_new_tokens)
            report.quality = workers.ask("ask", *asked)

    def _estimate(self, missing: Sequence[Unit], stored: int, tokens: int, seconds: Sequence[float]) -> Estimate:
        engine = self._settings[0].engine
        return make_estimate(
            missing,
            file_system=file_system_of(engine["store"]),
            budget_bytes=engine.get("disk_cache_bytes"),
            stored_bytes=stored,
            sample_tokens=tokens,
            sample_s=seconds,
        )

    def _check(self, estimate: Estimate) -> None:
        if estimate.missing_bytes and not self._options.is_forced:
            needed = [f"{estimate.num_bytes} bytes"]
            needed += [] if estimate.disk_bytes is None else [f"{estimate.disk_bytes} of the file system"]
            free = [] if estimate.free_bytes is None else [f"{estimate.free_bytes} free there"]
            free += [] if estimate.budget_bytes is None else [f"{estimate.budget_bytes} left of disk_cache_bytes"]
            raise DoesNotFitError(
                f"store: wanted space for {', '.join(needed)}, got {', '.join(free)}: free some, store less "
                "(neighbours, disk_kv_dtype), or force it"
            )

    def _compute(self, workers: Workers, work: Iterable[Sequence[Unit]]) -> None:
        """Has all batches computed.

        Raises:
          WorkerError: no worker is left.
          StoppedError: the user requested the end.
        """
        self._queue = collections.deque(_UnitBatch(tuple(units)) for units in work)
        while self._queue or self._running:
            for worker in workers.alive:
                if not worker.is_busy and self._queue and self._queue[0].not_before <= time.monotonic():
                    batch = self._running[worker.number] = self._queue.popleft()
                    worker.send("compute", self._work(batch.units))
            if not workers.alive:
                raise WorkerError(f"{self._why}; none is left")
            event = workers.next_event()
            if event is None:
                continue
            worker, kind, value = event
            if kind == "died":
                self._lose(worker)
            else:
                self._handle_reply(worker, value)

    def _handle_reply(self, worker: WorkerProcess, value: Any) -> None:
        """Processes a worker's reply to its batch; what others are computing is checked again later."""
        batch = self._running.pop(worker.number, None)
        if batch is None:
            return
        counts, put_off = self.report.counts, []
        if isinstance(value, Failure):
            counts.failed += [(unit.passage, len(unit.behind), value.message) for unit in batch.units]
            value = ()
        for unit, result in zip(batch.units, value, strict=False):  # fewer if it was interrupted
            counts.computed_tokens += result.computed_tokens
            counts.stored_bytes += result.num_bytes
            if result.status == "elsewhere":
                put_off.append(unit)
            elif result.reason:
                counts.failed.append((unit.passage, len(unit.behind), result.reason))
            else:
                counts.computed += result.status == "computed"
                counts.present += result.status == "present"
                self.report.stored.add(unit.variant_id)
        if put_off:
            self._queue.append(_UnitBatch(tuple(put_off), not_before=time.monotonic() + _AGAIN_S))
        self._save_progress()

    def _lose(self, worker: WorkerProcess) -> None:
        """Handles a dead worker: another one retries its batch."""
        self._why = worker.how_it_died
        batch = self._running.pop(worker.number, None)
        if batch is None:
            return
        if batch.attempt < _ATTEMPTS:
            self._queue.appendleft(dataclasses.replace(batch, attempt=batch.attempt + 1))
            return
        self.report.counts.failed += [(unit.passage, len(unit.behind), self._why) for unit in batch.units]
        self._save_progress()

    def _save_progress(self) -> None:
        self.report.counts.seconds = time.monotonic() - self._started
        self._show.computed(self.report)

    def _work(self, units: Sequence[Unit]) -> WarmingWork:
        collection = self.report.collection
        assert collection is not None
        passages = collection.passages
        behind = (
            collection.frame if unit.is_framed else tuple(passages[number] for number in unit.behind) for unit in units
        )
        return WarmingWork(tuple(passages[unit.passage] for unit in units), tuple(behind))

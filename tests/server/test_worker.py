"""The jobs of the engine: order, refusals, cancelling and ending, with answers that the test controls step by step."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator

import pytest

import ccjax.server.idle_thread as idle_module
from ccjax.engine import Delta, Request, Response, SamplingParams
from ccjax.errors import OverloadError
from ccjax.server.idle_thread import IdleWork, QueueFullError, WorkerClosedError
from ccjax.server.worker import EngineWorker, Job, JobCancelledError
from ccjax.types import ReuseReport

REPORT = ReuseReport("off", "full", 1, 1, 0, 0, 1.0, True)


class Steered:
    """An engine that answers with the prompt's words, one request after the other, one word per delta, each after a
    release of `step`.

    The word "layers" stands for a prefill: a layer for each release, until the request is cancelled.
    """

    def __init__(self) -> None:
        self.step = threading.Semaphore(0)
        self.log: list[str] = []
        self.refusal: Exception | None = None
        self._line = concurrent.futures.ThreadPoolExecutor(1)

    def submit(
        self, request: Request, emit: Callable[[Delta | Exception], None], *, on_start: Callable[[], None]
    ) -> Callable[[], None]:
        if self.refusal is not None:
            raise self.refusal
        given_up = threading.Event()

        def answer() -> None:
            if given_up.is_set():
                emit(RuntimeError("cancelled"))
                return
            on_start()
            self.log.append(f"start {request.prompt}")
            try:
                for delta in self._stream(request, given_up):
                    emit(delta)
                    if delta.response is not None:
                        return
                emit(RuntimeError("cancelled"))
            except Exception as error:
                emit(error)
            finally:
                self.log.append(f"closed {request.prompt}")

        self._line.submit(answer)
        return given_up.set

    def _stream(self, request: Request, given_up: threading.Event) -> Iterator[Delta]:
        assert request.prompt is not None
        for word in request.prompt.split():
            assert self.step.acquire(timeout=120)
            while word == "layers":
                if given_up.is_set():
                    return
                self.log.append("layer")
                assert self.step.acquire(timeout=120)
            if given_up.is_set():
                return
            if word == "boom":
                raise ValueError("boom")
            yield Delta(word, (1,))
        self.log.append(f"end {request.prompt}")
        yield Delta("", response=Response(request.prompt, (1,), "stop", REPORT, 1, 0.1, 0.1))


def request(prompt: str) -> Request:
    return Request(prompt=prompt, sampling=SamplingParams())


async def text(job: Job) -> str:
    return " ".join([delta.text async for delta in job.deltas() if delta.text])


def run(scenario, *, idle_work: IdleWork | None = None, preload=None) -> None:
    """Runs `scenario(worker, steered, ended)` on an event loop; the worker's thread must end by itself."""
    steered = Steered()
    ended: list[Job] = []
    worker = EngineWorker(steered.submit, on_end=ended.append, idle_work=idle_work, preload=preload)
    try:
        asyncio.run(scenario(worker, steered, ended))
    finally:
        steered.step.release(100)
        worker.close()


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


def test_requests_run_to_completion_in_arrival_order() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        jobs = [worker.submit(request(prompt)) for prompt in ("a b", "c", "d")]
        steered.step.release(4)
        assert [await text(job) for job in jobs] == ["a b", "c", "d"]
        await until(lambda: len(steered.log) == 9)
        assert steered.log == [
            f"{what} {prompt}" for prompt in ("a b", "c", "d") for what in ("start", "end", "closed")
        ]
        assert ended == jobs and all(job.response is not None and not job.cancelled for job in jobs)

    run(scenario)


def test_a_failure_reaches_its_own_client_only() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        bad, good = worker.submit(request("a boom")), worker.submit(request("c"))
        steered.step.release(3)
        with pytest.raises(ValueError, match="boom"):
            await text(bad)
        assert await text(good) == "c"
        assert ended == [good]

    run(scenario)


def test_request_refused_by_the_engine_leaves_no_job_or_preload() -> None:
    preloads = Preloads()

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        first = worker.submit(request("a"))
        steered.refusal = OverloadError("wanted fewer", 3.0)
        with pytest.raises(OverloadError):
            worker.submit(request("b"))
        assert preloads.log == ["begin b", "close b"] and not worker.is_idle
        steered.refusal = None
        steered.step.release(2)
        assert [await text(job) for job in (first, worker.submit(request("c")))] == ["a", "c"]
        await until(lambda: worker.is_idle)
        assert [job.request.prompt for job in ended] == ["a", "c"]

    run(scenario, preload=preloads)


def test_aborted_jobs_get_the_reason() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        jobs = [worker.submit(request(prompt)) for prompt in ("a b", "c")]
        await until(lambda: worker.num_running == 1)
        worker.break_off(OSError("enough"))
        outcomes = await asyncio.gather(*(text(job) for job in jobs), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["enough"] * 2
        steered.step.release(2)
        await until(lambda: worker.is_idle)
        assert set(ended) == set(jobs) and "start c" not in steered.log

    run(scenario)


def test_too_many_calls_are_refused() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        held = threading.Event()
        futures = [worker.thread.call(held.wait)]
        with pytest.raises(QueueFullError):
            for _ in range(1000):
                futures.append(worker.thread.call(lambda: len(futures)))
        assert 100 < len(futures) < 200
        held.set()
        await asyncio.gather(*map(asyncio.wrap_future, futures))

    run(scenario)


def test_shut_worker_finishes_its_jobs() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        held = threading.Event()
        call = worker.thread.call(held.wait)
        jobs = [worker.submit(request(prompt)) for prompt in ("a", "b")]
        worker.shut()
        with pytest.raises(WorkerClosedError):
            worker.submit(request("c"))
        with pytest.raises(WorkerClosedError):
            worker.thread.call(lambda: None)
        steered.step.release(2)
        assert [await text(job) for job in jobs] == ["a", "b"]
        assert not worker.is_idle  # the call runs
        held.set()
        assert await asyncio.wrap_future(call)
        await until(lambda: worker.is_idle)

    run(scenario)


def test_a_running_job_is_cancelled_after_its_step() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        job = worker.submit(request("a b c"))
        steered.step.release()
        deltas = job.deltas()
        assert (await anext(deltas)).text == "a"
        job.cancel()
        job.cancel()
        with pytest.raises(JobCancelledError):
            await anext(deltas)
        steered.step.release()
        await until(lambda: worker.num_running == 0)
        assert steered.log == ["start a b c", "closed a b c"] and ended == [job] and job.response is None

    run(scenario)


def test_a_job_is_cancelled_between_the_layers_of_its_prefill() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        job, other = worker.submit(request("layers a")), worker.submit(request("b"))
        steered.step.release(2)
        await until(lambda: steered.log.count("layer") == 2)
        job.cancel()
        with pytest.raises(JobCancelledError):
            await text(job)
        assert ended == []  # it still holds the engine
        steered.step.release(2)
        assert await text(other) == "b"
        assert steered.log[:4] == ["start layers a", "layer", "layer", "closed layers a"]
        assert ended == [job, other] and job.response is None and job.first_delta_s is None

    run(scenario)


class Idle:
    """Idle work of this many pieces."""

    def __init__(self, pieces: int) -> None:
        self.left, self.done = pieces, 0

    def __call__(self, is_wanted: Callable[[], bool]) -> bool:
        if not self.left:
            return False
        self.left, self.done = self.left - 1, self.done + 1
        return True


def test_idle_work_runs_before_and_after_requests() -> None:
    idle = Idle(3)

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        await until(lambda: idle.done == 3)
        assert worker.num_running == 0
        steered.step.release()
        assert await text(worker.submit(request("a"))) == "a"
        idle.left = 2  # left by the request
        await until(lambda: idle.done == 5)
        steered.step.release()
        assert await text(worker.submit(request("b"))) == "b"

    run(scenario, idle_work=idle)


def test_idle_work_yields_to_a_request() -> None:
    begun = threading.Event()

    def endless(is_wanted: Callable[[], bool]) -> bool:
        while not is_wanted():
            begun.set()
            threading.Event().wait(0.001)
        return True

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        for prompt in ("a", "b"):
            begun.clear()
            await until(begun.is_set)
            steered.step.release()
            assert await text(worker.submit(request(prompt))) == prompt
        begun.clear()
        await until(begun.is_set)  # and `close` ends it

    run(scenario, idle_work=endless)


def test_pieces_of_idle_work_follow_each_other_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    num_done = 0

    def idle(is_wanted: Callable[[], bool]) -> bool:
        nonlocal num_done
        monkeypatch.setattr(idle_module, "_IDLE_AFTER_S", 3600.0)  # too long for this test
        num_done += 1
        return num_done < 4

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        await until(lambda: num_done == 4)

    run(scenario, idle_work=idle)


def test_idle_work_yields_to_a_request_in_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_module, "_IDLE_AFTER_S", 0.0)
    begun, ended_work = threading.Event(), threading.Event()

    def endless(is_wanted: Callable[[], bool]) -> bool:
        begun.set()
        while not is_wanted():
            threading.Event().wait(0.001)
        ended_work.set()
        return True

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        await until(begun.is_set)
        with worker.thread.paused():
            await until(ended_work.is_set)
            begun.clear()
            for _ in range(3):  # its thread has time in between
                await asyncio.wrap_future(worker.thread.call(lambda: None))
            assert not begun.is_set()
        await until(begun.is_set)

    run(scenario, idle_work=endless)


def test_interrupted_idle_work_resumes_if_the_expected_request_never_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_module, "_IDLE_AFTER_S", 0.0)
    begun, broken_off = threading.Event(), threading.Event()

    def endless(is_wanted: Callable[[], bool]) -> bool:
        begun.set()
        while not is_wanted():
            threading.Event().wait(0.001)
        broken_off.set()
        return False  # as the engine does for interrupted work

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        await until(begun.is_set)
        with worker.thread.paused():
            await until(broken_off.is_set)
            begun.clear()
        await until(begun.is_set)

    run(scenario, idle_work=endless)


def test_failing_idle_work_does_not_stop_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    def failing(is_wanted: Callable[[], bool]) -> bool:
        begun.set()
        raise OSError("no disk today")

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        await until(begun.is_set)
        steered.step.release()
        assert await text(worker.submit(request("a"))) == "a"
        begun.clear()
        await until(begun.is_set)

    run(scenario, idle_work=failing)
    assert "no disk today" in caplog.text


def test_cancelled_queued_job_ends_at_once_and_never_runs() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        first, second, third = (worker.submit(request(prompt)) for prompt in ("a", "b", "c"))
        await until(lambda: worker.num_running == 1)
        second.cancel()
        with pytest.raises(JobCancelledError):
            await text(second)
        steered.step.release(2)
        assert [await text(first), await text(third)] == ["a", "c"]
        await until(lambda: worker.num_running == 0)
        assert "start b" not in steered.log and len(ended) == 3 and set(ended) == {first, second, third}

    run(scenario)


def test_cancelling_a_complete_answer_changes_nothing() -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        job = worker.submit(request("a"))
        steered.step.release()
        assert await text(job) == "a"
        job.cancel()
        await until(lambda: worker.num_running == 0)
        assert "end a" in steered.log and not job.cancelled and ended == [job]

    run(scenario)


@pytest.mark.parametrize("drain", [True, False])
def test_close_finishes_or_cancels_queued_jobs(drain: bool) -> None:
    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        jobs = [worker.submit(request(prompt)) for prompt in ("a b", "c")]
        await until(lambda: worker.num_running == 1)
        closing = asyncio.create_task(asyncio.to_thread(worker.close, drain=drain))
        await until(lambda: worker.is_closed and (drain or worker.num_waiting == 0))
        with pytest.raises(WorkerClosedError):
            worker.submit(request("d"))
        steered.step.release(3)
        outcomes = await asyncio.gather(*(text(job) for job in jobs), return_exceptions=True)
        await closing
        if drain:
            assert outcomes == ["a b", "c"]
        else:
            assert all(isinstance(outcome, JobCancelledError) for outcome in outcomes)
            assert steered.log == ["start a b", "closed a b"] and set(ended) == set(jobs)

    run(scenario)


class Preloads:
    """Records preloads that were begun for queued requests, and closed."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, request: Request) -> Preloads.One:
        self.log.append(f"begin {request.prompt}")
        return Preloads.One(self, request)

    class One:
        def __init__(self, preloads: Preloads, request: Request) -> None:
            self.preloads, self.request, self.is_open = preloads, request, True

        def close(self) -> None:
            if self.is_open:
                self.is_open = False
                self.preloads.log.append(f"close {self.request.prompt}")


def test_a_queued_requests_kv_is_preloaded_until_its_first_token() -> None:
    preloads = Preloads()

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        jobs = [worker.submit(request("a"))]
        await until(lambda: steered.log == ["start a"])
        jobs.append(worker.submit(request("b c")))
        assert preloads.log == ["begin b c"], "the first one had nobody to wait for"
        steered.step.release()
        assert await text(jobs[0]) == "a"
        await until(lambda: "start b c" in steered.log)
        assert preloads.log == ["begin b c"]
        steered.step.release()
        await until(lambda: preloads.log == ["begin b c", "close b c"])  # with b; c is still to come
        steered.step.release()
        assert await text(jobs[1]) == "b c"

    run(scenario, preload=preloads)


def test_preload_ends_if_its_queued_request_is_cancelled_or_fails() -> None:
    preloads = Preloads()

    async def scenario(worker: EngineWorker, steered: Steered, ended: list[Job]) -> None:
        first, given_up, bad = (worker.submit(request(prompt)) for prompt in ("a", "b", "boom"))
        given_up.cancel()
        assert preloads.log[-1] == "close b"
        steered.step.release(2)
        assert await text(first) == "a"
        with pytest.raises(ValueError, match="boom"):
            await text(bad)
        await until(lambda: preloads.log[-1] == "close boom")
        assert sorted(preloads.log[:2]) == ["begin b", "begin boom"]

    run(scenario, preload=preloads)


def test_answer_completed_after_a_disconnect_ends_its_job() -> None:
    """The engine emitted the last delta before it could see the cancellation: no more events follow."""
    emits: list[Callable[[Delta | Exception], None]] = []
    ended: list[Job] = []

    def start(_: Request, emit: Callable[[Delta | Exception], None], *, on_start: Callable[[], None]):
        on_start()
        emits.append(emit)
        return lambda: None

    async def scenario() -> None:
        worker = EngineWorker(start, on_end=ended.append)
        job = worker.submit(request("a"))
        job.cancel()
        emits[0](Delta("a", (1,)))
        assert not worker.is_idle
        emits[0](Delta("", response=Response("a", (1,), "stop", REPORT, 1, 0.1, 0.1)))
        assert worker.is_idle and ended == [job] and job.response is None
        worker.close()

    asyncio.run(scenario())

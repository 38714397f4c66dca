"""The jobs of the engine: order, refusals, cancelling and ending, with answers that the test controls step by step."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

import ccjax.server.idle_thread as idle_module
from ccjax.engine import Delta, Request, Response, SamplingParams
from ccjax.errors import OverloadError
from ccjax.server.idle_thread import IdleWork, QueueFullError, WorkerClosedError
from ccjax.server.worker import EngineWorker, Job, JobCancelledError
from ccjax.types import ReuseReport

pytestmark = pytest.mark.anyio
Start = Callable[..., EngineWorker]
REPORT = ReuseReport("off", "full", 1, 1, 0, 0, 1.0, True)


class Steered:
    """An engine that answers with the prompt's words, one request after the other, one word per delta, each after a
    release of `step`."""

    def __init__(self) -> None:
        self.step = threading.Semaphore(0)
        self.log: list[str] = []
        self.ended: list[Job] = []
        self.refusal: Exception | None = None
        self.line = concurrent.futures.ThreadPoolExecutor(1)

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

        self.line.submit(answer)
        return given_up.set

    def _stream(self, request: Request, given_up: threading.Event) -> Iterator[Delta]:
        assert request.prompt is not None
        for word in request.prompt.split():
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


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def steered() -> Iterator[Steered]:
    steered = Steered()
    yield steered
    steered.line.shutdown()


@pytest.fixture
def start(steered: Steered) -> Iterator[Start]:
    """`start(**options)` returns a worker, whose thread must end by itself."""
    with contextlib.ExitStack() as stack:

        def make(idle_work: IdleWork | None = None, preload=None) -> EngineWorker:
            worker = EngineWorker(steered.submit, on_end=steered.ended.append, idle_work=idle_work, preload=preload)
            stack.callback(worker.close)
            return worker

        yield make
        steered.step.release(100)


@pytest.fixture
def worker(start: Start) -> EngineWorker:
    return start()


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


async def test_request_refused_by_the_engine_leaves_no_job_or_preload(start: Start, steered: Steered) -> None:
    preloads = Preloads()
    worker = start(preload=preloads)
    first = worker.submit(request("a"))
    steered.refusal = OverloadError("wanted fewer", 3.0)
    with pytest.raises(OverloadError):
        worker.submit(request("b"))
    assert preloads.log == ["begin b", "close b"] and not worker.is_idle
    steered.refusal = None
    steered.step.release(2)
    assert [await text(job) for job in (first, worker.submit(request("c")))] == ["a", "c"]
    await until(lambda: worker.is_idle)
    assert [job.request.prompt for job in steered.ended] == ["a", "c"]


async def test_too_many_calls_are_refused(worker: EngineWorker) -> None:
    held = threading.Event()
    futures = [worker.thread.call(held.wait)]
    with pytest.raises(QueueFullError):
        for _ in range(1000):
            futures.append(worker.thread.call(lambda: len(futures)))
    assert 100 < len(futures) < 200
    held.set()
    await asyncio.gather(*map(asyncio.wrap_future, futures))


async def test_shut_worker_finishes_its_jobs(worker: EngineWorker, steered: Steered) -> None:
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


class Endless:
    """Idle work that goes on until the engine is wanted, and returns `is_done`."""

    def __init__(self, is_done: bool = True) -> None:
        self.is_done, self.begun, self.ended = is_done, threading.Event(), threading.Event()

    def __call__(self, is_wanted: Callable[[], bool]) -> bool:
        self.begun.set()
        while not is_wanted():
            self.begun.set()  # again, where a test has cleared it
            threading.Event().wait(0.001)
        self.ended.set()
        return self.is_done


async def test_pieces_of_idle_work_follow_each_other_without_a_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_done = 0

    def idle(is_wanted: Callable[[], bool]) -> bool:
        nonlocal num_done
        monkeypatch.setattr(idle_module, "_IDLE_AFTER_S", 3600.0)  # too long for this test
        num_done += 1
        return num_done < 4

    start(idle_work=idle)
    await until(lambda: num_done == 4)


async def test_idle_work_yields_to_a_request_in_preparation(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_module, "_IDLE_AFTER_S", 0.0)
    endless = Endless()
    worker = start(idle_work=endless)
    await until(endless.begun.is_set)
    with worker.thread.paused():
        await until(endless.ended.is_set)
        endless.begun.clear()
        for _ in range(3):  # its thread has time in between
            await asyncio.wrap_future(worker.thread.call(lambda: None))
        assert not endless.begun.is_set()
    await until(endless.begun.is_set)


async def test_interrupted_idle_work_resumes_if_the_expected_request_never_arrives(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_module, "_IDLE_AFTER_S", 0.0)
    endless = Endless(is_done=False)  # as the engine does for interrupted work
    worker = start(idle_work=endless)
    await until(endless.begun.is_set)
    with worker.thread.paused():
        await until(endless.ended.is_set)
        endless.begun.clear()
    await until(endless.begun.is_set)


async def test_failing_idle_work_does_not_stop_the_worker(
    start: Start, steered: Steered, caplog: pytest.LogCaptureFixture
) -> None:
    begun = threading.Event()

    def failing(is_wanted: Callable[[], bool]) -> bool:
        begun.set()
        raise OSError("no disk today")

    worker = start(idle_work=failing)
    await until(begun.is_set)
    steered.step.release()
    assert await text(worker.submit(request("a"))) == "a"
    begun.clear()
    await until(begun.is_set)
    assert "no disk today" in caplog.text


async def test_cancelled_queued_job_ends_at_once_and_never_runs(worker: EngineWorker, steered: Steered) -> None:
    first, second, third = (worker.submit(request(prompt)) for prompt in ("a", "b", "c"))
    await until(lambda: worker.num_running == 1)
    second.cancel()
    with pytest.raises(JobCancelledError):
        await text(second)
    steered.step.release(2)
    assert [await text(first), await text(third)] == ["a", "c"]
    await until(lambda: worker.num_running == 0)
    assert "start b" not in steered.log and len(steered.ended) == 3 and set(steered.ended) == {first, second, third}


async def test_cancelling_a_complete_answer_changes_nothing(worker: EngineWorker, steered: Steered) -> None:
    job = worker.submit(request("a"))
    steered.step.release()
    assert await text(job) == "a"
    job.cancel()
    await until(lambda: worker.num_running == 0)
    assert "end a" in steered.log and not job.cancelled and steered.ended == [job]


@pytest.mark.parametrize("drain", [True, False])
async def test_close_finishes_or_cancels_queued_jobs(worker: EngineWorker, steered: Steered, drain: bool) -> None:
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
        assert steered.log == ["start a b", "closed a b"] and set(steered.ended) == set(jobs)


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


async def test_a_queued_requests_kv_is_preloaded_until_its_first_token(start: Start, steered: Steered) -> None:
    preloads = Preloads()
    worker = start(preload=preloads)
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


async def test_preload_ends_if_its_queued_request_is_cancelled_or_fails(start: Start, steered: Steered) -> None:
    preloads = Preloads()
    worker = start(preload=preloads)
    first, given_up, bad = (worker.submit(request(prompt)) for prompt in ("a", "b", "boom"))
    given_up.cancel()
    assert preloads.log[-1] == "close b"
    steered.step.release(2)
    assert await text(first) == "a"
    with pytest.raises(ValueError, match="boom"):
        await text(bad)
    await until(lambda: preloads.log[-1] == "close boom")
    assert sorted(preloads.log[:2]) == ["begin b", "begin boom"]


async def test_answer_completed_after_a_disconnect_ends_its_job() -> None:
    """The engine emitted the last delta before it could see the cancellation: no more events follow."""
    emits: list[Callable[[Delta | Exception], None]] = []
    ended: list[Job] = []

    def start(_: Request, emit: Callable[[Delta | Exception], None], *, on_start: Callable[[], None]):
        on_start()
        emits.append(emit)
        return lambda: None

    worker = EngineWorker(start, on_end=ended.append)
    job = worker.submit(request("a"))
    job.cancel()
    emits[0](Delta("a", (1,)))
    assert not worker.is_idle
    emits[0](Delta("", response=Response("a", (1,), "stop", REPORT, 1, 0.1, 0.1)))
    assert worker.is_idle and ended == [job] and job.response is None
    worker.close()

"""What clients of one tenant can learn of each other's questions: nothing with evened-out timing, else all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from ccjax.engine import Delta, Request, Response, SamplingParams
from ccjax.errors import ConfigError
from ccjax.models.llama3.paged_steps import paged_layer_step
from ccjax.runner import pack as pack_module
from ccjax.server import ServerSettings
from ccjax.server.worker import EngineWorker, Job
from ccjax.types import ReuseReport
from tests.server import patience

EVENED_OUT = ServerSettings(even_out_timing=True, page=False, repair_when_idle=False)
AS_USUAL = ServerSettings(page=False, repair_when_idle=False)
RESPONSE = Response("ab", (1, 2), "stop", ReuseReport("off", "full", 1, 1, 0, 0, 1.0, True), 1, 0.1, 0.1)
MOST_S = 10.0
"""Longest time for computing a prompt on the clock of these tests."""


class Clock:
    """A clock that only computing and sleeping advance; while `is_held()` no sleep ends. A sleep counts from the
    sleeper's last look at the clock, whatever the engine's thread has computed since then."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.is_held: Callable[[], bool] = lambda: False
        self._read = threading.local()

    def __call__(self) -> float:
        self._read.now_s = self.now_s
        return self._read.now_s

    async def sleep(self, seconds: float) -> None:
        until_s = self._read.now_s + seconds
        while self.is_held():
            await asyncio.sleep(0.001)
        self.now_s = max(self.now_s, until_s)


def passages(seed: int, num_words: int = 20) -> list[str]:
    """Three passages that were never requested."""
    random = np.random.default_rng(seed)
    return [" ".join("".join(map(chr, random.integers(97, 123, 4))) for _ in range(num_words)) for _ in range(3)]


def body_of(texts: list[str], **more) -> dict:
    documents = [{"text": text, "id": text[:4]} for text in texts]
    return {"messages": [{"role": "user", "content": "Who?"}], "documents": documents, "max_tokens": 2} | more


def ask(url: str, texts: list[str], **more):
    response = patience.post(f"{url}/v1/chat/completions", json=body_of(texts, **more))
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("settings", [EVENED_OUT, AS_USUAL], ids=["evened out", "as usual"])
def test_evened_out_timing_hides_passages_cached_by_another_client(start_server, monkeypatch, settings):
    """Both take as long to the first token, on a clock that only rows of a prefill advance."""
    clock = Clock()

    def step(layer, x, *args, **kwargs):
        clock.now_s += 1e-3 * len(x)
        return paged_layer_step(layer, x, *args, **kwargs)

    whole, emit = [], Job._emit

    def emitted(job, event):
        emit(job, event)
        whole.append(getattr(event, "response", None))

    monkeypatch.setattr(Job, "_emit", emitted)
    clock.is_held = lambda: not any(whole)  # the engine completes an answer before time advances for its client
    monkeypatch.setattr(pack_module, "paged_layer_step", step)
    with start_server(settings, strategy="reuse", reorder_window=1) as server:
        worker, engine = server.service.backend.worker, server.engine
        monkeypatch.setattr(worker, "clock", clock)
        monkeypatch.setattr(worker, "sleep", clock.sleep)
        monkeypatch.setattr(engine, "full_prefill_s", lambda num_tokens: MOST_S)

        def seconds(texts: list[str]) -> float:
            before_s = clock.now_s
            whole.clear()
            ask(server.url, texts, reuse="fast", max_tokens=1)
            return clock.now_s - before_s

        ask(server.url, passages(1))  # the common beginning of all prompts is cached for all
        first, second, third = passages(2)
        fresh_s = seconds([third, first, second])
        for document in engine.documents.list():
            engine.documents.erase(document.document_id)
        ask(server.url, [first, second, third], reuse="fast")
        theirs_s = seconds([third, first, second])
        assert 0 < fresh_s and (fresh_s == theirs_s) == (settings is EVENED_OUT)
        if settings is EVENED_OUT:
            assert fresh_s == pytest.approx(1.25 * MOST_S)
        else:
            assert theirs_s < fresh_s / 2


def test_reuse_is_not_reported_with_evened_out_timing(start_server):
    texts = passages(3)
    with start_server(EVENED_OUT) as server:
        ask(server.url, texts)
        answer = ask(server.url, texts).json()
        assert answer["usage"]["prompt_tokens_details"] is None
        assert answer.keys() == {"id", "created", "model", "object", "choices", "usage", "documents"}
        response = ask(server.url, texts, stream=True, stream_options={"include_usage": True})
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        last = json.loads(events[-1])
        assert last["usage"]["prompt_tokens_details"] is None and not last.keys() & {"reuse", "ttft_s", "trace"}
        assert not any("cached" in event or "reuse" in event or "ttft" in event for event in events)


def test_the_page_is_refused_with_evened_out_timing():
    with pytest.raises(ConfigError, match="page: wanted it off"):
        ServerSettings(even_out_timing=True)


def run(scenario) -> None:
    """Runs `scenario(worker, clock, emits)` over an engine that says what is given to `emits`, request by request."""
    clock, emits = Clock(), []

    def start(request, emit, *, on_start):
        on_start()
        emits.append(emit)
        return lambda: None

    worker = EngineWorker(start, clock=clock, sleep=clock.sleep)
    try:
        asyncio.run(scenario(worker, clock, emits))
    finally:
        worker.close()


REQUEST = Request(prompt="x", sampling=SamplingParams())


async def times_of(job, clock) -> list[float]:
    return [clock() - job.submitted_s async for _ in job.deltas()]


def test_held_answer_keeps_its_pace_and_blocks_no_other_request():
    """Deltas at 0 and 0.5 s, held until 2 s: they come at 2.0 and 2.5. Meanwhile the engine is free, and others are
    answered; an error is told at once."""

    async def scenario(worker, clock, emits):
        left = []
        job = worker.submit(REQUEST, on_leave=left.append)
        job.least_ttft_s = 2.0
        emits[0](Delta("a", (1,)))
        clock.now_s += 0.5
        emits[0](Delta("b", (2,), response=RESPONSE))
        clock.is_held = lambda: True
        reading = asyncio.create_task(times_of(job, clock))
        assert worker.is_idle and left == [RESPONSE]
        other = worker.submit(REQUEST)
        emits[1](Delta("ab", (1, 2), response=RESPONSE))
        assert await times_of(other, clock) == [0.0]
        failing = worker.submit(REQUEST)
        failing.least_ttft_s = 9.0
        emits[2](ValueError("boom"))
        with pytest.raises(ValueError, match="boom"):
            await times_of(failing, clock)
        assert not reading.done()
        clock.is_held = lambda: False
        assert await reading == [2.0, 2.5]  # the second is held as long as the first, not only until that is through

    run(scenario)


def test_late_answer_is_not_held_longer():
    async def scenario(worker, clock, emits):
        job = worker.submit(REQUEST)
        job.least_ttft_s = 0.5
        clock.now_s += 0.75
        emits[0](Delta("ab", (1, 2), response=RESPONSE))
        assert await times_of(job, clock) == [0.75]

    run(scenario)

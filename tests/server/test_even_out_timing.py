"""What clients of one tenant can see of each other's questions: with timing evened out nothing, else all."""

from __future__ import annotations

import asyncio
import collections
import json
import time
from collections.abc import Callable

import numpy as np
import pytest

from ccjax.engine import Delta, Engine, Request, Response, SamplingParams
from ccjax.errors import ConfigError
from ccjax.server import ServerSettings, Service
from ccjax.server.worker import EngineWorker
from ccjax.types import ReuseReport
from tests.server import patience
from tests.server.conftest import DOCUMENTS, running
from tests.server.tiny_model import write_tiny_model

EVENED_OUT = ServerSettings(even_out_timing=True, page=False, repair_when_idle=False)
AS_USUAL = ServerSettings(page=False, repair_when_idle=False)
RESPONSE = Response("ab", (1, 2), "stop", ReuseReport("off", "full", 1, 1, 0, 0, 1.0, True), 1, 0.1, 0.1)


def passages(random: np.random.Generator, num_words: int = 50) -> list[str]:
    """Three that nobody asked for."""
    return [" ".join("".join(map(chr, random.integers(97, 123, 4))) for _ in range(num_words)) for _ in range(3)]


def body_of(texts: list[str], **more) -> dict:
    documents = [{"text": text} for text in texts]
    return {"messages": [{"role": "user", "content": "Who?"}], "documents": documents, "max_tokens": 2} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that takes a tenth of a second to compute such a prompt: HTTP alone takes milliseconds."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, list(DOCUMENTS.values()), d_model=256, num_layers=4, d_ff=1024, head_dim=64)
    return directory


def ask(url: str, texts: list[str], **more):
    response = patience.post(f"{url}/v1/chat/completions", json=body_of(texts, **more))
    assert response.status_code == 200, response.text
    return response


def first_token_s(url: str, texts: list[str]) -> float:
    """Seconds to the first token of a client, and of the whole answer, which tells as much."""
    started_s = time.perf_counter()
    ask(url, texts, reuse="fast")
    return time.perf_counter() - started_s


def measured(url: str, rounds: int, seed: int) -> dict[str, list[float]]:
    """Times over passages that another client asked for in another order, and over new ones, in turns."""
    random, times = np.random.default_rng(seed), collections.defaultdict(list)
    for _ in range(rounds):
        theirs, fresh = passages(random), passages(random)
        ask(url, theirs, reuse="fast")
        ways = {"theirs": [theirs[2], theirs[0], theirs[1]], "fresh": fresh}
        for way in sorted(ways, key=lambda _: random.random()):
            times[way].append(first_token_s(url, ways[way]))
    return times


def separation(first: list[float], second: list[float]) -> float:
    """Share of pairs in which the second takes longer, 0.5 where the two cannot be told apart (Mann-Whitney's U)."""
    return float((np.asarray(second)[None, :] > np.asarray(first)[:, None]).mean())


def separations(url: str, is_wanted: Callable[[float], bool], seed: int) -> list[float]:
    """Measured until it is as wanted, three times at most: other work on the machine may blur any of them."""
    found: list[float] = []
    while len(found) < 3 and not (found and is_wanted(found[-1])):
        times = measured(url, 14, seed + len(found))
        found.append(separation(times["theirs"], times["fresh"]))
    return found


def test_passages_of_another_client_behind_another_prefix(model):
    """Over 14 rounds U / 14^2 has a standard deviation of 0.11 where there is nothing to see: 0.1 to 0.9 is 3.6 of
    these. Without the option the measure shows at once what was asked for."""
    engine = Engine.from_pretrained(model, strategy="reuse", max_model_len=1024, reorder_window=1)
    service = Service(EVENED_OUT)
    with running(service) as url:
        service.open(engine)
        measured(url, 3, seed=8)  # compiles
        hidden = separations(url, lambda found: 0.1 < found < 0.9, seed=9)
        assert 0.1 < hidden[-1] < 0.9, hidden
        service.settings = AS_USUAL
        shown = separations(url, lambda found: found > 0.9, seed=20)
        assert shown[-1] > 0.9, shown


def test_nothing_is_told_of_reuse(start_server):
    texts = passages(np.random.default_rng(3), 20)
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
        for path in ("/v1/live", "/"):
            assert patience.get(f"{server.url}{path}").status_code == 404
        refused = patience.post(f"{server.url}/v1/chat/completions", json=body_of(texts, trace=True))
        assert refused.status_code == 400 and "trace" in refused.json()["error"]["message"]


def test_page_is_refused_beside_it():
    with pytest.raises(ConfigError, match="page: wanted it off"):
        ServerSettings(even_out_timing=True)


def test_held_answer_keeps_its_pace_and_nothing_waits_for_it():
    """Deltas at 0 and 0.1 s, held until 2 s: they come at 2.0 and 2.1. Meanwhile the engine is free, and others are
    answered; an error is told at once."""
    emits = []

    def start(request, emit, *, on_start):
        on_start()
        emits.append(emit)
        return lambda: None

    async def times_of(job, begun_s) -> list[float]:
        return [time.perf_counter() - begun_s async for _ in job.deltas()]

    async def main():
        left = []
        request = Request(prompt="x", sampling=SamplingParams())
        begun_s = time.perf_counter()
        job = worker.submit(request, on_leave=left.append)
        job.least_ttft_s = 2.0
        emits[0](Delta("a", (1,)))
        reading = asyncio.create_task(times_of(job, begun_s))
        await asyncio.sleep(0.1)
        emits[0](Delta("b", (2,), response=RESPONSE))
        assert worker.is_idle and left == [RESPONSE]
        other = worker.submit(request)
        emits[1](Delta("ab", (1, 2), response=RESPONSE))
        (other_s,) = await times_of(other, begun_s)
        failing = worker.submit(request)
        failing.least_ttft_s = 9.0
        emits[2](ValueError("boom"))
        with pytest.raises(ValueError, match="boom"):
            await times_of(failing, begun_s)
        assert not reading.done()
        return other_s, await reading

    worker = EngineWorker(start)
    try:
        other_s, (first_s, second_s) = asyncio.run(main())
    finally:
        worker.close()
    assert other_s < 1.5 and 2.0 <= first_s < second_s
    assert second_s - first_s >= 0.08  # the second is held as long as the first, not only until that is through


def test_late_answer_is_not_held_longer():
    def start(request, emit, *, on_start):
        on_start()
        emits.append(emit)
        return lambda: None

    async def main():
        job = worker.submit(Request(prompt="x", sampling=SamplingParams()))
        job.least_ttft_s = 0.6
        await asyncio.sleep(0.7)
        emits[0](Delta("ab", (1, 2), response=RESPONSE))
        emitted_s = time.perf_counter()
        assert [one async for one in job.deltas()]
        return time.perf_counter() - emitted_s

    emits, worker = [], EngineWorker(start)
    try:
        assert asyncio.run(main()) < 0.5
    finally:
        worker.close()

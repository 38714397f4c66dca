"""Many clients at once, clients that leave, a full queue, and their metrics."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ccjax.engine import Delta, Engine, Request
from ccjax.retrieval import changes
from ccjax.retrieval.documents import LoadedDocument
from ccjax.server import ServerSettings
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import Server, StartServer

NAMES = ("Anna", "Bob", "Carla", "Dino")


def body(question: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "documents": [], **more}


def metrics(server: Server) -> dict[tuple[str, ...], float]:
    """Value by (sample name, label values...), labels in order of their names."""
    text = patience.get(f"{server.url}/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """A context in which the engine begins no request."""
    with server.engine._loop.exclusive():
        yield


@contextlib.contextmanager
def held_steps(engine: Engine, after: int = 0) -> Iterator[None]:
    """A context in which at most `after` decode steps are done."""
    go_on, numbers = threading.Event(), itertools.count()
    step = engine._loop._decoder.step

    def held(*args):
        assert next(numbers) < after or go_on.wait(300)
        return step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._loop._decoder, "step", held)
        try:
            yield
        finally:
            go_on.set()


def test_metrics_include_memory_and_compilations(server: Server) -> None:
    compiled = ("ccjax_compilations_total",)
    assert patience.post(f"{server.url}/v1/chat/completions", json=body("Who?")).status_code == 200
    before = metrics(server)
    assert before[("process_resident_memory_bytes",)] > 50e6 and before[compiled] > 0
    jax.jit(lambda x: x + 2.0)(jnp.ones(7)).block_until_ready()  # the server runs in this process
    assert metrics(server)[compiled] > before[compiled]


def test_full_queue_returns_429_and_recovers(
    start_server: StartServer,
) -> None:
    import openai

    with start_server(max_queue=2, max_num_seqs=1) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/v1/chat/completions"
        with busy(server):
            taken = []
            for number in range(2):
                taken.append(pool.submit(httpx.post, url, json=body(NAMES[number]), timeout=60))
                wait_until(lambda: server.engine.batch_counts.waiting == len(taken))
            refused = patience.post(url, json=body("Who else?"))
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert error["code"] == "queue_full" and error["type"] == "rate_limit_error" and "2" in error["message"]
            with server.client() as client, pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="tiny", messages=body("And now?")["messages"])
        assert [answer.result().status_code for answer in taken] == [200, 200]
        assert patience.post(url, json=body("Who else?")).status_code == 200
        assert metrics(server)[("ccjax_request_errors_total", "queue_full")] == 2


def test_client_disconnect_mid_stream_frees_the_engine(server: Server) -> None:
    cancelled = ("ccjax_request_errors_total", "cancelled")
    before = metrics(server)
    long_request = body("Who lives in Paris?", max_tokens=440, stream=True, ignore_eos=True)
    worker = server.service.backend.worker
    with held_steps(server.engine, after=2):
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=long_request, timeout=60) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # kept: without it the stream is closed
            next(lines)
            (job,) = worker._jobs
        wait_until(lambda: job.cancelled, timeout_s=60)
    wait_until(lambda: worker.num_running == 0)
    after = metrics(server)
    assert after[cancelled] == before.get(cancelled, 0) + 1
    assert after[("ccjax_generation_tokens_total",)] == before[("ccjax_generation_tokens_total",)]
    assert patience.post(f"{server.url}/v1/chat/completions", json=body("And now?")).status_code == 200


def test_queued_request_is_never_run_after_its_client_disconnects(server: Server) -> None:
    worker = server.service.backend.worker
    cancelled = ("ccjax_request_errors_total", "cancelled")
    before = metrics(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, busy(server):
        url = f"{server.url}/v1/chat/completions"
        patient = pool.submit(httpx.post, url, json=body("patient"), timeout=60)
        wait_until(lambda: worker.num_waiting == 1)
        with patience.leaving(server.url, body("impatient")):
            wait_until(lambda: worker.num_waiting == 2)
        wait_until(lambda: metrics(server).get(cancelled, 0) > before.get(cancelled, 0))
        assert worker.num_waiting == 1
    assert patient.result().status_code == 200
    after = metrics(server)
    success = ("ccjax_request_success_total", "length")
    assert after[success] == before.get(success, 0) + 1


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_failing_engine_is_a_500_and_the_next_request_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    import openai

    def failing(request: Request, emit: Callable[[Delta | Exception], None], **_: object) -> Callable[[], None]:
        for delta in itertools.islice(server.engine.stream(request), num_good):
            emit(delta)
        emit(RuntimeError("secret inside"))
        return lambda: None

    url = f"{server.url}/v1/chat/completions"
    failed = ("ccjax_request_errors_total", "internal_error")
    before = metrics(server).get(failed, 0)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "submit", failing)
        whole = patience.post(url, json=body("Who?"))
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "internal_error"
        assert whole.json()["error"]["type"] == "server_error" and "secret" not in whole.text
        streamed = patience.post(url, json=body("Who?", stream=True))
        assert "secret" not in streamed.text
        # The status is gone: OpenAI's client raises what the stream says.
        assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
        with server.client() as client, pytest.raises(openai.APIError, match="the server failed"):
            list(client.chat.completions.create(model="tiny", messages=body("Who?")["messages"], stream=True))
    assert metrics(server)[failed] == before + 3
    assert patience.post(url, json=body("Who?")).status_code == 200


def test_metrics_counters_follow_requests(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    passages = [{"text": "A passage about metrics alone."}, {"text": "Another one about counters."}]
    patience.post(url, json=body("warm", documents=passages, reuse="bounded"))
    before = metrics(server)
    answer = patience.post(url, json=body("Which?", documents=passages, reuse="exact")).json()
    assert patience.post(url, json=body("")).status_code == 400
    assert patience.post(url, json=body("x", max_tokens=5000)).status_code == 400
    wait_until(lambda: all(meta.fidelity == "exact" for meta in server.engine._chunks.variants))  # no repair in between
    after = metrics(server)

    def moved(*key: str) -> float:
        return after[key] - before.get(key, 0)

    report = answer["reuse"]
    assert report["reused_tokens"] > 0
    assert moved("ccjax_request_success_total", answer["choices"][0]["finish_reason"]) == 1
    assert moved("ccjax_request_reuse_total", "true", "exact") == 1
    assert moved("ccjax_prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert moved("ccjax_generation_tokens_total") == answer["usage"]["completion_tokens"]
    assert moved("ccjax_request_errors_total", "invalid_request") == 1
    assert moved("ccjax_request_errors_total", "context_length_exceeded") == 1
    for kind in ("reused", "recomputed", "computed"):
        keys = [key for key in after if key[0] == f"ccjax_{kind}_tokens_total"]  # cause, if there is one, and role
        roles = ("instructions", "passage", "question")
        by_role = {role: sum(moved(*key) for key in keys if key[-1] == role) for role in roles}
        assert sum(by_role.values()) == report[f"{kind}_tokens"]
        documents = [entry for entry in report["per_document"] if entry["role"] == "passage"]
        assert by_role["passage"] == sum(entry[f"{kind}_tokens"] for entry in documents)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert moved(f"ccjax_{name}_count") == 1 and moved(f"ccjax_{name}_sum") > 0
    host = server.engine.cache.usage()["host"]
    assert after[("ccjax_store_used_bytes", "host")] == host.used_bytes > 0
    assert after[("ccjax_store_budget_bytes", "host")] == host.budget_bytes
    assert moved("ccjax_store_hits_total", "host") > 0
    for name in ("misses", "failed_writes", "corrupt"):
        assert after[(f"ccjax_store_{name}_total", "host")] == getattr(host, name)
    assert after[("ccjax_num_variants",)] == server.engine.cache.num_variants
    assert after[("ccjax_num_documents",)] == 5


def test_files_that_crash_a_parser_prevent_neither_startup_nor_answers(
    start_server: StartServer,
    docs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proper = changes.parse_document

    def parse(path: Path, data: bytes) -> LoadedDocument:
        if path.name.startswith("odd"):
            raise OverflowError("int too large to convert to float")
        return proper(path, data)

    monkeypatch.setattr(changes, "parse_document", parse)
    odd, later, added = docs_dir / "odd.md", docs_dir / "odd-later.md", docs_dir / "fay.md"
    odd.write_text("# Odd\n\nAn odd file.")
    try:
        with start_server(ServerSettings(refresh_interval_s=0.1, top_k=2)) as server:
            assert [path for path, _ in server.retriever.report.failed] == [str(odd)]
            later.write_text("# Odd\n\nAnother odd file.")
            added.write_text("# Fay\n\nFay collects meteorites in Chile.")
            wait_until(lambda: server.retriever.num_documents == 6)
            request = body("What does Fay collect?")
            del request["documents"]
            answer = patience.post(f"{server.url}/v1/chat/completions", json=request)
            assert answer.status_code == 200
            assert "fay.md#0" in json.dumps(answer.json())
    finally:
        for path in (odd, later, added):
            path.unlink(missing_ok=True)
    assert "OverflowError: int too large to convert to float" in caplog.text

"""A server whose engine compiled a few sizes compiles the rest between requests."""

from __future__ import annotations

import threading

import httpx
import pytest

from ccjax.engine import Engine
from ccjax.runner import warmup
from ccjax.runner.compilations import compilations
from ccjax.server import ServerSettings, Service
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import StartServer
from tests.server.test_idle import PASSAGES
from tests.server.test_traffic import body, metrics

LEFT = ("ccjax_sizes_to_compile",)
AHEAD = ("ccjax_background_compilations_total",)
WAITED_FOR = ("ccjax_compilations_total",)


def test_idle_time_compiles_the_rest_and_yields_to_requests(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    compile_key = warmup.StepCompiler.compile

    def held(steps: warmup.StepCompiler, key) -> None:
        if threading.current_thread().name.startswith("ccjax-compile"):
            begun.set()
            assert go_on.wait(300)
        compile_key(steps, key)

    def open_warm(service, engine: Engine, retriever) -> None:
        engine.warmup(only_first=True)
        opened(service, engine, retriever)

    opened = Service.open
    monkeypatch.setattr(Service, "open", open_warm)
    monkeypatch.setattr(warmup.StepCompiler, "compile", held)
    settings = ServerSettings(top_k=2, repair=False)
    try:
        with start_server(settings, max_num_batched_tokens=256, max_num_seqs=8, device_cache_bytes=3 << 20) as server:
            assert begun.wait(300)
            before, waited_for = metrics(server), compilations().count
            assert before[LEFT] == server.engine.num_sizes_left > 1
            for number in range(3):
                asked = body(f"Who sings {number}?", documents=PASSAGES)
                answer: httpx.Response = patience.post(f"{server.url}/v1/chat/completions", json=asked)
                assert answer.status_code == 200
            held_back = metrics(server)
            assert held_back[LEFT] >= before[LEFT] and held_back[AHEAD] == before[AHEAD]
            assert compilations().count == waited_for  # the answers were padded
            go_on.set()
            wait_until(lambda: metrics(server)[LEFT] == 0)
            assert metrics(server)[WAITED_FOR] == waited_for
            again = patience.post(f"{server.url}/v1/chat/completions", json=asked)
            assert again.json()["choices"][0]["message"] == answer.json()["choices"][0]["message"]
    finally:
        go_on.set()

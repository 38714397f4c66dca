"""A server's work between requests, and what requests interrupt: repairs, changes in the store, abandoned prefills."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from ccjax.engine import Engine, Request, SamplingParams
from ccjax.engine.engine_cache import EngineCache
from ccjax.models.llama3.paged_steps import paged_layer_step
from ccjax.runner import pack as pack_module
from ccjax.server import ServerSettings
from ccjax.server.service import _idle_work
from ccjax.types import Document
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import MAX_MODEL_LEN, Server, StartServer
from tests.server.test_traffic import body, metrics

PASSAGES = [{"text": f"{name} sings in the {when}."} for name, when in [("Anna", "morning"), ("Bob", "evening")]]


def post(server: Server, **more) -> httpx.Response:
    return patience.post(f"{server.url}/v1/chat/completions", json=body("Who sings?", **more), timeout=60)


def leave_approximate(server: Server) -> None:
    """Two requests directly to the engine, after which a repaired chunk is stored."""
    for passages in (PASSAGES, PASSAGES[::-1]):
        server.engine.generate("Who sings?", passages, max_new_tokens=1)
    assert num_approximate(server)


def num_approximate(server: Server) -> int:
    return sum(meta.fidelity == "approx" for meta in server.engine._chunks.variants)


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """`at_rest()` is True once the worker found nothing to repair, so that it sleeps until a request arrives."""
    outcomes: list[bool] = []
    repair_one = EngineCache.repair_one

    def watched(cache: EngineCache, **kwargs) -> bool:
        outcomes.append(repair_one(cache, **kwargs))
        return outcomes[-1]

    monkeypatch.setattr(EngineCache, "repair_one", watched)
    return lambda: outcomes[-1:] == [False]


class Gate:
    """Blocks the next layer of a request, or of idle work, until it is opened; counts their layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.open = threading.Event(), threading.Event()
        self.num_layers = 0

        def held(run):
            def step(*args, **kwargs):
                if threading.current_thread().name == "ccjax-batch":
                    self.num_layers += 1
                    self.held.set()
                    assert self.open.wait(300)
                return run(*args, **kwargs)

            return step

        monkeypatch.setattr(pack_module, "paged_layer_step", held(paged_layer_step))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def test_client_disconnect_stops_its_prefill(start_server: StartServer, gate: Gate) -> None:
    with start_server() as server:
        worker = server.service.backend.worker
        with patience.leaving(server.url, body("Who?")):
            assert gate.held.wait(120)
        (job,) = worker._jobs
        wait_until(lambda: job.cancelled)
        gate.open.set()
        wait_until(lambda: worker.num_running == 0)
        assert gate.num_layers == 1 and server.engine.cache.num_variants == 0  # of two layers
        assert metrics(server)[("ccjax_request_errors_total", "cancelled")] == 1
        assert post(server, documents=[]).status_code == 200
        assert metrics(server)[("ccjax_request_errors_total", "cancelled")] == 1


def test_idle_time_makes_approximate_variants_exact(start_server: StartServer, at_rest: Callable[[], bool]) -> None:
    with start_server() as server:
        wait_until(at_rest)
        leave_approximate(server)
        assert metrics(server)[("ccjax_variants_repaired_total",)] == 0
        assert post(server).status_code == 200  # after it, the worker finds itself idle
        wait_until(lambda: not num_approximate(server))
        wait_until(lambda: metrics(server)[("ccjax_variants_repaired_total",)] >= 1)
        assert metrics(server)[("ccjax_variants_repair_failed_total",)] == 0
        report = post(server, documents=PASSAGES[::-1], reuse="exact").json()["reuse"]
        assert report["exact"] and all(entry["computed_tokens"] == 0 for entry in report["per_document"])


def test_no_kind_of_idle_work_keeps_the_others_waiting(
    start_server: StartServer, at_rest: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_left = threading.Event()
    for owner, name in ((Engine, "compile_one"), (Engine, "profile_one"), (EngineCache, "check_one")):
        monkeypatch.setattr(owner, name, lambda *args, is_cancelled: is_left.is_set())
    with start_server() as server:
        wait_until(at_rest)
        leave_approximate(server)
        assert metrics(server)[("ccjax_passages_to_prepare",)] > 0
        is_left.set()
        assert post(server).status_code == 200  # after it, the worker finds itself idle
        wait_until(lambda: metrics(server)[("ccjax_passages_to_prepare",)] == 0)
        wait_until(lambda: not num_approximate(server))


@pytest.mark.parametrize("interrupted", range(1, 5))
def test_nothing_else_begins_once_idle_work_is_interrupted(interrupted: int) -> None:
    begun: list[str] = []
    arrived = threading.Event()

    def piece(name: str) -> Callable[..., bool]:
        def work(is_cancelled: Callable[[], bool]) -> bool:
            begun.append(name)
            if len(begun) == interrupted:
                arrived.set()
            return False

        return work

    cache = SimpleNamespace(check_one=piece("check"), repair_one=piece("repair"))
    engine = SimpleNamespace(compile_one=piece("compile"), profile_one=piece("profile"), cache=cache)
    step = _idle_work(engine, SimpleNamespace(step=lambda is_wanted: False), None, repair=True)
    for _ in range(2):
        assert step(arrived.is_set) and len(begun) == interrupted
    arrived.clear()
    assert not step(lambda: False) and begun[-1] == "profile"
    assert sorted(begun[-4:-1]) == ["check", "compile", "repair"]


def test_idle_time_compares_answers_with_a_full_prefill(start_server: StartServer) -> None:
    with start_server(shadow_ratio=1.0, strategy="cachecraft", recompute_ratio=0.0) as server:
        for passages in (PASSAGES, PASSAGES[::-1]):
            report = post(server, documents=passages).json()["reuse"]
        assert not report["exact"]
        name = "ccjax_shadow_checks_total"
        wait_until(lambda: metrics(server)[(name, "cachecraft")] == 1)
        found = metrics(server)
        assert found[("ccjax_shadow_greedy_total", "cachecraft")] == 1
        assert found[("ccjax_shadow_same_total", "cachecraft")] in (0, 1)
        assert found[("ccjax_shadow_first_kl_total", "cachecraft")] > 0
        assert found[("ccjax_shadow_factor", "cachecraft")] == 1.0


def test_idle_time_measures_what_pgdsf_evicts_by(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccjax.loading.prefill_profile.KeptProfile.read", lambda self: None)
    monkeypatch.setattr("ccjax.loading.prefill_profile.KeptProfile.write", lambda self, grid: None)
    with start_server(eviction_policy="pgdsf") as server:
        costs = server.engine._chunks.costs
        wait_until(lambda: costs.grid is not None)
        assert server.engine.cache.num_variants == 0 and post(server).status_code == 200


def test_quality_target_is_applied_and_reported(start_server: StartServer) -> None:
    with start_server() as server:
        for passages in (PASSAGES, PASSAGES[::-1]):
            report = post(server, documents=passages, quality_target=0.9).json()["reuse"]
        # Without a calibration only exact reuse keeps a target.
        assert report["exact"] and report["quality_target"] == 0.9 and report["quality_bound"] == 1.0
        assert not report["calibrated"] and report["mode"] == "bounded"
        refused = post(server, quality_target=1.5)
        assert refused.status_code == 400 and "quality_target" in refused.text


def test_request_interrupts_a_repair_between_layers(
    start_server: StartServer, gate: Gate, at_rest: Callable[[], bool]
) -> None:
    with start_server() as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        worker = server.service.backend.worker
        wait_until(at_rest)
        with worker.thread.paused():  # no repair yet
            gate.open.set()
            leave_approximate(server)
            assert post(server, reuse="off").status_code == 200
            wait_until(lambda: worker.num_running == 0)
            gate.open.clear()
            gate.held.clear()
        assert gate.held.wait(120)  # the repair is at its first layer
        assert worker.num_running == 0 and num_approximate(server)
        gate.num_layers = 1
        answer = pool.submit(post, server, reuse="off", max_tokens=1)
        wait_until(lambda: worker.num_waiting == 1)
        gate.open.set()
        assert answer.result().status_code == 200
        # One layer of the repair and two of the request; a repair that went on would have had two of its own.
        wait_until(lambda: not num_approximate(server))
        assert gate.num_layers == 1 + 2 + 2  # then the whole repair
        wait_until(lambda: metrics(server)[("ccjax_variants_repaired_total",)] >= 1)  # counted behind the exchange


def test_repairs_can_be_switched_off(start_server: StartServer) -> None:
    with start_server(ServerSettings(repair=False)) as server:
        leave_approximate(server)
        assert post(server).status_code == 200
        assert not any("passages_to_prepare" in name for name, *_ in metrics(server))
        warming = server.engine.documents.begin_warming([{"text": "Carla sings, too."}])
        backend = server.service.backend
        assert backend.warm_jobs.add(warming, backend.worker, at_once=False)
        wait_until(lambda: warming.is_finished)  # there was idle time
        assert backend.worker.thread.call(lambda: num_approximate(server)).result()


def test_variants_of_another_engine_are_used_without_a_restart(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    request = Request(
        messages=body("Who sings?")["messages"],
        documents=[Document(passage["text"]) for passage in PASSAGES],
        sampling=SamplingParams(max_new_tokens=1),
    )
    with start_server(ServerSettings(store_refresh_interval_s=0.05), store=url) as server:
        settings = {"max_model_len": MAX_MODEL_LEN, "tenant_salt": "house", "store": url, "frame": "none"}
        with Engine.from_pretrained(tiny_model, **settings) as other:
            other.run(request)
            other.cache.flush()
            wait_until(lambda: server.engine.cache.num_variants == other.cache.num_variants)
            assert metrics(server)[("ccjax_variants_adopted_total",)] == other.cache.num_variants == 3
            report = post(server, documents=PASSAGES, max_tokens=1).json()["reuse"]
            assert {entry["tier"] for entry in report["per_document"]} == {"disk"} and report["exact"]
            for meta in tuple(other._chunks.variants):
                other._chunks.variants.discard(meta.variant_id)
            # What it read is in its own memory now; what it did not read would be gone.
            wait_until(lambda: server.engine.cache.usage()["disk"].num_variants == 0)
            assert server.engine.cache.num_variants == 3

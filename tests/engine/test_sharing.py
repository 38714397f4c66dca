"""Processes on one store with the same prompt at the same time: it is computed once, and waits for dead ones end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ccjax.cache import contexts, planned_prefill
from ccjax.cache.shared import prefill as sharing
from ccjax.cache.shared.prefill import SharedPrefill
from ccjax.engine import EngineConfig
from ccjax.engine.batch import group, loop, sequences
from ccjax.errors import ConfigError
from ccjax.policy.capture import variants_to_compute
from ccjax.policy.loading import LEAST_WAIT_S, STORE_S, longest_shared_wait_s
from ccjax.runner.cancellation import PrefillCancelledError
from ccjax.store import StoreUnavailableError
from ccjax.types import VariantId
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.sharing_worker import LENGTHS, SEGMENTS

ROOT = Path(__file__).resolve().parents[2]
MODEL = TinyModel()
NUM_CHUNK_TOKENS = 7 + sum(LENGTHS)  # system prompt and passages
NUM_QUESTION_TOKENS = len(SEGMENTS[-1])


@pytest.fixture
def spawn(url, start_file):
    """`spawn(seconds)` starts a `sharing_worker`."""
    processes = []

    def start(seconds: float = 0.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.engine.sharing_worker", url, str(start_file), str(seconds)]
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None and process.stdout.readline() == f"{word}\n"


def result_of(process: subprocess.Popen[str]) -> dict:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def full_prefill() -> list[int]:
    with MODEL.engine() as engine:
        return list(engine.generate_from_tokens(SEGMENTS, max_new_tokens=4, reuse="off").token_ids)


@pytest.fixture
def start_file(tmp_path) -> Path:
    return tmp_path / "start"


def leases(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.rglob("leases/*")]


def test_two_processes_with_the_same_prompt_compute_it_once(spawn, start_file, tmp_path):
    processes = [spawn() for _ in range(2)]
    for process in processes:
        wait_for(process, "ready")
    start_file.touch()
    first, second = sorted(map(result_of, processes), key=lambda result: result["reused"])
    assert first["tokens"] == second["tokens"] == full_prefill()
    assert first["computed"] == NUM_CHUNK_TOKENS + NUM_QUESTION_TOKENS and first["reused"] == 0
    assert second["computed"] == NUM_QUESTION_TOKENS and second["reused"] == NUM_CHUNK_TOKENS
    assert second["recomputed"] == 0
    assert leases(tmp_path) == []


def test_wait_for_a_killed_claim_holder_is_bounded(spawn, url, start_file, tmp_path):
    holder = spawn(seconds=3600)
    wait_for(holder, "ready")
    start_file.touch()
    wait_for(holder, "computing")
    left = leases(tmp_path)
    assert len(left) == 5
    holder.kill()
    holder.wait()
    with MODEL.engine(store=url, share_computation=True) as engine:
        warm(engine)
        response = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)  # the claims last for an hour
        assert response.reuse.computed_tokens == NUM_CHUNK_TOKENS + NUM_QUESTION_TOKENS
        assert list(response.token_ids) == full_prefill()
        engine.cache.flush()
        assert engine.generate_from_tokens(SEGMENTS, max_new_tokens=1).reuse.computed_tokens == NUM_QUESTION_TOKENS


# -- in one process, with engines that take turns ------------------------------------------------------------------


def warm(engine) -> None:
    """Compiles, and measures the time per token."""
    for seed in (1, 2):
        segments = draw_segments(np.random.default_rng(seed), LENGTHS)
        engine.generate_from_tokens(segments, max_new_tokens=4)
        engine.generate_from_tokens(segments, max_new_tokens=4)


def claims_of(engine, segments, monkeypatch) -> list[VariantId]:
    """Claims the variants that computing the prompt would store, as another process does while it computes."""
    prefill, seen = engine._chunks.planner, []

    def stop(plan, known):
        seen.extend(variants_to_compute(plan, known))
        raise PrefillCancelledError

    with monkeypatch.context() as patch:
        patch.setattr("ccjax.cache.shared.prefill.variants_to_compute", stop)
        assert list(engine.stream(_request(segments))) == []
    assert seen and prefill._store.claims.claim(seen, 3600) == tuple(seen)
    return seen


def _request(segments):
    from ccjax.requests import Request, SamplingParams

    return Request(segments=segments, sampling=SamplingParams(4))


def answer(engine, segments=SEGMENTS, **options):
    return engine.generate_from_tokens(segments, max_new_tokens=4, **options)


def test_computation_is_shared_by_default_only_with_an_index(url):
    indexed = EngineConfig(store=url, store_index="sqlite:///x.db")
    assert indexed.shares_computation and not indexed.replace(share_computation=False).shares_computation
    assert not EngineConfig(store=url).shares_computation
    with pytest.raises(ConfigError, match="share_computation: wanted True or False, got 1"):
        EngineConfig(share_computation=1)  # type: ignore[arg-type]
    with MODEL.engine(store=url) as engine, MODEL.engine(store=url) as other:
        other._chunks.store.claims.claim(["x"], 3600)
        answer(engine)
        assert not [
            path for path in Path(url.removeprefix("file://")).rglob("leases/*") if not path.name.startswith("x")
        ]


class Clock:
    """The time of engines: it advances by 10 ms at each check for variants of other processes, and hardly otherwise.

    Attributes:
      num_looks: number of checks so far.
      on_look: called at each check, on the loop's thread.
    """

    def __init__(self) -> None:
        self.num_looks, self.on_look, self._now_s = 0, lambda: None, time.perf_counter()

    def perf_counter(self) -> float:
        self._now_s += 1e-5
        return self._now_s

    def look(self) -> float:
        self.num_looks += 1
        self._now_s += 0.01
        self.on_look()
        return self._now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (loop, sequences, group, planned_prefill, contexts):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(sharing, "time", SimpleNamespace(perf_counter=clock.look))
    return clock


@pytest.fixture
def patient(monkeypatch) -> None:
    """Waits for other processes do not time out."""
    monkeypatch.setattr(sharing, "longest_shared_wait_s", lambda *_: math.inf)


@pytest.fixture
def long_claims(monkeypatch) -> None:
    """Claims do not expire, however slow the machine is; an expired one is not deleted when it is released."""
    monkeypatch.setattr(sharing, "claim_s", lambda *_: 3600.0)


@pytest.fixture
def pair(url):
    """Two engines on one store."""
    settings = {"store": url, "share_computation": True}
    with MODEL.engine(**settings) as engine, MODEL.engine(**settings) as other:
        yield engine, other


def test_request_computes_itself_after_a_bounded_wait_without_progress(monkeypatch, clock, pair):
    engine, other = pair
    warm(engine)
    claims_of(other, SEGMENTS, monkeypatch)
    response = answer(engine)
    assert response.reuse.load_wait_s == pytest.approx(STORE_S + LEAST_WAIT_S, abs=0.1)
    assert response.ttft_s > response.reuse.load_wait_s and response.reuse.plan_s < 0.01
    assert response.reuse.computed_tokens == NUM_CHUNK_TOKENS + NUM_QUESTION_TOKENS
    assert engine.rates.seconds_per_token < 1e-3  # waiting does not count as computing


class Winner:
    """Claims of a process that wins the race for "a", and only then claims the others; it never stores them."""

    def __init__(self) -> None:
        self.stored: tuple[str, ...] = ()

    def claim(self, variant_ids, seconds):
        return ()

    def committed(self, variant_ids):
        return tuple(one for one in variant_ids if one in self.stored)

    def taken(self, variant_ids):
        return frozenset(variant_ids) & ({"b", "c"} if self.stored else {"a"})


def test_wait_is_extended_for_claims_that_arrive_late(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("ccjax.cache.shared.prefill.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(
        "ccjax.cache.shared.prefill.variants_to_compute", lambda plan, known: {"a": 100, "b": 2000, "c": 3000}
    )
    index = SimpleNamespace(apply_changes=lambda arrived, gone: (len(arrived), 0))
    shared = SharedPrefill(claims := Winner(), index, 1e-3)

    def wait() -> None:
        while not shared.is_wait_over():
            clock[0] += 0.01

    assert shared.claim(None, {}) == "wait"
    claims.stored = ("a",)
    wait()
    assert shared.waited_s < longest_shared_wait_s(100, 1e-3)
    assert shared.claim(None, {}) == "wait"
    wait()
    assert shared.waited_s == pytest.approx(longest_shared_wait_s(5000, 1e-3), abs=0.3)
    assert shared.claim(None, {}) == "go" and longest_shared_wait_s(5000, 1e-3) > 2 * longest_shared_wait_s(100, 1e-3)


@pytest.mark.usefixtures("patient")
def test_waiting_request_takes_over_at_once_when_claims_are_released(monkeypatch, clock, pair):
    engine, other = pair
    warm(engine)
    claimed = claims_of(other, SEGMENTS, monkeypatch)
    clock.on_look = lambda: clock.num_looks == 50 and other._chunks.store.claims.release(claimed)
    response = answer(engine)
    assert 0.5 < response.reuse.load_wait_s < 1.0
    assert response.reuse.computed_tokens == NUM_CHUNK_TOKENS + NUM_QUESTION_TOKENS


def test_chunks_just_stored_by_another_process_are_found_without_waiting(clock, pair):
    engine, other = pair
    answer(other)
    other.cache.flush()
    report = answer(engine).reuse
    assert report.computed_tokens == NUM_QUESTION_TOKENS and not clock.num_looks


@pytest.mark.usefixtures("patient")
def test_request_waits_only_for_the_common_prefix(monkeypatch, clock, pair):
    engine, other = pair
    warm(engine)
    claims_of(other, SEGMENTS, monkeypatch)
    computing = threading.Thread(target=answer, args=[other])
    clock.on_look = lambda: clock.num_looks == 20 and computing.start()
    shared_start = [SEGMENTS[0], SEGMENTS[1], SEGMENTS[4], SEGMENTS[-1]]
    report = answer(engine, shared_start, reuse="exact").reuse
    computing.join(120)
    assert report.reused_tokens >= len(SEGMENTS[0]) + len(SEGMENTS[1])
    assert report.computed_tokens == len(SEGMENTS[4]) + NUM_QUESTION_TOKENS


@pytest.mark.usefixtures("long_claims")
@pytest.mark.parametrize("reuse", ["bounded", "exact", "fast", "off"])
def test_claims_are_released_when_the_request_ends(url, tmp_path, reuse):
    with MODEL.engine(store=url, share_computation=True) as engine:
        answer(engine, reuse=reuse)
        answer(engine, permuted(SEGMENTS, (3, 1, 0, 2)), reuse=reuse)
        engine.cache.flush()
        assert leases(tmp_path) == []


@pytest.mark.usefixtures("long_claims")
def test_claims_of_chunks_without_room_are_released_too(url, tmp_path):
    with MODEL.engine(store=url, share_computation=True, host_cache_bytes=1, disk_cache_bytes=1) as engine:
        answer(engine)
        assert engine.cache.num_variants == 0 and leases(tmp_path) == []


def test_variants_are_stored_before_the_rest_of_the_answer_is_decoded(url):
    with MODEL.engine(store=url, share_computation=True) as engine:
        stream = engine.stream(_request(SEGMENTS))
        next(stream)
        next(stream)
        assert engine.cache.num_variants == 5 and not engine._chunks.store._pins
        stream.close()


@pytest.mark.usefixtures("long_claims")
def test_claims_are_released_on_cancellation_and_device_failure(url, tmp_path, monkeypatch):
    with MODEL.engine(store=url, share_computation=True) as engine:
        seen: list[int] = []

        def leave_late() -> bool:
            seen.append(len(leases(tmp_path)))
            return len(seen) > 1

        assert list(engine.stream(_request(SEGMENTS), is_cancelled=leave_late)) == []
        assert max(seen) == 5 and leases(tmp_path) == []

        def fail(*_, **__):
            raise RuntimeError("device lost")

        with monkeypatch.context() as patch:
            patch.setattr("ccjax.runner.pack.paged_layer_step", fail)
            with pytest.raises(RuntimeError, match="device lost"):
                answer(engine)
        assert leases(tmp_path) == []


@pytest.mark.usefixtures("patient")
def test_cancellation_ends_the_wait_for_another_process(tmp_path, monkeypatch, clock, pair):
    engine, other = pair
    claims_of(other, SEGMENTS, monkeypatch)
    assert list(engine.stream(_request(SEGMENTS), is_cancelled=lambda: clock.num_looks > 20)) == []
    assert len(leases(tmp_path)) == 5  # those of the other process


def test_unavailable_store_fails_no_request(url, monkeypatch):
    with MODEL.engine(store=url, share_computation=True) as engine:

        def refuse(*_, **__):
            raise StoreUnavailableError("no answer")

        with monkeypatch.context() as patch:
            for name in ("names", "create", "read", "replace", "delete", "make_prefix"):
                patch.setattr(engine._chunks.store._disk._root, name, refuse)
            response = answer(engine)
        assert list(response.token_ids) == full_prefill() and response.reuse.load_wait_s == 0.0


def test_read_only_engines_and_engines_without_a_disk_claim_nothing(url, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing is to be agreed on")

    monkeypatch.setattr(SharedPrefill, "claim", refuse)
    with MODEL.engine(share_computation=True) as engine:
        answer(engine)
    Path(urllib.parse.urlsplit(url).path).mkdir(exist_ok=True)
    with MODEL.engine(store=url, share_computation=True, read_only=True) as engine:
        answer(engine)
    assert leases(tmp_path) == []

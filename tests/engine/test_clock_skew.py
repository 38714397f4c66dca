"""Processes on one store whose clocks differ by an hour: work may be done twice, but nothing is lost or wrong."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ccjax.cache.shared import prefill as sharing
from ccjax.store.index.sqlite import SqliteIndex
from ccjax.store.leases import Leases
from tests.engine.helpers import TinyModel, draw_segments

MODEL = TinyModel()
LENGTHS = (23, 31, 17)
SEGMENTS = draw_segments(np.random.default_rng(11), LENGTHS)
NUM_QUESTION_TOKENS = len(SEGMENTS[-1])


@contextlib.contextmanager
def clock_ahead(seconds: float):
    """Engines created inside the block have a clock that is `seconds` ahead, or behind if negative."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Leases, SqliteIndex):
            defaults = kind.__init__.__defaults__
            assert time.time in defaults
            skewed = tuple((lambda: time.time() + seconds) if value is time.time else value for value in defaults)
            patch.setattr(kind.__init__, "__defaults__", skewed)
        yield


@pytest.fixture(params=["root", "index"])
def shared(request, tmp_path):
    """Settings for engines on one store, with leases in its root or in an index."""
    settings = {"store": f"file://{tmp_path}/store", "share_computation": True}
    return settings if request.param == "root" else settings | {"store_index": f"sqlite://{tmp_path}/index.db"}


@pytest.fixture
def waits(monkeypatch) -> None:
    """Replaces the clock that measures waits: each reading takes a hundredth of a second."""
    clock = itertools.count(0.0, 0.01)
    monkeypatch.setattr(sharing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def warm(engine) -> None:
    """Compiles, and measures the time per token."""
    for seed in (1, 2):
        engine.generate_from_tokens(draw_segments(np.random.default_rng(seed), LENGTHS), max_new_tokens=2)


def full_prefill() -> tuple[int, ...]:
    with MODEL.engine() as engine:
        return tuple(engine.generate_from_tokens(SEGMENTS, max_new_tokens=4, reuse="off").token_ids)


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
@pytest.mark.usefixtures("waits")
def test_concurrent_requests_on_skewed_clocks_answer_right_and_lose_nothing(shared, seconds):
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(MODEL.engine(**shared))]
        with clock_ahead(seconds):
            engines.append(stack.enter_context(MODEL.engine(**shared)))
        for engine in engines:
            warm(engine)
        found, begun = {}, threading.Barrier(2)

        def ask(number: int) -> None:
            begun.wait()
            response = engines[number].generate_from_tokens(SEGMENTS, max_new_tokens=4)
            found[number] = tuple(response.token_ids)
            engines[number].cache.flush()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        wanted = full_prefill()
        assert [*found.values()] == [wanted] * 2
    with MODEL.engine(**shared) as later:
        report = later.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        assert tuple(report.token_ids) == wanted
        assert report.reuse.computed_tokens == NUM_QUESTION_TOKENS and report.reuse.failed_loads == 0


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
@pytest.mark.usefixtures("waits")
def test_claims_of_a_dead_process_delay_no_request_despite_clock_skew(shared, seconds):
    with contextlib.ExitStack() as stack:
        with clock_ahead(seconds):
            dead = stack.enter_context(MODEL.engine(**shared))
        ours = stack.enter_context(MODEL.engine(**shared))
        warm(ours)
        with MODEL.engine(store=f"{shared['store']}-of-another") as other:
            other.generate_from_tokens(SEGMENTS, max_new_tokens=1)
            variants = [record.variant_id for record in other._chunks.store.records()]
        assert len(dead._chunks.store.claims.claim(variants, 300.0)) == len(variants) == 4  # and never releases them
        response = ours.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        assert tuple(response.token_ids) == full_prefill()

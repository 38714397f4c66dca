"""A load is waited for no longer than computing would take: bounds by hand, hanging reads of a real disk."""

import itertools
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ccjax.cache import contexts, planned_prefill
from ccjax.cache.contexts import LayerLoader
from ccjax.cache.reads import LoadFailedError, WaitLimit
from ccjax.engine import Request, SamplingParams
from ccjax.store.arrays import ShardReader
from ccjax.types import VariantId
from tests.engine.helpers import TinyModel, draw_segments

MODEL = TinyModel(seed=5)
SEGMENTS = draw_segments(np.random.default_rng(5), [40, 30, 50])


A, B = VariantId("A"), VariantId("B")


def wait_limit() -> WaitLimit:
    """10 ms per token: A (100 tokens) may take 1 s, B (300 tokens) 3 s, both together 4 s."""
    wait_limit = WaitLimit(0.01)
    wait_limit.expect({A: 100, B: 300})
    return wait_limit


def waits(wait_limit: WaitLimit, late: list[VariantId], seconds: float) -> set[VariantId]:
    """Waits for `late`; which of them have been waited for long enough."""
    wait_limit.spend(late, seconds)
    try:
        wait_limit.check(late)
    except LoadFailedError as error:
        return set(error.causes)
    return set()


def test_total_wait_over_all_layers_is_bounded():
    waiting = wait_limit()
    assert not waits(waiting, [A], 0.4) and not waits(waiting, [A], 0.5)
    assert not waits(waiting, [], 60.0)  # nothing was late
    assert waits(waiting, [A], 0.1) == {A}
    with pytest.raises(LoadFailedError, match="variant A: not there within 1.00 s"):
        waiting.check([A, B])
    assert not waits(waiting, [B], 2.9) and waits(waiting, [B], 0.1) == {B}


def test_parallel_loads_may_wait_as_long_as_computing_both():
    waiting = wait_limit()
    assert not waits(waiting, [A, B], 3.9)
    assert waits(waiting, [A, B], 0.1) == {A, B}


def test_wait_for_two_variants_is_charged_in_proportion_to_tokens():
    waiting = wait_limit()
    waits(waiting, [A, B], 2.0)  # a quarter of it for A, which may wait 0.5 s more by itself
    assert not waits(waiting, [A], 0.49) and waits(waiting, [A], 0.02) == {A}


def test_waiting_for_one_variant_is_not_charged_to_another():
    waiting = wait_limit()
    waits(waiting, [B], 2.9)
    assert not waits(waiting, [A], 0.9)


def test_retry_does_not_reset_the_time_already_waited():
    waiting = wait_limit()
    waits(waiting, [A], 0.9)
    waiting.expect({A: 100})
    assert waits(waiting, [A], 0.1) == {A}


def test_minimum_wait_is_shared_by_loads_that_hang_together():
    waiting = WaitLimit(1e-6)
    waiting.expect({A: 100, B: 300})
    assert not waits(waiting, [A, B], 0.49)
    assert waits(waiting, [A, B], 0.01) == {A, B}


class Hanging:
    """The disk's reads of variants with some numbers of tokens hang until `gate` is set."""

    def __init__(self, monkeypatch, lengths: set[int]) -> None:
        self.gate, self.waited_for = threading.Event(), threading.Event()
        start = ShardReader.start

        def hang(reader, first, last):
            start(reader, first, last)
            if reader._buffer.shape[2] in lengths:
                reader._futures[first:last] = [
                    future if isinstance(future, _Held) else _Held(future, self)
                    for future in reader._futures[first:last]
                ]

        monkeypatch.setattr(ShardReader, "start", hang)


class _Held:
    def __init__(self, future, hanging: Hanging) -> None:
        self.future, self.hanging = future, hanging

    def done(self):
        return self.hanging.gate.is_set() and self.future.done()

    def result(self, timeout=None):
        self.hanging.waited_for.set()
        if not self.hanging.gate.wait(timeout):
            raise TimeoutError
        return self.future.result(timeout=timeout)


@pytest.fixture
def url(tmp_path):
    """A store that holds system prompt and passages."""
    with MODEL.engine(store=f"file://{tmp_path}/store") as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
    return f"file://{tmp_path}/store"


def off(engine):
    return engine.generate_from_tokens(SEGMENTS, max_new_tokens=4, reuse="off")


@pytest.fixture
def fixed_times(monkeypatch):
    """A load is waited for as if tokens were computed in no time, and each look whether it is there took 50 ms."""
    clock = itertools.count(0.0, 0.05)
    monkeypatch.setattr(contexts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(planned_prefill, "WaitLimit", lambda seconds_per_token: WaitLimit(1e-6))


@pytest.mark.usefixtures("fixed_times")
@pytest.mark.parametrize("lengths", [{40}, {7, 40, 30, 50}], ids=["one", "all"])
def test_chunk_with_a_hanging_read_is_computed_and_reused_later(url, monkeypatch, caplog, lengths):
    with MODEL.engine(store=url) as engine:
        wanted = off(engine).token_ids
        held = {meta.variant_id: meta for meta in engine._chunks.variants}
        plans = []
        plan = engine._chunks.planner.plan
        monkeypatch.setattr(engine._chunks.planner, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
        hanging = Hanging(monkeypatch, lengths)
        with caplog.at_level(logging.WARNING, logger="ccjax"):
            response = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        assert response.token_ids == wanted and response.reuse.exact
        assert response.reuse.failed_loads == len(lengths) == caplog.text.count("not there within 0.50 s")
        assert response.reuse.load_wait_s > 0.49 and len(plans) == 2  # all that hang are left out at once
        computed = {d.num_tokens for d in response.reuse.per_document if d.computed_tokens}
        assert computed == lengths
        assert held.keys() == {meta.variant_id for meta in engine._chunks.variants} and not engine._chunks.store._pins
        hanging.gate.set()
        again = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        assert again.token_ids == wanted and again.reuse.failed_loads == 0
        assert again.reuse.computed_tokens == len(SEGMENTS[-1])


def test_a_slow_read_within_the_bound_is_used(url, monkeypatch):
    with MODEL.engine(store=url) as engine:
        wanted = off(engine).token_ids
        monkeypatch.setattr("ccjax.policy.loading.UNMEASURED_WAIT_S", 3600.0)
        hanging = Hanging(monkeypatch, {40, 30})
        wait, is_held_up = LayerLoader._wait, threading.Event()
        monkeypatch.setattr(LayerLoader, "_wait", lambda *args: (is_held_up.set(), wait(*args)))

        def release() -> None:
            assert hanging.waited_for.wait(120)
            assert is_held_up.wait(120)  # the first layer waits as well, not only the thread that reads ahead
            hanging.gate.set()

        releasing = threading.Thread(target=release)
        releasing.start()
        response = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        releasing.join()
        assert response.token_ids == wanted and response.reuse.failed_loads == 0
        assert response.reuse.reused_tokens == sum(map(len, SEGMENTS[:-1])) and response.reuse.load_wait_s > 0


def test_a_request_is_cancelled_while_it_waits_for_the_disk(url, monkeypatch):
    with MODEL.engine(store=url) as engine:
        hanging = Hanging(monkeypatch, {40})
        request = Request(segments=SEGMENTS, sampling=SamplingParams(max_new_tokens=1))
        assert list(engine.stream(request, is_cancelled=hanging.waited_for.is_set)) == []
        assert not engine._chunks.store._pins and engine.cache.num_variants == 4

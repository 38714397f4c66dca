"""A load is waited for no longer than computing would take: bounds on a fake clock, hanging reads of a real disk."""

import logging
import threading

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.engine import reads as reads_module
from ccjax.engine.prefill import PrefillCancelledError, PrefillResult
from ccjax.engine.reads import BoundedReader, ComputeRate, LoadFailedError
from ccjax.types import VariantId
from store.arrays import ShardReader
from tests.engine.helpers import TinyModel, draw_segments

MODEL = TinyModel(seed=5)
SEGMENTS = draw_segments(np.random.default_rng(5), [40, 30, 50])


class Disk:
    """A ticket whose layers arrive at fixed times of a clock that only waiting moves; times by (variant, layer)."""

    missing = frozenset()

    def __init__(self, arrivals: dict[tuple[str, int], float]) -> None:
        self.now = 0.0
        self.arrivals = arrivals

    def ready(self, variant_id, first, last):
        return all(self.arrivals[variant_id, layer] <= self.now for layer in range(first, last))

    def read_layers(self, variant_id, first, last, *, timeout_s=None):
        there = max(self.arrivals[variant_id, layer] for layer in range(first, last))
        if timeout_s is not None and there > self.now + timeout_s:
            self.now += timeout_s
            raise TimeoutError
        self.now = max(self.now, there)
        return np.full((last - first, 2, 1, 1, 1), there)


@pytest.fixture
def reader_of(monkeypatch):
    """`reader_of(disk)`: 10 ms per token, so A (100 tokens) may take 1 s and B (300 tokens) 3 s."""

    def make(disk, is_cancelled=None):
        monkeypatch.setattr(reads_module.time, "perf_counter", lambda: disk.now)
        return BoundedReader(disk, {VariantId("A"): 100, VariantId("B"): 300}, 0.01, is_cancelled)

    return make


def test_a_slow_load_within_the_bound_is_used_over_all_layers(reader_of):
    disk = Disk({("A", 0): 0.6, ("A", 1): 0.9, ("B", 0): 0.2, ("B", 1): 0.2})
    reader = reader_of(disk)
    assert reader("A", 0, 1).max() == 0.6 and reader("A", 1, 2).max() == 0.9
    assert disk.now == pytest.approx(0.9) and reader.waited_s == pytest.approx(0.9)
    reader("B", 0, 2)
    assert reader.waited_s == pytest.approx(0.9)


def test_the_wait_is_bounded_in_sum_over_the_layers(reader_of):
    never = {("B", layer): 99.0 for layer in range(3)}
    disk = Disk({("A", 0): 0.4, ("A", 1): 0.8, ("A", 2): 1.2, **never})
    reader = reader_of(disk)
    reader("A", 0, 1)
    reader("A", 1, 2)
    with pytest.raises(LoadFailedError, match="variant A: not there within 1.00 s") as caught:
        reader("A", 2, 3)
    assert list(caught.value.causes) == ["A"]  # B has 2 s left
    assert disk.now == pytest.approx(1.0)


def test_variants_that_load_side_by_side_wait_side_by_side(reader_of):
    disk = Disk({("A", 0): 99.0, ("B", 0): 99.0})
    with pytest.raises(LoadFailedError) as caught:
        reader_of(disk)("B", 0, 1)
    assert set(caught.value.causes) == {"A", "B"} and disk.now == pytest.approx(3.0)


def test_time_that_another_layer_took_is_not_held_against_a_variant_that_was_there(reader_of):
    disk = Disk({("A", 0): 0.0, ("A", 1): 3.5, ("B", 0): 2.9, ("B", 1): 2.9})
    reader = reader_of(disk)
    reader("A", 0, 1)
    reader("B", 0, 1)  # 2.9 s
    assert reader("A", 1, 2).max() == 3.5  # A itself was waited for 0.6 s only


def test_a_wait_ends_when_the_request_is_cancelled(reader_of):
    disk = Disk({("A", 0): 99.0, ("B", 0): 0.0})
    reader = reader_of(disk, is_cancelled=lambda: disk.now > 0.3)
    with pytest.raises(PrefillCancelledError):
        reader("A", 0, 1)
    assert disk.now < 0.4


def test_the_rate_is_the_least_of_recent_runs_that_only_computed():
    def run(computed_token_layers: int, has_new_sizes: bool = False) -> PrefillResult:
        result = PrefillResult(None, 1, [], [], [], computed_token_layers)  # type: ignore[arg-type]
        result.has_new_sizes = has_new_sizes
        return result

    rate = ComputeRate()
    rate.observe(run(400, has_new_sizes=True), 4, 0.1, 0.0)  # may have compiled
    rate.observe(run(400), 4, 0.2, 0.05)  # waited
    assert rate.seconds_per_token is None
    rate.observe(run(400), 4, 2.0, 0.0)  # 100 tokens through 4 layers in 2 s
    assert rate.seconds_per_token == pytest.approx(0.02)
    rate.observe(run(200), 4, 0.5, 0.0)
    assert rate.seconds_per_token == pytest.approx(0.01)
    for _ in range(16):
        rate.observe(run(400), 4, 3.0, 0.0)
    assert rate.seconds_per_token == pytest.approx(0.03)


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


@pytest.mark.parametrize("lengths", [{40}, {7, 40, 30, 50}], ids=["one", "all"])
def test_a_read_that_hangs_is_computed_instead_and_used_again_later(url, monkeypatch, caplog, lengths):
    with MODEL.engine(store=url) as engine:
        wanted = off(engine).token_ids
        off(engine)  # the first one may have compiled
        assert engine._prefill._rate.seconds_per_token is not None
        held = {meta.variant_id: meta for meta in engine._variants}
        plans = []
        plan = engine._prefill.plan
        monkeypatch.setattr(engine._prefill, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
        hanging = Hanging(monkeypatch, lengths)
        with caplog.at_level(logging.WARNING, logger="ccjax"):
            response = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        assert response.token_ids == wanted and response.reuse.exact
        assert response.reuse.failed_loads == len(lengths) == caplog.text.count("not there within 0.50 s")
        assert response.reuse.load_wait_s > 0.49 and len(plans) == 2  # all that hang are left out at once
        computed = {d.num_tokens for d in response.reuse.per_document if d.computed_tokens}
        assert computed == lengths
        assert held.keys() == {meta.variant_id for meta in engine._variants} and not engine._store._pins
        hanging.gate.set()
        again = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        assert again.token_ids == wanted and again.reuse.failed_loads == 0
        assert again.reuse.computed_tokens == len(SEGMENTS[-1])


def test_a_slow_read_within_the_bound_is_used(url, monkeypatch):
    with MODEL.engine(store=url) as engine:
        wanted = off(engine).token_ids  # compiled, so nothing is measured: the bound is 5 s
        hanging = Hanging(monkeypatch, {40, 30})
        releasing = threading.Thread(target=lambda: hanging.waited_for.wait(20) and hanging.gate.set())
        releasing.start()
        response = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        releasing.join()
        assert response.token_ids == wanted and response.reuse.failed_loads == 0
        assert response.reuse.reused_tokens == sum(map(len, SEGMENTS[:-1])) and response.reuse.load_wait_s > 0
        assert engine._prefill._rate.seconds_per_token is None  # what waited says nothing about computing


def test_a_request_is_cancelled_while_it_waits_for_the_disk(url, monkeypatch):
    with MODEL.engine(store=url) as engine:
        hanging = Hanging(monkeypatch, {40})
        request = Request(segments=SEGMENTS, sampling=SamplingParams(max_new_tokens=1))
        assert list(engine.stream(request, is_cancelled=hanging.waited_for.is_set)) == []
        assert not engine._store._pins and engine.num_variants == 4

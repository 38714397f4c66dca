"""A cancelled request stops between two layers of its prefill, leaks nothing and frees the engine."""

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.engine.batch import loop as loop_module
from tests.engine.helpers import After, TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=4, num_hidden_layers=5)
SEGMENTS = draw_segments(np.random.default_rng(1), [30, 20, 40])


@pytest.mark.parametrize(
    ("slow_s", "wanted"),
    [(1e9, "run0 run1 wait0 run2 wait1 run3 wait2 run4"), (0.0, "run0 wait0 run1 wait1 run2 wait2 run3 wait3 run4")],
    ids=["fast", "slow"],
)
def test_the_host_is_one_layer_ahead_of_the_device_unless_layers_are_slow(events, monkeypatch, slow_s, wanted):
    monkeypatch.setattr(loop_module, "_SLOW_LAYER_S", slow_s)
    with MODEL.engine() as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
    assert events == wanted.split()


@pytest.mark.parametrize("num_layers", range(5))
def test_no_layer_runs_after_cancellation(events, num_layers):
    request = Request(segments=SEGMENTS)
    with MODEL.engine() as engine:
        assert list(engine.stream(request, is_cancelled=lambda: len(runs(events)) >= num_layers)) == []
    assert runs(events) == [f"run{layer}" for layer in range(num_layers)]


def runs(events):
    return [event for event in events if event.startswith("run")]


@pytest.mark.parametrize("reuse", ["off", "bounded"])
def test_a_cancelled_prefill_ends_the_stream_and_keeps_nothing(reuse):
    request = Request(segments=SEGMENTS, sampling=SamplingParams(max_new_tokens=3), reuse=reuse)
    with MODEL.engine() as engine:
        for num_asked in range(6):  # before the first layer and after each
            assert list(engine.stream(request, is_cancelled=After(num_asked))) == []
            assert engine.cache.num_variants == 0
        assert list(engine.stream(request, is_cancelled=After(100)))[-1].response is not None


def test_a_cancelled_reuse_leaves_variants_credit_and_pins_as_they_were():
    segments = SEGMENTS
    with MODEL.engine() as engine:
        wanted = engine.generate_from_tokens(segments, max_new_tokens=3, reuse="off").token_ids
        engine.generate_from_tokens(segments, max_new_tokens=1)
        before = set(engine._chunks.variants)
        for num_layers in range(5):
            request = Request(segments=permuted(segments, [2, 1, 0]), sampling=SamplingParams(max_new_tokens=3))
            assert list(engine.stream(request, is_cancelled=After(num_layers))) == []
            assert set(engine._chunks.variants) == before and not engine._chunks.store._pins
        assert engine.generate_from_tokens(segments, max_new_tokens=3).token_ids == wanted

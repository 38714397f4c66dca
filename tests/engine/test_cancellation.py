"""A request that is given up stops between two layers of its prefill, leaves nothing behind and frees the engine."""

import threading

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.engine.prefill import PrefillCancelledError, Prefiller
from ccjax.types import PrefillPlan, Segment
from tests.engine.helpers import After, TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=4, num_hidden_layers=5)
TOKENS = np.arange(12, dtype=np.int32)
PLAN = PrefillPlan("test", (Segment(role="question", action="compute", start=0, num_tokens=12),))


@pytest.mark.parametrize(
    ("queued_layers", "wanted"),
    [
        (0, "ask run0 wait0 ask run1 wait1 ask run2 wait2 ask run3 wait3 ask run4"),
        (1, "ask run0 ask run1 wait0 ask run2 wait1 ask run3 wait2 ask run4"),
    ],
)
def test_it_is_asked_before_every_layer_and_the_host_does_not_run_ahead(events, queued_layers, wanted):
    def ask() -> bool:
        events.append("ask")
        return False

    prefiller = Prefiller(MODEL.loaded.params, MODEL.config)
    prefiller.run(TOKENS, PLAN, is_cancelled=ask, queued_layers=queued_layers)
    assert events == wanted.split()


@pytest.mark.parametrize("num_layers", range(5))
def test_no_layer_runs_once_it_is_cancelled(events, num_layers):
    prefiller = Prefiller(MODEL.loaded.params, MODEL.config)
    with pytest.raises(PrefillCancelledError):
        prefiller.run(TOKENS, PLAN, is_cancelled=After(num_layers))
    assert [event for event in events if event.startswith("run")] == [f"run{layer}" for layer in range(num_layers)]


def test_being_asked_changes_no_result():
    prefiller = Prefiller(MODEL.loaded.params, MODEL.config)
    plain = prefiller.run(TOKENS, PLAN)
    asked = prefiller.run(TOKENS, PLAN, is_cancelled=After(5))
    np.testing.assert_array_equal(prefiller.last_logits(asked), prefiller.last_logits(plain))


@pytest.mark.parametrize("reuse", ["off", "bounded"])
def test_a_cancelled_prefill_ends_the_stream_and_keeps_nothing(reuse):
    segments = draw_segments(np.random.default_rng(1), [30, 20, 40])
    request = Request(segments=segments, sampling=SamplingParams(max_new_tokens=3), reuse=reuse)
    with MODEL.engine() as engine:
        for num_asked in range(6):  # before the first layer and after each
            assert list(engine.stream(request, is_cancelled=After(num_asked))) == []
            assert engine.num_variants == 0
        assert list(engine.stream(request, is_cancelled=After(100)))[-1].response is not None


def test_a_cancelled_reuse_leaves_variants_credit_and_pins_as_they_were():
    segments = draw_segments(np.random.default_rng(1), [30, 20, 40])
    with MODEL.engine() as engine:
        wanted = engine.generate_from_tokens(segments, max_new_tokens=3, reuse="off").token_ids
        engine.generate_from_tokens(segments, max_new_tokens=1)
        before = set(engine._variants)
        for num_layers in range(5):
            request = Request(segments=permuted(segments, [2, 1, 0]), sampling=SamplingParams(max_new_tokens=3))
            assert list(engine.stream(request, is_cancelled=After(num_layers))) == []
            assert set(engine._variants) == before and not engine._store._pins
        assert engine.generate_from_tokens(segments, max_new_tokens=3).token_ids == wanted


def test_the_next_request_runs_when_another_thread_cancels(monkeypatch):
    """Nothing is left that it held: the second request, of another thread, is answered."""
    reached, given_up = threading.Event(), threading.Event()
    request = Request(segments=[[1, 2], [3, 4, 5]], sampling=SamplingParams(max_new_tokens=2))

    def is_cancelled() -> bool:
        reached.set()
        return given_up.wait(120)

    with MODEL.engine() as engine:
        deltas: list = []
        first = threading.Thread(target=lambda: deltas.extend(engine.stream(request, is_cancelled=is_cancelled)))
        first.start()
        assert reached.wait(120)
        answers: list = []
        second = threading.Thread(target=lambda: answers.append(engine.run(request)))
        second.start()
        given_up.set()
        second.join(120)
        first.join(120)
        assert deltas == [] and len(answers[0].token_ids) == 2
